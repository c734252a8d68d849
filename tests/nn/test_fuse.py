"""quantize_model(fuse="auto"): layers that read the same tensor are one product, with the same bits."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import threading
import weakref
from typing import Any

import fp4gemm
import fuse_models
import pytest
import torch
from fp4gemm import nn
from fp4gemm.nn.merged import MergedLinear, Part, merged_name
from nn_helpers import convert, same_bits, same_state
from torch import Tensor


@pytest.fixture(autouse=True)
def _no_grad() -> Any:
    torch.manual_seed(0)
    with torch.no_grad():
        yield


def both(model: torch.nn.Module, **options: Any) -> tuple[torch.nn.Module, torch.nn.Module]:
    """The quantized model, fused and not fused."""
    return convert(model, fuse="auto", **options)[0], convert(model, **options)[0]


def num_merged(model: torch.nn.Module) -> int:
    return sum(isinstance(module, MergedLinear) for module in model.modules())


def count_products(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows of every product that a merged layer makes from now on."""
    calls: list[int] = []
    forward = MergedLinear.forward

    def counted(self: MergedLinear, x: Tensor) -> Tensor:
        calls.append(x.shape[0])
        return forward(self, x)

    monkeypatch.setattr(MergedLinear, "forward", counted)
    return calls


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("weight_scaling", ["row", "tensor"])
@pytest.mark.parametrize("activations", ["per-token", "per-tensor", "a16"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
def test_attention_has_the_bits_of_three_layers(
    dtype: torch.dtype, weight_scaling: str, activations: str, bias: bool
) -> None:
    model = fuse_models.Attention(bias=bias).to(dtype)
    fused, plain = both(model, weight_scaling=weight_scaling, activations=activations)
    assert isinstance(fused.qkv_proj, MergedLinear)
    assert fused.qkv_proj.sizes == (64, 32, 32)
    for shape in ((2, 5, 64), (1, 1, 64)):
        x = torch.randn(shape, dtype=dtype)
        assert same_bits(fused(x), plain(x))
    assert fused.v_proj(x[:0]).shape == (0, 1, 32)


def test_one_product_for_three_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    fused, _ = both(fuse_models.Attention())
    calls = count_products(monkeypatch)
    fused(torch.randn(2, 5, 64))
    assert calls == [2]


def test_missing_bias_changes_no_bit() -> None:
    model = fuse_models.Attention(bias=True)
    model.k_proj = torch.nn.Linear(64, 32, bias=False)
    model.k_proj.weight.zero_()
    model.k_proj.weight[:, 0] = 1e-30  # products that round to zero keep their sign
    fused, plain = both(model)
    x = -torch.rand(2, 5, 64)
    assert same_bits(fused.k_proj(x), plain.k_proj(x))
    assert same_bits(fused(x), plain(x))


@pytest.mark.parametrize("cls", fuse_models.LEFT_ALONE, ids=lambda cls: cls.__name__)
def test_layers_that_do_not_share_an_input_are_left_alone(cls: type[torch.nn.Module]) -> None:
    float_model = cls()
    model, report = convert(float_model, fuse="auto")
    plain, _ = convert(float_model)
    assert num_merged(model) == 0
    (block,) = report.blocks
    assert (block.action, block.names, block.into) == ("left", ("a", "b"), "")
    assert block.reason == f"the forward of {cls.__name__} does not call them with the same tensor"
    x = torch.randn(3, 64)
    for inference in (False, True):  # tensors of inference mode do not count what is written to them
        with torch.inference_mode(inference):
            assert same_bits(model(x), plain(x))


@pytest.mark.parametrize("cls", [fuse_models.Loop, fuse_models.Late], ids=lambda cls: cls.__name__)
def test_calls_in_a_loop_and_ahead_of_what_is_unknown_are_merged(cls: type[torch.nn.Module]) -> None:
    fused, plain = both(cls())
    assert isinstance(fused.ab, MergedLinear)
    x = torch.randn(3, 64)
    assert same_bits(fused(x), plain(x))


@pytest.mark.parametrize(
    "cls",
    [
        fuse_models.Helper,
        fuse_models.WrappedHelper,
        fuse_models.WritesOther,
        fuse_models.AskedTwice,
        fuse_models.WithoutScale,
    ],
    ids=lambda cls: cls.__name__,
)
def test_calls_around_what_cannot_be_traced_are_merged(cls: type[torch.nn.Module]) -> None:
    fused, plain = both(cls())
    assert isinstance(fused.ab, MergedLinear)
    for x in (torch.rand(3, 64), -torch.rand(3, 64)):
        assert same_bits(fused(x), plain(x))


def test_same_calls_in_two_branches_are_merged() -> None:
    fused, plain = both(fuse_models.Together())
    assert isinstance(fused.ab, MergedLinear)
    x = torch.randn(3, 64)
    for twice in (False, True):
        assert same_bits(fused(x, twice), plain(x, twice))


@pytest.mark.parametrize("inference", [False, True], ids=["no_grad", "inference_mode"])
def test_a_part_that_gets_another_tensor_computes_it(inference: bool) -> None:
    fused, plain = both(fuse_models.Together())
    x = torch.randn(3, 64)
    with torch.inference_mode(inference):
        first, second = fused.a(x), fused.b(x + 1)
        assert same_bits(first, plain.a(x))
        assert same_bits(second, plain.b(x + 1))
        assert same_bits(fused.b(x), plain.b(x)), "a second part alone"


def test_a_tensor_that_was_written_is_not_the_same() -> None:
    fused, plain = both(fuse_models.Together())
    x = torch.randn(3, 64)
    first = fused.a(x)
    assert same_bits(first, plain.a(x))
    x.mul_(2)
    assert same_bits(fused.b(x), plain.b(x))


def test_nothing_is_kept() -> None:
    fused, _ = both(fuse_models.Together())
    x = torch.randn(3, 64)
    y = fused.a(x)
    kept = weakref.ref(y._base if y._base is not None else y)
    del y
    assert kept() is not None, "the columns of b wait for its call"
    del x
    gc.collect()
    assert kept() is None
    y = weakref.ref(fused(torch.randn(3, 64)))
    assert y() is None


def test_threads() -> None:
    fused, plain = both(fuse_models.Attention())
    inputs = [torch.randn(2, 5, 64) for _ in range(8)]
    wanted = [plain(x) for x in inputs]
    same: list[bool] = []
    start = threading.Barrier(8)

    def work(x: Tensor, y: Tensor) -> None:
        start.wait()
        with torch.no_grad():
            for _ in range(20):
                same.append(same_bits(fused(x), y))

    threads = [threading.Thread(target=work, args=pair) for pair in zip(inputs, wanted, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(same) == 160
    assert all(same)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies(copied: Any) -> None:
    fused, _ = both(fuse_models.Attention())
    x = torch.randn(2, 5, 64)
    fused.q_proj(x)  # with columns that wait
    other = copied(fused)
    assert other.q_proj.merged is other.k_proj.merged is other.qkv_proj is not fused.qkv_proj
    assert same_bits(other(x), fused(x))
    other.qkv_proj.reset_parameters()
    assert fused(x).isfinite().all()


def test_state_dict() -> None:
    fused, plain = both(fuse_models.Attention(bias=True))
    parts = ["weight_codes", "weight_scales", "weight_amax", "weight_e4m3_max"]
    own = [f"{name}.{part}" for name in ("o_proj", "qkv_proj") for part in parts]
    assert sorted(fused.state_dict()) == sorted([*own, "qkv_proj.bias"])
    other, _ = both(fuse_models.Attention(bias=True))
    x = torch.randn(2, 5, 64)
    assert not same_bits(other(x), fused(x))
    file = io.BytesIO()
    torch.save(fused.state_dict(), file)
    file.seek(0)
    assert str(other.load_state_dict(torch.load(file))) == "<All keys matched successfully>"
    assert same_bits(other(x), fused(x))
    assert same_state(other.qkv_proj, fused.qkv_proj)
    with pytest.raises(RuntimeError, match=r"Missing key.*qkv_proj\.weight_codes"):
        other.load_state_dict(plain.state_dict())


def test_part_shows_the_weight_of_its_layer() -> None:
    fused, plain = both(fuse_models.Attention(bias=True).to(torch.bfloat16))
    part, layer = fused.k_proj, plain.k_proj
    assert isinstance(part, Part)
    assert isinstance(layer, nn.Linear)
    assert same_bits(part.weight.codes, layer.weight.codes)
    assert same_bits(part.weight.compact_scales(), layer.weight.compact_scales())
    assert same_bits(part.weight.dequantize(), layer.weight.dequantize())
    assert part.weight.dtype is torch.bfloat16
    assert same_bits(part.bias, layer.bias)
    assert (part.in_features, part.out_features) == (64, 32)
    assert str(part) == "Part(in_features=64, out_features=32, start=64)"


def test_compiled_graph_has_one_product() -> None:
    fused, _ = both(fuse_models.Attention())
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    x = torch.randn(2, 5, 64)
    y = fused(x)
    compiled = torch.compile(fused, fullgraph=True, backend=backend)
    assert same_bits(compiled(x), y)
    targets = [str(node.target) for node in graphs[0].graph.nodes]
    products = [t for t in targets if t in ("fp4gemm.gemm.default", "fp4gemm.linear.default")]
    assert len(products) == 2, "qkv_proj and o_proj"
    assert fused.qkv_proj._traced is None
    assert same_bits(compiled(x + 1), fused(x + 1))
    assert len(graphs) == 1


def test_compiled_in_two_graphs() -> None:
    fused, plain = both(fuse_models.Broken())
    compiled = torch.compile(fused, backend="eager")
    for _ in range(2):
        x = torch.randn(3, 64)
        assert same_bits(compiled(x), plain(x))
        assert fused.ab._traced is None


@pytest.mark.parametrize("strict", [False, True], ids=["traced", "strict"])
def test_export(strict: bool) -> None:
    fused, _ = both(fuse_models.Attention())
    x = torch.randn(2, 5, 64)
    y = fused(x)
    program = torch.export.export(fused, (x,), strict=strict)
    assert same_bits(program.module()(x), y)
    assert same_bits(fused(x), y), "the model still runs"


def test_moves_keep_the_parts() -> None:
    fused, _ = both(fuse_models.Attention())
    x = torch.randn(2, 5, 64)
    y, state = fused(x), {name: t.clone() for name, t in fused.state_dict().items()}
    fused.to("meta").to_empty(device="cpu")
    assert fused.q_proj.merged is fused.qkv_proj
    with pytest.raises(RuntimeError, match="weight: not loaded yet"):
        fused(x)
    fused.load_state_dict(state)
    assert same_bits(fused(x), y)


def test_meta_device_and_checkpoint() -> None:
    fused, _ = both(fuse_models.Attention())
    with torch.device("meta"):
        empty = fp4gemm.models.quantize_model(fuse_models.Attention(), fuse="auto")
    assert empty.qkv_proj.weight_codes.is_meta
    empty.load_state_dict(fused.state_dict(), assign=True)
    x = torch.randn(2, 5, 64)
    assert same_bits(empty(x), fused(x))


def test_shared_layers_are_left_alone() -> None:
    model = torch.nn.Sequential(fuse_models.Together(), fuse_models.Together())
    model[1].a = model[0].a
    swapped, report = convert(model, fuse="auto")
    reason = "one of them is used in several places of the model"
    assert [block.reason for block in report.blocks] == [reason, reason]
    assert num_merged(swapped) == 0


def test_taken_name_is_left_alone() -> None:
    model = fuse_models.Together()
    model.ab = 1
    _, report = convert(model, fuse="auto")
    assert [block.reason for block in report.blocks] == ["their owner has an attribute 'ab' already"]


def test_no_source_is_needed() -> None:
    scope: dict[str, Any] = {"Pair": fuse_models.Pair}
    exec("class Made(Pair):\n    def forward(self, x):\n        return self.a(x) + self.b(x)\n", scope)
    fused, plain = both(scope["Made"]())
    assert isinstance(fused.ab, MergedLinear)
    x = torch.randn(3, 64)
    assert same_bits(fused(x), plain(x))


def test_a_forward_that_was_replaced_is_left_alone() -> None:
    model = fuse_models.Together()
    model.forward = lambda x: model.a(x)
    _, report = convert(model, fuse="auto", inplace=True)
    assert [block.reason for block in report.blocks] == [
        "the forward of Together cannot be traced: other code has replaced it"
    ]


def test_report() -> None:
    model = torch.nn.ModuleList([fuse_models.Attention() for _ in range(3)])
    _, report = convert(model, fuse="auto", exclude="2.q_proj")
    assert [(block.action, block.into) for block in report.blocks] == [
        ("merged", "0.qkv_proj"),
        ("merged", "1.qkv_proj"),
        ("merged", "2.kv_proj"),
    ]
    assert "*: q_proj, k_proj, v_proj merged into qkv_proj (2 times)" in str(report)
    assert report.bytes_after < report.bytes_before
    assert convert(model)[1].blocks == ()


def test_inplace_false_leaves_the_model() -> None:
    model = fuse_models.Attention()
    swapped = fp4gemm.models.quantize_model(model, inplace=False, fuse="auto")
    assert isinstance(model.q_proj, torch.nn.Linear)
    assert not hasattr(model, "qkv_proj")
    assert isinstance(swapped.q_proj, Part)


def test_bad_value() -> None:
    with pytest.raises(ValueError, match="fuse: got 'all', must be 'auto' or 'none'"):
        fp4gemm.models.quantize_model(fuse_models.Attention(), fuse="all")


@pytest.mark.parametrize(
    ("names", "wanted"),
    [
        ("q_proj k_proj v_proj", "qkv_proj"),
        ("gate_proj up_proj", "gate_up_proj"),
        ("query key value", "query_key_value"),
        ("to_q to_k to_v", "to_qkv"),
        ("q k v", "qkv"),
        ("w1 w3", "w1_w3"),
    ],
)
def test_names(names: str, wanted: str) -> None:
    assert merged_name(names.split()) == wanted
