"""fp4gemm.models.quantize_model: swap linear layers and experts for NVFP4 ones, and report what was done."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeVar, cast, get_args

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from .. import _changed, _checks
from ..calibration.gptq import Factorization
from ..calibration.statistics import InputStatistics, Statistics, StatisticsFile
from ..nn._hooks import carry_over, materialized
from ..nn._inputs import CheckFinite, check_options
from ..nn._weight import WeightModule
from ..nn.experts import Experts
from ..nn.linear import Linear
from ..patterns import Filter
from ..recipe import (
    AUTO,
    LAYER_ACTIVATIONS,
    LayerActivations,
    Method,
    Quantizer,
    Recipe,
    WeightScaling,
    check_residual_channels,
    checked_activations,
    checked_recipe,
    data_of,
)
from . import collect, moe, select
from .automatic import settle
from .calibration import collected, evaluated
from .fuse import fuse_blocks
from .report import QuantizeReport
from .residual import choose
from .select import Candidate, float_weights
from .walk import Walk

OnUnsupported = Literal["skip", "raise"]
Fuse = Literal["auto", "none"]
Model = TypeVar("Model", bound=torch.nn.Module)
MANY_OTHERS = 0.1  # a larger part of the model in weights that this library does not know is warned about


def quantize_model(
    model: Model,
    *,
    include: Filter | None = None,
    exclude: Filter | None = None,
    types: Iterable[type[torch.nn.Linear]] = (torch.nn.Linear,),
    activations: LayerActivations | Literal["auto"] = "per-token",
    weight_scaling: WeightScaling = "row",
    method: Method | None = None,
    calibration: Statistics | StatisticsFile | Iterable[object] | None = None,
    sequential: bool = False,
    residual_channels: int = 0,
    check_finite: CheckFinite = "off",
    use_fast_accum: bool = False,
    batch_invariant: bool = False,
    inplace: bool = True,
    report: Callable[[QuantizeReport], object] | None = None,
    progress: Callable[[int, int, str], object] | None = None,
    on_unsupported: OnUnsupported = "skip",
    fuse: Fuse = "none",
    recipe: Recipe | None = None,
) -> Model:
    """``y = x @ W.T + b`` becomes ``y = Q(x) @ Q(W).T + b`` in every selected linear layer of a model.

    The experts of transformers (5.x), whose weights are 3-D parameters of one module, become
    :class:`fp4gemm.nn.Experts`. Those in a list of modules are linear layers like others. docs/models.md says
    which experts are understood; the others stay in float, with the reason in the report.

    The new weights have no gradient, and fused blocks are forward only: run the model under
    torch.inference_mode() or torch.no_grad(), or train adapters on its linear layers and experts
    (docs/lora.md).

    By default two kinds of linear layers stay in float. Output embeddings: what ``get_output_embeddings()``
    of any module returns, a layer named lm_head or embed_out, or output at the top of the model, one that
    shares its weight with a torch.nn.Embedding. Routers: a layer inside of a module whose class name ends in
    Router, TopKGating or MoEGate, one whose name has "router", or "gating" in its last part, and a layer with
    n outputs, or one, whose owner also holds n experts (a list, or a child with num_experts, whose name
    contains "expert").

    Args:
        model: any module. One that is itself a linear layer or experts cannot be changed in place; the new
            module is returned.
        include: swap only what it matches, output embeddings and routers too; None is all but these. A
            pattern of names (:mod:`fp4gemm.patterns`), a compiled regular expression, a callable ``(name,
            module) -> bool``, or a sequence of these, any of which may match. The module is a linear layer
            or experts.
        exclude: keep what it matches as it is; it wins over include.
        types: the exact types of linear layers to swap. A subclass of torch.nn.Linear may compute something
            else, so it is swapped only where it is listed here. :class:`fp4gemm.training.Linear` counts as
            torch.nn.Linear, and converted experts as those of transformers.
        activations, weight_scaling: as in :class:`fp4gemm.nn.Linear`. Activations "auto" are chosen for each
            layer by the device on which it is now, and by its k: :func:`fp4gemm.recipe.automatic`. The report
            says what was chosen; a warning, or the report, names layers whose k does not fit. The weights are
            those of "per-token": the methods "search" and "gptq" take the rounding to e4m3 into account with
            "fp8" alone. A model that is quantized on the CPU for a GPU needs one of the others.
        check_finite: as in :class:`fp4gemm.nn.Linear`.
        use_fast_accum: as in :class:`fp4gemm.nn.Linear`, with activations "fp8", or "auto" where it chooses
            "fp8". It does not change the weights.
        batch_invariant: of all layers that are quantized, as in :class:`fp4gemm.nn.Linear`: the bits of a
            token do not depend on the other tokens of a call. docs/rollout.md says what other parts of a
            model need for that.
        method: how weights are rounded: "round", "four-over-six", "search" or "gptq", as
            :class:`fp4gemm.recipe.Recipe` defines them. None is the best method that the calibration allows:
            "gptq" with second moments, "search" with mean squares, "four-over-six" without calibration.
            docs/accuracy.md compares them.
        calibration: :class:`fp4gemm.calibration.Statistics` (or StatisticsFile, which reads a layer at a
            time) of this model's layers, or batches for
            :func:`fp4gemm.calibrate`, which then runs here. An expert with fewer tokens than k gets those of
            all experts added; the report names what else was done.
        sequential: with batches: block after block (decoder layer after decoder layer), each calibrated on
            the results of those before it, whose weights are rounded already; their inputs are not.
        residual_channels: of how many input channels of each linear layer the errors of the cast to NVFP4
            are multiplied too, as in :class:`fp4gemm.nn.Linear`: a multiple of 32, with activations
            "per-token" or "per-tensor"; 0: of none. The calibration chooses them
            (:func:`fp4gemm.calibration.residual_channels`), for layers that read the same tensor together.
            Statistics need quantization errors: ``calibrate(..., quantization_error=True)``, after
            :func:`fp4gemm.models.smooth`. Experts and layers with fewer channels have none; the report says
            so.
        inplace: swap inside ``model`` and return it; otherwise the model stays as it is and a copy is
            returned. The float weights of swapped layers are not copied.
        report: called with a QuantizeReport of what was done; ``report=print`` shows it as a table. It lists
            every linear layer, every module of experts and every other parameter, whatever became of it, and
            the totals of the model. Without it, warnings name the layers and experts that do not fit, and say
            when much of the model is in weights that this function does not know.
        progress: called as ``progress(done, total, name)`` after each layer.
        on_unsupported: what to do about a selected layer that cannot be swapped (k not a multiple of 32, or
            of 64 with activations "fp8", n not of 8, another dtype, weights that are not finite, hooks on the
            layer, an owner that bypasses its forward, experts that are not understood): "skip" leaves it and
            reports it, "raise" raises before anything is changed.
        fuse: "auto" joins the quantized layers of a block where the forwards of the model show that the
            result is the same: layers that read the same tensor become one product, an MLP
            ``down(act(gate(x)) * up(x))`` an :class:`fp4gemm.nn.GatedMLP`, a norm quantizes its result, and
            both add the residuals of a decoder layer. docs/models.md says which rounding disappears; the
            names in ``state_dict`` change.
            "none" swaps layer by layer.
        recipe: None, or activations, weight_scaling and method together, and the options of the casts, as
            :meth:`fp4gemm.training.Recipe.for_inference` makes them: the linear layers then compute the bits
            of the forward pass of training. They keep it for updates of their weights.

    Returns:
        The model with its layers swapped. A module that occurs under several names is quantized once, and
        only if no name of it is excluded. A weight that is tied to another parameter (of an embedding, say)
        is quantized for this layer alone; the report says so. A later ``model.tie_weights()`` quantizes the
        embedding's weight again. Hooks of accelerate (``dispatch_model``, ``cpu_offload``) are carried over;
        an offloaded layer stays offloaded, its codes in CPU memory.

    Raises:
        TypeError, ValueError: naming the argument; also if ``include`` or ``exclude`` matches no linear layer
            of a model that has some (a pattern that matches none beside others that match is only warned
            about), and with ``on_unsupported="raise"`` a ValueError that lists every layer that does not fit.
            The model is then unchanged.

    Synchronises (for each layer, to look for weights that are not finite and biases that are NaN).
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model: got {_checks.describe(model)}, must be a torch.nn.Module")
    given = recipe
    if given is not None:
        absent = {"activations": (activations, "per-token"), "weight_scaling": (weight_scaling, "row")}
        checked_recipe(given).check_absent(**absent, method=(method, None))
        activations, weight_scaling = cast(Any, given.activations), cast(WeightScaling, given.weight_scaling)
    activations = checked_activations(activations, (*LAYER_ACTIVATIONS, AUTO))
    is_auto = activations == AUTO
    first = "per-token" if is_auto else cast(LayerActivations, activations)
    _checks.is_bool("use_fast_accum", use_fast_accum)
    _checks.is_bool("batch_invariant", batch_invariant)
    check_options(first, weight_scaling, check_finite, use_fast_accum and not is_auto)
    _checks.is_one_of("on_unsupported", on_unsupported, get_args(OnUnsupported))
    _checks.is_one_of("fuse", fuse, get_args(Fuse))
    _checks.is_bool("inplace", inplace)
    data = data_of(calibration, sequential)
    if given is None:
        recipe = Recipe(activations=first, weight_scaling=weight_scaling, method=method, data=data)
    else:
        recipe = dataclasses.replace(given, data=data)
    check_residual_channels(residual_channels, cast(str, activations), data)
    for name, callback in (("progress", progress), ("report", report)):
        _checks.is_callback(name, callback)
    candidates = select.chosen(model, include, exclude, types)
    select.refuse_unsupported(model, candidates, first, raises=on_unsupported == "raise")
    weights = float_weights(
        model,
        [c.module for c in candidates if c.action == "quantized"],
        [c.module for c in candidates if c.action != "quantized"],
    )
    before = _totals(model)

    chosen = [c for c in candidates if c.action == "quantized"]
    swapper = Swapper(
        recipe, check_finite, use_fast_accum, is_auto, len(chosen), progress, given, residual_channels
    )
    if sequential:
        swapper.walk(model, chosen, calibration)
    else:
        if calibration is not None and not isinstance(calibration, (Statistics, StatisticsFile)):
            calibration = Statistics(collected(model, calibration, chosen, swapper.wanted))
        swapper.all(chosen, calibration)
    _set_batch_invariant(chosen, batch_invariant)
    model = _placed(model, chosen, inplace)
    del chosen
    swaps = select.reports(candidates)
    has_candidates = bool(candidates)
    candidates.clear()  # frees the float layers here, and the quantized ones as soon as they are fused
    blocks = fuse_blocks(model) if fuse == "auto" else ()
    _changed.tell(model)
    after = _totals(model)
    done_report = QuantizeReport(
        *swaps, weights, before[0], after[0], before[1], after[1], after[2], blocks=blocks
    )
    if report is not None:
        report(done_report)
        return model
    if not has_candidates:
        what = "no linear layer in float and no known module of experts"
        warnings.warn(f"quantize_model: model: has {what}, so that nothing was changed", stacklevel=3)
    if done_report.names("skipped"):
        warnings.warn(f"quantize_model: {done_report.about_skipped()}", stacklevel=3)
    for reason, names in swapper.changed.items():
        more = "" if len(names) == 1 else f" and {len(names) - 1} more"
        warnings.warn(f"quantize_model: {names[0]!r}{more}: {reason}", stacklevel=3)
    if include is None and done_report.bytes_of_others > MANY_OTHERS * done_report.model_bytes_before:
        warnings.warn(f"quantize_model: {done_report.about_others()}", stacklevel=3)
    return model


def _placed(model: Model, chosen: list[Candidate], inplace: bool) -> Model:
    """Put what was quantized into the model, or into the copy that is returned.

    Only now, with everything quantized, is anything changed: an error before leaves the model whole.
    """
    if inplace and not isinstance(model, torch.nn.Linear) and not moe.is_experts(model):
        _replace(model, chosen)
        return model
    # deepcopy returns what its memo holds for an object instead of copying the object.
    swapped = {id(c.module): c.swapped for c in chosen}
    return copy.deepcopy(model, cast(dict[int, Any], swapped))


def _totals(model: torch.nn.Module) -> tuple[int, int, int]:
    """Bytes of all parameters and buffers; elements of all weights and biases; of these, those in NVFP4."""
    held = {id(t): t for t in (*model.parameters(), *model.buffers()) if not is_lazy(t)}
    num_float = sum(p.numel() for p in {id(p): p for p in model.parameters()}.values() if not is_lazy(p))
    num_quantized = 0
    for module in model.modules():
        if isinstance(module, WeightModule):
            num_quantized += module.in_features * module.out_features * max(module.num_matrices, 1)
            num_float += 0 if module.bias is None else module.bias.numel()
    return sum(t.nbytes for t in held.values()), num_float + num_quantized, num_quantized


def _set_batch_invariant(chosen: list[Candidate], value: bool) -> None:
    for c in chosen:
        cast(Linear | Experts, c.swapped).batch_invariant = value


def _replace(model: torch.nn.Module, chosen: list[Candidate]) -> None:
    owners = dict(model.named_modules(remove_duplicate=False))
    for c in chosen:
        for name in c.names:
            owner, _, child = name.rpartition(".")
            setattr(owners[owner], child, c.swapped)


Progress = Callable[[int, int, str], object]


class Swapper:
    """Sets ``swapped``, ``method`` and ``output_error`` of candidates; the model does not change."""

    def __init__(
        self,
        recipe: Recipe,
        check_finite: CheckFinite,
        use_fast_accum: bool,
        is_auto: bool,
        total: int,
        progress: Progress | None,
        kept: Recipe | None = None,
        residual_channels: int = 0,
    ) -> None:
        self._recipe = recipe
        self._residual_channels = residual_channels
        self.wanted = collect.Wanted(moment=recipe.method == "gptq", error=residual_channels > 0)
        self._options: dict[str, Any] = {
            "recipe": kept,
            "activations": recipe.activations,
            "check_finite": check_finite,
            "use_fast_accum": use_fast_accum and not is_auto,
        }
        self._is_auto, self._use_fast_accum = is_auto, use_fast_accum
        self.changed: dict[str, list[str]] = {}  # the layers that "auto" treats apart, by the reason
        self._factorization = Factorization()
        self._progress, self._done, self._total = progress, 0, total

    def all(self, chosen: Sequence[Candidate], statistics: Mapping[str, InputStatistics] | None) -> None:
        """Quantize every candidate.

        Raises:
            ValueError: the statistics lack a layer, or have another k or number of experts for it.
        """
        channels = self._channels(chosen, statistics)
        for c in chosen:
            self._swap(c, {} if statistics is None else statistics_of(c, statistics), channels)

    def _channels(
        self, candidates: Sequence[Candidate], statistics: Mapping[str, InputStatistics] | None
    ) -> dict[str, Tensor]:
        """The residual channels of layers, by their first names; statistics are there if some are wanted."""
        return (
            choose(candidates, statistics or {}, self._residual_channels) if self._residual_channels else {}
        )

    def walk(self, model: torch.nn.Module, chosen: Sequence[Candidate], batches: Any) -> None:
        """Quantize block by block, each with statistics behind the weights that were quantized before.

        Raises:
            ValueError: as of :func:`fp4gemm.calibrate` with sequential=True.
        """
        batches = list(batches)
        if not batches:
            raise ValueError("calibration: is empty, must have at least one batch")
        with evaluated(model):
            walk = Walk(model, batches, chosen, None)
            walk.refuse_outside(chosen)
            for number in range(len(walk.blocks)):
                own = walk.inside(number, chosen)
                collector = collect.Collector(own, self.wanted)
                with collector.hooked():
                    walk.run(number, keep=False)
                statistics = collector.statistics()
                channels = self._channels(own, statistics)
                for c in own:
                    self._swap(c, statistics_of(c, statistics), channels)
                with _rounded(own):
                    walk.run(number, keep=True)

    def _swap(
        self, c: Candidate, statistics: Mapping[str, InputStatistics], channels: Mapping[str, Tensor]
    ) -> None:
        quantizer = Quantizer(self._recipe, statistics, self._factorization)
        with materialized(c.module):
            c.swapped = quantized(c, {**self._options, "method": quantizer}, channels.get(c.names[0]))
        carry_over(c.module, c.swapped)
        if self._is_auto:
            reason = settle(c.swapped, self._use_fast_accum)
            if reason:
                self.changed.setdefault(reason, []).append(c.names[0])
                c.reason = "; ".join(filter(None, (c.reason, reason)))
        if (
            self._options["recipe"] is not None
            and isinstance(c.swapped, Experts)
            and not c.swapped.rounded_gate
        ):
            reason = f"{c.swapped.activation} of float32 sums, which training rounds first"
            c.reason = "; ".join(filter(None, (c.reason, reason)))
        c.activations = c.swapped.activations
        c.method = cast(Method, self._recipe.method)
        if quantizer.errors:
            squares = [error * error for error in quantizer.errors]
            c.output_error = (sum(squares) / len(squares)) ** 0.5
        c.reason = "; ".join(filter(None, (c.reason, *dict.fromkeys(quantizer.notes))))
        self._done += 1
        if self._progress is not None:
            self._progress(self._done, self._total, c.names[0])


def quantized(
    c: Candidate, options: dict[str, Any], residual_channels: Tensor | None = None
) -> Linear | Experts:
    """The NVFP4 layer or experts of a candidate; options are those of ``from_float``."""
    if isinstance(c.module, torch.nn.Linear):
        if residual_channels is not None:
            options = {**options, "residual_channels": residual_channels.to(c.module.weight.device)}
        return Linear.from_float(c.module, **options)
    return moe.convert(c.module, cast(moe.ExpertsPlan, c.plan), **options)


def statistics_of(c: Candidate, statistics: Mapping[str, InputStatistics]) -> dict[str, InputStatistics]:
    """The statistics of a candidate's products, by "" or "w13" and "w2"."""
    found = {}
    for name, k, num_experts in collect.products_of(c):
        if name not in statistics:
            raise ValueError(f"calibration: has no statistics of {name!r}, must have those of every layer")
        known = statistics[name]
        shape, wanted = tuple(known.mean_square.shape), (num_experts, k) if num_experts else (k,)
        if shape != wanted:
            raise ValueError(f"calibration: mean_square of {name!r} has shape {shape}, must be {wanted}")
        found["" if not num_experts else name.rpartition(".")[2]] = known
    return found


@contextlib.contextmanager
def _rounded(candidates: Sequence[Candidate]) -> Iterator[None]:
    """Give the float modules the values of their NVFP4 weights until the context ends."""
    held: list[tuple[Tensor, Tensor]] = []
    try:
        for c in candidates:
            for parameter, values in _values(c):
                held.append((parameter, parameter.data))
                parameter.data = values.to(parameter.dtype)
        yield
    finally:
        for parameter, data in held:
            parameter.data = data


def _values(c: Candidate) -> Iterator[tuple[Tensor, Tensor]]:
    """The float parameters of a module, and the values of the NVFP4 weights that were made from them."""
    if isinstance(c.module, torch.nn.Linear) and isinstance(c.swapped, Linear):
        yield c.module.weight, c.swapped.dequantize_weight()
    elif c.plan is not None and isinstance(c.swapped, Experts):
        yield from moe.rounded(c.module, c.plan, c.swapped)
