"""fp4gemm._names: one table of what names mean, for checkpoints, live models, training and engines."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fp4gemm
import pytest
import torch
from checkpoints import save
from fp4gemm import _names, training
from fp4gemm.checkpoint import CheckpointError, Options, Plan, convert
from fp4gemm.checkpoint.calibration import Place, place_of
from fp4gemm.checkpoint.formats import Scheme
from fp4gemm.integrations.serving import choice

PACKAGE = Path(__file__).resolve().parents[2] / "python" / "fp4gemm"
GROK = _names.Projections("linear", "linear_v", "linear_1")  # a family that the table does not have


class Layers(torch.nn.Module):
    """Linear layers under dotted names."""

    def __init__(self, names: list[str]) -> None:
        super().__init__()
        for name in names:
            owner: torch.nn.Module = self
            *parts, last = name.split(".")
            for part in parts:
                if not hasattr(owner, part):
                    owner.add_module(part, torch.nn.Module())
                owner = getattr(owner, part)
            owner.add_module(last, torch.nn.Linear(64, 32, bias=False))


@pytest.mark.parametrize("name", ["lm_head", "embed_out", "text.lm_head", "output"])
def test_every_function_knows_the_output_embeddings(name: str) -> None:
    agree(name, "output embedding")


@pytest.mark.parametrize("name", ["mlp.router", "mlp.router.proj", "mlp.router_mlp", "mlp.gating"])
def test_every_function_knows_the_routers(name: str) -> None:
    agree(name, "router")
    assert choice.stored(None, name, [name]) == "it is a router"


@pytest.mark.parametrize("name", ["attention.output", "output.dense", "mlp.down", "routing.x"])
def test_other_layers_are_quantized(name: str) -> None:
    agree(name, "")
    assert choice.stored(None, name, [name]) == "per-token"


def agree(name: str, reason: str) -> None:
    """Fail unless quantize_model, convert_model and the converter all keep the layer for this reason."""
    model = Layers([name, "mlp.up"])
    kept: dict[str, str] = {}
    reports: list[Any] = []
    fp4gemm.models.quantize_model(model, inplace=False, report=reports.append)
    kept["quantize_model"] = next(x.reason for x in reports[0].layers if x.name == name)
    report = training.convert_model(model, "bf16")
    kept["convert_model"] = next(x.reason for x in report.layers if x.name == name)
    kept["convert"] = Plan.of_model(model, Options()).kept.get(f"{name}.weight", "")
    assert {how: text.partition(",")[0] for how, text in kept.items()} == dict.fromkeys(kept, reason)


def test_a_gate_is_a_router_where_only_its_name_is_known() -> None:
    """In a live model the layers beside it tell: there are no experts, so it is the gate of an MLP."""
    model = Layers(["mlp.gate", "mlp.up"])
    assert Plan.of_model(model, Options()).kept["mlp.gate.weight"] == "router"
    assert choice.stored(None, "mlp.gate", ["mlp.gate"]) == "it is a router"
    assert training.convert_model(model, "bf16").names("converted") == ["mlp.gate", "mlp.up"]


@pytest.mark.parametrize("holder", ["experts.0", "shared_experts", "shared_expert", "local_experts.3"])
def test_experts_only_converts_every_kind_of_experts(holder: str) -> None:
    names = [f"mlp.{holder}.{child}.weight" for child in ("gate_proj", "up_proj", "down_proj")]
    shapes = dict.fromkeys((*names, "attn.o_proj.weight"), ((64, 64), torch.bfloat16))
    plan = Plan.of_shapes(shapes, {}, Options(experts_only=True))
    assert set(plan.kept) == {"attn.o_proj.weight"}


# ---- a family is one line


@pytest.fixture
def models() -> Iterator[Any]:
    """The module of small models, which skips without transformers, while fp4gemm is registered."""
    import nvfp4_models

    nvfp4_models.integration.register()
    yield nvfp4_models
    nvfp4_models.integration.unregister()


def renamed(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same experts under the names of GROK."""
    names = dict(zip(_names.EXPERTS[0][:3], GROK[:3], strict=True))

    def new(name: str) -> str:
        owner, _, child = name.removesuffix(".weight").rpartition(".")
        return f"{owner}.{names[child]}.weight" if ".experts." in name else name

    return {new(name): tensor for name, tensor in tensors.items()}


def test_a_family_of_experts_is_one_line(
    models: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The names of its experts, in the table alone, reach the converter, transformers and serving."""
    from fp4gemm.integrations.transformers import _save

    known = models.save_float(models.float_model("qwen3-moe"), tmp_path / "known")
    tensors, config = models.read(known)
    new = save(tmp_path / "new", renamed(tensors), config=config)
    with pytest.raises(CheckpointError, match="no weight would be NVFP4"):
        convert(new, tmp_path / "x", Options(experts_only=True))
    monkeypatch.setattr(_names, "EXPERTS", (*_names.EXPERTS, GROK))
    only = Options(experts_only=True)

    # The converter: experts_only, an amax that gate and up share, and the statistics of stacked experts.
    reports = [convert(folder, tmp_path / f"{folder.name}-nvfp4", only) for folder in (known, new)]
    actions = [[entry.action for entry in report.tensors] for report in reports]
    assert sorted(actions[0]) == sorted(actions[1])
    plan = Plan.of_shapes(
        {name: (tuple(t.shape), t.dtype) for name, t in renamed(tensors).items()}, config, only
    )
    sets = {tuple(m.module.rpartition(".")[2] for m in one.matrices) for one in plan.sets}
    assert sets == {("linear", "linear_v"), ("linear_1",)}
    matrix = next(one for one in plan.sets if len(one.matrices) == 2).matrices[1]
    owner, number, _ = matrix.module.rsplit(".", 2)
    assert place_of(matrix) == (Place(matrix.module), Place(f"{owner}.w13", int(number)))

    # transformers: the experts of both checkpoints fill the same modules with the same weights.
    loaded = [models.load(tmp_path / f"{folder.name}-nvfp4") for folder in (known, new)]
    experts = [[m for m in model.modules() if isinstance(m, fp4gemm.nn.Experts)] for model in loaded]
    assert len(experts[0]) == len(experts[1]) > 0
    assert torch.equal(models.logits(loaded[0]), models.logits(loaded[1]))
    entry = SimpleNamespace(source_patterns=[r"\.experts\.*\.linear\.weight"])
    monkeypatch.setattr(_save, "get_model_conversion_mapping", lambda model: [entry])
    assert _save._expert_names(loaded[1]) == GROK

    # Serving, where the engine does not say the names.
    scheme = Scheme("fp4gemm", "per-token", ("m.experts.*.linear_1",))
    assert choice.stored_experts(scheme, "m.experts") == "the checkpoint excludes it"
    assert choice.stored_experts(scheme, "n.experts") == "per-token"


# What the converters of others keep, which these files repeat.
CONVENTIONS = {"checkpoint/formats/mxfp4.py", "checkpoint/formats/mxfp8.py"}


def test_no_other_table_has_these_names() -> None:
    """Whole strings, since texts may name layers. w1, w2 and w3 are arguments of functions too."""
    names = {name for one in (*_names.EXPERTS, _names.STACKED) for name in one[:3]} - {"w1", "w2", "w3"}
    names |= {*_names.OUTPUTS, *(name for one in _names.fused_sets()[1:] for name in one)} - {"w1", "w3"}
    found = [
        f"{path.relative_to(PACKAGE)}:{node.lineno}: {node.value}"
        for path in sorted(PACKAGE.rglob("*.py"))
        if path.name != "_names.py" and path.relative_to(PACKAGE).as_posix() not in CONVENTIONS
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and node.value in names
    ]
    assert not found, json.dumps(found, indent=1)


@pytest.mark.parametrize(
    ("gate_up", "down", "wanted"),
    [
        ((4, 64, 96), (4, 96, 32), _names.Orientation(4, 96, 32, False)),
        ((4, 96, 64), (4, 32, 96), _names.Orientation(4, 96, 32, True)),
        ((4, 64, 32), (4, 32, 32), _names.Orientation(4, 32, 32, False)),
    ],
)
def test_shapes_say_how_stacked_experts_lie(gate_up: Any, down: Any, wanted: Any) -> None:
    assert _names.orientation(gate_up, down) == wanted
    assert "are not the shapes of gated experts" in str(_names.orientation(gate_up, (3, *down[1:])))
