"""activation, c and beta of the product: against the second model, in place, exact properties."""

from __future__ import annotations

import fp4gemm
import model
import model_epilogue
import pytest
import torch
from fp4gemm import NVFP4Tensor
from fp4gemm.activations import names
from helpers import FLOATS, assert_bits, assert_poison_intact, make, poisoned, short

ACTIVATIONS = names(is_gated=False)
M, N, K = 33, 40, 96


@pytest.fixture
def pair(device: torch.device, gen: torch.Generator) -> tuple[NVFP4Tensor, NVFP4Tensor]:
    a = fp4gemm.quantize(make("normal", M, K, torch.bfloat16, gen).to(device))
    return a, fp4gemm.quantize(make("normal", N, K, torch.bfloat16, gen).to(device))


def before_activation(a: NVFP4Tensor, b: NVFP4Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    acc = model.values(a.codes, a.scales) @ model.values(b.codes, b.scales).T
    return model.epilogue(acc, 1 / (36 * 448 * 448), a.amax, b.amax, bias)


@pytest.mark.parametrize("with_c", [False, True], ids=["alone", "c"])
@pytest.mark.parametrize("with_bias", [False, True], ids=["nobias", "bias"])
@pytest.mark.parametrize("out_dtype", FLOATS, ids=short)
@pytest.mark.parametrize("activation", [None, *ACTIVATIONS])
def test_against_the_model(
    activation: str | None,
    out_dtype: torch.dtype,
    with_bias: bool,
    with_c: bool,
    pair: tuple[NVFP4Tensor, NVFP4Tensor],
    gen: torch.Generator,
) -> None:
    a, b = pair
    bias = torch.randn(N, generator=gen).to(a.device) if with_bias else None
    c = torch.randn(M, N, generator=gen).to(out_dtype).to(a.device) if with_c else None
    beta = {"beta": -0.7} if with_c else {}
    z = before_activation(a, b, bias).numpy()
    want = model_epilogue.finish(z, activation, c, -0.7, out_dtype)
    got = fp4gemm.mm(a, b, bias=bias, activation=activation, c=c, out_dtype=out_dtype, **beta)
    assert_bits(got, want, "mm")
    alpha = 1 / (36 * 448 * 448)
    got = fp4gemm.scaled_mm(
        a.codes,
        b.codes,
        a.scales,
        b.scales,
        alpha=alpha,
        alpha_row=a.amax,
        alpha_col=b.amax,
        bias=bias,
        activation=activation,
        c=c,
        out_dtype=out_dtype,
        **beta,
    )
    assert_bits(got, want, "scaled_mm")


@pytest.mark.parametrize("with_bias", [False, True], ids=["nobias", "bias"])
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float16], ids=short)
@pytest.mark.parametrize("m", [0, 1, 33, 130])
@pytest.mark.parametrize("activation", names(is_gated=True))
def test_gated(
    activation: str,
    m: int,
    out_dtype: torch.dtype,
    with_bias: bool,
    device: torch.device,
    gen: torch.Generator,
) -> None:
    """D has half as many columns as b has rows; nothing around D is written."""
    n = 48
    a = fp4gemm.quantize(make("normal", m, K, torch.bfloat16, gen).to(device))
    b = fp4gemm.quantize(make("normal", n, K, torch.bfloat16, gen).to(device))
    bias = torch.randn(n, generator=gen).to(device) if with_bias else None
    want = model_epilogue.finish(before_activation(a, b, bias).numpy(), activation, out_dtype=out_dtype)
    assert want.shape == (m, n // 2)
    got = fp4gemm.mm(a, b, bias=bias, activation=activation, out_dtype=out_dtype)
    assert_bits(got, want, "D")
    view, buffer = poisoned(m, n // 2, out_dtype, device, pad=8)
    assert fp4gemm.mm(a, b, bias=bias, activation=activation, out=view, batch_invariant=True) is view
    assert_bits(view, want, "out")
    assert_poison_intact(buffer, m, n // 2)


def test_gated_is_the_product_of_two_layers(device: torch.device, gen: torch.Generator) -> None:
    """The rows of W_gate and W_up alternate, as docs/grouped.md says."""
    x = make("normal", 40, K, torch.bfloat16, gen).to(device)
    gate, up = (make("normal", 32, K, torch.bfloat16, gen).to(device) for _ in range(2))
    both = torch.stack((gate, up), dim=1).flatten(0, 1)
    a = fp4gemm.quantize(x)
    got = fp4gemm.mm(a, fp4gemm.quantize(both), activation="swiglu", out_dtype=torch.float16)
    halves = [fp4gemm.mm(a, fp4gemm.quantize(w), out_dtype=torch.float32).cpu() for w in (gate, up)]
    want = torch.from_numpy(model_epilogue.activate(halves[0].numpy(), "silu")) * halves[1]
    assert_bits(got, want.half(), "D")


@pytest.mark.parametrize("pad", [0, 16], ids=["dense", "strided"])
@pytest.mark.parametrize("out_dtype", FLOATS, ids=short)
def test_accumulates_in_place(
    out_dtype: torch.dtype, pad: int, pair: tuple[NVFP4Tensor, NVFP4Tensor], gen: torch.Generator
) -> None:
    """With c = out, three products are added one after the other; memory around out is poisoned."""
    a, b = pair
    view, buffer = poisoned(M, N, out_dtype, a.device, pad)
    total = torch.randn(M, N, generator=gen).to(out_dtype)
    view.copy_(total)
    z = before_activation(a, b, None).numpy()
    for beta in (1.0, 0.5, 0.0):
        assert fp4gemm.mm(a, b, c=view, beta=beta, out=view) is view
        total = model_epilogue.finish(z, None, total, beta, out_dtype)
        assert_bits(view, total, f"beta {beta}")
    assert_poison_intact(buffer, M, N)


def test_c_is_read_and_kept(pair: tuple[NVFP4Tensor, NVFP4Tensor], gen: torch.Generator) -> None:
    a, b = pair
    wide = torch.randn(M, 2 * N, generator=gen).bfloat16().to(a.device)
    for c in (wide[:, :N], wide[:, N:], wide[:, :N].contiguous()):
        before = c.clone()
        got = fp4gemm.mm(a, b, c=c)
        assert_bits(c, before, "c")
        want = model_epilogue.finish(before_activation(a, b, None).numpy(), None, c, 1.0, torch.bfloat16)
        assert_bits(got, want, "D")
        out = torch.full((M, N), torch.nan, dtype=torch.bfloat16, device=a.device)
        assert_bits(fp4gemm.mm(a, b, c=c, out=out), want, "out")


def test_beta_0_still_reads_c(pair: tuple[NVFP4Tensor, NVFP4Tensor]) -> None:
    """A given c is read even if beta is 0: 0 times NaN is NaN, and 0 times a number is 0."""
    a, b = pair
    c = torch.ones(M, N, dtype=torch.bfloat16, device=a.device)
    c[3, 4] = torch.nan
    got = fp4gemm.mm(a, b, c=c, beta=0.0)
    assert got[3, 4].isnan()
    got[3, 4] = fp4gemm.mm(a, b)[3, 4]
    assert_bits(got + 0.0, fp4gemm.mm(a, b) + 0.0, "the others")


def test_activations_of_what_is_not_finite(device: torch.device, gen: torch.Generator) -> None:
    """Infinities and NaN of the scales reach the output as the activations define."""
    a = fp4gemm.quantize(make("normal", 6, 64, torch.bfloat16, gen).to(device))
    b = fp4gemm.quantize(make("normal", 16, 64, torch.bfloat16, gen).to(device))
    row = torch.tensor([torch.inf, -torch.inf, torch.nan, 3e38, -3e38, 1e-44], device=device)
    acc = model.values(a.codes, a.scales) @ model.values(b.codes, b.scales).T
    z = model.epilogue(acc, 1.0, row, b.amax).numpy()
    for activation in ACTIVATIONS:
        got = fp4gemm.scaled_mm(
            a.codes,
            b.codes,
            a.scales,
            b.scales,
            alpha_row=row,
            alpha_col=b.amax,
            activation=activation,
            out_dtype=torch.float32,
        ).cpu()
        want = model_epilogue.finish(z, activation)
        assert torch.equal(got.isnan(), want.isnan())
        assert_bits(got.nan_to_num(0.0), want.nan_to_num(0.0), activation)


def test_batch_invariant_is_the_same_function(pair: tuple[NVFP4Tensor, NVFP4Tensor]) -> None:
    a, b = pair
    assert_bits(fp4gemm.mm(a, b, batch_invariant=True), fp4gemm.mm(a, b, batch_invariant=False), "D")


def test_rows_do_not_depend_on_their_batch(device: torch.device, gen: torch.Generator) -> None:
    """With batch_invariant a row has the same bits in any batch, although sums are not exact in float32."""
    k, n = 2048, 256
    codes = torch.randint(0, 256, (300, k // 2), generator=gen, dtype=torch.uint8).to(device)
    scales = torch.randint(0, 0x7F, (300, k // 16), generator=gen, dtype=torch.uint8).to(device)
    one = torch.ones(1, device=device)
    a = NVFP4Tensor.from_compact(codes, scales, one)
    b = NVFP4Tensor.from_compact(codes[:n].flip(1).contiguous(), scales[:n].contiguous(), one)
    whole = fp4gemm.mm(a, b, out_dtype=torch.float32, batch_invariant=True)
    for rows in (1, 7, 40, 129):
        part = NVFP4Tensor.from_compact(codes[:rows].contiguous(), scales[:rows].contiguous(), one)
        got = fp4gemm.mm(part, b, out_dtype=torch.float32, batch_invariant=True)
        assert_bits(got, whole[:rows], f"{rows} rows")


def test_explicit_defaults_are_the_plain_call(pair: tuple[NVFP4Tensor, NVFP4Tensor]) -> None:
    a, b = pair
    beta = float("1.0")  # not the same object as the default
    assert_bits(fp4gemm.mm(a, b, activation=None, c=None, beta=beta), fp4gemm.mm(a, b), "D")
    assert_bits(fp4gemm.mm(a, b, beta=1), fp4gemm.mm(a, b), "D")


def test_training_names(device: torch.device, gen: torch.Generator) -> None:
    """fprop, dgrad and wgrad are mm of the operands of a training step, whose shapes fit together."""
    m, n, k = 64, 96, 128
    x, w, dy = (make("normal", *shape, torch.bfloat16, gen).to(device) for shape in ((m, k), (n, k), (m, n)))
    (q_x, x_t), (q_w, w_t), (q_dy, dy_t) = map(fp4gemm.quantize_both, (x, w, dy))
    y = fp4gemm.fprop(q_x, q_w, activation="silu", out_dtype=torch.float32)
    assert_bits(y, fp4gemm.mm(q_x, q_w, activation="silu", out_dtype=torch.float32), "y")
    dx = fp4gemm.dgrad(q_dy, w_t)
    assert_bits(dx, fp4gemm.mm(q_dy, w_t), "dx")
    dw = fp4gemm.wgrad(dy_t, x_t, out_dtype=torch.float32)
    assert (y.shape, dx.shape, dw.shape) == ((m, n), (m, k), (n, k))
    for got, want in ((y, torch.nn.functional.silu(x.float() @ w.float().T)), (dw, dy.float().T @ x.float())):
        assert (got - want).norm() < 0.2 * want.norm()
    before = dw.clone()
    assert fp4gemm.wgrad(dy_t, x_t, c=dw, out=dw) is dw
    assert_bits(dw, before + before, "2 dw")


def test_out_is_apart_from_what_is_read(device: torch.device, gen: torch.Generator) -> None:
    """A kernel writes D while it still reads, also into the tokens of a product with as many columns."""
    q = fp4gemm.quantize(torch.randn(64, 64, generator=gen).to(device))
    w = fp4gemm.prepack(q)
    buffer = torch.randn(96, 64, generator=gen).bfloat16().to(device)
    x, below = buffer[:48], buffer[48:]
    want = fp4gemm.mm(x, w)
    assert torch.equal(fp4gemm.mm(x, w, out=below), want)
    with pytest.raises(ValueError, match=r"^out: overlaps the first operand, must be apart from it"):
        fp4gemm.mm(x, w, out=x)
    with pytest.raises(ValueError, match=r"^out: overlaps the first operand, must be apart from it"):
        fp4gemm.mm(x, w, out=buffer[16:64])
    wide = torch.zeros(49, 64, device=device)
    with pytest.raises(ValueError, match=r"^out: overlaps bias, must be apart from it"):
        fp4gemm.mm(x, w, bias=wide[47], out=wide[:48])
    fp4gemm.mm(x, w, bias=wide[48], out=wide[:48])
    wider = torch.zeros(48, 128, device=device)
    want = fp4gemm.mm(x, w, out_dtype=torch.float32)
    assert torch.equal(fp4gemm.mm(x, w, bias=wider[47, 64:], out=wider[:, :64]), want)
    codes = torch.zeros(64 * 64, device=device, dtype=torch.bfloat16)
    data = codes.view(torch.uint8)[: q.codes.numel()].view(q.codes.dtype).view(q.codes.shape).copy_(q.codes)
    with pytest.raises(ValueError, match=r"^out: overlaps the first operand, must be apart from it"):
        fp4gemm.scaled_mm(data, q.codes, q.scales, q.scales, out=codes.view(64, 64))


def test_operator_refuses_an_out_that_overlaps(device: torch.device, gen: torch.Generator) -> None:
    """Also where no Python function is in between."""
    w = fp4gemm.prepack(fp4gemm.quantize(torch.randn(64, 64, generator=gen).to(device)))
    x = torch.randn(48, 64, generator=gen).bfloat16().to(device)
    c = torch.zeros(48, 72, device=device, dtype=torch.bfloat16)
    error = RuntimeError if device.type == "cuda" else ValueError  # of the C interface, of Python
    gemm_out = torch.ops.fp4gemm.gemm_out
    before = x.clone()
    with pytest.raises(error, match=r"(d: overlaps a|out: overlaps the first operand), must be apart"):
        gemm_out(x, w.data, b_rows=64, out=x)
    with pytest.raises(error, match=r"c: overlaps (d|out), must be"):
        gemm_out(x, w.data, b_rows=64, c=c[:, 8:], out=c[:, :64])
    assert torch.equal(x, before)


def test_c_beside_out_in_one_buffer(device: torch.device, gen: torch.Generator) -> None:
    """Left and right columns of a buffer, and rows one after the other, share no element."""
    a, b = (fp4gemm.quantize(torch.randn(rows, 64, generator=gen).to(device)) for rows in (48, 24))
    c = torch.randn(48, 24, generator=gen).bfloat16().to(device)
    want = fp4gemm.mm(a, b, c=c)
    beside, below = c.new_zeros(48, 48), c.new_zeros(96, 24)
    for left, right in ((beside[:, :24], beside[:, 24:]), (below[:48], below[48:])):
        for addend, out in ((left, right), (right, left)):
            addend.copy_(c)
            assert torch.equal(fp4gemm.mm(a, b, c=addend, out=out), want)
            assert torch.equal(addend, c)
    # The same view twice is one memory: it accumulates.
    assert torch.equal(fp4gemm.mm(a, b, c=c[:], out=c), want)
    wide = c.new_zeros(48, 40)
    with pytest.raises(ValueError, match=r"^c: overlaps out, must be out itself"):
        fp4gemm.mm(a, b, c=wide[:, :24], out=wide[:, 16:])
