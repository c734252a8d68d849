"""FP8 as a baseline, and the arms of W4A8: formulas, refusals, and the option that chooses contenders."""

from __future__ import annotations

from typing import Any

import fp4gemm
import pytest
import torch
from bench_helpers import FP8, FP8_PRODUCT, W4A8, named, run

from bench.__main__ import main
from bench.baselines import fp8
from bench.commands import layer
from bench.commands.options import options_used
from bench.measure import verify, w4a8
from bench.models.decoder import DecoderLayer
from bench.models.fp8 import Linear, in_fp8
from bench.models.shapes import SHAPES

E4M3 = torch.float8_e4m3fn


# ---- torch's FP8 ------------------------------------------------------------------------------------------


def test_the_formula_of_fp8() -> None:
    x = torch.tensor([[1.0, -2.0, 0.5, 0.1], [0.0, 0.0, -0.0, 0.0], [1e-40, 0.0, 0.0, 0.0]])
    codes, scales = fp8.formula(x)
    # 0.1 * 224 = 22.4, between 22 and 24
    assert codes[0].tolist() == [224.0, -448.0, 112.0, 22.0]
    assert torch.equal(scales[0], torch.tensor([2.0]) / 448)
    assert codes[1:].float().abs().max() == 0
    assert scales.isfinite().all()


def test_products_of_fp8(gen: torch.Generator) -> None:
    x, w = torch.randn(5, 64, generator=gen), torch.randn(3, 32, 64, generator=gen)
    stack = fp8.formula_of_stack(w)
    one = stack.part(1)
    assert verify.off_by(fp8.linear(x, one), fp8.formula(x).dequantize(), one.dequantize()) is None
    assert one.nbytes == 32 * 64 + 4 * 32
    bias = torch.randn(32, generator=gen).bfloat16()
    want = fp8.formula(x).dequantize() @ one.dequantize().T + bias.float()
    torch.testing.assert_close(fp8.linear(x, one, True, bias).float(), want, atol=0.05, rtol=0.01)
    # The second expert has no token.
    got = fp8.grouped(x, stack, torch.tensor([2, 2, 5], dtype=torch.int32))
    for rows, e in ((slice(0, 2), 0), (slice(2, 5), 2)):
        values = fp8.formula(x[rows]).dequantize()
        assert verify.off_by(got[rows], values, stack.part(e).dequantize()) is None


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda a: a._replace(scales=a.scales * 1.001), "a scale is off by 1.0e-03"),
        (lambda a: a._replace(codes=(a.codes.float() * 1.07).to(E4M3)), "of the codes differ"),
        (lambda a: a._replace(codes=(-a.codes.float()).to(E4M3)), "of the codes differ"),
    ],
)
def test_a_wrong_quantizer_is_refused(
    change: Any, text: str, monkeypatch: pytest.MonkeyPatch, gen: torch.Generator
) -> None:
    assert fp8.wrong(torch.randn(7, 96, generator=gen)) is None
    monkeypatch.setattr(fp8, "quantize", lambda x: change(fp8.formula(x)))
    assert text in str(fp8.wrong(torch.randn(7, 96, generator=gen)))
    for command, shape in (("layer", "5x64x128"), ("grouped", "4x64x128")):
        found = named(run(command, "--shapes", shape, "--m", "5"))
        assert text in found["torch fp8"]["refused"]
        assert "torch fp8" not in found["fp4gemm"]["ratio"]


def test_a_wrong_product_is_absent_where_torch_refuses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*args: Any, **options: Any) -> torch.Tensor:
        raise RuntimeError("trailing dimension must be divisible by 16\nmore")

    monkeypatch.setattr(torch, "_scaled_mm", refuses)
    found = named(run("dense", "--shapes", "5x64x128"))
    reason = "RuntimeError: trailing dimension must be divisible by 16"
    assert {found[name]["absent"] for name in (*FP8, FP8_PRODUCT)} == {reason}


def test_a_product_without_its_scale_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    right = torch._scaled_mm

    def wrong(a: torch.Tensor, b: torch.Tensor, **options: Any) -> torch.Tensor:
        options["scale_a"] = torch.ones_like(options["scale_a"]) * options["scale_a"].mean()
        return right(a, b, **options)

    monkeypatch.setattr(torch, "_scaled_mm", wrong)
    for line in (["dense", "--shapes", "5x64x128"], ["grouped", "--shapes", "4x64x128", "--m", "9"]):
        found = named(run(*line))
        assert all("off by" in found[name]["refused"] for name in (*FP8, FP8_PRODUCT))


def test_layers_and_experts_in_fp8(gen: torch.Generator) -> None:
    """Linear layers and experts are replaced, norms and routers are not; a weight has half of its bytes."""
    from bench.models.build import layer_weights

    shape = SHAPES["tiny-oss"]
    weights = layer_weights(shape, 0, torch.device("cpu"))
    made: Any = in_fp8(DecoderLayer(shape, weights, is_merged=True))
    assert isinstance(made.self_attn.qkv_proj, Linear)
    assert isinstance(made.self_attn.o_proj, Linear)
    assert {t.dtype for t in made.mlp.experts.buffers()} == {E4M3, torch.float32}
    assert made.mlp.gate.weight.dtype is torch.bfloat16
    x = torch.randn(3, shape.hidden, generator=gen).bfloat16()
    plain = DecoderLayer(shape, weights, is_merged=True)
    want, got = (module.self_attn.qkv_proj(x).float() for module in (plain, made))
    assert 0.001 < float((got - want).norm() / want.norm()) < 0.06


@pytest.mark.gpu
@pytest.mark.parametrize("k", [16, 96, 2048, 14336, 28672])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_kernel_of_the_quantizer(k: int, dtype: torch.dtype) -> None:
    pytest.importorskip("triton")
    x = torch.randn(33, k, device="cuda", dtype=torch.float32)
    x *= torch.logspace(-3, 3, 33, device="cuda")[:, None]
    x[5] = 0
    x = x.to(dtype)
    got, want = fp8.quantize(x), fp8.formula(x)
    assert torch.equal(got.codes.view(torch.uint8), want.codes.view(torch.uint8))
    assert torch.equal(got.scales, want.scales)
    assert fp8.wrong(x) is None


# ---- W4A8 -------------------------------------------------------------------------------------------------


def test_the_order_of_fp8_tokens() -> None:
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(2, 128)
    got = w4a8.stored(codes.view(E4M3))
    for row in range(2):
        for block in range(2):
            for w in range(2):
                for h in range(2):
                    for q in range(4):
                        for b in range(4):
                            byte, k = 32 * w + 16 * h + 4 * q + b, 16 * q + 8 * w + 4 * h + b
                            assert got[row, 64 * block + byte] == codes[row, 64 * block + k]


def test_the_definition_of_fp8_tokens() -> None:
    x = torch.zeros(5, 64)
    x[0, :3] = torch.tensor([2.0, -1.0, 0.1])
    x[2, 0] = 1e-44  # 448 / amax is infinite
    x[3, 0], x[3, 1] = torch.inf, 1.0
    x[4, :2] = torch.tensor([3e38, -3e38])
    codes, amax = w4a8.codes_of(x)
    assert codes[0, :3].tolist() == [448.0, -224.0, 22.0]
    assert codes[1].float().abs().max() == 0
    assert codes[2, 0].float() == 0  # 1e-44 times the largest number is below the least code
    assert codes[3, :2].tolist() == [448.0, 1.0]  # the multiplier is 1
    assert codes[4, :2].tolist() == [448.0, -448.0]
    assert torch.equal(amax, x.abs().amax(1))
    assert w4a8.token_values(x[:1])[0, 0] == pytest.approx(2.0)


def test_the_definition_of_weights(gen: torch.Generator) -> None:
    w = fp4gemm.quantize(torch.randn(8, 64, generator=gen))
    exact = fp4gemm.decode(w).data.double()  # q * s
    want = torch.empty(8, 64, dtype=torch.float64)
    for row in range(8):
        for column in range(64):
            v = (exact[row, column] / 8).float().to(E4M3).double()
            want[row, column] = v * 8 * w.amax[row].double() / (6 * 448)
    torch.testing.assert_close(w4a8.weight_values(w).double(), want, rtol=1e-6, atol=0)
    # The rounding to e4m3 is not void: it is what tells the formats apart.
    apart = (w4a8.weight_values(w) - w.dequantize()).norm() / w.dequantize().norm()
    assert 0.003 < float(apart) < 0.03


class Library:
    """fp4gemm's FP8 functions by their definition, with a fault."""

    def __init__(self, fault: str = "") -> None:
        self.fault = fault

    def quantize(self, x: torch.Tensor, offs: torch.Tensor | None = None) -> Any:
        codes, amax = w4a8.codes_of(x)
        data = codes.view(torch.uint8) if self.fault == "order" else w4a8.stored(codes)
        if self.fault == "amax":
            amax = amax * 1.01
        return type("Tokens", (), {"data": data.view(E4M3), "amax": amax})()

    def weight(self, w: Any) -> torch.Tensor:
        return w.dequantize() if self.fault == "unrounded" else w4a8.weight_values(w)

    def linear(self, x: torch.Tensor, w: Any, use_fast_accum: bool) -> torch.Tensor:
        y = w4a8.token_values(x).double() @ self.weight(w).double().T
        if self.fault == "fast" and use_fast_accum:
            y[:, 3] *= 1.5  # far more than TOLERANCE_OF_FAST allows
        return y.bfloat16()

    def grouped(self, x: torch.Tensor, w: Any, offs: torch.Tensor, use_fast_accum: bool) -> torch.Tensor:
        ends = offs.tolist()
        parts = zip([0, *ends[:-1]], ends, strict=True)
        return torch.cat([self.linear(x[i:j], w[e], use_fast_accum) for e, (i, j) in enumerate(parts)])


@pytest.mark.parametrize(
    ("fault", "refused", "text"),
    [
        ("", set(), ""),
        ("order", W4A8, "its tokens: data: "),
        ("amax", W4A8, "its tokens: amax: "),
        ("unrounded", W4A8, "is off by"),
        ("fast", {"fp4gemm W4A8 fast"}, "is off by"),
    ],
)
def test_what_is_refused_of_w4a8(
    fault: str, refused: set[str], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = Library(fault)
    monkeypatch.setattr(w4a8, "prepack", lambda w: w)
    for name in ("quantize", "linear", "grouped"):
        monkeypatch.setattr(w4a8, name, getattr(library, name))
    lines = [
        ["dense", "--shapes", "64x128x256"],
        ["layer", "--shapes", "64x128x256"],
        ["grouped", "--shapes", "4x128x256", "--m", "64"],
    ]
    for line in lines:
        found = named(run(*line, "--contenders", "W4A8|torch"))
        assert {name for name, row in found.items() if "refused" in row} == set(refused), (line, found)
        assert all(text in found[name]["refused"] for name in refused)
        for name in W4A8 - set(refused):
            assert set(found[name]["ratio"]) >= FP8
            assert found[name]["checked"] == "but for rounding"


def test_a_k_that_fp8_tokens_lack_is_named() -> None:
    found = named(run("dense", "--shapes", "5x64x96"))
    assert all(
        found[name]["absent"].endswith("k is 96, must be a multiple of 64 for FP8 tokens") for name in W4A8
    )


# ---- the option -------------------------------------------------------------------------------------------


def test_contenders_are_chosen_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*args: Any) -> None:
        raise AssertionError("was not asked for")

    monkeypatch.setattr(layer.Contenders, "_fp8", never)
    line = ["dense", "--shapes", "5x64x128", "--contenders", r"^(torch fp32|fp4gemm)$"]
    assert [row["contender"] for row in run(*line)] == ["fp4gemm", "torch fp32"]
    with pytest.raises(ValueError, match="--contenders: no name matches 'none', must match one of fp4gemm; "):
        run(*line[:-1], "none")


def test_results_of_other_contenders_are_not_mixed() -> None:
    from bench.__main__ import parser

    args = parser().parse_args(["grouped", "--contenders", "fp8|W4"])
    assert options_used(args) == "settle=60ms eager contenders=fp8|W4"


def test_a_bad_pattern_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["dense", "--device", "cpu", "--contenders", "("])
    assert stopped.value.code == 2
    assert "must be a regular expression" in capsys.readouterr().err
