"""What happens to fp4gemm.nn.Experts: prepacking, checkpoints, moves, copies, graphs, accelerate."""

from __future__ import annotations

import copy
import io
import pickle
import typing
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from experts_helpers import INTER, D, G, experts, routed
from fp4gemm import nn
from nn_helpers import bits, same_bits, state_bits


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


# ---- prepacked weights


def test_prepacked_experts_give_the_same_bits() -> None:
    m, inputs = experts(), routed()
    want = m(*inputs)
    packed = copy.deepcopy(m)
    assert packed.prepack() is packed
    assert {name for name, _ in packed.named_buffers()} == {
        f"{w}.{name}"
        for w in ("w13", "w2")
        for name in ("weight_amax", "weight_e4m3_max", "weight_prepacked", "bias")
    }
    assert same_bits(packed(*inputs), want)
    for name, value in state_bits(packed).items():
        assert torch.equal(value, state_bits(m)[name])
    for copier in (copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))):
        assert same_bits(copier(packed)(*inputs), want)
    other = experts()
    packed.load_state_dict(other.state_dict())
    assert packed.w13.weight_prepacked is not None
    assert same_bits(packed(*inputs), other(*inputs))


def test_the_first_forward_prepacks_where_the_device_streams_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    from fp4gemm.nn import _weight

    m, inputs = experts(), routed()
    want = copy.deepcopy(m)(*inputs)
    assert m.w13.weight_prepacked is None
    monkeypatch.setattr(_weight.support, "streams_prepacked", lambda *_: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert same_bits(m(*inputs), want)
    assert m.w13.weight_prepacked is not None
    assert m.w2.weight_prepacked is not None


# ---- state


@pytest.mark.parametrize("assign", [False, True], ids=["copy", "assign"])
@pytest.mark.parametrize("scaling", ["row", "tensor"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "nobias"])
def test_state_dict_round_trip(bias: bool, scaling: typing.Any, assign: bool, tmp_path: Path) -> None:
    m, inputs = experts(bias=bias, weight_scaling=scaling), routed()
    safetensors = pytest.importorskip("safetensors.torch", reason="safetensors is not installed")
    model = torch.nn.ModuleDict({"experts": m})
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    buffer.seek(0)
    safetensors.save_file(model.state_dict(), tmp_path / "model.safetensors")
    for state in (
        torch.load(buffer, weights_only=True),
        safetensors.load_file(tmp_path / "model.safetensors"),
    ):
        fresh = nn.Experts(G, D, INTER, bias=bias, weight_scaling=scaling, device="meta" if assign else None)
        with pytest.raises(RuntimeError, match=r"^weight: not loaded yet"):
            fresh(*inputs)
        torch.nn.ModuleDict({"experts": fresh}).load_state_dict(state, assign=assign)
        assert same_bits(fresh(*inputs), m(*inputs))


def test_distributed_checkpoint(tmp_path: Path) -> None:
    dcp = pytest.importorskip("torch.distributed.checkpoint")
    m, inputs = experts(), routed()
    dcp.save({"model": m.state_dict()}, checkpoint_id=tmp_path, no_dist=True)
    fresh = nn.Experts(G, D, INTER, bias=True)
    state = {"model": fresh.state_dict()}
    dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
    fresh.load_state_dict(state["model"])
    assert same_bits(fresh(*inputs), m(*inputs))


def test_a_checkpoint_of_other_experts_is_refused() -> None:
    state = experts().state_dict()
    with pytest.raises(
        RuntimeError, match=r"w13\.weight_codes: shape is \(4, 192, 32\), must be \(8, 192, 32\)"
    ):
        nn.Experts(8, D, INTER, bias=True).load_state_dict(state)
    with pytest.raises(RuntimeError, match=r"w13\.weight_amax: .* \(weight_scaling differs\)"):
        nn.Experts(G, D, INTER, bias=True, weight_scaling="tensor").load_state_dict(state)
    bad = {**state, "w13.weight_amax": state["w13.weight_amax"].clone()}
    bad["w13.weight_amax"][2, 7] = -torch.inf
    with pytest.raises(RuntimeError, match=r"w13\.weight_amax: 1 of \d+ values .* is -inf at \[2, 7\]"):
        nn.Experts(G, D, INTER, bias=True).load_state_dict(bad)
    del state["w2.weight_scales"]
    with pytest.raises(RuntimeError, match=r"w2\.weight_scales: is missing"):
        nn.Experts(G, D, INTER, bias=True).load_state_dict(state)


@pytest.mark.parametrize(
    "move",
    [
        lambda m: m.half(),
        lambda m: m.to(torch.bfloat16),
        lambda m: m.to("cpu"),
        copy.deepcopy,
        lambda m: pickle.loads(pickle.dumps(m)),
    ],
    ids=["half", "to-bf16", "to-cpu", "deepcopy", "pickle"],
)
def test_moves_and_copies(move: Callable[[nn.Experts], nn.Experts]) -> None:
    m, inputs = experts("silu", activations="per-token"), routed()
    before, want = {k: v.clone() for k, v in state_bits(m).items()}, m(*inputs)
    moved = move(m)
    assert all(torch.equal(before[name], value) for name, value in state_bits(moved).items())
    assert same_bits(moved(*inputs), want)


def test_meta_and_reset() -> None:
    m, inputs = experts(), routed()
    on_meta = copy.deepcopy(m).to("meta")
    assert on_meta(*(t.to("meta") for t in inputs)).shape == (7, D)
    on_meta.to_empty(device="cpu")
    with pytest.raises(RuntimeError, match="not loaded yet"):
        on_meta(*inputs)
    on_meta.load_state_dict(m.state_dict())
    assert same_bits(on_meta(*inputs), m(*inputs))
    m.reset_parameters()
    assert not any(bits(t).any() for name, t in m.named_buffers() if "e4m3" not in name)
    with pytest.raises(RuntimeError, match="not loaded yet"):
        m(*inputs)


def test_repr() -> None:
    assert repr(nn.Experts(G, D, INTER, activation="silu", check_finite="raise")) == (
        "Experts(\n"
        "  activation='silu', activations='per-token', check_finite='raise'\n"
        "  (w13): StackedWeight(num_experts=4, out_features=96, in_features=64, bias=False, "
        "weight_scaling='row')\n"
        "  (w2): StackedWeight(num_experts=4, out_features=64, in_features=96, bias=False, "
        "weight_scaling='row')\n"
        ")"
    )


# ---- graphs


@pytest.mark.parametrize("is_packed", [False, True], ids=["codes", "prepacked"])
def test_compile_and_export(is_packed: bool) -> None:
    m = experts().prepack() if is_packed else experts()
    compiled = torch.compile(m, fullgraph=True, backend="aot_eager")
    for t in (3, 9):
        inputs = routed(t)
        assert same_bits(compiled(*inputs), m(*inputs))
    with torch.no_grad():
        exported = torch.export.export(m, inputs)
    assert same_bits(exported.module()(*inputs), m(*inputs))


@pytest.mark.gpu
def test_a_graph_is_replayed_with_other_routings(cuda: torch.device) -> None:
    m = experts(g=8).to(cuda)
    x, ids, scores = (t.to(cuda) for t in routed(32, 2, 8, torch.bfloat16))
    m(x, ids, scores)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = m(x, ids, scores)
    for seed in range(100):
        torch.manual_seed(seed)
        other = routed(32, 2, 8, torch.bfloat16)
        for place, value in zip((x, ids, scores), other, strict=True):
            place.copy_(value)
        graph.replay()
        assert same_bits(y, m(x, ids, scores))


def test_calls_after_the_first_notice_what_changed() -> None:
    """They omit the checks as long as the buffers are the same."""
    m, (x, ids, scores) = experts(), routed()
    first = m(x, ids, scores)
    assert m.w13.is_checked
    for _ in range(2):
        assert same_bits(m(x, ids, scores), first)
        assert same_bits(m(x.T.contiguous().T, ids, scores), first)  # the operator refuses it; it is copied
    with pytest.raises(ValueError, match=r"^x: shape is \(7, 32\)"):
        m(x[:, :32], ids, scores)
    assert m(x.clone().requires_grad_(), ids, scores).requires_grad
    other = experts("swiglu")
    m.w2.weight = other.w2.weight
    m.w2.bias = torch.nn.Parameter(other.w2.bias)
    assert not same_bits(m(x, ids, scores), first)
    m.load_state_dict(other.state_dict())
    assert same_bits(m(x, ids, scores), other(x, ids, scores))
    m.w13.weight_e4m3_max.fill_(448)
    assert not same_bits(m(x, ids, scores), other(x, ids, scores))
    state = copy.deepcopy(m).__dict__
    assert not any(name.startswith("_known_held") for name in state)
    m.prepack()
    assert m.w13().scales is None


# ---- accelerate


@pytest.mark.parametrize("kind", ["dispatch", "cpu-offload"])
def test_accelerate(kind: str) -> None:
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    m, inputs = experts(), routed()
    want = m(*inputs)
    if kind == "dispatch":
        hooked = accelerate.dispatch_model(m, {"": "cpu"}, force_hooks=True)
    else:
        hooked = accelerate.cpu_offload(m, execution_device="cpu", offload_buffers=True)
        assert hooked.w13.weight_codes.is_meta
    for _ in range(2):
        assert same_bits(hooked(*inputs), want)
