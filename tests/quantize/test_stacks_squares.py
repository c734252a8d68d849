"""Stacks of matrices in blocks of 16x16: one call for all of them, with the bits of each matrix by itself."""

from __future__ import annotations

import ctypes
from typing import Any

import capi
import fp4gemm
import pytest
import torch
from fp4gemm import reference
from fp4gemm.ops import operators
from helpers import FLOATS, assert_bits, assert_parts, captured, dirty, make, short
from op_checks import opcheck
from torch import Tensor

CASTS: list[dict[str, Any]] = [
    {},
    {"four_over_six": 1, "e4m3_max": 256},
    {"four_over_six": 2, "fast_error": True, "e4m3_max": 448},
]
SHAPES = [(1, 16, 16), (3, 48, 80), (2, 128, 64), (5, 144, 208), (2, 272, 48)]


def matrices_of(kind: str, shape: tuple[int, int, int], dtype: torch.dtype, gen: torch.Generator) -> Tensor:
    """(g, n, k), where each matrix is of another magnitude."""
    g, n, k = shape
    x = torch.stack([make(kind, n, k, torch.float32, gen) * 4.0 ** (e - 1) for e in range(g)])
    return x.to(dtype)


def want_of(x: Tensor, amax: Tensor | None, rows: bool, columns: bool, **cast: Any) -> tuple[Tensor, ...]:
    """What the operator must return, from the reference of one matrix."""
    parts: list[Tensor] = []
    measured = torch.empty(0)
    for axis, is_wanted in ((-1, rows), (0, columns)):
        made = [
            reference.quantize(each, None if amax is None else amax[e : e + 1], False, axis, 16, **cast)
            for e, each in enumerate(x)
        ]
        codes, scales, found = ([m[i] for m in made] for i in range(3))
        taken = slice(None) if is_wanted else slice(0, 0)
        parts += [torch.stack(codes)[taken], torch.stack([s.view(torch.uint8) for s in scales])[taken]]
        measured = torch.cat(found)
    return parts[0], parts[1], parts[2], parts[3], measured


def as_bytes(made: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(t.view(torch.uint8).cpu() if t.dtype is torch.float8_e4m3fn else t.cpu() for t in made)


def poison(device: torch.device, g: int, n: int, k: int) -> None:
    """Leaves 0xFF in the memory from which the results will be allocated."""
    sizes = [(n, k), (k, n)]
    scales = [(a + 127) // 128 * 128 * ((b // 16 + 3) // 4 * 4) for a, b in sizes]
    dirty(device, g * n * k // 2, g * n * k // 2, *(g * s for s in scales), 4 * g)


@pytest.mark.parametrize("cast", CASTS, ids=["te", "mae", "mse-fast"])
@pytest.mark.parametrize("dtype", FLOATS, ids=short)
def test_each_matrix_has_its_own_bits(
    dtype: torch.dtype, cast: dict[str, Any], device: torch.device, gen: torch.Generator
) -> None:
    for shape in SHAPES:
        x = matrices_of("heavy", shape, dtype, gen)
        amax = torch.rand(shape[0], generator=gen) * 4
        for given in (None, amax):
            for rows, columns in ((True, False), (False, True), (True, True)):
                poison(device, *shape)
                got = operators.quantize_stack(
                    x.to(device), None if given is None else given.to(device), rows, columns, **cast
                )
                want = want_of(x, given, rows, columns, **cast)
                assert_parts(as_bytes(got), want, f"{shape} rows {rows} columns {columns}")


@pytest.mark.parametrize("kind", ["row_ranges", "denormal", "specials"])
def test_values(kind: str, device: torch.device, gen: torch.Generator) -> None:
    """Zeros, infinities, NaN and numbers of every exponent, in one matrix and not in the next."""
    x = torch.randn(3, 48, 64, generator=gen)
    if kind == "specials":
        x[0, :16] = 0
        x[1, 3, 5], x[1, 20, 40], x[1, 47, 63] = torch.inf, torch.nan, -torch.inf
        x[2] = 0
    else:
        x[1] = make(kind, 48, 64, torch.float32, gen)
    for cast in CASTS:
        got = operators.quantize_stack(x.to(device), None, True, True, **cast)
        assert_parts(as_bytes(got), want_of(x, None, True, True, **cast), f"{kind} {cast}")


def test_rows_need_no_whole_squares(device: torch.device, gen: torch.Generator) -> None:
    """Rows alone: n may be any number, and the rows of x may be further apart than k."""
    for n in (1, 5, 40, 129):
        x = matrices_of("heavy", (3, n, 96), torch.bfloat16, gen)
        for given in (x, x[:, :, 16:80]):
            moved = x.to(device)[:, :, 16:80] if given is not x else x.to(device)
            got = operators.quantize_stack(moved, None, True, False)
            one = [reference.quantize(each, None, False, -1, 16) for each in given.contiguous()]
            for e, (codes, scales, amax) in enumerate(one):
                assert_bits(got[0][e].cpu(), codes, f"codes {n} {e}")
                assert_bits(got[1][e].cpu(), scales, f"scales {n} {e}")
                assert_bits(got[4][e : e + 1].cpu(), amax, f"amax {n} {e}")
            assert got[2].shape[0] == got[3].shape[0] == 0


def test_facade(device: torch.device, gen: torch.Generator) -> None:
    """quantize and quantize_both of a stack call the operator once, and each matrix equals its own call."""
    x = matrices_of("heavy", (4, 80, 48), torch.bfloat16, gen).to(device)
    amax = torch.rand(4, 1, generator=gen).to(device)
    for options in (
        {"scaling": "tensor", "block": (16, 16)},
        {"scaling": "tensor", "block": (16, 16), "four_over_six": "mae"},
    ):
        for given in ({}, {"amax": amax}):
            along = [fp4gemm.quantize(x, axis=axis, **given, **options) for axis in (-1, 0)]
            pairs = {"amax": amax, "amax_t": 2 * amax} if given else {}
            both = fp4gemm.quantize_both(x, **pairs, **options)
            for e in range(4):
                own = {"amax": amax[e]} if given else {}
                for axis, made in zip((-1, 0), along, strict=True):
                    want = fp4gemm.quantize(x[e], axis=axis, **own, **options)
                    for name in ("codes", "scales", "amax"):
                        assert_bits(getattr(made[e], name), getattr(want, name), f"{name} {axis} {e}")
                own = {"amax": amax[e], "amax_t": 2 * amax[e]} if given else {}
                for axis, made in zip((-1, 0), both, strict=True):
                    one = {"amax": own["amax" if axis == -1 else "amax_t"]} if own else {}
                    want = fp4gemm.quantize(x[e], axis=axis, **one, **options)
                    for name in ("codes", "scales", "amax"):
                        assert_bits(getattr(made[e], name), getattr(want, name), f"both {name} {axis} {e}")


def test_one_call(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    """No operator is called for a matrix by itself."""
    calls = []
    for name in ("quantize", "quantize_both", "quantize_stack"):
        original = getattr(operators, name)
        monkeypatch.setattr(
            operators, name, lambda *a, name=name, original=original: calls.append(name) or original(*a)
        )
    x = torch.ones(3, 32, 64, dtype=torch.bfloat16, device=device)
    fp4gemm.quantize(x, scaling="tensor", block=(16, 16))
    fp4gemm.quantize(x, axis=0, scaling="tensor", block=(16, 16))
    fp4gemm.quantize_both(x, scaling="tensor", block=(16, 16))
    assert calls == ["quantize_stack"] * 3


def test_opcheck(device: torch.device, gen: torch.Generator) -> None:
    x = matrices_of("heavy", (2, 48, 80), torch.bfloat16, gen).to(device)
    opcheck("quantize_stack", x, None, True, True)
    opcheck("quantize_stack", x, torch.rand(2, device=device), False, True, four_over_six=1, e4m3_max=256)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", FLOATS, ids=short)
def test_large(dtype: torch.dtype, cuda: torch.device, gen: torch.Generator) -> None:
    """Against the reference on the GPU; the shape of an expert, many matrices, and long rows."""
    for shape in ((3, 1536, 2048), (300, 32, 48), (70000, 16, 16), (2, 16, 65552)):
        x = torch.randn(shape, generator=gen).to(dtype).to(cuda)
        poison(cuda, *shape)
        got = operators.quantize_stack(x, None, True, True)
        rows = [0, shape[0] // 2, shape[0] - 1]
        want = want_of(x[rows], None, True, True)
        for part, wanted in zip(got, want, strict=True):
            wanted_bytes = part[rows].view(torch.uint8) if part.dtype is torch.float8_e4m3fn else part[rows]
            assert torch.equal(wanted_bytes, wanted), shape
        assert torch.equal(got[4], x.abs().amax((1, 2)).float()), shape


@pytest.mark.gpu
def test_graph(cuda: torch.device, gen: torch.Generator) -> None:
    """The call does not synchronise, and a replay reads x again."""
    x, other = (matrices_of("heavy", (3, 144, 64), torch.bfloat16, gen).to(cuda) for _ in range(2))
    given = x.clone()
    graph, made = captured(lambda: operators.quantize_stack(given, None, True, True), cuda)
    given.copy_(other)
    graph.replay()
    assert_parts(as_bytes(made), as_bytes(operators.quantize_stack(other, None, True, True)), "replay")


@pytest.mark.gpu
def test_operator_refuses(cuda: torch.device) -> None:
    """What the operator checks itself, on a GPU."""
    x = torch.ones(2, 48, 64, dtype=torch.bfloat16, device=cuda)
    cases: list[tuple[tuple[Any, ...], str]] = [
        ((x[0], None, True, False), "x: has 2 dimensions, must have 3"),
        ((x, None, False, False), "rows: is False, must be True where columns is False"),
        ((x[:, :40], None, True, True), "x: n is 40"),
        ((x[:, :40], None, True, False), "x: stride along matrices is 3072, must be 2560"),
        ((x[:, :, :40], None, True, False), "x: k is 40, must be a positive multiple of 16"),
        ((x.transpose(1, 2), None, True, False), "x: stride along k is 64, must be 1"),
        ((x, torch.ones(3, device=cuda), True, False), "amax: has 3 elements"),
        ((x.double(), None, True, False), "x: dtype is Double"),
    ]
    for args, message in cases:
        with pytest.raises(RuntimeError, match=message):
            operators.quantize_stack(*args)


@pytest.mark.parametrize(
    ("changes", "num_matrices", "message"),
    [
        ({"m": -1}, 2, "m: is -1, must be between 0"),
        ({}, 0, "num_matrices: is 0, must be between 1"),
        ({}, 1 << 27, "num_matrices: 134217728 of 32 rows, must be at most 2147483647 rows"),
        ({"block_rows": 1}, 2, "block_rows: is 1, which requires column without row for a stack"),
        ({"scaling": capi.SCALING_ROW}, 2, "block_rows: is 16, which requires FP4GEMM_SCALING_TENSOR"),
        ({"offs": 1024, "num_groups": 1}, 2, "without groups, Hadamard and stochastic rounding"),
        ({"block_rows": 1, "offs": 1024, "num_groups": 1}, 2, "offs: is 0x400, must be null for a stack"),
    ],
)
def test_c_interface_refuses(changes: dict[str, Any], num_matrices: int, message: str) -> None:
    """The arguments are checked before the device is asked for, so that this runs without one."""
    side = capi.Quantized(codes=1024, scales=1024, amax=1024)
    good = {"m": 32, "k": 64, "x": 1024, "x_row_stride": 64, "scaling": capi.SCALING_TENSOR, "block_rows": 16}
    library = capi.core()
    args = capi.QuantizeArgs(row=side, **{**good, **changes})
    assert library.fp4gemm_quantize_stack(ctypes.byref(args), num_matrices, 0, None) != capi.SUCCESS
    assert message in library.fp4gemm_last_error().decode()
