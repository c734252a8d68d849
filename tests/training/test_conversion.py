"""convert_model and set_recipe: which layers change, what stays the same object, and the report."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
from fp4gemm import training
from fp4gemm.training import convert_model, set_recipe


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(64, 96)
        self.down = torch.nn.Linear(96, 64, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.silu(self.up(x)))


class Model(torch.nn.Module):
    """An embedding, blocks, a layer of odd sizes, and a head that shares the weight of the embedding."""

    def __init__(self, num_blocks: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = torch.nn.Embedding(40, 64)
        self.blocks = torch.nn.ModuleList(Block() for _ in range(num_blocks))
        self.odd = torch.nn.Linear(64, 33)
        self.lm_head = torch.nn.Linear(64, 40, bias=False)
        self.lm_head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.lm_head(x + self.odd(x)[..., :1])


IDS = torch.arange(32).view(2, 16)


def loss(model: torch.nn.Module) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(model(IDS).flatten(0, 1), IDS.roll(-1, 1).flatten())


def actions(report: training.ConversionReport) -> dict[str, str]:
    return {layer.name: layer.action for layer in report.layers}


def converted(model: torch.nn.Module, recipe: Any, **options: Any) -> training.ConversionReport:
    with pytest.warns(UserWarning, match=r"skipped 'odd' \(out_features is 33, must be a multiple of 32\)"):
        return convert_model(model, recipe, **options)


def test_everything_but_the_numbers_stays_the_same() -> None:
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    modules, parameters = list(model.modules()), dict(model.named_parameters())
    state = copy.deepcopy(model.state_dict())
    seen: list[torch.nn.Module] = []
    model.blocks[0].up.register_forward_hook(lambda module, *_: seen.append(module))
    report = converted(model, "te_per_token")
    assert [id(m) for m in model.modules()] == [id(m) for m in modules]
    assert all(parameters[name] is p for name, p in model.named_parameters())
    assert list(model.state_dict()) == list(state)
    assert report.names("converted") == [f"blocks.{i}.{n}" for i in range(2) for n in ("up", "down")]
    assert isinstance(model.blocks[0].up, training.Linear)
    assert "te_per_token" in repr(model.blocks[0].up)
    before = loss(model)
    assert seen == [model.blocks[0].up]
    before.backward()
    optimizer.step()
    assert loss(model) < before
    assert not torch.equal(model.blocks[0].up.weight, state["blocks.0.up.weight"])


def test_a_layer_has_the_bits_of_one_that_was_made_so() -> None:
    model = Model()
    converted(model, "te_per_token")
    made = training.Linear(64, 96, recipe="te_per_token")
    made.load_state_dict(model.blocks[1].up.state_dict())
    x = torch.randn(32, 64)
    assert torch.equal(model.blocks[1].up(x), made(x))
    assert not torch.equal(model.blocks[1].up(x), torch.nn.functional.linear(x, made.weight, made.bias))


def test_state_dicts_interchange_with_the_float_model() -> None:
    model, plain = Model(), Model()
    converted(model, "nvidia")
    loss(model).backward()
    plain.load_state_dict(model.state_dict())
    model.load_state_dict(plain.state_dict())
    set_recipe(model, "bf16")
    assert torch.equal(model(IDS), plain(IDS))


def test_the_report_accounts_for_everything() -> None:
    model = Model()
    report = converted(model, "nvidia")
    assert actions(report) == {
        **{f"blocks.{i}.{n}": "converted" for i in range(2) for n in ("up", "down")},
        "odd": "skipped",
        "lm_head": "excluded",
    }
    by_name = {layer.name: layer for layer in report.layers}
    assert by_name["lm_head"].reason == "output embedding, left unless filter matches it"
    assert by_name["blocks.0.up"].recipe == training.PRESETS["nvidia"]
    assert by_name["blocks.0.up"].shape == (96, 64)
    named = {layer.name for layer in report.layers} | {weight.name for weight in report.weights}
    assert {"lm_head", "odd"} <= named
    assert report.weights == ()  # the weight of the embedding is that of lm_head
    text = str(report)
    assert re.search(r"blocks\.0-1\.up .*96 x 64 .*converted .*nvidia", text)
    assert "6 linear layers (4 converted, 1 excluded, 1 skipped)" in text
    numel = 2 * (96 * 64 + 96 + 64 * 96)
    total = sum(p.numel() for p in model.parameters())
    assert f"{100 * numel / total:.1f} % of the parameters' bytes" in text


def test_a_function_of_the_name() -> None:
    model = Model()
    recipes = {"up": "te_per_token", "down": training.PRESETS["nvidia"]}
    report = convert_model(model, lambda name: recipes.get(name.rpartition(".")[2]))
    assert model.blocks[0].up.recipe == training.PRESETS["te_per_token"]
    assert model.blocks[0].down.recipe == training.PRESETS["nvidia"]
    assert actions(report)["odd"] == "excluded"
    assert set_recipe(model, lambda name: "bf16" if "0" in name else None) == ["blocks.0.up", "blocks.0.down"]
    assert model.blocks[0].up.recipe.is_plain
    assert not model.blocks[1].up.recipe.is_plain


def test_filters() -> None:
    model = Model()
    report = convert_model(
        model, "nvidia", filter=["blocks.1", lambda name, module: module.out_features == 96]
    )
    assert report.names("converted") == ["blocks.0.up", "blocks.1.up", "blocks.1.down"]
    with pytest.warns(UserWarning, match=r"'lm_head' \(out_features is 40, must be a multiple of 32\)"):
        report = convert_model(model, "te_per_token", filter=["lm_head", "blocks.0.up"])
    assert model.blocks[0].up.recipe == training.PRESETS["te_per_token"]
    assert model.blocks[1].up.recipe == training.PRESETS["nvidia"]


@pytest.mark.parametrize(("keep_last", "kept"), [(0.1, [6]), (0.15, [5, 6]), (2 / 7, [5, 6]), (1, range(7))])
def test_the_last_blocks_stay(keep_last: float, kept: Any) -> None:
    model = Model(7)
    report = convert_model(model, "nvidia", filter="blocks", keep_last=keep_last)
    found = {int(layer.name.split(".")[1]) for layer in report.layers if "keep_last" in layer.reason}
    assert found == set(kept)
    assert type(model.blocks[6].up) is torch.nn.Linear


def test_what_does_not_fit_is_skipped_with_its_reason() -> None:
    class Own(torch.nn.Linear):
        pass

    model = torch.nn.ModuleDict(
        {
            "subclass": Own(64, 64),
            "of_double": torch.nn.Linear(64, 64, dtype=torch.float64),
            "in": torch.nn.Linear(48, 64),
            "attention": torch.nn.MultiheadAttention(64, 4),
            "replaced": torch.nn.Linear(64, 64),
            "fits": torch.nn.Linear(64, 64),
        }
    )
    model["replaced"].forward = lambda x: x
    model["alias"] = model["fits"]
    with pytest.warns(
        UserWarning, match=r"convert_model: skipped 'subclass' .* and 1 more; filter leaves them out"
    ):
        report = convert_model(model, "nvidia")
    reasons = {layer.name: layer.reason for layer in report.layers}
    assert reasons == {
        "subclass": "its type is Own, must be torch.nn.Linear itself",
        "of_double": "dtype is torch.float64, must be torch.bfloat16, torch.float16 or torch.float32",
        "in": "in_features is 48, must be a multiple of 32",
        "attention.out_proj": "its type is NonDynamicallyQuantizableLinear, must be torch.nn.Linear itself",
        "replaced": "its forward was replaced on the module, by a hook of accelerate for example",
        "fits": "",
        "alias": "same module as fits",
    }
    assert actions(report)["alias"] == "shared"


def test_a_model_that_is_a_layer() -> None:
    model = torch.nn.Linear(64, 32)
    assert convert_model(model, "nvidia").names("converted") == [""]
    assert isinstance(model, training.Linear)


def test_set_recipe_switches_in_the_middle_of_a_run() -> None:
    torch.manual_seed(0)
    layer = torch.nn.Linear(64, 64)
    convert_model(layer, "te_per_token")
    training.attach(torch.optim.SGD(layer.parameters(), 0.1))
    x = torch.randn(32, 64)
    first, again = layer(x), layer(x)
    set_recipe(layer, "nvidia")
    second = layer(x)
    set_recipe(layer, "te_per_token")
    assert torch.equal(first, again)
    assert not torch.equal(first, second)
    assert torch.equal(first, layer(x))
    layer.cache = None
    set_recipe(layer, "nvidia")
    assert layer.cache is None


BAD = {
    "model": (lambda: convert_model(3, "nvidia"), TypeError, "model: got 3 (int), must be a torch.nn.Module"),
    "no layer": (
        lambda: convert_model(torch.nn.ReLU(), "nvidia"),
        ValueError,
        "model: has no torch.nn.Linear and no experts of transformers, must have one",
    ),
    "recipe": (
        lambda: convert_model(Model(), 3),
        TypeError,
        "recipe: got 3 (int), must be an fp4gemm.training.Recipe, a name of PRESETS or a function",
    ),
    "name of a recipe": (lambda: convert_model(Model(), "fp4"), ValueError, "recipe: got 'fp4', must be "),
    "result of a function": (
        lambda: convert_model(Model(), lambda name: 3),
        TypeError,
        "recipe('blocks.0.up'): returned 3 (int), must be an fp4gemm.training.Recipe, a name of PRESETS",
    ),
    "filter": (lambda: convert_model(Model(), "nvidia", filter=3), TypeError, "filter: got 3"),
    "filter without a match": (
        lambda: convert_model(Model(), "nvidia", filter="attn"),
        ValueError,
        "filter: 'attn' matches none of the 6 layers, such as 'blocks.0.up'",
    ),
    "keep_last": (
        lambda: convert_model(Model(), "nvidia", keep_last="2"),
        TypeError,
        "keep_last: got '2' (str)",
    ),
    "range of keep_last": (
        lambda: convert_model(Model(), "nvidia", keep_last=15),
        ValueError,
        "keep_last: got 15, must be from 0 to 1",
    ),
    "keep_last without blocks": (
        lambda: convert_model(torch.nn.Linear(64, 64), "nvidia", keep_last=0.1),
        ValueError,
        "keep_last: got 0.1, must be 0 for a model without a torch.nn.ModuleList of blocks",
    ),
    "set_recipe: model": (lambda: set_recipe(3, "nvidia"), TypeError, "model: got 3 (int)"),
    "set_recipe: no layer": (
        lambda: set_recipe(Model(), "nvidia"),
        ValueError,
        "model: has no fp4gemm.training layer, must have one; use convert_model first",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input(case: str) -> None:
    call, error, text = BAD[case]
    with pytest.raises(error, match=re.escape(text)):
        call()


def test_nothing_changes_if_a_recipe_is_refused() -> None:
    odd = training.Linear(64, 48, recipe="bf16")
    layers = torch.nn.Sequential(training.Linear(64, 64, recipe="bf16"), odd)
    with pytest.raises(ValueError, match="layer '1': out_features: n is 48, must be a positive multiple of"):
        set_recipe(layers, "nvidia")
    assert layers[0].recipe is training.PRESETS["bf16"]
    model = Model()
    with pytest.raises(ValueError, match="recipe: got 'none'"):
        convert_model(model, lambda name: "nvidia" if name == "blocks.0.up" else "none")
    assert type(model.blocks[0].up) is torch.nn.Linear
