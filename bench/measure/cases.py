"""The cases of ``python -m bench quantize``: each mode with its call, reference, bytes and target."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import fp4gemm
import torch
from fp4gemm import reference
from torch import Tensor

from .library import operator_arguments
from .targets import FEW_ROWS, QUANTIZE, Target
from .traffic import Traffic, grouped_bytes, packed_bytes, scale_bytes
from .verify import filled

Inputs = Mapping[str, Any]
SEED = 20260


@dataclass(frozen=True)
class Case:
    """One mode on one kind of input: a row of the table."""

    name: str
    call: Callable[[Inputs], object]
    want: Callable[[Inputs], tuple[Tensor, ...]]  # the result of the reference, in the order of verify.parts
    traffic: Traffic
    target: Target | None = None


@dataclass(frozen=True)
class Family:
    """Cases on the same inputs, timed interleaved."""

    title: str
    inputs: Callable[[torch.device], Inputs]
    cases: tuple[Case, ...]

    def name(self, case: Case) -> str:
        return f"{case.name}, {self.title}"


# ---- a case from options of the library -------------------------------------------------------------------


def quantize_case(
    name: str,
    shape: tuple[int, int],
    elem_bytes: int,
    target: Target | None = None,
    *,
    given: bool = False,
    axis: int = -1,
    stochastic: bool = False,
    **options: Any,
) -> Case:
    """A case of fp4gemm.quantize with these options; ``given``: the tensor's amax is an argument."""
    m, k = shape
    rows, width = (m, k) if axis == -1 else (k, m)  # rows and row length of the result
    arguments = operator_arguments({**options, "stochastic": stochastic})
    per_row = arguments.pop("per_row")

    def call(inputs: Inputs) -> object:
        extra: dict[str, Any] = {"axis": axis}
        if given:
            extra["amax"] = inputs["amax"]
        if stochastic:
            extra |= {"stochastic": True, "rng_state": inputs["rng_state"]}
        return fp4gemm.quantize(inputs["x"], **options, **extra)

    def want(inputs: Inputs) -> tuple[Tensor, ...]:
        amax = inputs["amax"] if given else None
        extra = {"rng_state": inputs["rng_state"]} if stochastic else {}
        result = reference.quantize(inputs["x"], amax, per_row, axis=axis, **arguments, **extra)
        return filled(result, [inputs["amax"]])

    packed = packed_bytes(rows, width, rows if per_row else 1)
    return Case(
        name, call, want, Traffic({"x": m * k * elem_bytes, "q": packed}), target or QUANTIZE.get(name)
    )


def both_case(
    name: str,
    shape: tuple[int, int],
    elem_bytes: int,
    *,
    given: bool = False,
    **options: Any,
) -> Case:
    """A case of fp4gemm.quantize_both; two reads of x are counted. ``given``: both amax are arguments."""
    m, k = shape
    arguments = operator_arguments(options)
    per_row = arguments.pop("per_row")

    def call(inputs: Inputs) -> object:
        extra = {"amax": inputs["amax"], "amax_t": inputs["amax"]} if given else {}
        return fp4gemm.quantize_both(inputs["x"], **options, **extra)

    def want(inputs: Inputs) -> tuple[Tensor, ...]:
        amax = inputs["amax"] if given else None
        result = reference.quantize_both(inputs["x"], amax, amax, per_row, **arguments)
        return filled(result, [inputs["amax"]] * 2)

    terms = {
        "2 x": 2 * m * k * elem_bytes,
        "q": packed_bytes(m, k, m if per_row else 1),
        "q_t": packed_bytes(k, m, k if per_row else 1),
    }
    return Case(name, call, want, Traffic(terms), QUANTIZE.get(name))


# ---- the families -----------------------------------------------------------------------------------------


def plain_inputs(shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Inputs:
    """A Gaussian x, its amax and a Philox state."""
    x = torch.randn(shape, device=device, dtype=dtype)
    state = torch.randint(-(2**63), 2**63 - 1, (2,), device=device, dtype=torch.int64)
    return {"x": x, "amax": x.abs().amax().float().view(1), "rng_state": state}


def plain_family(shape: tuple[int, int], dtype: torch.dtype, cases: tuple[Case, ...]) -> Family:
    names = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
    title = f"{names[dtype]} {shape[0]}x{shape[1]}"
    return Family(title, partial(plain_inputs, shape, dtype), cases)


def mode_cases(shape: tuple[int, int]) -> tuple[Case, ...]:
    """Every mode of quantize, quantize_both and quantize_mxfp8 on bf16 of one shape."""
    one = partial(quantize_case, shape=shape, elem_bytes=2)
    both = partial(both_case, shape=shape, elem_bytes=2)
    tensor: dict[str, Any] = {"scaling": "tensor"}
    return (
        one("row"),
        one("tensor, amax given", given=True, **tensor),
        one("tensor", **tensor),
        one("row te_per_token", encode="te_per_token"),
        one("row 4over6 mae", four_over_six="mae"),
        one("row 4over6 mse", four_over_six="mse"),
        one("row 4over6 mae, fast error", four_over_six="mae", four_over_six_error="fast"),
        one("tensor 4over6 mae, amax given", given=True, four_over_six="mae", **tensor),
        one("tensor 4over6 mse, amax given", given=True, four_over_six="mse", **tensor),
        one("row stochastic", stochastic=True),
        one("row hadamard bf16", hadamard="bf16"),
        one("row hadamard fp32, stochastic", hadamard="fp32", stochastic=True),
        one("row eden", encode="eden", hadamard="fp32", stochastic=True),
        one("axis 0 row", axis=0),
        one(
            "axis 0 tensor hadamard bf16, amax given",
            given=True,
            axis=0,
            hadamard="bf16",
            **tensor,
        ),
        one("16x16 tensor, amax given", given=True, block=(16, 16), **tensor),
        one("16x16 tensor", block=(16, 16), **tensor),
        both("both row"),
        both("both tensor, amax given", given=True, **tensor),
        both("both tensor hadamard bf16, amax given", given=True, hadamard="bf16", **tensor),
        mxfp8_case("mxfp8", shape, -1),
        mxfp8_case("mxfp8 axis 0", shape, 0),
    )


def mxfp8_case(name: str, shape: tuple[int, int], axis: int) -> Case:
    m, k = shape
    rows, width = (m, k) if axis == -1 else (k, m)
    return Case(
        name,
        lambda inputs: fp4gemm.quantize_mxfp8(inputs["x"], axis=axis),
        lambda inputs: reference.mxfp8_quantize(inputs["x"], axis, torch.float8_e4m3fn, True),
        Traffic({"x": 2 * m * k, "q": m * k + scale_bytes(rows, width, 32)}),
    )


def gated_family(m: int, k: int) -> Family:
    """silu_and_mul_quantize of (m, 2k), the output of the first GEMM of an MLP."""
    case = Case(
        "silu_and_mul row",
        lambda inputs: fp4gemm.silu_and_mul_quantize(inputs["x"]),
        lambda inputs: reference.silu_and_mul_quantize(inputs["x"]),
        Traffic({"x": 4 * m * k, "q": packed_bytes(m, k, m)}),
        QUANTIZE["silu_and_mul row"],
    )
    return plain_family((m, 2 * k), torch.bfloat16, (case,))


def norm_family(m: int, k: int) -> Family:
    """rms_norm_quantize, without and with a residual, which is added first and written back."""
    eps = 1e-6

    def inputs(device: torch.device) -> Inputs:
        x, residual = torch.randn(2, m, k, device=device, dtype=torch.bfloat16)
        return {"x": x, "residual": residual, "weight": 1 + 0.1 * torch.randn_like(x[0])}

    def alone(inputs: Inputs) -> tuple[Tensor, ...]:
        return tuple(reference.rms_norm_quantize(inputs["x"], inputs["weight"], None, eps)[:3])

    def added(inputs: Inputs) -> tuple[Tensor, ...]:
        return tuple(reference.rms_norm_quantize(inputs["x"], inputs["weight"], inputs["residual"], eps))

    size = 2 * m * k
    fixed = {"weight": 2 * k, "q": packed_bytes(m, k, m)}
    cases = (
        Case(
            "rms_norm row",
            lambda i: fp4gemm.rms_norm_quantize(i["x"], i["weight"], eps=eps),
            alone,
            Traffic({"x": size} | fixed),
        ),
        Case(
            "rms_norm row, residual",
            lambda i: fp4gemm.rms_norm_quantize(i["x"], i["weight"], eps=eps, residual=i["residual"]),
            added,
            Traffic({"x": size, "2 residual": 2 * size} | fixed),
        ),
    )
    return Family(f"bf16 {m}x{k}", inputs, cases)


def dequantize_family(m: int, k: int) -> Family:
    """dequantize of NVFP4 with an amax for each row and of MXFP8, and decode."""
    packed = packed_bytes(m, k, m)

    def inputs(device: torch.device) -> Inputs:
        x = torch.randn(m, k, device=device, dtype=torch.bfloat16)
        return {"q": fp4gemm.quantize(x), "mx": fp4gemm.quantize_mxfp8(x)}

    def case(dtype: torch.dtype, name: str, elem_bytes: int) -> Case:
        return Case(
            f"dequantize to {name}",
            lambda i: fp4gemm.dequantize(i["q"], dtype),
            lambda i: (reference.dequantize(i["q"].codes, i["q"].scales, i["q"].amax, 448, dtype),),
            Traffic({"q": packed, "y": elem_bytes * m * k}),
            QUANTIZE[f"dequantize to {name}"],
        )

    cases = (
        case(torch.bfloat16, "bf16", 2),
        case(torch.float32, "fp32", 4),
        Case(
            "decode",
            lambda i: fp4gemm.decode(i["q"]),
            lambda i: (reference.decode(i["q"].codes, i["q"].scales),),
            Traffic({"codes + scales": packed - 4 * m, "y": 2 * m * k}),
        ),
        Case(
            "mxfp8 dequantize to bf16",
            lambda i: fp4gemm.dequantize(i["mx"], torch.bfloat16),
            lambda i: (reference.mxfp8_dequantize(i["mx"].values, i["mx"].scales, torch.bfloat16, True),),
            Traffic({"q": m * k + scale_bytes(m, k, 32), "y": 2 * m * k}),
        ),
    )
    return Family(f"{m}x{k}", inputs, cases)


def group_ends(m: int, g: int, zipf: bool) -> Tensor:
    """int32 (g,): the cumulative ends of m rows that chose one of g experts, uniformly or by Zipf's law."""
    gen = torch.Generator().manual_seed(SEED)
    odds = 1 / torch.arange(1, g + 1) if zipf else torch.ones(g)
    odds = odds[torch.randperm(g, generator=gen)]
    drawn = torch.multinomial(odds, m, replacement=True, generator=gen)
    return torch.bincount(drawn, minlength=g).cumsum(0).to(torch.int32)


def grouped_family(m: int, k: int, g: int) -> Family:
    """quantize of the rows of g experts, beside quantize of an ungrouped input of the same size."""
    ends = {name: group_ends(m, g, name == "zipf") for name in ("uniform", "zipf")}

    def inputs(device: torch.device) -> Inputs:
        return dict(plain_inputs((m, k), torch.bfloat16, device)) | {
            name: offs.to(device) for name, offs in ends.items()
        }

    def grouped(name: str) -> Case:
        return Case(
            f"grouped row, {g} experts {name}",
            lambda i: fp4gemm.quantize(i["x"], offs=i[name]),
            lambda i: tuple(reference.quantize(i["x"], None, True, offs=i[name])),
            Traffic({"x": 2 * m * k, "q": grouped_bytes(m, k, g)}),
            QUANTIZE["grouped row"],
        )

    dense = quantize_case("row", (m, k), 2)
    return Family(f"bf16 {m}x{k}", inputs, (dense, *map(grouped, ends)))


@dataclass(frozen=True)
class Sizes:
    """The shapes of the table; on a CPU and in tests they are small."""

    square: tuple[int, int] = (8192, 8192)
    tall: tuple[int, int] = (16384, 7168)
    gated: tuple[tuple[int, int], ...] = ((8192, 8192), (4096, 14336))
    experts: int = 128
    few_rows: tuple[int, ...] = (1, 4, 16, 64)


def families(sizes: Sizes) -> tuple[Family, ...]:
    """All families of cases, in the order of the table."""
    m, k = sizes.square
    row = partial(quantize_case, "row")
    return (
        plain_family(sizes.square, torch.bfloat16, mode_cases(sizes.square)),
        plain_family(sizes.square, torch.float16, (row(sizes.square, 2),)),
        plain_family(sizes.square, torch.float32, (row(sizes.square, 4),)),
        grouped_family(*sizes.tall, sizes.experts),
        *(gated_family(*shape) for shape in sizes.gated),
        norm_family(m, k),
        dequantize_family(m, k),
        *(
            plain_family((few, k), torch.bfloat16, (row((few, k), 2, QUANTIZE[FEW_ROWS]),))
            for few in sizes.few_rows
        ),
    )
