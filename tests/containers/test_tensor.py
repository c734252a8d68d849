"""The containers: views, conversions, pytrees, copies, and immutability."""

from __future__ import annotations

import copy
import dataclasses
import io
import pickle

import fp4gemm
import pytest
import torch
import torch.utils._pytree as pytree
from fp4gemm import DecodedTensor, NVFP4Tensor
from helpers import assert_bits, make, make_codes, make_scales


@pytest.fixture
def t(device: torch.device, gen: torch.Generator) -> NVFP4Tensor:
    return fp4gemm.quantize(make("row_ranges", 33, 96, torch.float32, gen).to(device))


def assert_equal(actual: NVFP4Tensor | DecodedTensor, expected: NVFP4Tensor | DecodedTensor) -> None:
    assert type(actual) is type(expected)
    for field in dataclasses.fields(expected):
        got, want = getattr(actual, field.name), getattr(expected, field.name)
        if isinstance(want, torch.Tensor):
            assert_bits(got, want, field.name)
        else:
            assert got == want


def test_properties(t: NVFP4Tensor, device: torch.device) -> None:
    assert t.shape == (33, 96)
    assert t.device == t.codes.device
    assert t.device.type == device.type
    assert t.nbytes == 33 * 48 + 128 * 8 + 33 * 4
    assert repr(t).startswith("NVFP4Tensor(shape=(33, 96), amax=(33,), e4m3_max=448, device=")
    d = fp4gemm.decode(t)
    assert d.shape == (33, 96)
    assert d.device == t.device
    assert d.nbytes == 33 * 96 * 2 + 33 * 4
    assert repr(d).startswith("DecodedTensor(shape=(33, 96), amax=(33,)")


def test_other_dtypes_are_taken_by_view(t: NVFP4Tensor) -> None:
    codes, scales = t.codes.view(torch.float4_e2m1fn_x2), t.scales.view(torch.uint8)
    same = NVFP4Tensor(codes, scales, t.amax, 448)
    assert same.codes.dtype is torch.uint8
    assert same.scales.dtype is torch.float8_e4m3fn
    assert same.codes.data_ptr() == t.codes.data_ptr()
    assert same.scales.data_ptr() == t.scales.data_ptr()
    assert_equal(same, t)


def test_frozen_and_compared_by_identity(t: NVFP4Tensor) -> None:
    for value in (t, fp4gemm.decode(t)):
        with pytest.raises(dataclasses.FrozenInstanceError):
            value.amax = t.amax  # type: ignore[misc]
        assert value == value
        assert value != value.clone()
        assert len({value, value, value.clone()}) == 2


@pytest.mark.parametrize("e4m3_max", [448, 256])
@pytest.mark.parametrize("as_bytes", [False, True], ids=["e4m3", "u8"])
def test_from_compact(e4m3_max: int, as_bytes: bool, device: torch.device, gen: torch.Generator) -> None:
    codes, compact = make_codes(130, 80, gen).to(device), make_scales(130, 80, gen).to(device)
    amax = torch.ones(1, device=device)
    t = NVFP4Tensor.from_compact(codes, compact.view(torch.uint8) if as_bytes else compact, amax, e4m3_max)
    assert_bits(t.compact_scales(), compact, "scales")
    assert_bits(t.scales, fp4gemm.swizzle_scales(compact), "swizzled")
    assert t.scales.shape == (256, 8)
    assert t.e4m3_max == e4m3_max
    assert t.codes is codes


def test_one_row_takes_either_amax(gen: torch.Generator) -> None:
    codes, scales = make_codes(1, 32, gen), make_scales(1, 32, gen)
    assert NVFP4Tensor.from_compact(codes, scales, torch.ones(1)).shape == (1, 32)


def test_clone_shares_nothing(t: NVFP4Tensor) -> None:
    for value in (t, fp4gemm.decode(t)):
        other = value.clone()
        assert_equal(other, value)
        for field in dataclasses.fields(value):
            part = getattr(value, field.name)
            if isinstance(part, torch.Tensor):
                assert getattr(other, field.name).data_ptr() != part.data_ptr()


def test_to(t: NVFP4Tensor) -> None:
    for value in (t, fp4gemm.decode(t)):
        assert value.to(value.device) is value
        there = value.to("cpu")
        assert_equal(there, value)
        assert there.device == torch.device("cpu")
        assert there.amax.device == torch.device("cpu")
        away = value.to("meta")
        assert away.device.type == "meta"
        assert away.shape == value.shape
        assert away.amax.device.type == "meta"


def test_pytree(t: NVFP4Tensor) -> None:
    for value, names in ((t, ["codes", "scales", "amax"]), (fp4gemm.decode(t), ["data", "amax"])):
        leaves, spec = pytree.tree_flatten(value)
        assert [leaf is getattr(value, name) for leaf, name in zip(leaves, names, strict=True)] == [
            True
        ] * len(names)
        assert_equal(pytree.tree_unflatten(leaves, spec), value)
        paths = [pytree.keystr(path) for path, _ in pytree.tree_leaves_with_path({"w": value})]
        assert paths == [f"['w'].{name}" for name in names]
        # Leaves of any type must be accepted, since torch uses fake tensors, specs and None.
        assert pytree.tree_map(lambda _: None, value).amax is None
        assert repr(pytree.tree_map(lambda _: None, value)) == f"{type(value).__name__}(...)"


def test_pytree_keeps_the_bound(t: NVFP4Tensor) -> None:
    value = NVFP4Tensor(t.codes, t.scales, t.amax, 256)
    assert pytree.tree_map(lambda leaf: leaf, value).e4m3_max == 256
    assert value.clone().e4m3_max == 256
    assert value.to("meta").e4m3_max == 256
    assert fp4gemm.decode(value).clone().e4m3_max == 256


def test_save_load_and_deepcopy(t: NVFP4Tensor) -> None:
    for value in (t, fp4gemm.decode(t)):
        file = io.BytesIO()
        torch.save(value, file)
        file.seek(0)
        assert_equal(torch.load(file, weights_only=False), value)
        assert_equal(copy.deepcopy(value), value)


def test_replace_validates(t: NVFP4Tensor) -> None:
    assert dataclasses.replace(t, e4m3_max=256).e4m3_max == 256
    with pytest.raises(ValueError, match=r"^e4m3_max: got 300, must be 448 or 256"):
        dataclasses.replace(t, e4m3_max=300)


@pytest.fixture
def grouped(device: torch.device, gen: torch.Generator) -> NVFP4Tensor:
    offs = torch.tensor([5, 5, 30], dtype=torch.int32, device=device)
    return fp4gemm.quantize(make("row_ranges", 33, 96, torch.float32, gen).to(device), offs=offs)


@pytest.fixture
def rotated(device: torch.device, gen: torch.Generator) -> NVFP4Tensor:
    x = make("row_ranges", 33, 96, torch.float32, gen).to(device)
    return fp4gemm.quantize(x, hadamard="fp32", hadamard_signs=0)


def test_groups_and_rotations_are_kept(grouped: NVFP4Tensor, rotated: NVFP4Tensor) -> None:
    """Every way to copy a container keeps them; a sign vector of 0 differs from None."""
    assert rotated.hadamard_signs == 0
    for value in (grouped, rotated, fp4gemm.decode(rotated)):
        leaves, spec = pytree.tree_flatten(value)
        file = io.BytesIO()
        torch.save(value, file)
        file.seek(0)
        for other in (
            value.clone(),
            value.to("cpu"),
            copy.deepcopy(value),
            pickle.loads(pickle.dumps(value)),
            torch.load(file, weights_only=False),
            pytree.tree_unflatten(leaves, spec),
            dataclasses.replace(value),
        ):
            assert_equal(other, value)
        away = value.to("meta")
        assert away.hadamard_signs == value.hadamard_signs
    assert grouped.to("meta").offs.device.type == "meta"
    assert grouped.clone().offs.data_ptr() != grouped.offs.data_ptr()
    assert "hadamard_signs=0x0000" in repr(rotated)
    assert "hadamard_signs=0x0000" in repr(fp4gemm.decode(rotated))
    assert "groups=3" in repr(grouped)


def test_pytree_of_groups(t: NVFP4Tensor, grouped: NVFP4Tensor, rotated: NVFP4Tensor) -> None:
    """offs is a leaf if the container has groups; otherwise there is no leaf for it."""
    paths = [pytree.keystr(path) for path, _ in pytree.tree_leaves_with_path(grouped)]
    assert paths == [".codes", ".scales", ".amax", ".offs"]
    specs = [pytree.tree_structure(value) for value in (t, grouped, rotated)]
    assert [spec.num_leaves for spec in specs] == [3, 4, 3]
    assert specs[0] != specs[1]
    assert specs[0] != specs[2]
    for spec in specs:
        assert pytree.treespec_loads(pytree.treespec_dumps(spec)) == spec
    assert pytree.tree_map(lambda _: None, grouped).offs is None


def test_old_pickles_load(t: NVFP4Tensor) -> None:
    """Pickles load that were written before groups and rotations were fields."""
    from fp4gemm.containers import nvfp4

    parts = (t.codes, t.scales.view(torch.uint8), t.amax, t.e4m3_max)
    assert_equal(nvfp4._unpickle(*parts), t)


def test_grouped_parts_of_ones_own(grouped: NVFP4Tensor) -> None:
    same = NVFP4Tensor(
        grouped.codes, grouped.scales.view(torch.uint8), grouped.amax, offs=grouped.offs, hadamard_signs=7
    )
    assert_bits(same.dequantize(), grouped.dequantize(), "values")
    assert same.hadamard_signs == 7
    with pytest.raises(
        ValueError, match=r"^scales: shape is \(128, 8\), must be \(384, 8\), the grouped swizzled"
    ):
        dataclasses.replace(grouped, scales=grouped.scales[:128])
    with pytest.raises(ValueError, match=r"^amax: shape is \(1,\), must be \(33,\)"):
        dataclasses.replace(grouped, amax=grouped.amax[:1])


def test_views_of_aligned_rows(gen: torch.Generator) -> None:
    """Rows can be sliced if the slice is aligned to 16 bytes and starts at a tile of 128 rows of scales."""
    x = make("normal", 300, 64, torch.float32, gen)
    t = fp4gemm.quantize(x)
    part = NVFP4Tensor(t.codes[128:256], t.scales[128:256], t.amax[128:256])
    assert_bits(part.dequantize(), t.dequantize()[128:256], "values")
    assert part.codes.data_ptr() == t.codes.data_ptr() + 128 * 32


@pytest.mark.parametrize("scaling", ["row", "tensor"])
def test_pickle_round_trip(scaling: str) -> None:
    """pickle and torch.save keep containers, float8 scales included."""
    t = fp4gemm.quantize(torch.randn(5, 64), scaling=scaling)
    copy = pickle.loads(pickle.dumps(t))
    assert torch.equal(copy.codes, t.codes)
    assert torch.equal(copy.scales.view(torch.uint8), t.scales.view(torch.uint8))
    assert torch.equal(copy.amax, t.amax)
    assert copy.e4m3_max == t.e4m3_max
    decoded = pickle.loads(pickle.dumps(fp4gemm.decode(t)))
    assert torch.equal(decoded.data, fp4gemm.decode(t).data)
