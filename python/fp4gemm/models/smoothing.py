"""fp4gemm.models.smooth: scales of input channels, moved from inputs into weights; exact in floats.

A block of 16 input channels has one scale, so a channel with large values costs its neighbours precision. If
channel j of the input of a layer is divided by s[j], and column j of its weight multiplied by s[j], nothing
changes but the rounding to NVFP4. The division is done where the input comes from::

    x = norm(h) * w            w[j] / s[j]                     every layer that reads x has its columns * s
    x = act(g(h)) * up(h)      row j of up, and its bias / s[j]     down: columns * s
    x = attention(q, k, v)     row j of v, and its bias / s[j]      o: columns * s, those of a head alike

All s are powers of two, so that every product keeps its bits up to its exponent, and the float model computes
the same numbers, bit for bit. That is checked on a batch.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .. import _checks, _names
from ..calibration.statistics import InputStatistics, Statistics
from . import collect
from .calibration import evaluated

ATTENTION = (("v_proj", "o_proj"), ("v_proj", "out_proj"))
MOST = 12  # powers of two between a channel and the mean


class _Fold(NamedTuple):
    """The modules into which the scales of one input are folded."""

    kind: str  # the name of the source in its owner
    source: torch.nn.Module  # a norm, or a linear layer whose rows are divided
    readers: tuple[str, ...]  # the linear layers that read the input
    head_rows: int  # the elements of a head of o if several heads share the rows of v, else 0


def smooth(
    model: torch.nn.Module, statistics: Statistics, batch: object, *, strength: float = 0.5
) -> Statistics:
    """Divide channel j of the inputs of layers by ``s[j] ~ mean_square[j] ** (strength / 2)``, in the model.

    The float model computes the same numbers afterwards, bit for bit, and NVFP4 loses less: in the inputs
    and, since columns with large inputs get larger weights, in the weights. Norms, ``up_proj`` (before
    ``down_proj``) and ``v_proj`` (before ``o_proj``) are divided; inputs that come from elsewhere stay. Call
    it between :func:`fp4gemm.calibrate` and :func:`fp4gemm.models.quantize_model`.

    Args:
        model: the float model, changed in place.
        statistics: the statistics of its layers, by calibrate.
        batch: as of calibrate. The model runs on it before and after each kind of change; a kind after which
            the result has other bits is taken back, with a warning.
        strength: 0 changes nothing, 1 makes all channels equally large.

    Returns:
        The statistics of the changed model, those of layers whose inputs were divided without
        quantization errors: these change, and :func:`fp4gemm.calibrate` measures them again.

    Raises:
        TypeError, ValueError: naming the argument; statistics of a layer that the model lacks or of another
            k; a model that returns no tensor; weights that accelerate has offloaded.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model: got {_checks.describe(model)}, must be a torch.nn.Module")
    if not isinstance(statistics, Statistics):
        raise TypeError(f"statistics: got {_checks.describe(statistics)}, must be Statistics")
    if isinstance(strength, bool) or not isinstance(strength, (int, float)):
        raise TypeError(f"strength: got {_checks.describe(strength)}, must be a number")
    if not 0 <= strength <= 1:
        raise ValueError(f"strength: got {strength}, must be from 0 to 1")
    if any(p.is_meta for p in model.parameters()):
        raise ValueError("model: has weights on the meta device, must have none (offloaded by accelerate?)")
    layers = {n: m for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)}
    for name, known in statistics.items():
        if known.mean_square.dim() == 1 and (name not in layers or layers[name].in_features != known.k):
            raise ValueError(f"statistics: {name!r} has k = {known.k}, must be a linear layer of the model")
    made = dict(statistics)
    with evaluated(model), torch.no_grad():
        want, folds = _observed(model, layers, statistics, batch)
        for kind in dict.fromkeys(fold.kind for fold in folds):
            own = [fold for fold in folds if fold.kind == kind]
            scales = [_scales(fold, statistics, layers, strength) for fold in own]
            for fold, s in zip(own, scales, strict=True):
                _apply(fold, s, layers)
            if not _same(want, _results(model, batch)):
                for fold, s in zip(own, scales, strict=True):
                    _apply(fold, 1 / s, layers)
                warnings.warn(
                    f"smooth: {kind} stays as it is: the model would not compute the same bits", stacklevel=2
                )
                continue
            for fold, s in zip(own, scales, strict=True):
                for name in fold.readers:
                    if name in made:
                        made[name] = _divided(made[name], s.cpu())
    return Statistics(made)


def _observed(
    model: torch.nn.Module, layers: dict[str, torch.nn.Linear], statistics: Statistics, batch: object
) -> tuple[list[Tensor], list[_Fold]]:
    """The results of the model, and the folds that its modules and a run on the batch show."""
    made: dict[int, tuple[str, torch.nn.Module, Tensor]] = {}  # the key is the id of a norm's result
    readers: dict[int, list[str]] = {}
    handles = []

    def returned(name: str) -> Any:
        def hook(module: torch.nn.Module, args: Any, result: Any) -> None:
            if isinstance(result, Tensor):
                made[id(result)] = (name, module, result)  # held, so that its id stays its own

        return hook

    def read(name: str) -> Any:
        def hook(module: torch.nn.Module, args: tuple[Any, ...]) -> None:
            if args and id(args[0]) in made:
                readers.setdefault(id(args[0]), []).append(name)

        return hook

    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if "Norm" in type(module).__name__ and isinstance(weight, Tensor) and weight.dim() == 1:
            handles.append(module.register_forward_hook(returned(name)))
    handles += [layer.register_forward_pre_hook(read(name)) for name, layer in layers.items()]
    try:
        want = _results(model, batch)
    finally:
        for handle in handles:
            handle.remove()
    folds, used = [], set()
    for key, names in readers.items():
        name, norm, _ = made[key]
        if id(norm) not in used and _may(names, layers, statistics, model):
            folds.append(_Fold(name.rpartition(".")[2], norm, tuple(dict.fromkeys(names)), 0))
        used.add(id(norm))
    return want, [*folds, *_pairs(model, layers, statistics)]


def _pairs(
    model: torch.nn.Module, layers: dict[str, torch.nn.Linear], statistics: Statistics
) -> Iterator[_Fold]:
    """The folds of up and down, and of v and o."""
    pairs = (*((names.up, names.down) for names in _names.EXPERTS), *ATTENTION)
    for path, owner in model.named_modules():
        prefix = f"{path}." if path else ""
        for first, second in pairs:
            source, reader = layers.get(prefix + first), layers.get(prefix + second)
            if source is None or reader is None or not _may([prefix + second], layers, statistics, model):
                continue
            head_rows = 0
            if reader.in_features != source.out_features:
                head_rows = int(getattr(owner, "head_dim", 0) or 0)
                if (
                    not head_rows
                    or reader.in_features % source.out_features
                    or source.out_features % head_rows
                ):
                    continue
            yield _Fold(first, source, (prefix + second,), head_rows)


def _may(
    names: Sequence[str], layers: dict[str, torch.nn.Linear], statistics: Statistics, model: torch.nn.Module
) -> bool:
    """Whether the columns of these layers may be scaled, and the scales of one are known."""
    uses: dict[int, int] = {}
    for p in dict(model.named_parameters(remove_duplicate=False)).values():
        uses[id(p)] = uses.get(id(p), 0) + 1
    return any(name in statistics for name in names) and all(
        uses[id(layers[name].weight)] == 1 for name in names
    )


def _scales(
    fold: _Fold, statistics: Statistics, layers: dict[str, torch.nn.Linear], strength: float
) -> Tensor:
    """Powers of two, float32 (k,), with a geometric mean of about 1."""
    name = next(name for name in fold.readers if name in statistics)
    square = statistics[name].mean_square.double()
    if fold.head_rows:
        groups = _groups(fold, square)
        heads = square.view(-1, groups, fold.head_rows).mean(1, keepdim=True)
        square = heads.expand(-1, groups, -1).reshape(-1)
    logs = square.clamp(min=float(square.mean()) * 1e-9 + 1e-300).log2() * (strength / 2)
    return torch.exp2((logs - logs.mean()).round().clamp(-MOST, MOST)).float()


def _groups(fold: _Fold, s: Tensor) -> int:
    """How many heads share each head of v."""
    source = fold.source
    return s.numel() // source.out_features if isinstance(source, torch.nn.Linear) else 1


def _apply(fold: _Fold, s: Tensor, layers: dict[str, torch.nn.Linear]) -> None:
    """Divide what the source returns by s, and multiply the columns of its readers."""
    rows = s
    if fold.head_rows:
        groups = _groups(fold, s)
        rows = s.view(-1, groups, fold.head_rows)[:, 0].reshape(-1)
    for p in (fold.source.weight, getattr(fold.source, "bias", None)):
        if isinstance(p, Tensor):
            factor = (1 / rows).to(p.device, p.dtype)
            p.data.mul_(factor if p.dim() == 1 else factor[:, None])
    for name in fold.readers:
        weight = layers[name].weight.data
        weight.mul_(s.to(weight.device, weight.dtype))


def _divided(known: InputStatistics, s: Tensor) -> InputStatistics:
    moment = None if known.second_moment is None else known.second_moment / s / s[:, None]
    return InputStatistics(known.num_tokens, known.mean_square / s / s, moment)


def _results(model: torch.nn.Module, batch: object) -> list[Tensor]:
    """The tensors that the model returns."""
    results: list[Any] = []
    handle = model.register_forward_hook(lambda _, args, result: results.append(result))
    try:
        collect.run(model, batch, 0)
    finally:
        handle.remove()
    found = results[0] if isinstance(results[0], dict) else {"": results[0]}
    leaves = [x for x in pytree.tree_leaves(dict(found)) if isinstance(x, Tensor)]
    if not leaves:
        raise ValueError(f"model: returns a {type(results[0]).__name__}, must return tensors")
    return leaves


def _same(a: Sequence[Tensor], b: Sequence[Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
