"""fp4gemm.patterns: one language, which every function and command that selects layers by name accepts."""

from __future__ import annotations

import copy
import json
import re
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
    "(": "must be a name, with wildcards or without, or 're:' and a regular expression: 're:('",
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


# ---- regular expressions without a mark


@pytest.mark.parametrize("pattern", ["c$", r"layers\.[0-9]$", "(fc|9)", "ayers.1+"])
def test_a_regular_expression_needs_its_prefix(layers: Any, pattern: str) -> None:
    wanted = re.escape(f"got {pattern!r}, must be ") + ".*" + re.escape(f": {'re:' + pattern!r}")
    with pytest.raises(ValueError, match=f"^filter: {wanted}"):
        training.convert_model(layers, "bf16", filter=pattern)
    with pytest.raises(ValueError, match=f"^include: {wanted}"):
        fp4gemm.models.quantize_model(layers, include=pattern, inplace=False)
    chosen = [
        set(training.convert_model(copy.deepcopy(layers), "bf16", filter=same).names("converted"))
        for same in (re.compile(pattern), f"re:{pattern}")
    ]
    assert chosen[0] == chosen[1] != set()
