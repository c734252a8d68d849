"""Records: their bytes, how they are made, and the grouped operands that are gathered from them."""

from __future__ import annotations

from typing import Any

import capi
import fp4gemm
import numpy as np
import pytest
import torch
from fp4gemm import NVFP4Tensor, records, reference
from helpers import FLOATS, KINDS, assert_bits, captured, fill_and_free, make, short
from op_checks import BACKENDS, assert_fake_is_real, compiled, opcheck, ready
from torch import Tensor

STATE = torch.tensor([7, -3])
OPTIONS: dict[str, dict[str, Any]] = {
    "nearest": {},
    "mae": {"four_over_six": "mae"},
    "mse_fast": {"four_over_six": "mse", "four_over_six_error": "fast", "e4m3_max": 448},
    "stochastic": {"rng_state": STATE},
}
# The first few also run on a CPU. The last is longer than a turn of any kernel.
SHAPES = ((1, 16), (5, 528), (0, 64), (37, 80), (9, 2048), (37, 2880), (130, 7168), (3, 20000), (2, 1 << 17))


def on(device: torch.device, options: dict[str, Any]) -> dict[str, Any]:
    return {k: v.to(device) if isinstance(v, Tensor) else v for k, v in options.items()}


def quantized(x: Tensor, options: dict[str, Any], **more: Any) -> NVFP4Tensor:
    """fp4gemm.quantize with the options of quantize_records."""
    return fp4gemm.quantize(x, stochastic="rng_state" in options, **options, **more)


def bytes_of(t: NVFP4Tensor) -> np.ndarray:
    """The records of a quantized tensor, written out in numpy."""
    m, k = t.shape
    out = np.zeros((m, records.record_bytes(k)), dtype=np.uint8)
    out[:, : k // 2] = t.codes.cpu().numpy()
    out[:, k // 2 : k // 2 + k // 16] = t.compact_scales().cpu().view(torch.uint8).numpy()
    at = k // 2 + -(-k // 64) * 4
    out[:, at : at + 4] = t.amax.cpu().numpy().reshape(m, 1).view(np.uint8)
    return out


def operand_bits(t: NVFP4Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return t.codes, t.scales.view(torch.uint8), t.amax


def assert_same(got: NVFP4Tensor, want: NVFP4Tensor, where: str = "") -> None:
    for name, a, b in zip(("codes", "scales", "amax"), operand_bits(got), operand_bits(want), strict=True):
        assert_bits(a, b, f"{where} {name}")
    assert got.e4m3_max == want.e4m3_max


def test_the_bytes_of_a_record() -> None:
    assert [records.record_bytes(k) for k in (16, 64, 96, 2048, 2880, 7168)] == [16, 48, 64, 1168, 1632, 4048]
    library = capi.core()
    for k in range(16, 1 << 14, 16):
        assert records.record_bytes(k) % 16 == 0
        assert 0 <= records.record_bytes(k) - (k // 2 + -(-k // 64) * 4 + 4) < 16
        assert library.fp4gemm_record_bytes(k) == records.record_bytes(k)


@pytest.mark.parametrize("dtype", FLOATS, ids=short)
@pytest.mark.parametrize("options", OPTIONS)
def test_quantize_records(
    options: str, dtype: torch.dtype, device: torch.device, gen: torch.Generator
) -> None:
    """Against quantize, in every shape of the kernel; memory is filled first."""
    given = on(device, OPTIONS[options])
    fill_and_free(device)
    for m, k in SHAPES if device.type == "cuda" else SHAPES[:4]:
        x = make("normal", m, k, dtype, gen).to(device)
        want = torch.from_numpy(bytes_of(quantized(x, given)))
        assert_bits(records.quantize_records(x, **given).cpu(), want, f"{m} x {k}")


@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_values(kind: str, device: torch.device, gen: torch.Generator) -> None:
    x = make(kind, 33, 528, torch.float32, gen)
    x[3, 5], x[4, ::16] = torch.nan, torch.nan
    for options in OPTIONS.values():
        given = on(device, options)
        want = torch.from_numpy(bytes_of(quantized(x.to(device), given)))
        assert_bits(records.quantize_records(x.to(device), **given).cpu(), want, str(options))


def test_the_random_numbers_are_those_of_the_token(device: torch.device, gen: torch.Generator) -> None:
    """A part of the tokens has the bits that it has among all, wherever it begins."""
    x = make("normal", 50, 144, torch.bfloat16, gen).to(device)
    options = on(device, OPTIONS["stochastic"])
    whole = records.quantize_records(x, **options)
    for first, last in ((0, 7), (7, 40), (40, 50), (50, 50)):
        part = records.quantize_records(x[first:last], first_row=first, **options)
        assert_bits(part, whole[first:last], f"{first}:{last}")
    assert not torch.equal(records.quantize_records(x[7:40], **options), whole[7:40])
    far = records.quantize_records(x, first_row=2**31 - 1, **options).cpu()  # block numbers beyond 32 bits
    call = (x.cpu(), torch.empty_like(far), 0, False, 448, STATE, 2**31 - 1)
    reference.quantize_records(*call)
    assert_bits(far, call[1])


def test_out_is_written_in_place(device: torch.device, gen: torch.Generator) -> None:
    x = make("normal", 6, 96, torch.float16, gen).to(device)
    buffer = torch.full((8, records.record_bytes(96)), 0xFF, dtype=torch.uint8, device=device)
    assert records.quantize_records(x, out=buffer[1:7]).data_ptr() == buffer[1:7].data_ptr()
    want = records.quantize_records(x)
    assert_bits(buffer[1:7], want)
    assert bool((buffer[[0, 7]] == 0xFF).all())
    assert_bits(records.make_records(fp4gemm.quantize(x), out=buffer[:6]), want)
    assert bool((buffer[7] == 0xFF).all())


@pytest.mark.parametrize(("m", "k"), SHAPES[:-2], ids=str)
def test_make_records(m: int, k: int, device: torch.device, gen: torch.Generator) -> None:
    t = fp4gemm.quantize(make("normal", m, k, torch.bfloat16, gen).to(device))
    fill_and_free(device)
    assert_bits(records.make_records(t).cpu(), torch.from_numpy(bytes_of(t)))


def test_records_of_a_producer(device: torch.device, gen: torch.Generator) -> None:
    t = fp4gemm.silu_and_mul_quantize(make("normal", 40, 192, torch.bfloat16, gen).to(device))
    assert_bits(records.make_records(t).cpu(), torch.from_numpy(bytes_of(t)))


GATHERED = {
    "one": (1, 64, [1]),
    "groups": (200, 2048, [0, 130, 0, 1, 17, 0]),
    "all_rows": (64, 96, [32, 32]),
    "no_group_has_a_row": (70, 528, [0, 0, 0]),
    "no_row": (0, 64, [0, 0]),
    "long_rows": (5, 1 << 15, [2, 2]),
    "rows_beyond_shared_memory": (5, 1 << 17, [2, 2]),
    "many_groups": (300, 80, [3] * 90),
}


@pytest.mark.parametrize("case", GATHERED)
def test_gather_records(case: str, device: torch.device, gen: torch.Generator) -> None:
    """Against quantize with rows and offs, from one buffer and from several."""
    m, k, sizes = GATHERED[case]
    if k > 1 << 15 and device.type == "cpu":
        pytest.skip("rows_beyond_shared_memory: only the kernel has another path")
    x = make("normal", 8, k, torch.bfloat16, gen).to(device)
    rows = torch.randint(-3, 11, (m,), generator=gen).int().to(device)  # some are outside of x
    offs = torch.tensor(sizes).cumsum(0).int().to(device)
    want = fp4gemm.quantize(x, rows=rows, offs=offs)
    made = records.quantize_records(x)
    fill_and_free(device)
    for num_buffers in (1, 2, 8):
        parts = [part.clone() for part in made.chunk(num_buffers)]
        given = parts[0] if num_buffers == 1 else parts
        assert_same(records.gather_records(given, rows, offs, k), want, f"{num_buffers} buffers")


def test_the_bound_of_the_scales_is_that_of_the_records(device: torch.device, gen: torch.Generator) -> None:
    x = make("normal", 12, 64, torch.bfloat16, gen).to(device)
    rows, offs = torch.arange(12).int().to(device), torch.tensor([5, 12]).int().to(device)
    made = records.quantize_records(x, four_over_six="mse")
    got = records.gather_records(made, rows, offs, 64, e4m3_max=256)
    assert_same(got, fp4gemm.quantize(x, four_over_six="mse", offs=offs))


def test_records_that_were_never_written_are_copied_as_they_are(
    device: torch.device, gen: torch.Generator
) -> None:
    made = torch.randint(0, 256, (9, records.record_bytes(144)), generator=gen, dtype=torch.uint8).to(device)
    rows, offs = torch.arange(9).flip(0).int().to(device), torch.tensor([4, 9]).int().to(device)
    got = records.gather_records(made, rows, offs, 144)
    assert_bits(got.codes, made.flip(0)[:, :72])
    assert_bits(got.amax.view(torch.uint8).view(9, 4), made.flip(0)[:, 84:88])


@pytest.mark.gpu
@pytest.mark.parametrize("ends", [[-5, 200], [900, 3], [40, 20, 60], [2**31 - 1, -(2**31)]], ids=str)
def test_wrong_ends_stay_inside(ends: list[int], cuda: torch.device, gen: torch.Generator) -> None:
    """The values of offs are not checked on a GPU; compute-sanitizer finds what they would lead outside."""
    made = records.quantize_records(make("normal", 30, 64, torch.bfloat16, gen).to(cuda))
    rows, offs = torch.arange(60, device=cuda).int(), torch.tensor(ends, device=cuda).int()
    records.gather_records(made, rows, offs, 64)
    torch.cuda.synchronize()


def test_opcheck(device: torch.device, gen: torch.Generator) -> None:
    x = make("normal", 20, 96, torch.bfloat16, gen).to(device)
    made = records.quantize_records(x)
    state = STATE.to(device)
    opcheck("quantize_records", x, torch.empty_like(made))
    opcheck("quantize_records", x, torch.empty_like(made), 0, False, 448, state, 5)
    t = fp4gemm.quantize(x)
    opcheck("make_records", t.codes, t.scales, t.amax, torch.empty_like(made))
    rows, offs = torch.arange(20).int().to(device), torch.tensor([3, 11]).int().to(device)
    opcheck("gather_records", [made], rows, offs, 96)
    opcheck("gather_records", [made[:10], made[10:]], rows, offs, 96)
    for given in ([made], [made[:10], made[10:]]):
        real = torch.ops.fp4gemm.gather_records(given, rows, offs, 96)
        fake = torch.ops.fp4gemm.gather_records([r.to("meta") for r in given], rows.to("meta"),
                                                offs.to("meta"), 96)  # fmt: skip
        assert [(t.shape, t.dtype) for t in real] == [(t.shape, t.dtype) for t in fake]
    assert_fake_is_real("quantize", x, None, True, offs=offs, rows=rows)


@pytest.mark.parametrize("backend", BACKENDS)
def test_compile(backend: str, device: torch.device, gen: torch.Generator) -> None:
    ready(backend)

    def step(x: Tensor, rows: Tensor, offs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        made = records.quantize_records(x, four_over_six="mae")
        t = records.gather_records(made, rows, offs, x.shape[1], e4m3_max=256)
        return t.codes, t.scales.view(torch.uint8), t.amax

    run = compiled(step, backend, dynamic=True)
    for t in (5, 40):
        x = make("normal", t, 64, torch.bfloat16, gen).to(device)
        rows, offs = torch.arange(t).int().to(device), torch.tensor([t // 2, t]).int().to(device)
        for got, want in zip(run(x, rows, offs), step(x, rows, offs), strict=True):
            assert_bits(got, want)


@pytest.mark.gpu
def test_a_graph_follows_other_rows(cuda: torch.device, gen: torch.Generator) -> None:
    x = make("normal", 64, 2048, torch.bfloat16, gen).to(cuda)
    rows, offs = torch.zeros(256, device=cuda).int(), torch.zeros(4, device=cuda).int()

    def step() -> tuple[Tensor, ...]:
        made = records.quantize_records(x)
        return operand_bits(records.gather_records([made[:32], made[32:]], rows, offs, 2048))

    graph, results = captured(step, cuda)
    for _ in range(3):
        rows.copy_(torch.randint(-1, 64, (256,), generator=gen))
        offs.copy_(torch.randint(0, 64, (4,), generator=gen).cumsum(0))
        x.copy_(make("normal", 64, 2048, torch.bfloat16, gen))
        graph.replay()
        for got, want in zip(results, operand_bits(fp4gemm.quantize(x, rows=rows, offs=offs)), strict=True):
            assert_bits(got, want)


@pytest.mark.gpu
def test_nothing_is_read_on_the_host(cuda: torch.device, gen: torch.Generator) -> None:
    x = make("normal", 8, 64, torch.bfloat16, gen).to(cuda)
    rows, offs = torch.arange(8, device=cuda).int(), torch.tensor([8], device=cuda).int()
    records.gather_records(records.quantize_records(x), rows, offs, 64)
    torch.cuda.set_sync_debug_mode("error")
    try:
        records.gather_records(records.make_records(fp4gemm.quantize(x)), rows, offs, 64)
    finally:
        torch.cuda.set_sync_debug_mode("default")
