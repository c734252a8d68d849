"""quantize_model on small random models of transformers: what it swaps, and that the models still work."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Iterator
from pathlib import Path

import fp4gemm
import pytest
import torch
from fp4gemm import nn
from model_zoo import IDS, ZOO, logits
from nn_helpers import same_bits
from saved_models import saved_and_loaded

SWAPPED = (nn.Linear, nn.Experts)


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture(scope="module", params=ZOO)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def original(name: str) -> torch.nn.Module:
    return ZOO[name]()


@pytest.fixture(scope="module")
def converted(original: torch.nn.Module) -> tuple[torch.nn.Module, fp4gemm.models.QuantizeReport]:
    """A quantized copy and its report; nothing may be left over that a warning would name."""
    reports: list[fp4gemm.models.QuantizeReport] = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = fp4gemm.models.quantize_model(
            original, inplace=False, report=reports.append, on_unsupported="raise"
        )
    return model, reports[0]


@pytest.fixture(scope="module")
def model(converted: tuple[torch.nn.Module, fp4gemm.models.QuantizeReport]) -> torch.nn.Module:
    return converted[0]


@pytest.fixture(scope="module")
def wanted(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return logits(model)


def cleared(model: torch.nn.Module) -> torch.nn.Module:
    """A copy of a quantized model whose NVFP4 weights are gone."""
    empty = copy.deepcopy(model)
    for module in empty.modules():
        if isinstance(module, SWAPPED):
            module.reset_parameters()
    return empty


def test_every_weight_is_accounted_for(
    name: str, original: torch.nn.Module, converted: tuple[torch.nn.Module, fp4gemm.models.QuantizeReport]
) -> None:
    (model, report), case = converted, ZOO[name]
    assert [e.action for e in report.layers].count("quantized") == case.layers
    assert [e.action for e in report.experts] == ["quantized"] * case.experts
    assert len(report.names("excluded")) == case.excluded
    assert sum(isinstance(m, nn.Linear) for m in model.modules()) == case.layers
    assert sum(isinstance(m, nn.Experts) for m in model.modules()) == case.experts
    assert not report.others

    params = dict(original.named_parameters(remove_duplicate=False))
    owners = {entry.name for entry in report.swapped}
    found = {w.name for w in report.weights} | {n for n in params if n.rpartition(".")[0] in owners}
    tied = {n for n, p in params.items() if any(p is params[other] for other in found)}
    assert found | tied == set(params)
    distinct = {id(p): p for p in params.values()}.values()
    assert report.bytes_before + sum(w.num_bytes for w in report.weights) == sum(p.nbytes for p in distinct)
    assert report.parameters_before == report.parameters_after == sum(p.numel() for p in distinct)
    assert report.model_bytes_before == sum(t.nbytes for t in (*distinct, *original.buffers()))
    assert report.model_bytes_after == sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
    in_float = sum(e.bytes_before for e in report.swapped if e.action == "excluded")
    assert report.bytes_after - in_float < 0.25 * (report.bytes_before - in_float)
    assert 60 < report.percent_quantized < 100


def test_routers_and_output_embeddings_stay(original: torch.nn.Module, model: torch.nn.Module) -> None:
    for name, module in model.named_modules():
        if "Router" in type(module).__name__ or name == "lm_head":
            assert isinstance(getattr(module, "weight", None), torch.nn.Parameter)
            assert torch.equal(module.weight, original.get_submodule(name).weight)


def test_the_output_is_near_the_float_one(name: str, original: torch.nn.Module, wanted: torch.Tensor) -> None:
    want = logits(original)
    assert torch.cosine_similarity(wanted.flatten(), want.flatten(), 0) > ZOO[name].cosine


def test_it_generates(model: torch.nn.Module) -> None:
    if not model.can_generate():
        pytest.skip("the model generates nothing")
    made = model.generate(IDS, max_new_tokens=3, min_new_tokens=3, do_sample=False)
    assert made.shape == (1, IDS.shape[1] + 3)
    # The first new token is that of one forward; later ones need a cache that works.
    assert made[0, IDS.shape[1]] == logits(model)[0, -1].argmax()


def test_state_round_trips(model: torch.nn.Module, wanted: torch.Tensor, tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch", reason="safetensors is not installed")
    import torch.distributed.checkpoint as dcp

    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    safetensors.save_model(model, str(tmp_path / "model.safetensors"))
    dcp.save(model.state_dict(), checkpoint_id=tmp_path / "dcp", no_dist=True)
    loaded = cleared(model)
    loaded.load_state_dict(torch.load(file, weights_only=True))
    assert same_bits(logits(loaded), wanted)
    loaded = cleared(model)
    safetensors.load_model(loaded, str(tmp_path / "model.safetensors"))
    assert same_bits(logits(loaded), wanted)
    loaded = cleared(model)
    state = loaded.state_dict()
    dcp.load(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    loaded.load_state_dict(state)
    assert same_bits(logits(loaded), wanted)


def test_save_pretrained_is_loaded_with_the_same_bits(
    model: torch.nn.Module, wanted: torch.Tensor, tmp_path: Path
) -> None:
    assert same_bits(logits(saved_and_loaded(model, tmp_path)), wanted)


def test_copies_and_moves(model: torch.nn.Module, wanted: torch.Tensor) -> None:
    assert same_bits(logits(copy.deepcopy(model).to("cpu")), wanted)
    assert same_bits(logits(pickle.loads(pickle.dumps(model))), wanted)
    half = logits(copy.deepcopy(model).to(torch.bfloat16)).float()
    assert torch.cosine_similarity(half.flatten(), wanted.flatten(), 0) > 0.95


def test_quantized_on_the_meta_device(name: str, model: torch.nn.Module, wanted: torch.Tensor) -> None:
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    with accelerate.init_empty_weights():
        empty = ZOO[name]()
    empty = fp4gemm.models.quantize_model(empty, on_unsupported="raise")
    assert all(p.is_meta for p in empty.parameters())
    empty.load_state_dict(model.state_dict(), assign=True)
    empty.tie_weights()
    assert same_bits(logits(empty), wanted)


def test_offloaded_before_and_after(
    original: torch.nn.Module, model: torch.nn.Module, wanted: torch.Tensor
) -> None:
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    before = accelerate.cpu_offload(copy.deepcopy(original), execution_device="cpu")
    fp4gemm.models.quantize_model(before, on_unsupported="raise")
    after = accelerate.cpu_offload(copy.deepcopy(model), execution_device="cpu", offload_buffers=True)
    for offloaded in (before, after):
        swapped = [m for m in offloaded.modules() if isinstance(m, nn.Linear)]
        assert all(m.weight_codes.is_meta for m in swapped)
        assert same_bits(logits(offloaded), wanted)


def test_compile(model: torch.nn.Module, wanted: torch.Tensor) -> None:
    torch._dynamo.reset()
    assert same_bits(torch.compile(lambda: logits(model), backend="eager", fullgraph=True)(), wanted)
