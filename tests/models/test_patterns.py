"""fp4gemm.patterns: one language, which every function and command that selects layers by name accepts."""

from __future__ import annotations

import copy
import json
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fp4gemm
import pytest
import torch
from fp4gemm import patterns, training
from fp4gemm.checkpoint import Options, Plan
from fp4gemm.commands import main
from fp4gemm.integrations.serving.options import Options as ServingOptions

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "models.md"


def rows() -> list[tuple[str, list[str], list[str]]]:
    """Pattern, names that it matches and names that it does not match, of the table in docs/models.md."""
    section = DOCUMENT.read_text(encoding="utf-8").split("## Patterns of names", 1)[1].split("\n## ", 1)[0]
    cells = [line.split("|")[1:-1] for line in section.splitlines() if line.startswith("| `")]
    names = [[re.findall(r"`([^`]+)`", cell) for cell in row] for row in cells]
    return [(pattern, some, others) for (pattern,), some, others in names]


@pytest.mark.parametrize(("pattern", "some", "others"), rows(), ids=[row[0] for row in rows()])
def test_the_table_of_the_documentation(pattern: str, some: list[str], others: list[str]) -> None:
    assert some
    assert all(patterns.matches(pattern, name) for name in some)
    assert not any(patterns.matches(pattern, name) for name in others)


@pytest.mark.parametrize(
    ("pattern", "name", "is_matched"),
    [
        ("a.b", "a.b", True),
        ("a.b", "x.a.b.y", True),
        ("a.b", "a.x.b", False),
        ("a", "ab", False),
        ("A", "a", False),
        ("*", "", True),
        ("*.a", "a", False),
        ("*.a", "x.a.y", True),
        ("[!a]b", "ab", False),
        ("re:b$", "a.b", True),
        ("re:b$", "b.a", False),
        (re.compile("b$"), "ab", True),
        (lambda name, module: module is None, "a", True),
    ],
)
def test_matches(pattern: Any, name: str, is_matched: bool) -> None:
    assert patterns.matches(pattern, name) is is_matched


# ---- every function and command


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, tie_word_embeddings=False,
    )  # fmt: skip
    made: torch.nn.Module = transformers.LlamaForCausalLM(config).eval()
    return made


@pytest.fixture(scope="module")
def folder(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model")
    model.save_pretrained(made)
    return made


@pytest.fixture
def config() -> Any:
    """The class Fp4GemmConfig while fp4gemm is registered with transformers."""
    from fp4gemm.integrations import transformers

    transformers.register()
    yield transformers.Fp4GemmConfig
    transformers.unregister()


def linear_layers(model: torch.nn.Module) -> set[str]:
    return {name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}


PATTERNS: dict[str, Callable[[str], bool]] = {
    "mlp": lambda name: ".mlp." in name,
    "*.mlp*": lambda name: ".mlp." in name,
    "layers.0": lambda name: ".layers.0." in name,
    "model.layers.1.mlp.up_proj": lambda name: name == "model.layers.1.mlp.up_proj",
    "q_proj": lambda name: name.endswith(".q_proj"),
    "self_attn.[!kv]_proj": lambda name: name.endswith((".q_proj", ".o_proj")),
    "layers.?.mlp.g*": lambda name: name.endswith(".gate_proj"),
    "lm_head": lambda name: name == "lm_head",
    "*": lambda name: True,
    r"re:1.*(up|down)_proj$": lambda name: ".1." in name and name.endswith((".up_proj", ".down_proj")),
}


@pytest.mark.parametrize("pattern", PATTERNS)
def test_every_function_selects_the_same_layers(
    pattern: str, model: Any, folder: Path, config: Any, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    names = linear_layers(model)
    wanted = {name for name in names if PATTERNS[pattern](name)}
    assert wanted
    got: dict[str, set[str]] = {}

    reports: list[Any] = []
    fp4gemm.models.quantize_model(model, include=pattern, inplace=False, report=reports.append)
    got["quantize_model include"] = set(reports[0].names("quantized"))
    fp4gemm.models.quantize_model(model, exclude=pattern, inplace=False, report=reports.append)
    got["quantize_model exclude"] = {
        layer.name for layer in reports[1].layers if layer.reason == "matched by exclude"
    }
    got["calibrate"] = set(fp4gemm.calibrate(model, [torch.arange(8)[None]], include=pattern))

    loaded = AutoModelForCausalLM.from_pretrained(folder, quantization_config=config(include=pattern))
    got["Fp4GemmConfig"] = {n for n, m in loaded.named_modules() if isinstance(m, fp4gemm.nn.Linear)}

    report = training.convert_model(copy.deepcopy(model), "bf16", filter=pattern)
    got["convert_model"] = set(report.names("converted"))

    plan = Plan.of_model(model, Options(include=pattern, fuse=()))
    got["Options include"] = {matrix.module for one in plan.sets for matrix in one.matrices}
    options = Options(include="*", exclude=pattern, fuse=())
    if pattern != "*":
        plan = Plan.of_model(model, options)
        left = {matrix.module for one in plan.sets for matrix in one.matrices}
        got["Options exclude"] = names - left

    command = ["convert", str(folder), str(tmp_path / "new"), "--include", pattern, "--fuse", "none"]
    assert main([*command, "--dry-run", "--report", str(tmp_path / "report.json")]) == 0
    entries = json.loads((tmp_path / "report.json").read_text())["tensors"]
    got["convert"] = {
        entry["name"].removesuffix(".weight") for entry in entries if entry["action"] == "quantized"
    }

    serving = ServingOptions(ignore=pattern)
    got["serving"] = {name for name in names if serving.ignores(name)}

    assert got == dict.fromkeys(got, wanted)


@pytest.fixture
def layers() -> torch.nn.ModuleDict:
    """fc, fc2 and twelve of a list: names that begin in the same way."""

    def linear() -> torch.nn.Linear:
        return torch.nn.Linear(32, 32)

    many = torch.nn.ModuleList(linear() for _ in range(12))
    return torch.nn.ModuleDict({"fc": linear(), "fc2": linear(), "layers": many})


BAD = {
    "re:(": "missing ), unterminated subpattern",
    "(": "missing ), unterminated subpattern",
    "re:": "must be a name, with wildcards or without, or 're:' and a regular expression",
}


@pytest.mark.parametrize("pattern", BAD)
def test_a_pattern_that_is_none_names_the_argument(pattern: str, layers: Any, config: Any) -> None:
    calls: dict[str, Callable[[], object]] = {
        "include": lambda: fp4gemm.models.quantize_model(layers, include=[pattern]),
        "exclude": lambda: fp4gemm.calibrate(layers, [torch.ones(1, 32)], exclude=pattern),
        "filter": lambda: training.convert_model(layers, "bf16", filter=pattern),
        "include ": lambda: config(include=pattern),
        "exclude ": lambda: Options(exclude=[pattern]),
        "ignore": lambda: ServingOptions(ignore=[pattern]),
    }
    for name, call in calls.items():
        text = BAD[pattern]
        if pattern == "(" and name in ("exclude ", "ignore"):  # where a text never was an expression
            text = "must be a name, with wildcards or without, or 're:' and a regular expression: 're:('"
        begin = f"^{name.strip()}: got {re.escape(repr(pattern))}, must be "
        with pytest.raises(ValueError, match=begin) as error:
            call()
        assert text in str(error.value)


@pytest.mark.parametrize("value", [3, [3], [["a"]]])
def test_a_value_that_is_no_pattern_names_the_argument(value: Any, layers: Any) -> None:
    with pytest.raises(ValueError, match=r"^ignore: got '', must be a name, with wildcards or without"):
        ServingOptions(ignore="")
    for name, call in {
        "filter": lambda: training.convert_model(layers, "bf16", filter=value),
        "include": lambda: Options(include=value),
        "ignore": lambda: ServingOptions(ignore=value),
    }.items():
        with pytest.raises(TypeError, match=f"^{name}: got .*, must be "):
            call()


# ---- what patterns meant in older versions


def converted(layers: Any, pattern: Any) -> set[str]:
    return set(training.convert_model(layers, "bf16", filter=pattern).names("converted"))


@pytest.mark.parametrize(
    ("pattern", "number"),
    [("c$", 1), (r"layers\.[0-9]$", 10), ("(fc|9)", 3), ("ayers.1+", 3), ("f", 2), (".", 14), ("", 14)],
)
def test_regular_expressions_are_read_with_a_warning(layers: Any, pattern: str, number: int) -> None:
    text = f"^filter: {re.escape(repr(pattern))} is read as a regular expression; write "
    with pytest.warns(FutureWarning, match=text) as found:
        assert len(converted(layers, pattern)) == number
    assert found[0].filename == __file__
    with pytest.warns(FutureWarning, match="^include: .* is read as a regular expression") as found:
        fp4gemm.models.quantize_model(layers, include=pattern, inplace=False)
    assert found[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(converted(layers, re.compile(pattern))) == number
        assert not pattern or len(converted(layers, f"re:{pattern}")) == number


def test_a_name_that_matches_fewer_layers_than_before_warns(layers: Any) -> None:
    text = (
        r"^filter: 'layers.1' matches whole parts of 1 names, and not 'layers.10'; as the regular expression "
    )
    with pytest.warns(
        FutureWarning, match=text + r"that it was in older versions it matched 3: write 're:layers\.1'"
    ):
        assert converted(layers, "layers.1") == {"layers.1"}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert converted(layers, "layers.1*") == {"layers.1", "layers.10", "layers.11"}
        assert converted(layers, ["layers.0", "fc2"]) == {"layers.0", "fc2"}


def test_a_pattern_of_a_checkpoint_that_matches_more_than_before_warns() -> None:
    names = ("layers.0.fc", "layers.1.fc", "vision.layers.0.fc")
    shapes = {f"{name}.weight": ((64, 64), torch.bfloat16) for name in names}

    def left(pattern: str) -> set[str]:
        plan = Plan.of_shapes(shapes, {}, Options(exclude=pattern))
        return set(names) - {matrix.module for one in plan.sets for matrix in one.matrices}

    text = r"^exclude: 'layers\.0' matches 2 names, at any place, such as 'vision\.layers\.0\.fc'; "
    with pytest.warns(FutureWarning, match=f"{text}in older versions it matched 1, at the start") as found:
        assert left("layers.0") == {"layers.0.fc", "vision.layers.0.fc"}
    assert found[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert left(r"re:^layers\.0\.") == {"layers.0.fc"}
        assert left("vision") == {"vision.layers.0.fc"}
        assert left("*.0") == {"layers.0.fc", "vision.layers.0.fc"}


def test_the_warning_counts_layers_and_names_the_line_of_the_user() -> None:
    model = torch.nn.ModuleDict({"layers": torch.nn.ModuleList([torch.nn.Linear(64, 64)])})
    model["vision"] = torch.nn.ModuleDict({"layers": torch.nn.ModuleList([torch.nn.Linear(64, 64)])})
    text = r"^include: 'layers\.0' matches 2 names, at any place, such as 'vision\.layers\.0'; "
    with pytest.warns(FutureWarning, match=text) as found:
        Plan.of_model(model, Options(include="layers.0"))
    assert found[0].filename == __file__
