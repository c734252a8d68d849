"""Tables 1 to 3: quantizers in both directions, of one tensor and of eight, and how scales get swizzled.

Every result must have the bits of the reference, or, of another library, what its own definition allows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import fp4gemm
import torch
from fp4gemm import NVFP4Tensor, reference
from fp4gemm.training import Cast, Recipe
from torch import Tensor

from ..baselines import flashinfer, transformer_engine
from ..measure import library
from ..measure.contest import BASELINE, BITS, OURS, ROUNDING, UNCHECKED, Check, Contender, Contest, Job, Row
from ..measure.harness import Harness
from ..measure.library import operator_arguments, training_copies
from ..measure.operands import calls
from ..measure.roofline import Work
from ..measure.traffic import grouped_bytes, packed_bytes, scale_bytes
from ..measure.verify import difference
from .arms import GROUPS, PER_TENSOR, PER_TOKEN, RECIPES, SEED

COPY, COPY_NOTE = "torch clone", "reads x and writes a copy, which moves more bytes than a quantizer"
FUSED, SEPARATE, TENSOR = "swizzled in the cast", "swizzled by a kernel", "per tensor"
SEPARATE_NOTE = "the quantizer, which swizzles too, and a kernel that swizzles scales of the same size again"
SEPARATE_ON_CPU = "on a CPU torch's operators swizzle"
TE = transformer_engine.NAME
FLASHINFER = flashinfer.NAME


def inputs(harness: Harness, m: int, k: int) -> list[Tensor]:
    """Gaussian x (m, k) in bf16, as many as keep the caches cold."""
    gen = harness.generator(m + k)
    return [
        harness.gaussian(gen, m, k).to(torch.bfloat16).contiguous()
        for _ in range(harness.rotations(2 * m * k))
    ]


def state_of(harness: Harness) -> Tensor:
    """The random state of stochastic rounding."""
    return torch.tensor([SEED, 0], device=harness.device)


# ---- tables 1 and 2: both directions


def both(sizes: Sequence[tuple[int, int]], harness: Harness) -> list[Job]:
    """Table 1: x and x.T by each recipe, as for a gradient."""
    return _jobs("upstream quantize", sizes, harness, partial(_both, groups=0))


def grouped(sizes: Sequence[tuple[int, int]], harness: Harness) -> list[Job]:
    """Table 2: the same of eight tensors in one call, m rows together."""
    return _jobs("upstream grouped", sizes, harness, partial(_both, groups=GROUPS))


Enter = Callable[[Contest, Harness, int, int], None]


def _jobs(bench: str, sizes: Sequence[tuple[int, int]], harness: Harness, enter: Enter) -> list[Job]:
    return [Job(f"{bench} {m}x{k}", bench, partial(_rows, harness, bench, m, k, enter)) for m, k in sizes]


def _rows(harness: Harness, bench: str, m: int, k: int, enter: Enter) -> Iterator[Row]:
    made = Contest({"bench": bench, "case": f"{bench} {m}x{k}", "m": m, "k": k}, only=harness.only)
    enter(made, harness, m, k)
    yield from made.rows(harness)


def _both(made: Contest, harness: Harness, m: int, k: int, groups: int) -> None:
    xs, state = inputs(harness, m, k), state_of(harness)
    offs = even_ends(m, groups).to(harness.device) if groups else None
    for name, recipe in RECIPES.items():
        made.attempt(name, partial(_both_directions, xs, recipe, state, offs, name == PER_TENSOR))
    work = Work(0.0, 2 * xs[0].nbytes)
    made.enter(COPY, Contender(calls(torch.clone, xs), work, BASELINE, None, UNCHECKED, COPY_NOTE))
    theirs = {
        f"{TE}, {PER_TENSOR}": {"rotates": True, "rounds": True},
        f"{TE}, row-scaled": {"row_scaled": True},
    }
    for name, options in theirs.items():
        reason = transformer_engine.absent(harness)
        if reason is not None:
            made.miss(name, reason)
        else:
            made.attempt(name, partial(_te_both, xs, groups, options), ours=False)


def even_ends(m: int, groups: int) -> Tensor:
    """int32 (groups,): the ends of groups that share m rows as evenly as possible, on the CPU."""
    return torch.tensor([m * (i + 1) // groups for i in range(groups)], dtype=torch.int32)


def _both_directions(
    xs: list[Tensor], recipe: Recipe, state: Tensor, offs: Tensor | None, is_baseline: bool
) -> tuple[Contender, Check]:
    """The two casts of a gradient by a recipe, in one call of fp4gemm.quantize_both."""
    options = options_of(recipe.dy, recipe.dy_t, recipe, state)
    m, k = xs[0].shape
    per_row = options["scaling"] == "row"
    groups = 0 if offs is None else offs.numel()
    written = packed_bytes(m, k, m if per_row else 1) + packed_bytes(k, m, k if per_row else 1)
    if groups:
        written = grouped_bytes(m, k, groups) + packed_bytes(k, m, groups * (k if per_row else 1))
    # Whatever finds an amax of columns reads x before the blocks are cast.
    work = Work(0.0, 2 * xs[0].nbytes + written)
    made = calls(partial(fp4gemm.quantize_both, offs=offs, **options), xs)
    contender = Contender(made, work, BASELINE if is_baseline else OURS)

    def check() -> str | None:
        arguments = operator_arguments(options)
        arguments["rng_state"] = options.get("rng_state")
        return difference(made[0](), reference.quantize_both(xs[0], None, None, offs=offs, **arguments))

    return contender, check


def options_of(of_rows: Any, of_columns: Any, recipe: Recipe, state: Tensor) -> dict[str, Any]:
    """The options of fp4gemm.quantize_both for two casts of a recipe.

    Raises:
        ValueError: one pass does not make both.
    """
    if not isinstance(of_rows, Cast) or not isinstance(of_columns, Cast):
        raise ValueError("the recipe does not quantize both")
    if not of_rows.is_one_pass_with(of_columns):
        raise ValueError(f"the casts {of_rows} and {of_columns} differ, must be those of one pass")
    return training_copies.keywords(of_rows, of_columns.hadamard, recipe.hadamard_signs, state)


def _te_both(xs: list[Tensor], groups: int, options: dict[str, bool]) -> tuple[Contender, Check]:
    m, k = xs[0].shape
    splits = torch.diff(even_ends(m, groups), prepend=torch.zeros(1, dtype=torch.int32)).tolist()
    quantizer = transformer_engine.quantizer(columnwise=True, **options)
    function = (
        partial(transformer_engine.split_quantize, splits, quantizer)
        if groups
        else partial(transformer_engine.quantize, quantizer)
    )
    made = calls(function, xs)
    work = Work(0.0, 2 * xs[0].nbytes + packed_bytes(m, k, 1) + packed_bytes(k, m, 1))
    contender = Contender(made, work, BASELINE, None, ROUNDING, facts=transformer_engine.facts)

    def check() -> str | None:
        got = made[0]()
        tensors = got if isinstance(got, (list, tuple)) else [got]
        parts = xs[0].split(splits) if groups else [xs[0]]
        reasons = map(transformer_engine.cast_differs, tensors, parts)
        return next((reason for reason in reasons if reason is not None), None)

    return contender, check


# ---- table 3: swizzled in the cast, or by another kernel


def swizzle(sizes: Sequence[tuple[int, int]], harness: Harness, pairs: Sequence[bool]) -> list[Job]:
    """Table 3: the cast of one operand, and of the two operands of a GEMM (m, k) by (k, k)."""
    made = []
    for pair in pairs:
        bench = "upstream swizzle"
        for m, k in sizes:
            key = f"{bench} {'pair ' if pair else ''}{m}x{k}"
            made.append(Job(key, bench, partial(_swizzle_rows, harness, key, m, k, pair)))
    return made


def _swizzle_rows(harness: Harness, key: str, m: int, k: int, pair: bool) -> Iterator[Row]:
    start: Row = {"bench": "upstream swizzle", "case": key, "m": m, "k": k, "pair": pair}
    made = Contest(start, only=harness.only)
    xs = inputs(harness, m, k)
    ws = inputs(harness, k, k)[: len(xs)] if pair else []
    operands = [(x, ws[i % len(ws)]) if pair else (x,) for i, x in enumerate(xs)]
    cast = RECIPES[PER_TOKEN].x
    if not isinstance(cast, Cast):
        raise ValueError("the recipe does not quantize x")
    options = training_copies.keywords(cast, None, library.SIGNS, None)
    num_bytes = sum(x.nbytes + packed_bytes(x.shape[0], x.shape[1], x.shape[0]) for x in operands[0])

    def fused() -> tuple[Contender, Check]:
        made = calls(partial(_each, partial(fp4gemm.quantize, **options)), operands)
        return Contender(made, Work(0.0, num_bytes)), _casts_right(made[0], operands[0], options)

    def separate() -> tuple[Contender, Check]:
        # Our quantizers write swizzled scales alone: the kernel swizzles plain scales of the same size.
        plain = [[_plain_scales(x, options) for x in one] for one in operands]
        moved = sum(2 * scale_bytes(x.shape[0], x.shape[1]) for x in operands[0])
        made = calls(partial(_two_kernels, options), operands, plain)
        note = SEPARATE_NOTE if harness.is_cuda else SEPARATE_ON_CPU
        contender = Contender(made, Work(0.0, num_bytes + moved), BASELINE, None, BITS, note)
        return contender, _casts_right(made[0], operands[0], options)

    def tensor() -> tuple[Contender, Check]:
        of_tensor = {"scaling": "tensor"}
        made = calls(partial(_each, partial(fp4gemm.quantize, **of_tensor)), operands)
        contender = Contender(made, Work(0.0, num_bytes), BASELINE)
        return contender, _casts_right(made[0], operands[0], of_tensor)

    made.attempt(FUSED, fused)
    made.attempt(SEPARATE, separate)
    made.attempt(TENSOR, tensor)
    _others(made, harness, operands, num_bytes)
    yield from made.rows(harness)


def _each(quantize: Callable[[Tensor], NVFP4Tensor], operands: tuple[Tensor, ...]) -> Any:
    return tuple(map(quantize, operands))


def _plain_scales(x: Tensor, options: dict[str, Any]) -> Tensor:
    m, k = x.shape
    return fp4gemm.unswizzle_scales(fp4gemm.quantize(x, **options).scales, m, k // 16)


def _two_kernels(options: dict[str, Any], operands: tuple[Tensor, ...], plain: Sequence[Tensor]) -> Any:
    made = []
    for x, scales in zip(operands, plain, strict=True):
        t = fp4gemm.quantize(x, **options)
        made.append(NVFP4Tensor(t.codes, library.swizzle_scales(scales), t.amax))
    return tuple(made)


def _casts_right(call: Callable[[], Any], operands: tuple[Tensor, ...], options: dict[str, Any]) -> Check:
    """A check that a call returns the bits of the reference for each operand."""

    def check() -> str | None:
        arguments = operator_arguments(options)
        per_row = arguments.pop("per_row")
        want = [part for x in operands for part in reference.quantize(x, None, per_row, **arguments)]
        return difference(call(), want)

    return check


def _others(made: Contest, harness: Harness, operands: Sequence[tuple[Tensor, ...]], num_bytes: int) -> None:
    """The casts of other libraries along rows."""
    reason = transformer_engine.absent(harness)
    quantizers: dict[str, Callable[[], Any]] = {
        f"{TE}, {TENSOR}": lambda: transformer_engine.quantizer(columnwise=False),
        f"{TE}, row-scaled": lambda: transformer_engine.quantizer(columnwise=False, row_scaled=True),
    }

    def te(quantizer: Callable[[], Any]) -> tuple[Contender, Check]:
        found = calls(partial(_each, partial(transformer_engine.quantize, quantizer())), operands)
        work = Work(0.0, num_bytes)
        contender = Contender(found, work, BASELINE, None, ROUNDING, facts=transformer_engine.facts)
        return contender, _differs(found[0], operands[0], transformer_engine.cast_differs)

    def of_flashinfer(per_token: bool) -> tuple[Contender, Check]:
        sides = [flashinfer.base_scales(one, per_token) for one in operands]
        found = calls(partial(flashinfer.quantize_each, per_token), operands, sides)
        contender = Contender(found, Work(0.0, num_bytes), BASELINE, None, ROUNDING, facts=flashinfer.facts)
        contender.note = None if per_token else "the amax is given"
        return contender, _differs(found[0], operands[0], flashinfer.cast_differs)

    for name, quantizer in quantizers.items():
        if reason is not None:
            made.miss(name, reason)
        else:
            made.attempt(name, partial(te, quantizer), ours=False)
    reason = flashinfer.absent(harness)
    for name, per_token in {f"{FLASHINFER}, per token": True, f"{FLASHINFER}, per tensor": False}.items():
        if reason is not None:
            made.miss(name, reason)
        else:
            made.attempt(name, partial(of_flashinfer, per_token), ours=False)


def _differs(
    call: Callable[[], Any], operands: tuple[Tensor, ...], wrong: Callable[[Any, Tensor], str | None]
) -> Check:
    return lambda: next((reason for reason in map(wrong, call(), operands) if reason is not None), None)
