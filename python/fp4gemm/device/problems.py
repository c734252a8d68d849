"""The products of the self-test: small and ragged, on numbers whose sums no order of additions can round.

Values are e2m1 times a block scale of 1/2 to 4: multiples of 1/4 up to 24, so that a sum of 320 products is
a multiple of 1/16 below 2^18 and exact in float32. Kernels and reference then agree in every bit.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from .. import _gemm_checks, layout, ops
from ..kernel_table import KernelInfo
from ..reference import decode_e2m1

SEED = 20260
SIZES = (130, 0, 1, 37)  # of the groups
LOOSE_ROWS = 5  # behind the last group
DENSE = ((300, 400, 288), (3, 32, 32))
ROWS, COLUMNS = (272, 160), (136, 264)  # (n, k) of groups of rows; (m, n) of groups of columns
POISON = 0xFF  # a NaN in every output type


@dataclasses.dataclass(frozen=True)
class Problem:
    """One call of an operator: its operands, and all terms of its epilogue or none."""

    name: str
    mode: str  # of the kernels that compute it
    operands: tuple[Tensor | None, ...]  # a, b, scale_a, scale_b and, with groups, offs
    shape: tuple[int, ...]  # of D
    terms: dict[str, Any]  # by name; c is float32 here
    prepacks: bool = False  # b is prepacked first, on the device

    def suits(self, kernel: KernelInfo) -> bool:
        """Whether the kernel computes it."""
        is_gated = self.terms.get("activation") == _gemm_checks.SWIGLU
        a, b, scale_a, scale_b = self.operands[:4]
        if a is None or b is None or kernel.mode != self.mode or kernel.is_gated != is_gated:
            return False
        formats = _gemm_checks.formats(a, scale_a, scale_b, int(self.prepacks))
        return kernel.supports(*formats, ragged="k" if self.mode == "grouped" and b.dim() == 2 else "m")

    def run(self, device: torch.device, out_dtype: torch.dtype, kernel: str | None) -> Tensor:
        """D on the CPU, from a kernel of the device, or its reference; what was not written is NaN."""
        size = torch.Size(self.shape).numel() * out_dtype.itemsize
        out = torch.full((size,), POISON, dtype=torch.uint8, device=device).view(out_dtype).view(self.shape)
        moved = {
            name: value.to(device) if isinstance(value, Tensor) else value
            for name, value in self.terms.items()
        }
        if "c" in moved:
            moved["c"] = moved["c"].to(out_dtype)
        absent = {"alpha": 1.0, "alpha_row": None, "alpha_col": None, "bias": None}
        operator = ops.scaled_mm_out
        if self.mode == "grouped":
            operator, absent = ops.scaled_grouped_mm_out, absent | {"alpha_groups": None}
        a, b, scale_a, scale_b, *offs = (None if x is None else x.to(device) for x in self.operands)
        groups: dict[str, Any] = {"offs": offs[0]} if offs else {}
        if self.prepacks and b is not None:
            groups["b_rows"] = b.shape[-2]
            b, scale_b = ops.prepack(b, scale_b), None
        operator(
            a=a,
            b=b,
            scale_a=scale_a,
            scale_b=scale_b,
            kernel=kernel,
            out=out,
            **groups,
            **(absent | moved),
        )
        return out.cpu()


def problems() -> list[Problem]:
    """Every problem, each without and with the terms of the epilogue, and gated where that is possible."""
    gen = torch.Generator().manual_seed(SEED)
    made = []
    for m, n, k in DENSE:
        a, b = _matrix(m, k, gen), _matrix(n, k, gen)
        scale_b = layout.swizzle_scales(b[1])
        operands: tuple[Tensor, ...] = (a[0], b[0], layout.swizzle_scales(a[1]), scale_b)
        made += _with_terms(f"{m}x{n}x{k}", "dense", operands, (m, n), gen)
        made += _prepacked(f"{m}x{n}x{k}", "dense", (_values(*a), b[0], None, scale_b), (m, n), gen)
    operands, values, shape = _grouped_rows(gen)
    made += _with_terms("groups of rows", "grouped", operands, shape, gen)
    made += _prepacked("groups of rows", "grouped", (values, operands[1], None, *operands[3:]), shape, gen)
    made += _with_terms("groups of columns", "grouped", *_grouped_columns(gen), gen)
    return made + _one_hot(gen)


def _prepacked(
    name: str, mode: str, operands: tuple[Tensor | None, ...], shape: tuple[int, ...], gen: torch.Generator
) -> list[Problem]:
    """The products of float16 and bfloat16 values with a prepacked weight."""
    made = []
    for dtype in (torch.float16, torch.bfloat16):
        values = operands[0]
        if values is not None:
            said = f"{name}, prepacked, {str(dtype).removeprefix('torch.')}"
            made += _with_terms(said, mode, (values.to(dtype), *operands[1:]), shape, gen, prepacks=True)
    return made


def _one_hot(gen: torch.Generator) -> list[Problem]:
    """Row l of a is one at l: D is the decoded weight, of every code and every finite scale, transposed."""
    n, k = ROWS
    codes = torch.randint(0, 256, (2, n, k // 2), generator=gen, dtype=torch.uint8)
    finite = torch.randint(0, 0x7F, (2 * n, k // 16), generator=gen, dtype=torch.uint8)
    finite.view(-1)[:0x7F] = torch.arange(0x7F)
    scales = torch.stack([layout.swizzle_scales(part).view(torch.uint8) for part in finite.split(n)])
    ends = torch.tensor((k, 2 * k), dtype=torch.int32)
    made = []
    for dtype in (torch.float16, torch.bfloat16):
        said = f"prepacked, one-hot {str(dtype).removeprefix('torch.')}"
        one, f8 = torch.eye(k, dtype=dtype), torch.float8_e4m3fn
        dense = (one, codes[0], None, scales[0].view(f8))
        made.append(Problem(said, "dense", dense, (k, n), {}, True))
        grouped = (torch.cat((one, one)), codes, None, scales.view(f8), ends)
        made.append(Problem(f"{said}, groups", "grouped", grouped, (2 * k, n), {}, True))
    return made


def _values(codes: Tensor, scales: Tensor) -> Tensor:
    """Decoded values (rows, k) of what _matrix makes; bfloat16 and float16 hold them."""
    return (decode_e2m1(codes).view(*scales.shape, 16) * scales.float().unsqueeze(-1)).view(len(codes), -1)


def _with_terms(
    name: str,
    mode: str,
    operands: tuple[Tensor | None, ...],
    shape: tuple[int, ...],
    gen: torch.Generator,
    prepacks: bool = False,
) -> list[Problem]:
    m, n = shape[-2:]
    terms = {
        "alpha": 0.37,
        "alpha_row": torch.rand(m, generator=gen) * 2e-3,
        "alpha_col": torch.rand(n, generator=gen) + 0.5,
        "bias": torch.randn(n, generator=gen),
        "activation": 2,
        "c": torch.randn(shape, generator=gen),
        "beta": -0.6,
    }
    if mode == "grouped":
        num_groups = len(SIZES)
        terms["alpha_col"] = torch.rand((num_groups, n), generator=gen) + 0.5
        terms["bias"] = torch.randn((num_groups, n), generator=gen)
        terms["alpha"], terms["alpha_groups"] = 1.0, torch.rand(num_groups, generator=gen)
    made = [
        Problem(name, mode, operands, shape, {}, prepacks),
        Problem(f"{name} with every term", mode, operands, shape, terms, prepacks),
    ]
    if len(shape) == 2:
        gate = {"activation": _gemm_checks.SWIGLU}
        gated = {key: value for key, value in terms.items() if key not in ("c", "beta")} | gate
        half = (m, n // 2)
        made.append(Problem(f"{name}, gated", mode, operands, half, gate, prepacks))
        made.append(Problem(f"{name}, gated, with every term", mode, operands, half, gated, prepacks))
    return made


def _matrix(rows: int, k: int, gen: torch.Generator) -> tuple[Tensor, Tensor]:
    """Random codes (rows, k/2) and compact scales (rows, k/16), 1/2 to 4."""
    codes = torch.randint(0, 256, (rows, k // 2), generator=gen, dtype=torch.uint8)
    scales = torch.exp2(torch.randint(-1, 3, (rows, k // 16), generator=gen).float())
    return codes, scales.to(torch.float8_e4m3fn)


def _ends() -> Tensor:
    return torch.tensor(SIZES).cumsum(0).to(torch.int32)


def _grouped_rows(gen: torch.Generator) -> tuple[tuple[Tensor, ...], Tensor, tuple[int, ...]]:
    """Operands, the values of a, and the shape of D."""
    n, k = ROWS
    m = sum(SIZES) + LOOSE_ROWS
    codes, scales = _matrix(m, k, gen)
    parts = [layout.swizzle_scales(part) for part in scales[: sum(SIZES)].split(SIZES)]
    grouped = torch.zeros((layout.grouped_scale_rows(m, len(SIZES)), parts[0].shape[1]), dtype=torch.uint8)
    used = torch.cat([part.view(torch.uint8) for part in parts])
    grouped[: used.shape[0]] = used
    weights = [_matrix(n, k, gen) for _ in SIZES]
    b = torch.stack([weight[0] for weight in weights])
    scale_b = torch.stack([layout.swizzle_scales(weight[1]).view(torch.uint8) for weight in weights])
    f8 = torch.float8_e4m3fn
    return (codes, b, grouped.view(f8), scale_b.view(f8), _ends()), _values(codes, scales), (m, n)


def _grouped_columns(gen: torch.Generator) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    m, n = COLUMNS
    k = sum(-(-size // 64) * 64 for size in SIZES) + 64  # and columns of no group
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
    return (a, b, scale_a, scale_b, _ends()), (len(SIZES), m, n)
