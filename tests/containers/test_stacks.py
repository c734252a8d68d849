"""Stacks of matrices (g, n, k): each matrix is quantized as it would be on its own."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from typing import Any

import fp4gemm
import modes
import pytest
import torch
import torch.utils._pytree as pytree
from fp4gemm import DecodedTensor, NVFP4Tensor, reference
from helpers import FLOATS, assert_bits, dirty, make, make_codes, make_scales, short
from modes import FEW, MODES, Mode, assert_same, by_name
from torch import Tensor

# (g, n, k): scales with and without padding between matrices, one matrix, codes not aligned to 16 bytes.
SHAPES = ((3, 16, 48), (2, 128, 32), (4, 144, 16), (1, 33, 80), (3, 7, 16))


def make_stack(kind: str, shape: tuple[int, int, int], dtype: torch.dtype, gen: torch.Generator) -> Tensor:
    g, n, k = shape
    return make(kind, g * n, k, dtype, gen).view(shape)


def state_of(e: int, device: torch.device) -> Tensor:
    """The random state of matrix e; its offset wraps around."""
    offset = (modes.OFFSET + 2 * e + 2**63) % 2**64 - 2**63
    return torch.tensor([modes.SEED, offset], device=device)


def alone(x: Tensor, e: int, which: Mode, **more: Any) -> NVFP4Tensor:
    options = {**which.options, "rng_state": state_of(e, x.device)} if which.stochastic else which.options
    return fp4gemm.quantize(x[e], **options, **more)


def assert_each(t: NVFP4Tensor, wanted: list[NVFP4Tensor]) -> None:
    assert t.shape == (len(wanted), *wanted[0].shape)
    assert t.amax.shape == (len(wanted), *wanted[0].amax.shape)
    for e, want in enumerate(wanted):
        assert_same(t[e], want, f"matrix {e}")


@pytest.mark.parametrize("axis", [-1, 0])
@pytest.mark.parametrize("which", MODES, ids=by_name)
def test_each_matrix_is_quantized_alone(
    which: Mode, axis: int, device: torch.device, gen: torch.Generator
) -> None:
    for i, shape in enumerate(SHAPES):
        if axis == 0 and shape[1] % 16:
            continue
        x = make_stack("row_ranges", shape, FLOATS[i % 3], gen).to(device)
        wanted = [alone(x, e, which, axis=axis) for e in range(shape[0])]
        dirty(device, x.numel() // 2, x.numel() // 16, 4 * shape[0], 512 * shape[0])
        assert_each(fp4gemm.quantize(x, axis=axis, **which.on(device)), wanted)


@pytest.mark.parametrize("which", FEW, ids=by_name)
def test_both(which: Mode, device: torch.device, gen: torch.Generator) -> None:
    for shape in SHAPES[:3]:
        x = make_stack("heavy", shape, torch.bfloat16, gen).to(device)
        rows, columns = fp4gemm.quantize_both(x, **which.on(device))
        plain = {k: v for k, v in which.on(device).items() if not k.startswith("hadamard")}
        assert_same(rows, fp4gemm.quantize(x, **plain), "rows")
        assert_same(columns, fp4gemm.quantize(x, axis=0, **which.on(device)), "columns")
        again = fp4gemm.quantize_both(x, amax=rows.amax, amax_t=columns.amax, **which.on(device))
        for t, want in zip(again, (rows, columns), strict=True):
            assert t.amax is want.amax
            assert_same(t, want, "given amax")


@pytest.mark.parametrize("axis", [-1, 0])
@pytest.mark.parametrize("which", FEW, ids=by_name)
def test_given_amax(which: Mode, axis: int, device: torch.device, gen: torch.Generator) -> None:
    for g, n, k in SHAPES[:3]:
        x = make_stack("normal", (g, n, k), torch.float16, gen).to(device)
        rows = (n if axis == -1 else k) if which.arguments["per_row"] else 1
        amax = (torch.rand(g, rows, generator=gen) * 9).to(device)
        t = fp4gemm.quantize(x, axis=axis, amax=amax, **which.on(device))
        assert t.amax is amax
        wanted = [alone(x, e, which, axis=axis, amax=amax[e]) for e in range(g)]
        assert_each(t, wanted)


def test_strides(device: torch.device, gen: torch.Generator) -> None:
    """Rows and matrices with any strides."""
    x = make_stack("normal", (4, 32, 96), torch.bfloat16, gen).to(device)
    for view in (x[:, :, 16:80], x[::2], x[:, :16], x.transpose(0, 1), x[1:2, 3:], x.expand(4, 32, 96)):
        assert_same(fp4gemm.quantize(view), fp4gemm.quantize(view.contiguous()), str(view.stride()))


def test_amax_of_empty_values(device: torch.device) -> None:
    x = torch.zeros(2, 16, 32, device=device)
    x[1, 3, 5] = -7
    t = fp4gemm.quantize(x, scaling="tensor")
    assert t.amax.tolist() == [[0], [7]]
    assert t.dequantize().count_nonzero() == 1


@pytest.mark.parametrize("scaling", ["row", "tensor"])
def test_stack_is_the_inverse_of_indexing(scaling: str, device: torch.device, gen: torch.Generator) -> None:
    for shape in SHAPES:
        x = make_stack("outliers", shape, torch.float16, gen).to(device)
        t = fp4gemm.quantize(x, scaling=scaling, hadamard="fp32", hadamard_signs=9)
        again = fp4gemm.stack([t[e] for e in range(shape[0])])
        assert_same(again, t)
        assert_same(fp4gemm.stack(tuple(t)), t)  # type: ignore[call-overload]
        assert again.amax.shape == ((shape[0], shape[1]) if scaling == "row" else (shape[0], 1))


def test_stack_of_both_scalings(device: torch.device, gen: torch.Generator) -> None:
    x = make("normal", 32, 64, torch.float32, gen).to(device)
    a, b = fp4gemm.quantize(x), fp4gemm.quantize(x, scaling="tensor")
    t = fp4gemm.stack([a, b])
    assert t.amax.shape == (2, 32)
    assert_same(t[0], a)
    assert_same(t[1], b.with_row_amax())


def test_indexing(device: torch.device, gen: torch.Generator) -> None:
    t = fp4gemm.quantize(make_stack("normal", (3, 16, 32), torch.float32, gen).to(device))
    assert t[1].codes.data_ptr() == t.codes[1].data_ptr()
    assert t[1].amax.data_ptr() == t.amax[1].data_ptr()
    assert_same(t[-1], t[2])
    assert NVFP4Tensor(t[1].codes, t[1].scales, t[1].amax).shape == (16, 32)
    with pytest.raises(IndexError, match=r"^e: got 3, must be below 3"):
        t[3]
    with pytest.raises(IndexError, match=r"^e: got -4"):
        t[-4]
    for index in (True, "0", None, torch.tensor(0)):
        with pytest.raises(TypeError, match=r"^e: got"):
            t[index]  # type: ignore[index]
    with pytest.raises(TypeError, match=r"must be \(g, n, k\)"):
        t[0][0]
    odd = fp4gemm.quantize(make_stack("normal", (3, 7, 16), torch.float32, gen).to(device))
    assert all(odd[e].codes.data_ptr() % 16 == 0 for e in range(3))


@pytest.mark.parametrize("dtype", FLOATS, ids=short)
def test_dequantize_and_decode(dtype: torch.dtype, device: torch.device, gen: torch.Generator) -> None:
    for shape in SHAPES:
        x = make_stack("wide_blocks", shape, torch.float32, gen).to(device)
        for options in ({}, {"scaling": "tensor"}, {"scaling": "tensor", "four_over_six": "mae"}):
            t = fp4gemm.quantize(x, **options)
            dirty(device, x.numel() * dtype.itemsize, x.numel() * 2)
            values, decoded = fp4gemm.dequantize(t, dtype), fp4gemm.decode(t)
            assert values.shape == decoded.shape == shape
            assert decoded.amax is t.amax
            assert decoded.e4m3_max == t.e4m3_max
            DecodedTensor(decoded.data, decoded.amax, decoded.e4m3_max)
            for e in range(shape[0]):
                codes, scales, amax = (part.cpu() for part in modes.parts(t[e]))
                want = reference.dequantize(codes, scales, amax, t.e4m3_max, dtype)
                assert_bits(values[e], want, "values")
                assert_bits(decoded.data[e], reference.decode(codes, scales), "decoded")
            assert_bits(t.with_row_amax().dequantize(dtype), values, "with a vector of amax")


def test_decode_of_groups_of_rows(device: torch.device, gen: torch.Generator) -> None:
    for m, values in ((300, [10, 140, 140, 270]), (40, [0, 0]), (0, [0]), (128, [128])):
        x = make("row_ranges", m, 48, torch.bfloat16, gen).to(device)
        offs = torch.tensor(values, dtype=torch.int32, device=device)
        t = fp4gemm.quantize(x, offs=offs)
        d = fp4gemm.decode(t)
        assert d.offs is offs
        assert (d.offs_dim, d.shape) == (0, (m, 48))
        DecodedTensor(d.data, d.amax, offs=d.offs)
        end = values[-1]
        plain = fp4gemm.decode(fp4gemm.quantize(x))
        assert_bits(d.data[:end], plain.data[:end], "values")
        assert not d.data[end:].cpu().any()


def test_compact_scales(device: torch.device, gen: torch.Generator) -> None:
    for g, n, k in SHAPES:
        codes = make_codes(g * n, k, gen).view(g, n, k // 2).to(device)
        compact = make_scales(g * n, k, gen).view(g, n, k // 16).to(device)
        amax = torch.rand(g, 1, generator=gen).to(device)
        for scales in (compact, compact.view(torch.uint8)):
            t = NVFP4Tensor.from_compact(codes, scales, amax, 256)
            assert t.e4m3_max == 256
            assert t.codes is codes
            assert_bits(t.compact_scales(), compact, "scales")
            for e in range(g):
                assert_bits(t.scales[e], fp4gemm.swizzle_scales(compact[e]), "swizzled")
        wide = torch.zeros(g, n, k // 8, dtype=torch.uint8, device=device)
        wide[..., ::2] = compact.view(torch.uint8)
        assert_bits(
            NVFP4Tensor.from_compact(codes, wide[..., ::2], amax).compact_scales(), compact, "strided"
        )


def test_container(device: torch.device, gen: torch.Generator) -> None:
    x = make_stack("normal", (3, 16, 32), torch.bfloat16, gen).to(device)
    t = fp4gemm.quantize(x, hadamard="bf16")
    d = fp4gemm.decode(t)
    assert repr(t).startswith(
        "NVFP4Tensor(shape=(3, 16, 32), amax=(3, 16), e4m3_max=448, hadamard_signs=0xd7e8"
    )
    assert repr(d).startswith("DecodedTensor(shape=(3, 16, 32), amax=(3, 16)")
    assert t.nbytes == 3 * (16 * 16 + 128 * 4 + 16 * 4)
    assert d.nbytes == 3 * (16 * 32 * 2 + 16 * 4)
    assert t.with_row_amax() is t
    for value in (t, d):
        leaves, spec = pytree.tree_flatten(value)
        for other in (
            value.clone(),
            value.to("cpu"),
            copy.deepcopy(value),
            pickle.loads(pickle.dumps(value)),
            pytree.tree_unflatten(leaves, spec),
            dataclasses.replace(value),
        ):
            for field in dataclasses.fields(value):
                got, want = getattr(other, field.name), getattr(value, field.name)
                if isinstance(want, Tensor):
                    assert_bits(got, want, field.name)
                else:
                    assert got == want
        assert value.to("meta").shape == (3, 16, 32)
    for library in ("modelopt", "compressed_tensors"):
        with pytest.raises(ValueError, match=r"^codes: shape is \(1, 16, 16\), must be"):
            getattr(fp4gemm.quantize(x[:1], scaling="tensor"), f"to_{library}")()


@pytest.mark.parametrize("dim", [0, 1])
def test_containers_of_groups(dim: int, device: torch.device, gen: torch.Generator) -> None:
    """Copies keep offs_dim along with offs."""
    x = make("normal", 70, 32, torch.bfloat16, gen).to(device)
    offs = torch.tensor([3, 68], dtype=torch.int32, device=device)
    t = fp4gemm.quantize(x, axis=-1 if dim == 0 else 0, offs=offs, hadamard="fp32")
    name = "groups=2" if dim == 0 else "groups_of_k=2"
    for value in (t, fp4gemm.decode(t)):
        leaves, spec = pytree.tree_flatten(value)
        assert pytree.treespec_loads(pytree.treespec_dumps(spec)) == spec
        for other in (
            value.clone(),
            value.to("cpu"),
            value.to("meta"),
            copy.deepcopy(value),
            pickle.loads(pickle.dumps(value)),
            pytree.tree_unflatten(leaves, spec),
            dataclasses.replace(value),
        ):
            assert other.offs_dim == dim
            assert other.offs.shape == (2,)
            assert other.hadamard_signs == value.hadamard_signs
            assert f" {name}," in repr(other)
        assert value.clone().offs.data_ptr() != value.offs.data_ptr()
        assert value.nbytes == sum(leaf.nbytes for leaf in leaves)


def test_compiles_in_one_graph(device: torch.device, gen: torch.Generator) -> None:
    x = make_stack("normal", (2, 48, 32), torch.bfloat16, gen).to(device)
    offs = torch.tensor([3, 40], dtype=torch.int32, device=device)

    def run(x: Tensor, offs: Tensor) -> tuple[Tensor, ...]:
        t = fp4gemm.quantize(x, scaling="tensor")
        w, w_t = fp4gemm.quantize_both(x)
        c = fp4gemm.quantize(x[0], axis=0, offs=offs)
        again = fp4gemm.stack([w[1], w[0]])
        return (
            t.dequantize(),
            w_t.codes,
            fp4gemm.decode(w).data,
            again.amax,
            c.dequantize(),
            fp4gemm.decode(c).data,
        )

    for got, want in zip(torch.compile(run, fullgraph=True)(x, offs), run(x, offs), strict=True):
        assert_bits(got, want, "compiled")
