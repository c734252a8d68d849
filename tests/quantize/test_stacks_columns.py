"""Stacks of matrices, the weights of experts, quantized along n: the bits of each matrix by itself."""

from __future__ import annotations

import ctypes
from typing import Any

import capi
import fp4gemm
import pytest
import torch
from fp4gemm import reference
from fp4gemm.ops import operators
from helpers import FLOATS, assert_parts, captured, dirty, make, short
from modes import MODES, Mode, by_name, state
from op_checks import opcheck
from torch import Tensor

COLUMN_MODES = [mode for mode in MODES if not mode.tiles]
ROW = {"rows": False, "columns": True, "per_row": True, "block_rows": 1}


@pytest.mark.parametrize("shape", [(3, 64, 80), (2, 128, 144), (1, 64, 16), (3, 48, 64)], ids=str)
def test_transposes_of_stacks(
    shape: tuple[int, int, int], device: torch.device, gen: torch.Generator
) -> None:
    """The public functions: each matrix has the bits of its own."""
    g, n, k = shape
    x = torch.randn(shape, generator=gen).bfloat16().to(device)
    x[0, 0, 0] = 100
    options: list[dict[str, Any]] = [
        {},
        {"scaling": "tensor"},
        {"hadamard": "fp32"},
        {"encode": "te_per_token", "hadamard": "bf16"},
        {"four_over_six": "mae", "scaling": "tensor"},
        {"scaling": "tensor", "block": (16, 16)},
    ]
    for option in options:
        is_row = option.get("scaling") != "tensor"
        whole = fp4gemm.quantize(x, axis=0, **option)
        assert whole.shape == (g, k, n)
        assert whole.amax.shape == (g, k if is_row else 1)
        rows, columns = fp4gemm.quantize_both(x, **option)
        amax = torch.rand(g, k if is_row else 1, generator=gen).to(device)
        given = fp4gemm.quantize(x, axis=0, amax=amax, **option)
        assert given.amax is amax
        for e in range(g):
            want = fp4gemm.quantize(x[e], axis=0, **option)
            for made in (whole, columns):
                assert_parts(parts_of(made[e]), parts_of(want), f"{option} {e}")
                assert made.hadamard_signs == want.hadamard_signs
            plain = {name: value for name, value in option.items() if name != "hadamard"}
            assert_parts(parts_of(rows[e]), parts_of(fp4gemm.quantize(x[e], **plain)), f"rows {option} {e}")
            want = fp4gemm.quantize(x[e], axis=0, amax=amax[e], **option)
            assert_parts(parts_of(given[e]), parts_of(want), f"given {option} {e}")


def parts_of(t: Any) -> tuple[Tensor, ...]:
    return t.codes, t.scales, t.amax


def columns_of(x: Tensor, amax: Tensor | None = None, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    """What the operator makes of the columns: bytes of codes and scales, and the amax, on the CPU."""
    _, _, codes, scales, made = operators.quantize_stack(x, amax, False, True, **options)
    return codes.cpu(), scales.view(torch.uint8).cpu(), made.cpu()


def assert_columns(x: Tensor, device: torch.device, amax: Tensor | None = None, **options: Any) -> None:
    """Compares the operator with the reference of each matrix, whose random state is its own."""
    g, n, k = x.shape
    own_state = options.pop("rng_state", None)
    scales = (k + 127) // 128 * 128 * ((n // 16 + 3) // 4 * 4)
    dirty(device, g * k * n // 2, g * scales, 4 * g * k, 4 * g)
    moved = None if own_state is None else own_state.to(device)
    given = None if amax is None else amax.to(device)
    got = columns_of(x.to(device), given, rng_state=moved, **options)
    assert got[2].shape == ((0 if amax is not None else g,) + ((k,) if options["per_row"] else ()))
    for e in range(g):
        own = None if own_state is None else torch.stack((own_state[0], own_state[1] + 2 * e))
        of_e = None if amax is None else amax[e].view(-1)
        codes, wanted, found = reference.quantize(x[e], of_e, axis=0, rng_state=own, **options)
        parts = (got[0][e], got[1][e]) + (() if amax is not None else (got[2][e].view(-1),))
        want = (codes, wanted.view(torch.uint8)) + (() if amax is not None else (found,))
        assert_parts(parts, want, f"{tuple(x.shape)} matrix {e} {options}")


@pytest.mark.parametrize("mode", COLUMN_MODES, ids=by_name)
def test_modes(mode: Mode, device: torch.device, gen: torch.Generator) -> None:
    """Each mode, with an n that is no multiple of 64; a matrix of zeros, NaN and infinities in others."""
    x = torch.randn(3, 80, 48, generator=gen) * torch.tensor([1.0, 0.0, 2.0**-9]).view(3, 1, 1)
    x[0, 3, 5], x[0, 20, 40], x[2, 79, 47], x[2, 0] = torch.inf, torch.nan, -torch.inf, 0
    options = {**mode.arguments, "rng_state": state(torch.device("cpu")) if mode.stochastic else None}
    assert_columns(x.bfloat16(), device, **options)
    amax = torch.rand(3, 48 if options["per_row"] else 1, generator=gen) * 4
    assert_columns(x.bfloat16(), device, amax if options["per_row"] else amax.view(-1), **options)


@pytest.mark.parametrize("dtype", FLOATS, ids=short)
def test_shapes(dtype: torch.dtype, device: torch.device, gen: torch.Generator) -> None:
    """One matrix, the least matrix, tiles that are not full, and rows that are further apart than k."""
    plain = {"block_rows": 1, "per_row": True}
    for g, n, k in ((1, 16, 16), (1, 144, 80), (4, 16, 32), (2, 272, 48), (5, 48, 208)):
        x = torch.stack([make("row_ranges", n, k, torch.float32, gen) * 4.0**e for e in range(g)]).to(dtype)
        assert_columns(x, device, **plain)
        assert_columns(x, device, block_rows=1, per_row=False)
    wide = torch.randn(3, 48, 96, generator=gen).to(dtype).to(device)
    got = operators.quantize_stack(wide[:, :, 16:80], None, False, True, True, 1)
    want = operators.quantize_stack(wide[:, :, 16:80].contiguous(), None, False, True, True, 1)
    for made, wanted in zip(got[2:], want[2:], strict=True):
        assert torch.equal(made.view(torch.uint8), wanted.view(torch.uint8))


def test_stochastic(device: torch.device, gen: torch.Generator) -> None:
    """quantize and quantize_both: matrix e is rounded with the offset of the state plus 2e."""
    x = torch.randn(3, 48, 32, generator=gen).bfloat16().to(device)
    given = torch.tensor([7, 5], device=device)
    made = fp4gemm.quantize(x, axis=0, stochastic=True, rng_state=given)
    rows, columns = fp4gemm.quantize_both(x, stochastic=True, rng_state=given)
    for e in range(3):
        own = torch.tensor([7, 5 + 2 * e], device=device)
        want = fp4gemm.quantize_both(x[e], stochastic=True, rng_state=own)
        assert_parts(parts_of(made[e]), parts_of(want[1]), f"columns {e}")
        assert_parts(parts_of(columns[e]), parts_of(want[1]), f"columns of both {e}")
        assert_parts(parts_of(rows[e]), parts_of(want[0]), f"rows of both {e}")


def test_one_call(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    """The columns of all matrices are quantized in one call."""
    calls = []
    for name in ("quantize", "quantize_both", "quantize_stack"):
        original = getattr(operators, name)
        monkeypatch.setattr(
            operators, name, lambda *a, name=name, original=original: calls.append(name) or original(*a)
        )
    x = torch.ones(3, 48, 64, dtype=torch.bfloat16, device=device)
    fp4gemm.quantize(x, axis=0)
    fp4gemm.quantize(x, axis=0, scaling="tensor", hadamard="bf16", stochastic=True)
    fp4gemm.quantize_both(x)
    assert calls == ["quantize_stack", "quantize_stack", "quantize", "quantize_stack"]


def test_opcheck(device: torch.device, gen: torch.Generator) -> None:
    x = torch.randn(2, 48, 80, generator=gen).bfloat16().to(device)
    opcheck("quantize_stack", x, None, **ROW, hadamard=1, signs=5)
    opcheck("quantize_stack", x, torch.rand(2, 80, device=device), **ROW)
    opcheck("quantize_stack", x, None, **{**ROW, "per_row": False})


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", FLOATS, ids=short)
def test_large(dtype: torch.dtype, cuda: torch.device, gen: torch.Generator) -> None:
    """The shape of an expert, more matrices than a grid has along z, and long columns."""
    for shape in ((3, 1536, 2048), (300, 48, 48), (70000, 16, 16), (2, 65552, 16)):
        x = torch.randn(shape, generator=gen).to(dtype).to(cuda)
        scales = (shape[2] + 127) // 128 * 128 * ((shape[1] // 16 + 3) // 4 * 4)
        dirty(cuda, x.numel() // 2, shape[0] * scales, 4 * shape[0] * shape[2])
        _, _, codes, made, amax = operators.quantize_stack(x, None, **ROW)
        for e in (0, shape[0] // 2, shape[0] - 1):
            want = operators.quantize(x[e], None, True, 0)
            assert_parts((codes[e], made[e].view(torch.uint8), amax[e]), bytes_of(want), f"{shape} {e}")
        assert torch.equal(amax, x.abs().amax(1).float()), shape


def bytes_of(parts: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return parts[0], parts[1].view(torch.uint8), parts[2]


@pytest.mark.gpu
def test_graph(cuda: torch.device, gen: torch.Generator) -> None:
    """The call does not synchronise, and a replay reads x again."""
    x, other = (torch.randn(3, 144, 64, generator=gen).bfloat16().to(cuda) for _ in range(2))
    given = x.clone()
    graph, made = captured(lambda: operators.quantize_stack(given, None, **ROW), cuda)
    given.copy_(other)
    graph.replay()
    want = operators.quantize_stack(other, None, **ROW)
    assert_parts(bytes_of(made[2:]), bytes_of(want[2:]), "replay")


@pytest.mark.gpu
def test_operator_refuses(cuda: torch.device) -> None:
    x = torch.ones(2, 48, 64, dtype=torch.bfloat16, device=cuda)
    state_of_3 = torch.zeros(3, dtype=torch.int64, device=cuda)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"rows": True}, "row: amax_given is null, must be given"),
        ({"rows": True, "columns": False}, "which requires column without row for a stack"),
        ({"amax": torch.ones(2, device=cuda)}, "amax: has 1 dimensions, must have 2"),
        ({"amax": torch.ones(2, 48, device=cuda)}, r"amax: shape is \(2, 48\), must be \(2, 64\)"),
        ({"rng_state": state_of_3}, "rng_state: must be a contiguous vector of 2 elements"),
        ({"block_rows": 16}, "requires FP4GEMM_SCALING_TENSOR"),
        ({"x": x[:, :40]}, "x: n is 40"),
    ]
    for changes, message in cases:
        with pytest.raises(RuntimeError, match=message):
            operators.quantize_stack(**{"x": x, "amax": None, **ROW, **changes})


def test_c_interface_refuses_rows() -> None:
    """The arguments are checked before the device is asked for, so that this runs without one."""
    side = capi.Quantized(codes=1024, scales=1024, amax=1024)
    library = capi.core()
    args = capi.QuantizeArgs(column=side, m=24, k=64, x=1024, x_row_stride=64)
    assert library.fp4gemm_quantize_stack(ctypes.byref(args), 2, 0, None) != capi.SUCCESS
    assert "m: is 24, must be" in library.fp4gemm_last_error().decode()
    args = capi.QuantizeArgs(row=side, column=side, m=32, k=64, x=1024, x_row_stride=64)
    assert library.fp4gemm_quantize_stack(ctypes.byref(args), 2, 0, None) != capi.SUCCESS
    assert "column without row for a stack" in library.fp4gemm_last_error().decode()
