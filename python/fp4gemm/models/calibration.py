"""fp4gemm.calibrate: statistics of the inputs of a model's linear layers and experts on given batches."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from .. import _checks
from ..calibration.statistics import InputStatistics, Statistics
from ..patterns import Filter
from . import collect, select
from .select import Candidate
from .walk import Walk

Progress = Callable[[int, int, str], object]
_NARROW = (torch.bfloat16, torch.float16)


def calibrate(
    model: torch.nn.Module,
    batches: Iterable[object],
    *,
    second_moment: bool = False,
    quantization_error: bool = False,
    include: Filter | None = None,
    exclude: Filter | None = None,
    types: Iterable[type[torch.nn.Linear]] = (torch.nn.Linear,),
    sequential: bool = False,
    device: torch.device | str | int | None = None,
    progress: Progress | None = None,
) -> Statistics:
    """Run a float model on batches and return ``mean x[j]^2`` and ``mean x x^T`` of the input x of each
    layer.

    The layers are those that :func:`fp4gemm.models.quantize_model` would swap with the same include, exclude
    and types, each under its first name. Of experts with 3-D weights (transformers 5), each expert has
    statistics of the tokens that are routed to it, of its two products, ``NAME.w13`` and ``NAME.w2``; an
    expert in a list of modules is a layer like others. Every row of an input counts, so that padding would
    count too.

    The model runs in eval mode without gradients and is not changed. On a CPU, linear layers in bfloat16 or
    float16 are multiplied in float32 and rounded once. Sums are in float32 on the device of each layer; the
    result is in CPU memory. The same batches on the same device give the same bits.

    Args:
        model: any module with linear layers.
        batches: tensors, which the model is called with; mappings, which become its keywords; or tuples or
            lists, its arguments.
        second_moment: whether to compute the matrices (k, k), for the method "gptq". They need 4 k^2
            bytes
            a layer.
        quantization_error: whether to compute the mean squared errors ``mean (x[j] - Q(x)[j])^2`` of the
            inputs of linear layers but experts, for residual channels (docs/accuracy.md). Q is the cast of
            activations "per-token".
        include, exclude, types: as of quantize_model.
        sequential: run the blocks of the model (its decoder layers) one after the other, each on all batches,
            so that the sums of one block alone are on the device. Needs memory for the hidden states of all
            batches, and a model whose blocks are called one after the other.
        device: with sequential, where each block is brought to run; None is where it lies.
        progress: called as ``progress(done, total, name)`` after each batch, or after each block.

    Returns:
        Statistics, in model order. Synchronises.

    Raises:
        TypeError, ValueError: naming the argument; a batch that the model does not accept; no batches; inputs
            that hold NaN or infinity, with the layer's name; layers that no token reached, except experts in
            a list; with sequential a model whose blocks cannot be run one after the other.
    """
    check(model, batches, progress)
    _checks.is_bool("second_moment", second_moment)
    _checks.is_bool("quantization_error", quantization_error)
    _checks.is_bool("sequential", sequential)
    if device is not None and not sequential:
        raise ValueError(f"device: got {device!r}, must be None without sequential=True")
    place = None if device is None else _checks.as_device("device", device)
    candidates = select.chosen(model, include, exclude, types)
    select.refuse_unsupported(model, candidates, "per-token", raises=False)
    chosen = [c for c in candidates if c.action == "quantized"]
    if not chosen:
        raise ValueError("model: has no layer that quantize_model would swap, must have one")
    wanted = collect.Wanted(second_moment, quantization_error)
    if not sequential:
        return Statistics(collected(model, batches, chosen, wanted, progress))
    found: dict[str, InputStatistics] = {}
    with evaluated(model):
        walk = Walk(model, _listed(batches), chosen, place)
        walk.refuse_outside(chosen)
        for number in range(len(walk.blocks)):
            own = walk.inside(number, chosen)
            with walk.placed(number):
                collector = collect.Collector(own, wanted)
                with collector.hooked():
                    walk.run(number, keep=True)
                found |= collector.statistics()
            if progress is not None:
                progress(number + 1, len(walk.blocks), f"{walk.name}.{number}")
    return Statistics(found)


def collected(
    model: torch.nn.Module,
    batches: Iterable[object],
    chosen: list[Candidate],
    wanted: collect.Wanted,
    progress: Progress | None = None,
) -> dict[str, InputStatistics]:
    """The statistics of candidates from one pass of the whole model over the batches."""
    total = len(batches) if hasattr(batches, "__len__") else 0  # type: ignore[arg-type]
    collector = collect.Collector(chosen, wanted)
    count = 0
    with evaluated(model), collector.hooked():
        for batch in batches:
            collect.run(model, batch, count)
            count += 1
            if progress is not None:
                progress(count, max(total, count), f"batch {count}")
    if not count:
        raise ValueError("batches: is empty, must have at least one batch")
    return collector.statistics()


def check(model: object, batches: object, progress: object) -> None:
    """Raise TypeError unless these are a module, an iterable of batches, and None or callable."""
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model: got {_checks.describe(model)}, must be a torch.nn.Module")
    if isinstance(batches, (str, bytes, Mapping, torch.Tensor)) or not isinstance(batches, Iterable):
        raise TypeError(f"batches: got {_checks.describe(batches)}, must be a list of batches")
    _checks.is_callback("progress", progress)


def _listed(batches: Iterable[object]) -> list[object]:
    made = list(batches)
    if not made:
        raise ValueError("batches: is empty, must have at least one batch")
    return made


@contextlib.contextmanager
def evaluated(model: torch.nn.Module) -> Iterator[None]:
    """Put modules into eval mode, and multiply 16-bit CPU layers in float32, until the context ends."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    is_narrow = any(p.device.type == "cpu" and p.dtype in _NARROW for p in model.parameters())
    try:
        with _WideProducts() if is_narrow else contextlib.nullcontext():
            yield
    finally:
        for module in training:
            module.training = True


class _WideProducts(TorchFunctionMode):
    """F.linear of bfloat16 and float16 CPU tensors in float32, rounded once to their dtype.

    That is what these products are defined as, up to the order of sums. Where a CPU has no instructions for
    them, torch needs eight times as long for bfloat16 as for float32.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.nn.functional.linear:
            x, weight, bias = _operands(*args, **kwargs)
            if all(_is_narrow(t) and t.dtype is x.dtype for t in (x, weight, bias) if t is not None):
                return func(x.float(), weight.float(), None if bias is None else bias.float()).to(x.dtype)
        return func(*args, **kwargs)


def _is_narrow(t: object) -> bool:
    plain = type(t) in (torch.Tensor, torch.nn.Parameter)
    return plain and isinstance(t, torch.Tensor) and t.device.type == "cpu" and t.dtype in _NARROW


def _operands(input: Any, weight: Any, bias: Any = None) -> tuple[Any, Any, Any]:
    """The operands of F.linear, whose parameters have these names."""
    return input, weight, bias
