"""Products with epilogues in Python on the CPU: the ten examples, every format, groups, tracing by torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import fp4gemm
import pytest
import torch
from fp4gemm import _epilogues, reference
from fp4gemm import epilogues as ep
from fp4gemm.activations import ACTIVATIONS
from helpers import assert_bits
from op_checks import BACKENDS, assert_fake_is_real, compiled, opcheck, ready
from torch import Tensor

from examples import epilogues as examples

M, N, K = 37, 48, 64
OFFS = torch.tensor([9, 9, 30], dtype=torch.int32)  # and seven rows of no group
OUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def operands(gen: torch.Generator, offs: Tensor | None = None) -> tuple[Any, Any]:
    """a (M, K) and b (N, K), or of groups b (3, N, K)."""
    x, w = torch.randn(M, K, generator=gen), torch.randn(3, N, K, generator=gen)
    return fp4gemm.quantize(x, offs=offs), fp4gemm.quantize(w if offs is not None else w[0])


# ---- the built-in formula and activations, written as epilogues

ACTIVATION_OF = {
    None: lambda z: z,
    "silu": ep.silu,
    "gelu": ep.gelu,
    "gelu_tanh": ep.gelu_tanh,
    "relu2": ep.relu2,
    "swiglu": lambda g, u: ep.silu(g) * u,
    "geglu_tanh": lambda g, u: ep.gelu_tanh(g) * u,
    "swiglu_limit10": lambda g, u: ep.silu(ep.minimum(g, 10.0)) * ep.clamp(u, -10.0, 10.0),
}


def swiglu_oai(g: ep.Value, u: ep.Value) -> ep.Value:
    g = ep.minimum(g, 7.0)
    return g / (1.0 + ep.exp(-(1.702 * g))) * (ep.clamp(u, -7.0, 7.0) + 1.0)


def built_in(name: str | None) -> ep.Epilogue:
    """The whole formula of an activation; z is made of the factors in another order of parameters."""
    function: Callable[..., Any] = {**ACTIVATION_OF, "swiglu_oai": swiglu_oai}[name]
    if any(a.name == name and a.is_gated for a in ACTIVATIONS):

        @fp4gemm.epilogue(pairs=True)
        def gated(gate, up, alpha, row, col, bias):
            z = [alpha * (col[i] * (row * acc)) + bias[i] for i, acc in enumerate((gate, up))]
            return function(*z)

        return gated

    @fp4gemm.epilogue
    def plain(acc, bias, c, *, beta):
        return function(acc + bias) + beta * c

    return plain


@pytest.mark.parametrize("name", [a.name for a in ACTIVATIONS], ids=str)
def test_built_in_activations(name: str | None, gen: torch.Generator) -> None:
    """D of the keyword ``activation``, dense and grouped, in every output type."""
    epilogue = built_in(name)
    for out_dtype in OUT_DTYPES[: 2 if epilogue.program.halves else 3]:
        c = None if epilogue.program.halves else torch.randn(M, N, generator=gen).to(out_dtype)
        terms = {"bias": torch.randn(N, generator=gen), "out_dtype": out_dtype, "c": c}
        beta = {} if c is None else {"beta": -0.7}
        for offs in (None, OFFS):
            a, b = operands(gen, offs)
            function = fp4gemm.mm if offs is None else fp4gemm.grouped_mm
            want = function(a, b, activation=name, **terms, **beta)
            rows = M if offs is None else int(offs[-1])
            assert_bits(function(a, b, epilogue=epilogue(**beta), **terms)[:rows], want[:rows])


@pytest.mark.parametrize("name", [a.name for a in ACTIVATIONS], ids=str)
def test_bits_of_activations(name: str | None, gen: torch.Generator) -> None:
    """At every number of 16 bits, NaN and infinity among them."""
    numbers = torch.arange(-(2**15), 2**15).to(torch.int16)
    z = torch.cat((numbers.view(torch.bfloat16).float(), numbers.view(torch.float16).float())).view(-1, 256)
    one = torch.ones(1)
    bound = built_in(name)
    terms = {"bias": torch.full((256,), -0.0)}
    if bound.program.halves:
        z = torch.cat((z, z.flip(0).flip(1)), dim=1)
        terms = {"alpha": one[0], "row": one, "col": one, "bias": torch.full((512,), -0.0)}
        got, _ = bound().forward(z, **terms)
    else:
        got, _ = bound(beta=-0.0, c=torch.zeros_like(z)).forward(z, **terms)
    number = next(a.number for a in ACTIVATIONS if a.name == name)
    want = reference.activate(z, number)
    nan = want.isnan()
    assert torch.equal(got.isnan(), nan)
    assert_bits(got.masked_fill(nan, 0), want.masked_fill(nan, 0))


# ---- the examples, each against plain float32 arithmetic of torch

Model = Callable[..., tuple[Tensor, ...]]
MATRIX, HALF = torch.Size((M, N)), torch.Size((M, N // 2))
RANDOM: dict[str, torch.Size] = {
    "bias": torch.Size((N,)),
    "c": MATRIX,
    "gate": torch.Size((M,)),
    "gamma": torch.Size((N,)),
    "mask": MATRIX,
    "cos": HALF,
    "sin": HALF,
}


def pairs(z: Tensor) -> tuple[Tensor, Tensor]:
    return z[:, 0::2], z[:, 1::2]


def clamped(z: Tensor, bias: Tensor) -> tuple[Tensor]:
    g, u = pairs(z + bias)
    g, u = g.clamp(max=7), u.clamp(-7, 7)
    return (g * torch.sigmoid(1.702 * g) * (u + 1),)


def rotated(z: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor]:
    x, y = pairs(z)
    return (torch.stack((x * cos - y * sin, x * sin + y * cos), dim=2).flatten(1),)


def geglu(z: Tensor) -> tuple[Tensor, ...]:
    gate, up = pairs(z)
    return torch.nn.functional.gelu(gate, approximate="tanh") * up, gate, up


def squared(z: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
    return (z + bias).clamp(min=0) ** 2, z + bias


def fake_quantized(z: Tensor, scale: float) -> tuple[Tensor]:
    return ((z / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale,)


MODELS: dict[str, tuple[Model, bool]] = {  # and whether each operation is one of torch's that rounds once
    "scaled_residual": (lambda z, c, scale: (c.float() + scale * z,), True),
    "row_gate": (lambda z, gate: (gate[:, None] * z,), True),
    "soft_cap": (lambda z: (30 * torch.tanh(z / 30),), False),
    "clamped_swiglu": (clamped, False),
    "dropout": (lambda z, mask, keep: (z * mask / torch.tensor(keep),), True),
    "rotation": (rotated, True),
    "fake_quantize": (fake_quantized, True),
    "gelu_and_mul": (geglu, False),
    "squared_relu": (squared, True),
    "layer_scale": (lambda z, bias, c, gamma: (c.float() + gamma * (z + bias),), True),
}


@pytest.mark.parametrize("epilogue", examples.EXAMPLES, ids=lambda e: e.name)
def test_examples(epilogue: ep.Epilogue, gen: torch.Generator) -> None:
    a, b = operands(gen)
    z = fp4gemm.mm(a, b, out_dtype=torch.float32)
    model, is_exact = MODELS[epilogue.name]
    for out_dtype in OUT_DTYPES:
        given: dict[str, Any] = {}
        for p in epilogue.parameters:
            if p.name in RANDOM and p.kind != "acc":
                given[p.name] = torch.randn(RANDOM[p.name], generator=gen)
            elif p.name in examples.SCALARS:
                given[p.name] = examples.SCALARS[p.name]
        if "c" in given:
            given["c"] = given["c"].to(out_dtype)
        found = fp4gemm.mm(a, b, epilogue=epilogue(**given), out_dtype=out_dtype)
        results = (found[0], *found[1].values()) if isinstance(found, tuple) else (found,)
        want = model(z, **given)
        assert len(results) == len(want) == 1 + len(epilogue.aux)
        for got, expected in zip(results, want, strict=True):
            if is_exact:
                assert_bits(got, expected.to(out_dtype))
            else:
                torch.testing.assert_close(got.float(), expected, rtol=2**-8, atol=1e-5)


def test_examples_by_the_public_check() -> None:
    for epilogue in examples.EXAMPLES:
        scalars = {name: x for name, x in examples.SCALARS.items() if name in epilogue.names("scalars")}
        report = fp4gemm.check_epilogue(epilogue, "cpu", scalars=scalars)
        assert report.passed
        assert len(report.results) > 60
        assert f"products with {epilogue.name} equal the reference" in str(report)


def test_the_check_finds_a_wrong_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    from fp4gemm.ops import operators

    right = operators.gemm_epilogue

    def wrong(*args: Any) -> list[Tensor]:
        results = right(*args)
        results[1].view(torch.uint8).view(-1)[0] ^= 1
        return results

    monkeypatch.setattr(operators, "gemm_epilogue", wrong)
    report = fp4gemm.check_epilogue(examples.squared_relu, "cpu")
    assert len(report.failures) == len(report.results)
    assert "auxiliary output 0: 1 of" in str(report)


# ---- formats and groups


@fp4gemm.epilogue
def every_kind(acc, row, bias, c, x: ep.Row, y: ep.Column, z: ep.Matrix, *, s=0.5):
    return (row * acc * x + bias) * y + z * c * s, {"scaled": row * acc}


def terms_of(gen: torch.Generator, shape: tuple[int, ...], groups: int = 0) -> dict[str, Tensor]:
    *_, m, n = shape
    return {
        "x": torch.randn(m, generator=gen),
        "y": torch.randn(*([groups] if groups else []), n, generator=gen),
        "z": torch.randn(shape, generator=gen).bfloat16(),
        "bias": torch.randn(n, generator=gen),
        "c": torch.randn(shape, generator=gen).half(),
    }


def expected(z: Tensor, row: Tensor, given: dict[str, Tensor], y: Tensor) -> Tensor:
    """every_kind of z, the product with the factors col and alpha."""
    scaled = row.view(-1, 1) * z
    return (scaled * given["x"].view(-1, 1) + given["bias"]) * y + given["z"] * given["c"] * 0.5


FORMS = {
    "nvfp4": lambda x, w: (fp4gemm.quantize(x), w),
    "decoded": lambda x, w: (fp4gemm.quantize(x, decoded=True), fp4gemm.decode(w)),
    "bf16": lambda x, w: (x.bfloat16(), w),
    "fp16-prepacked": lambda x, w: (x.half(), fp4gemm.prepack(w)),
    "fp8": lambda x, w: (fp4gemm.quantize_fp8(x), fp4gemm.prepack(w, fp8=True)),
}


@pytest.mark.parametrize("form", FORMS)
def test_formats(form: str, gen: torch.Generator) -> None:
    a, b = FORMS[form](torch.randn(M, K, generator=gen), fp4gemm.quantize(torch.randn(N, K, generator=gen)))
    given = terms_of(gen, (M, N))
    y, aux = fp4gemm.mm(
        a, b, epilogue=every_kind(**given, aux_dtypes={"scaled": torch.float32}), out_dtype=torch.float16
    )
    without = fp4gemm.epilogue(lambda acc, row: acc + 0.0 * row)
    z = fp4gemm.mm(a, b, epilogue=without, out_dtype=torch.float32)
    row = torch.ones(1) if isinstance(a, Tensor) else a.amax
    assert_bits(aux["scaled"], row.view(-1, 1) * z)
    assert_bits(y, expected(z, row, given, given["y"]).half())


def test_groups_of_rows(gen: torch.Generator) -> None:
    """Vectors of each group, numbers of each group; rows of no group are not computed."""

    @fp4gemm.epilogue
    def scaled(acc, bias, y: ep.Column, g: ep.Group, z: ep.Matrix):
        return (acc + bias) * y * g + z

    a, b = operands(gen, OFFS)
    y, g = torch.randn(3, N, generator=gen), torch.randn(3, generator=gen)
    bias, z = torch.randn(3, N, generator=gen), torch.randn(M, N, generator=gen)
    got = fp4gemm.grouped_mm(a, b, epilogue=scaled(y=y, g=g, z=z), bias=bias, out_dtype=torch.float32)
    plain = fp4gemm.grouped_mm(a, b, bias=bias, out_dtype=torch.float32)
    begin = 0
    for group, end in enumerate(OFFS.tolist()):
        assert_bits(got[begin:end], plain[begin:end] * y[group] * g[group] + z[begin:end])
        begin = end
    with pytest.raises(ValueError, match=r"offs: got None.*scaled has values by group"):
        fp4gemm.mm(*operands(gen), epilogue=scaled(y=y, g=g, z=z), bias=bias[0])


def test_groups_of_columns(gen: torch.Generator) -> None:
    """Ragged k: a matrix for each group, that of an empty group is the epilogue of 0."""

    @fp4gemm.epilogue
    def scaled(acc, c, x: ep.Row, y: ep.Column, g: ep.Group, z: ep.Matrix):
        return acc * x * y * g + z + c

    tokens = torch.randn(M, N, generator=gen), torch.randn(M, 32, generator=gen)
    left, right = (fp4gemm.quantize(t, axis=0, offs=OFFS) for t in tokens)
    shape = (3, N, 32)
    given = {
        "x": torch.randn(3, N, generator=gen),
        "y": torch.randn(3, 32, generator=gen),
        "g": torch.randn(3, generator=gen),
        "z": torch.randn(shape, generator=gen),
        "c": torch.randn(shape, generator=gen),
    }
    got = fp4gemm.grouped_mm(left, right, epilogue=scaled(**given), out_dtype=torch.float32)
    z = fp4gemm.grouped_mm(left, right, out_dtype=torch.float32)
    x, y, g = given["x"][:, :, None], given["y"][:, None], given["g"][:, None, None]
    assert_bits(got, z * x * y * g + given["z"] + given["c"])


def test_other_products(gen: torch.Generator) -> None:
    """The functions of raw tensors and those of a training step have the keyword, too."""
    a, b = operands(gen)
    want = fp4gemm.mm(a, b, activation="silu")
    silu = fp4gemm.epilogue(lambda acc: ep.silu(acc))
    assert_bits(fp4gemm.fprop(a, b, epilogue=silu), want)
    alpha = 1 / (36 * 448 * 448)
    raw = (a.codes, b.codes, a.scales, b.scales)
    assert_bits(fp4gemm.scaled_mm(*raw, alpha=alpha, alpha_row=a.amax, alpha_col=b.amax, epilogue=silu), want)


def test_a_factor_of_one_row_changes_one_row(gen: torch.Generator) -> None:
    a, b = operands(gen)
    gate = torch.ones(M)
    gate[5] = 4.0
    got = fp4gemm.mm(a, b, epilogue=examples.row_gate(gate=gate))
    want = fp4gemm.mm(a, b)
    want[5] *= 4
    assert_bits(got, want)


# ---- torch.compile, export, opcheck


def step(x: Tensor, c: Tensor, w: fp4gemm.NVFP4Tensor, scale: float) -> tuple[Tensor, Tensor]:
    a = fp4gemm.quantize(x)
    y = fp4gemm.mm(a, w, epilogue=examples.scaled_residual(c=c, scale=scale))
    d, aux = fp4gemm.mm(a, w, epilogue=examples.gelu_and_mul(aux_dtypes={"up": torch.float32}))
    return y, d * aux["up"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_compile(backend: str, gen: torch.Generator) -> None:
    _, w = operands(gen)
    function = compiled(step, ready(backend), dynamic=True)
    for m in (M, 5):
        x, c = torch.randn(m, K, generator=gen).bfloat16(), torch.randn(m, N, generator=gen).bfloat16()
        for got, want in zip(function(x, c, w, 0.3), step(x, c, w, 0.3), strict=True):
            assert_bits(got, want)


@pytest.mark.parametrize("strict", [False, True], ids=["non-strict", "strict"])
def test_export(strict: bool, gen: torch.Generator) -> None:
    torch._dynamo.reset()
    _, w = operands(gen)

    class Model(torch.nn.Module):
        def forward(self, x: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
            return step(x, c, w, 0.25)

    x, c = torch.randn(M, K, generator=gen).bfloat16(), torch.randn(M, N, generator=gen).bfloat16()
    tokens = torch.export.Dim("tokens", min=1, max=4096)
    program = torch.export.export(Model(), (x, c), dynamic_shapes=({0: tokens}, {0: tokens}), strict=strict)
    for got, want in zip(program.module()(x[:7], c[:7]), Model()(x[:7], c[:7]), strict=True):
        assert_bits(got, want)


def test_the_operator(gen: torch.Generator) -> None:
    a, b = operands(gen)
    given = terms_of(gen, (M, N))
    args = (a.codes, b.codes, every_kind.text, [given["x"], given["y"], given["z"]], [0.5], [2])
    kwargs = {
        "scale_a": a.scales,
        "scale_b": b.scales,
        "alpha_row": a.amax,
        "alpha_col": b.amax,
        "bias": given["bias"],
        "c": given["c"],
        "out_dtype": torch.float16,
    }
    opcheck("gemm_epilogue", *args, **kwargs)
    assert_fake_is_real("gemm_epilogue", *args, **kwargs)
    for kernel in ("CPU", "CUDA"):
        assert torch._C._dispatch_has_kernel_for_dispatch_key("fp4gemm::gemm_epilogue", kernel)


def test_requires_grad_is_refused(gen: torch.Generator) -> None:
    a, b = operands(gen)
    with pytest.raises(NotImplementedError, match="gate: requires grad"):
        fp4gemm.mm(a, b, epilogue=examples.row_gate(gate=torch.ones(M, requires_grad=True)))


# ---- outputs that are given


@pytest.mark.parametrize("grouped", [False, True], ids=["dense", "grouped"])
def test_given_outputs(grouped: bool, gen: torch.Generator) -> None:
    """They have the bits of new ones, and rows of no group and columns beside D stay as they were."""
    a, b = operands(gen, OFFS if grouped else None)
    rows = int(OFFS[-1]) if grouped else M
    multiply = fp4gemm.grouped_mm if grouped else fp4gemm.mm
    bias, dtypes = torch.randn(N, generator=gen), {"pre": torch.float32}
    want, aux = multiply(a, b, bias=bias, epilogue=examples.squared_relu(aux_dtypes=dtypes))
    wide, pre = torch.full((M, N + 8), -7.0).bfloat16(), torch.full((M, N), -7.0)
    out = wide[:, :N]
    bound = examples.squared_relu(aux_out={"pre": pre})
    y, found = multiply(a, b, bias=bias, epilogue=bound, out=out)
    assert y is out
    assert found["pre"] is pre
    assert_bits(out[:rows], want[:rows])
    assert_bits(pre[:rows], aux["pre"][:rows])
    assert bool((wide[:, N:] == -7).all())
    assert bool((wide[rows:] == -7).all())
    assert bool((pre[rows:] == -7).all())
    y, found = multiply(a, b, bias=bias, epilogue=bound)  # a new D beside a given output
    assert found["pre"] is pre
    assert_bits(y[:rows], want[:rows])


def test_c_may_be_out(gen: torch.Generator) -> None:
    a, b = operands(gen)
    c = torch.randn(M, N, generator=gen).bfloat16()
    want = fp4gemm.mm(a, b, epilogue=examples.scaled_residual(c=c, scale=0.5))
    assert fp4gemm.mm(a, b, epilogue=examples.scaled_residual(c=c, scale=0.5), out=c) is c
    assert_bits(c, want)


def test_pairs_into_given_outputs(gen: torch.Generator) -> None:
    a, b = operands(gen)
    want, aux = fp4gemm.mm(a, b, epilogue=examples.gelu_and_mul(), out_dtype=torch.float16)
    out, up = torch.empty(M, N // 2).half(), torch.empty(M, N // 2).half()
    y, found = fp4gemm.mm(a, b, epilogue=examples.gelu_and_mul(aux_out={"up": up}), out=out)
    assert list(found) == ["gate", "up"]
    assert found["up"] is up
    for got, expected in ((y, want), (found["gate"], aux["gate"]), (up, aux["up"])):
        assert_bits(got, expected)


@fp4gemm.epilogue
def with_c(acc, c, z: ep.Matrix):
    return acc + c + z, {"acc": acc}


def refused(gen: torch.Generator, message: str, error: type[Exception] = ValueError, **terms: Any) -> None:
    a, b = operands(gen)
    with pytest.raises(error, match=message):
        fp4gemm.mm(a, b, **terms)


def test_outputs_that_are_refused(gen: torch.Generator) -> None:
    buffer = torch.zeros(M, 2 * N).bfloat16()
    x, y = buffer[:, :N], torch.zeros(M, N).bfloat16()
    cap, relu, bias = examples.soft_cap(), examples.squared_relu, torch.zeros(N)
    refused(gen, r"out: shape is \(37, 40\), must be \(37, 48\)", epilogue=cap, out=y[:, :40])
    refused(gen, r"out: shape is \(37, 48\), must be \(37, 24\)", epilogue=examples.gelu_and_mul(), out=y)
    refused(gen, "out_dtype: got torch.float16", epilogue=cap, out=y, out_dtype=torch.float16)
    refused(gen, "out: got ", TypeError, epilogue=cap, out=[y])
    refused(gen, "out: dtype is torch.int32", TypeError, epilogue=cap, out=torch.zeros(M, N).int())
    ints = relu(aux_out={"pre": torch.zeros(M, N).int()})
    refused(gen, r"aux_out\['pre'\]: dtype is torch.int32", TypeError, bias=bias, epilogue=ints)
    refused(gen, r"aux_out\['pre'\]: stride", bias=bias, epilogue=relu(aux_out={"pre": y.T.contiguous().T}))
    refused(gen, r"aux_out\['pre'\]: overlaps out", bias=bias, out=y, epilogue=relu(aux_out={"pre": y}))
    half = buffer[:, 24 : N + 24]
    refused(gen, r"c: overlaps out", epilogue=examples.scaled_residual(c=x, scale=1.0), out=half)
    z = torch.zeros(M, N)
    both = with_c(c=y, z=z, aux_out={"acc": z.clone()})
    refused(gen, r"out: overlaps c, must be apart", epilogue=both, out=y)
    refused(gen, r"out: overlaps z, must be apart", epilogue=with_c(c=x, z=y), out=y)
    shared = torch.zeros(M + 1, N)
    refused(gen, r"out: overlaps bias, must be apart", bias=shared[3], epilogue=relu(), out=shared[:M])
    fp4gemm.mm(*operands(gen), bias=shared[M], epilogue=relu(), out=shared[:M])
    refused(gen, r"aux_out\['acc'\]: overlaps z", epilogue=with_c(c=x, z=z, aux_out={"acc": z}))
    # Two column ranges of one buffer do not overlap.
    fp4gemm.mm(*operands(gen), epilogue=with_c(c=x, z=z, aux_out={"acc": buffer[:, N:]}), out=y)


def test_c_is_not_out_beside_a_new_auxiliary_output(
    gen: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The function refuses it itself: the kernels of a GPU do not compare addresses."""
    monkeypatch.setattr(_epilogues, "_written", lambda *args: pytest.fail("was called"))
    y, z = torch.zeros(M, N).bfloat16(), torch.zeros(M, N)
    refused(gen, r"out: overlaps c, must be apart", epilogue=with_c(c=y, z=z), out=y)
    both = with_c(c=y, z=z, aux_dtypes={"acc": torch.float32})
    refused(gen, r"out: overlaps c, must be apart", epilogue=both, out=y)


def test_arguments_have_names() -> None:
    with pytest.raises(
        TypeError, match=r"^row_gate: got a .* without a name, must get keywords: gate, aux_d"
    ):
        examples.row_gate(torch.ones(M))  # type: ignore[misc]


def test_aux_out_names_outputs() -> None:
    with pytest.raises(TypeError, match="aux_out: got 'up', must be an auxiliary output of squared_relu"):
        examples.squared_relu(aux_out={"up": torch.zeros(M, N)})
    for name in ("aux_out", "aux_dtypes"):
        with pytest.raises(TypeError, match=f"{name}: got .*, must be a dictionary by names of outputs"):
            examples.squared_relu(**{name: torch.zeros(M, N)})
    with pytest.raises(TypeError, match=r"aux_out\['pre'\]: got None"):
        examples.squared_relu(aux_out={"pre": None})  # type: ignore[dict-item]
    with pytest.raises(TypeError, match="aux_dtypes: got 'pre', must be omitted: aux_out has it"):
        examples.squared_relu(aux_out={"pre": torch.zeros(M, N)}, aux_dtypes={"pre": torch.float32})


def step_out(x: Tensor, out: Tensor, up: Tensor, w: fp4gemm.NVFP4Tensor) -> Tensor:
    a = fp4gemm.quantize(x)
    d, aux = fp4gemm.mm(a, w, epilogue=examples.gelu_and_mul(aux_out={"up": up}), out=out)
    return torch.stack([2 * d, aux["up"], aux["gate"]])


@pytest.mark.parametrize("backend", BACKENDS)
def test_compile_with_given_outputs(backend: str, gen: torch.Generator) -> None:
    _, w = operands(gen)
    function = compiled(step_out, ready(backend))
    x = torch.randn(M, K, generator=gen).bfloat16()
    given, expected = ([torch.zeros(M, N // 2).bfloat16() for _ in range(2)] for _ in range(2))
    assert_bits(function(x, *given, w), step_out(x, *expected, w))
    for got, want in zip(given, expected, strict=True):
        assert_bits(got, want)


def test_the_operator_with_given_outputs(gen: torch.Generator) -> None:
    a, b = operands(gen)
    given = terms_of(gen, (M, N))
    args = (a.codes, b.codes, every_kind.text, [given["x"], given["y"], given["z"]], [0.5])
    kwargs = {
        "scale_a": a.scales,
        "scale_b": b.scales,
        "alpha_row": a.amax,
        "alpha_col": b.amax,
        "bias": given["bias"],
        "c": given["c"],
        "out": torch.empty(M, N).half(),
        "aux": [torch.empty(M, N)],
    }
    opcheck("gemm_epilogue_out", *args, **kwargs)
    with pytest.raises(ValueError, match=r"aux: has 0 tensors, must have 1"):
        torch.ops.fp4gemm.gemm_epilogue_out(*args, **{**kwargs, "aux": []})
    with pytest.raises(ValueError, match=r"aux\[0\]: overlaps out"):
        torch.ops.fp4gemm.gemm_epilogue_out(*args, **{**kwargs, "aux": [kwargs["out"]]})


def test_pairs_of_ragged_k(gen: torch.Generator) -> None:
    """Each group has the bits of its dense product, an empty one those of a product of zeros."""
    tokens = torch.randn(M, N, generator=gen), torch.randn(M, 32, generator=gen)
    left, right = (fp4gemm.quantize(t, axis=0, offs=OFFS) for t in tokens)
    z = fp4gemm.grouped_mm(left, right, out_dtype=torch.float32)
    y, aux = fp4gemm.grouped_mm(left, right, epilogue=examples.gelu_and_mul(), out_dtype=torch.float32)
    gate, up = z[..., 0::2].contiguous(), z[..., 1::2].contiguous()
    assert_bits(aux["gate"], gate)
    assert_bits(aux["up"], up)
    (gelu,) = (a for a in ACTIVATIONS if a.name == "gelu_tanh")
    assert_bits(y, gelu(gate) * up)
