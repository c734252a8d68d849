"""The statistics of a text: transformers loads the float model of a checkpoint, which reads the text."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..calibration.statistics import InputStatistics, Statistics
from ..models.calibration import calibrate
from .calibrated import Text
from .errors import CheckpointError
from .inputs import place_of
from .plan import Plan
from .runner import Progress
from .source import Source

__all__ = ["batches_of", "statistics_of"]

LENGTH = 1024  # tokens of a batch, unless the model reads fewer


def statistics_of(
    source: Source, plan: Plan, text: Text, device: torch.device, progress: Progress | None
) -> tuple[Statistics, str]:
    """The statistics of every matrix of a plan, under the names of the checkpoint, and what made them.

    The model is loaded in bfloat16 for a GPU, and in float32 for a CPU, on many of which bfloat16 is several
    times as slow. On a GPU its blocks come to the device one by one, if they call one another directly;
    otherwise it is there as a whole.

    Raises:
        CheckpointError: transformers cannot load the model or its tokenizer, the model lacks a module that is
            quantized, or a layer sees no token or inputs that are not finite. ModuleNotFoundError:
            transformers is not installed.
    """
    try:
        transformers = importlib.import_module("transformers")
    except ImportError as error:
        raise ModuleNotFoundError(
            "transformers is not installed, which calibration by a text needs (pip install transformers); "
            "statistics that fp4gemm.calibrate made need it not"
        ) from error
    batches, count, total = _read(transformers, source, text)
    model = _model(transformers, source, torch.float32 if device.type == "cpu" else torch.bfloat16)
    wanted = _names(plan, model, source)
    modules = set(wanted.values()) | {name.rpartition(".")[0] for name in wanted.values()}
    options: dict[str, Any] = {
        "second_moment": plan.options.method == "gptq",
        "include": lambda name, module: name in modules,
        "progress": progress,
    }
    try:
        made = _calibrated(model, batches, device, options)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"calibration: {error}") from error
    found: dict[str, InputStatistics] = {name: made[own] for name, own in wanted.items() if own in made}
    used = f"the first {count} of the {total} tokens of" if count < total else f"the {total} tokens of"
    about = f"{used} {text.name}"
    largest = max(matrix.shape[1] for one in plan.sets for matrix in one.matrices)
    if count < largest and plan.options.method == "gptq":
        about += f", which are fewer than the {largest} inputs of a layer; a longer text is better"
    return Statistics(found), about


def batches_of(
    tokenizer: Any, texts: list[str], length: int, num_tokens: int | None = None
) -> tuple[list[Tensor], int, int]:
    """The first tokens of texts, or all, as batches (1, length), the last of each text shorter.

    Returns:
        (batches, tokens in them, tokens of all texts).
    """
    batches: list[Tensor] = []
    count = total = 0
    for text in texts:
        ids = torch.tensor(tokenizer(text)["input_ids"], dtype=torch.int64)
        total += ids.numel()
        if num_tokens is not None:
            ids = ids[: max(num_tokens - count, 0)]
        count += ids.numel()
        batches += [part[None] for part in ids.split(length) if part.numel()]
    return batches, count, total


def length_of(config: Any) -> int:
    """Tokens of a batch for a model of this config."""
    inner = getattr(config, "text_config", config)
    most = getattr(inner, "max_position_embeddings", None)
    return min(LENGTH, most) if isinstance(most, int) and most > 0 else LENGTH


def _read(transformers: Any, source: Source, text: Text) -> tuple[list[Tensor], int, int]:
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(source.folder, local_files_only=True)
        config = transformers.AutoConfig.from_pretrained(source.folder, local_files_only=True)
        batches, count, total = batches_of(tokenizer, [text.text], length_of(config), text.num_tokens)
    except Exception as error:  # the exceptions of transformers have no common class
        raise CheckpointError(
            f"{source.folder}: has no tokenizer that transformers can load, which calibration by a text "
            f"needs (statistics that fp4gemm.calibrate made need none): {_first_line(error)}"
        ) from error
    if not batches:
        raise CheckpointError(f"calibration: {text.name} has no tokens, must have some")
    return batches, count, total


def _model(transformers: Any, source: Source, dtype: torch.dtype) -> Any:
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            source.folder, dtype=dtype, local_files_only=True
        )
    except Exception as error:  # these exceptions have no common class either
        raise CheckpointError(
            f"{source.folder}: is no causal language model that transformers can load, which calibration by "
            f"a text needs: {_first_line(error)}"
        ) from error
    model.config.use_cache = False
    return model.eval()


def _calibrated(
    model: torch.nn.Module, batches: list[Tensor], device: torch.device, options: Mapping[str, Any]
) -> Statistics:
    if device.type != "cpu":
        placed = [batch.to(device) for batch in batches]
        try:
            return calibrate(model, placed, sequential=True, device=device, **options)
        except ValueError:  # its blocks cannot be run one after the other
            return calibrate(model.to(device), placed, **options)
    return calibrate(model, batches, **options)


def _names(plan: Plan, model: Any, source: Source) -> dict[str, str]:
    """The name in the model of each entry of the statistics, by its name in the checkpoint.

    Raises:
        CheckpointError: the model has no such module.
    """
    rename = _renaming(model)
    modules = dict(model.named_modules(remove_duplicate=False))
    found: dict[str, str] = {}
    for one in plan.sets:
        for matrix in one.matrices:
            alone, stacked = place_of(matrix)
            own = rename(alone.name)
            if own in modules:
                found[alone.name] = own
                continue
            experts, _, product = (stacked.name if stacked is not None else "").rpartition(".")
            owner = rename(f"{experts}.down_proj").rpartition(".")[0]
            if stacked is None or owner not in modules:
                raise CheckpointError(
                    f"{source.folder}: {matrix.module} is no module of the model that transformers loads, so "
                    "that a text cannot calibrate it; exclude it, or choose a method without calibration"
                )
            found[stacked.name] = f"{owner}.{product}"
    return found


def _renaming(model: Any) -> Callable[[str], str]:
    """A function from the name of a module in the checkpoint to its name in the loaded model."""
    try:
        mapping = importlib.import_module("transformers.conversion_mapping")
        loading = importlib.import_module("transformers.core_model_loading")
    except ImportError:  # before 5, when names were equal but for a prefix
        return lambda name: name
    entries = mapping.get_model_conversion_mapping(model)
    renamings = [entry for entry in entries if isinstance(entry, loading.WeightRenaming)]
    state, prefix = model.state_dict(), model.base_model_prefix

    def rename(name: str) -> str:
        weight: str = loading.rename_source_key(f"{name}.weight", renamings, [], prefix, state)[0]
        return weight.removesuffix(".weight")

    return rename


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0] if text else ''}"
