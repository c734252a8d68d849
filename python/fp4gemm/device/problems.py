"""The products of the self-test: small and ragged, on numbers whose sums are exact in any order of additions.

A value is an e2m1 number times a block scale of 1/2 to 4: a multiple of 1/4 up to 24 in magnitude. A sum of
320 products is then a multiple of 1/16 below 2^18, which float32 holds exactly, so that kernels and the
reference agree in every bit.

Scales of the MX formats are 1/2 to 2. MXFP8 values have magnitudes from 1/2 to 15/8 and 4 significant bits; a
sum is then a multiple of 2^-10 below 2^13. Of MXFP4 it is a multiple of 1/16 below 2^16, and of MXFP8 beside
MXFP4 a multiple of 2^-7 below 2^15. There k is a multiple of 128, as their own kernels require.

The FP8 tensor cores of Hopper add with fewer bits. So FP8 tokens are zero but for four elements of a row, 1
or -1; a sum is then a multiple of 1/32 below 16, which needs nine bits.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from .. import activations, layout
from .._formats import MX_BLOCK, MXFP4, MXFP8, BlockFormat
from ..kernel_table import KernelInfo, kernel_by_name
from ..ops import gemm as gemm_ops
from ..ops import operators
from ..ops.gemm import GemmCall
from ..reference import decode_e2m1
from ..reference.fp8 import transposed

SEED = 20260
SIZES = (130, 0, 1, 37)  # rows (or columns of k) of each group
LOOSE_ROWS = 5  # rows after the last group, which no group owns
DENSE = ((300, 400, 288), (3, 32, 32))
RAGGED_M, RAGGED_K = (272, 160), (136, 264)  # (n, k) with ragged m; (m, n) with ragged k
NEGATIVE = (37, 40, 96)  # (m, n, k) of the product with negative block scales
DENSE_FP8, RAGGED_M_FP8 = ((300, 400, 320), (3, 32, 64)), (272, 192)
NONZERO = 4  # elements of a row of FP8 tokens
UNPACKED = 128  # k of MXFP8 beside MXFP4 is a multiple of it for kernels that read both
POISON = 0xFF  # a byte of a NaN in every output type
NAN_SCALES = (0x7F, 0xFF)


@dataclasses.dataclass(frozen=True)
class Problem:
    """One call of the operator: its operands, and all terms of its epilogue or none."""

    name: str
    operands: GemmCall  # the call without terms
    shape: tuple[int, ...]  # the shape of D
    terms: dict[str, Any]  # the terms by name; c is float32 here
    prepacks: bool = False  # b is prepacked first, on the device
    # If block scales have sign bits, the operands without these bits; else None.
    unsigned_operands: GemmCall | None = None

    @property
    def mode(self) -> str:
        """The mode of the kernels that compute the problem."""
        return "dense" if self.operands.offs is None else "grouped"

    def suits(self, kernel: KernelInfo) -> bool:
        """Whether the kernel can compute the problem."""
        x = self.operands
        is_gated = activations.by_number[self.terms.get("activation", 0)].is_gated
        if kernel.mode != self.mode or kernel.is_gated != is_gated:
            return False
        formats = gemm_ops.formats(x.a, x.b, x.scale_a, x.scale_b, int(self.prepacks))
        return kernel.supports(*formats, ragged="k" if gemm_ops.is_ragged_k(x) else "m")

    def unsigned(self, kernel: KernelInfo) -> Problem | None:
        """The problem as the kernel may also compute it: without the sign bits of its block scales.

        None if it has no such bits, or if the kernel decodes the scales itself, as negative numbers. The
        tensor cores of Blackwell read scales as ue4m3 (docs/quantization.md).
        """
        if self.unsigned_operands is None or kernel.arch < 100 or kernel.operand != "nvfp4":
            return None
        return dataclasses.replace(self, name=f"{self.name}, ignored", operands=self.unsigned_operands)

    def run(self, device: torch.device, out_dtype: torch.dtype, kernel: str | None) -> Tensor:
        """D on the CPU, computed by a kernel or the reference; elements that were not written are NaN."""
        size = torch.Size(self.shape).numel() * out_dtype.itemsize
        out = torch.full((size,), POISON, dtype=torch.uint8, device=device).view(out_dtype).view(self.shape)
        call = self.operands._replace(kernel_name=kernel, **self.terms)
        found = None if kernel is None else kernel_by_name(kernel)
        if found is not None and found.fast_accum:
            call = call._replace(use_fast_accum=True)
        if call.c is not None:
            call = call._replace(c=call.c.to(out_dtype))
        tensors = {name: x for name, x in call._asdict().items() if isinstance(x, Tensor)}
        moved: dict[str, Any] = {name: x.to(device) for name, x in tensors.items()}
        call = call._replace(**moved)
        if self.prepacks:
            packed = operators.prepack(call.b, call.scale_b, call.a.dtype is gemm_ops.FP8)
            call = call._replace(b=packed, scale_b=None, b_rows=call.b.shape[-2])
        operators.gemm_out(*call[:-1], out=out)  # all but out_dtype, which is that of out
        return out.cpu()


def problems() -> list[Problem]:
    """Every problem, each without and with the terms of the epilogue, and gated where the epilogue can be."""
    gen = torch.Generator().manual_seed(SEED)
    made = []
    for m, n, k in DENSE:
        a, b = _matrix(m, k, gen), _matrix(n, k, gen)
        scale_b = layout.swizzle_scales(b[1])
        operands = GemmCall(a[0], b[0], layout.swizzle_scales(a[1]), scale_b)
        made += _with_terms(f"{m}x{n}x{k}", operands, (m, n), gen)
        made += _prepacked(f"{m}x{n}x{k}", operands, _values(*a), (m, n), gen)
    operands, values, shape = _ragged_m(gen)
    made += _with_terms("ragged m", operands, shape, gen)
    made += _prepacked("ragged m", operands, values, shape, gen)
    made += _with_terms("ragged k", *_ragged_k(gen), gen)
    made += _fp8(gen) + _one_hot(gen) + _mx(MXFP8, MXFP8, gen) + _mx(MXFP4, MXFP4, gen)
    made += _mx(MXFP8, MXFP4, gen)
    return [*made, _negative_scales(gen)]


def _negative_scales(gen: torch.Generator) -> Problem:
    """A product in which half of the block scales of both operands have their sign bit set."""
    m, n, k = NEGATIVE
    calls: list[list[Tensor]] = [[], []]
    for rows in (m, n):
        codes, scales = _matrix(rows, k, gen)
        signs = torch.randint(0, 2, scales.shape, generator=gen, dtype=torch.uint8) << 7
        for operands, sign in zip(calls, (signs, signs & 0), strict=True):
            signed = (scales.view(torch.uint8) | sign).view(scales.dtype)
            operands += [codes, layout.swizzle_scales(signed)]
    with_signs, without = (GemmCall(a, b, scale_a, scale_b) for a, scale_a, b, scale_b in calls)
    return Problem("negative block scales", with_signs, (m, n), {}, unsigned_operands=without)


def _fp8(gen: torch.Generator) -> list[Problem]:
    """The products of FP8 tokens with a prepacked weight, dense and with ragged m."""
    products = []
    for m, n, k in DENSE_FP8:
        codes, scales = _matrix(n, k, gen)
        operands = GemmCall(_tokens(m, k, gen), codes, scale_b=layout.swizzle_scales(scales))
        products.append((f"{m}x{n}x{k}", operands, (m, n)))
    n, k = RAGGED_M_FP8
    m = sum(SIZES) + LOOSE_ROWS
    b, scale_b = _stack(n, k, gen)
    products.append(("ragged m", GemmCall(_tokens(m, k, gen), b, scale_b=scale_b, offs=_ends()), (m, n)))
    made = []
    for name, operands, shape in products:
        full_name = f"{name}, prepacked, FP8 tokens"
        made += _with_terms(full_name, operands, shape, gen, prepacks=True)
        fast = {"use_fast_accum": True}
        made.append(Problem(f"{full_name}, fast accumulation", operands, shape, fast, True))
    return made


def _mx(form_a: BlockFormat, form_b: BlockFormat, gen: torch.Generator) -> list[Problem]:
    """The products of two operands of MX formats, dense and with groups."""
    made = []
    title = form_a.title if form_a is form_b else f"{form_a.title} and {form_b.title}"
    step = MX_BLOCK if form_a is form_b else UNPACKED
    for m, n, k in DENSE:
        k = -(-k // step) * step
        (a, scale_a), (b, scale_b) = _mx_matrix(form_a, m, k, gen), _mx_matrix(form_b, n, k, gen)
        operands = GemmCall(a, b, layout.swizzle_scales(scale_a), layout.swizzle_scales(scale_b))
        made += _with_terms(f"{m}x{n}x{k}, {title}", operands, (m, n), gen)
    n, k = RAGGED_M
    k = -(-k // step) * step
    m = sum(SIZES) + LOOSE_ROWS
    a, scale_a = _mx_matrix(form_a, m, k, gen)
    weights = [_mx_matrix(form_b, n, k, gen) for _ in SIZES]
    values, scales = (torch.stack([w[i].view(torch.uint8) for w in weights]) for i in (0, 1))
    swizzled = torch.stack([layout.swizzle_scales(part) for part in scales]).view(scale_a.dtype)
    operands = GemmCall(a, values.view(weights[0][0].dtype), _spread(scale_a, m), swizzled, _ends())
    made += _with_terms(f"ragged m, {title}", operands, (m, n), gen)
    m, n = RAGGED_K
    step = form_a.group_columns
    taken = torch.zeros(sum(-(-size // step) * step for size in SIZES) + step, dtype=torch.bool)
    begin = 0
    for size in SIZES:
        taken[begin : begin + size] = True
        begin += -(-size // step) * step
    both = []
    for form, rows in ((form_a, m), (form_b, n)):
        data, block_scales = _mx_matrix(form, rows, len(taken), gen)
        elements = data.view(torch.uint8)
        if form is MXFP4:
            elements = torch.stack([elements & 15, elements >> 4], 2).flatten(1)
        elements[:, ~taken] = 0
        if form is MXFP4:
            data = elements[:, ::2] | elements[:, 1::2] << 4
        both.append((data, layout.swizzle_scales(block_scales)))
    (a, scale_a), (b, scale_b) = both
    call = GemmCall(a, b, scale_a, scale_b, _ends())
    return made + _with_terms(f"ragged k, {title}", call, (len(SIZES), m, n), gen)


def _mx_matrix(form: BlockFormat, rows: int, k: int, gen: torch.Generator) -> tuple[Tensor, Tensor]:
    """Random data (rows, k / per_entry) and row-major scales (rows, k/32) of an MX format."""
    if form is MXFP4:
        data = torch.randint(0, 256, (rows, k // 2), generator=gen).to(torch.uint8)
    else:
        sign_and_mantissa = torch.randint(0, 16, (rows, k), generator=gen)
        exponent = torch.randint(6, 8, (rows, k), generator=gen)
        values = (sign_and_mantissa & 8) << 4 | exponent << 3 | sign_and_mantissa & 7
        data = values.to(torch.uint8).view(gemm_ops.FP8)
    scales = torch.randint(126, 129, (rows, k // form.block), generator=gen)
    return data, scales.to(torch.uint8).view(torch.float8_e8m0fnu)


def _tokens(m: int, k: int, gen: torch.Generator) -> Tensor:
    """FP8 tokens (m, k) in the order of the kernels."""
    values = torch.zeros(m, k)
    places = torch.rand(m, k, generator=gen).argsort(dim=1)[:, :NONZERO]
    signs = torch.randint(0, 2, (m, NONZERO), generator=gen).float() * 2 - 1
    return transposed(values.scatter_(1, places, signs).to(gemm_ops.FP8))


def _prepacked(
    name: str, operands: GemmCall, values: Tensor, shape: tuple[int, ...], gen: torch.Generator
) -> list[Problem]:
    """The products of the values of a, in float16 and in bfloat16, with a prepacked weight."""
    made = []
    for dtype in (torch.float16, torch.bfloat16):
        full_name = f"{name}, prepacked, {str(dtype).removeprefix('torch.')}"
        plain = operands._replace(a=values.to(dtype), scale_a=None)
        made += _with_terms(full_name, plain, shape, gen, prepacks=True)
    return made


def _one_hot(gen: torch.Generator) -> list[Problem]:
    """a is an identity matrix, so D is the decoded weight, transposed, and rounded to e4m3 for FP8 tokens.

    The weight has every code and every finite scale, negative ones too.
    """
    made = []
    for dtype in (torch.float16, torch.bfloat16, gemm_ops.FP8):
        made += _one_hot_of(dtype, gen)
    return made


def _one_hot_of(dtype: torch.dtype, gen: torch.Generator) -> list[Problem]:
    """The problems of _one_hot for tokens of this dtype."""
    fp8 = dtype is gemm_ops.FP8
    n, k = RAGGED_M_FP8 if fp8 else RAGGED_M
    codes = torch.randint(0, 256, (2, n, k // 2), generator=gen, dtype=torch.uint8)
    finite = torch.tensor([scale for scale in range(256) if scale not in NAN_SCALES], dtype=torch.uint8)
    chosen = finite[torch.randint(0, len(finite), (2 * n, k // 16), generator=gen)]
    chosen.view(-1)[: len(finite)] = finite
    scales = torch.stack([layout.swizzle_scales(part).view(torch.uint8) for part in chosen.split(n)])
    ends = torch.tensor((k, 2 * k), dtype=torch.int32)
    name = f"prepacked, one-hot {'FP8 tokens' if fp8 else str(dtype).removeprefix('torch.')}"
    one, f8 = torch.eye(k).to(dtype), torch.float8_e4m3fn
    one = transposed(one) if fp8 else one
    two = torch.cat((one.view(torch.uint8), one.view(torch.uint8))).view(dtype)
    dense = GemmCall(one, codes[0], scale_b=scales[0].view(f8))
    grouped = GemmCall(two, codes, scale_b=scales.view(f8), offs=ends)
    return [
        Problem(name, dense, (k, n), {}, True),
        Problem(f"{name}, groups", grouped, (2 * k, n), {}, True),
    ]


def _values(codes: Tensor, scales: Tensor) -> Tensor:
    """The decoded values (rows, k) of a result of _matrix, which bfloat16 and float16 hold exactly."""
    return (decode_e2m1(codes).view(*scales.shape, 16) * scales.float().unsqueeze(-1)).view(len(codes), -1)


def _with_terms(
    name: str,
    operands: GemmCall,
    shape: tuple[int, ...],
    gen: torch.Generator,
    prepacks: bool = False,
) -> list[Problem]:
    """The product alone, and with every term for each activation."""
    m, n = shape[-2:]
    terms = {
        "alpha": 0.37,
        "alpha_row": torch.rand(m, generator=gen) * 2e-3,
        "alpha_col": torch.rand(n, generator=gen) + 0.5,
        "bias": torch.randn(n, generator=gen),
    }
    addend = {"c": torch.randn(shape, generator=gen), "beta": -0.6}
    if operands.offs is not None:
        num_groups = len(SIZES)
        terms["alpha_col"] = torch.rand((num_groups, n), generator=gen) + 0.5
        terms["bias"] = torch.randn((num_groups, n), generator=gen)
        terms["alpha"], terms["alpha_groups"] = 1.0, torch.rand(num_groups, generator=gen)
    made = [Problem(name, operands, shape, {}, prepacks)]
    for number, activation in activations.by_number.items():
        full_name = f"{name}, {activation.name or 'no activation'}"
        act = {"activation": number}
        if not activation.is_gated:
            every = {**terms, **addend, **act}
            made.append(Problem(f"{full_name}, with every term", operands, shape, every, prepacks))
        elif len(shape) == 2:
            half = (m, activation.width(n))
            made.append(Problem(full_name, operands, half, act, prepacks))
            made.append(Problem(f"{full_name}, with every term", operands, half, {**terms, **act}, prepacks))
    return made


def _matrix(rows: int, k: int, gen: torch.Generator) -> tuple[Tensor, Tensor]:
    """Random codes (rows, k/2) and row-major scales (rows, k/16), powers of two from 1/2 to 4."""
    codes = torch.randint(0, 256, (rows, k // 2), generator=gen, dtype=torch.uint8)
    scales = torch.exp2(torch.randint(-1, 3, (rows, k // 16), generator=gen).float())
    return codes, scales.to(torch.float8_e4m3fn)


def _ends() -> Tensor:
    return torch.tensor(SIZES).cumsum(0).to(torch.int32)


def _ragged_m(gen: torch.Generator) -> tuple[GemmCall, Tensor, tuple[int, ...]]:
    """The operands of a product with ragged m, the values of a, and the shape of D."""
    n, k = RAGGED_M
    m = sum(SIZES) + LOOSE_ROWS
    codes, scales = _matrix(m, k, gen)
    b, scale_b = _stack(n, k, gen)
    operands = GemmCall(codes, b, _spread(scales, m), scale_b, _ends())
    return operands, _values(codes, scales), (m, n)


def _spread(scales: Tensor, m: int) -> Tensor:
    """The swizzled scales of m rows in groups, each at a multiple of 128 rows."""
    parts = [layout.swizzle_scales(part) for part in scales[: sum(SIZES)].split(SIZES)]
    grouped = torch.zeros((layout.grouped_scale_rows(m, len(SIZES)), parts[0].shape[1]), dtype=torch.uint8)
    used = torch.cat([part.view(torch.uint8) for part in parts])
    grouped[: used.shape[0]] = used
    return grouped.view(scales.dtype)


def _stack(n: int, k: int, gen: torch.Generator) -> tuple[Tensor, Tensor]:
    """The codes and the swizzled scales of a weight (n, k) for each group."""
    weights = [_matrix(n, k, gen) for _ in SIZES]
    scales = torch.stack([layout.swizzle_scales(weight[1]).view(torch.uint8) for weight in weights])
    return torch.stack([weight[0] for weight in weights]), scales.view(torch.float8_e4m3fn)


def _ragged_k(gen: torch.Generator) -> tuple[GemmCall, tuple[int, ...]]:
    """The operands of a product with ragged k, and the shape of D."""
    m, n = RAGGED_K
    k = sum(-(-size // 64) * 64 for size in SIZES) + 64  # and 64 columns after the last group
    empty = torch.ones(k, dtype=torch.bool)
    begin = 0
    for size in SIZES:
        empty[begin : begin + size] = False
        begin += -(-size // 64) * 64
    operands = []
    for rows in (m, n):
        codes, scales = _matrix(rows, k, gen)
        nibbles = torch.stack((codes & 15, codes >> 4), dim=2).view(rows, k)
        nibbles[:, empty] = 0
        codes = nibbles[:, 0::2] | nibbles[:, 1::2] << 4
        scales.view(torch.uint8)[:, empty.view(-1, 16).all(1)] = 0
        operands.append((codes, layout.swizzle_scales(scales)))
    (a, scale_a), (b, scale_b) = operands
    return GemmCall(a, b, scale_a, scale_b, _ends()), (len(SIZES), m, n)
