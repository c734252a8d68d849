"""The calibration of a conversion: what the options name, and the statistics of each matrix.

Statistics are those of the options, in memory or in a file, or those of a text: transformers loads the float
model of the checkpoint, which reads it.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor

from .. import _checks, _names, recipe
from ..calibration.statistics import PARTS, InputStatistics, Statistics, StatisticsFile
from ..models.calibration import calibrate
from ..recipe import Data, Method, completed
from .source import CheckpointError, Source, TensorInfo

if TYPE_CHECKING:
    from .plan import FusedSet, Matrix, Plan
    from .runner import Progress

__all__ = [
    "Calibration",
    "Inputs",
    "Text",
    "causal_model",
    "data_of",
    "inputs_of",
    "read_calibration",
    "renaming",
    "statistics_of",
    "tokens_of",
]

NUM_TOKENS = 2**17  # the most tokens of a text that are used by default
LENGTH = 1024  # tokens of a batch, unless the model reads fewer


@dataclass(frozen=True)
class Text:
    """A text whose tokens the float model reads, so that its layers show their inputs.

    Attributes:
        text: of the kind that the model will read.
        num_tokens: how many of its tokens are used at most, the first ones.
        name: its name in reports.
        key: it identifies the text when an interrupted conversion continues.

    Raises:
        TypeError, ValueError: the text is no str or empty, or num_tokens is not positive.
    """

    text: str = field(repr=False)
    num_tokens: int = NUM_TOKENS
    name: str = "a text"

    def __post_init__(self) -> None:
        if not isinstance(self.text, str):
            raise TypeError(f"calibration: got {_checks.describe(self.text)}, must be a text")
        if not self.text.strip():
            raise ValueError(f"calibration: {self.name} is empty, must be a text")
        if isinstance(self.num_tokens, bool) or not isinstance(self.num_tokens, int) or self.num_tokens < 1:
            raise ValueError(f"num_tokens: got {_checks.describe(self.num_tokens)}, must be 1 or more tokens")

    @property
    def key(self) -> dict[str, Any]:
        return {"sha256": hashlib.sha256(self.text.encode()).hexdigest(), "num_tokens": self.num_tokens}


Calibration = Statistics | StatisticsFile | Text


def read_calibration(value: object, num_tokens: int = NUM_TOKENS) -> Calibration | None:
    """The calibration that the options name: a path, a text, or what is one already.

    A str without white space, or a path, must be a file: one of ``Statistics.save``, or a text in UTF-8. Any
    other str is a text itself.

    Raises:
        TypeError, ValueError: naming calibration, its value and what it must be.
    """
    if value is None or isinstance(value, Calibration):
        return value
    if not isinstance(value, str | os.PathLike):
        raise TypeError(f"calibration: got {_checks.describe(value)}, must be statistics, a path or a text")
    if isinstance(value, str) and not _is_file(value):
        if value.split() != [value]:
            return Text(value, num_tokens)
        raise ValueError(
            f"calibration: {value!r} is no file, must be a file of statistics or of text, or a text of "
            "several words"
        )
    path = Path(value)
    try:
        with path.open("rb") as file:
            start = file.read(9)
        if start[7:] == b"\0{":  # the end of the length of a header of safetensors, and the header
            return StatisticsFile(path)
        return Text(path.read_text(encoding="utf-8"), num_tokens, str(path))
    except OSError as error:
        raise ValueError(f"calibration: {path} cannot be read: {error.strerror or error}") from error
    except ImportError as error:
        raise ModuleNotFoundError(str(error)) from error
    except UnicodeDecodeError as error:
        raise ValueError(f"calibration: {path} is neither statistics nor a text in UTF-8: {error}") from error
    except ValueError as error:
        text = str(error)
        raise ValueError(text if text.startswith("calibration:") else f"calibration: {text}") from error


def _is_file(value: str) -> bool:
    try:
        return Path(value).is_file()
    except (OSError, ValueError):  # a text that is too long for a name, or has a null character
        return False


def data_of(calibration: Calibration | None, method: Method | None) -> Data:
    """What a calibration holds. A text gives second moments.

    Raises:
        ValueError: the method is "gptq", and a layer has no second moment.
    """
    if isinstance(calibration, Text):
        return "second moment"
    data = recipe.data_of(calibration)
    if method == "gptq" and calibration is not None and data == "mean square":
        raise ValueError(f"calibration: {_without_moment(calibration)}, must have it for the method 'gptq'")
    return data


def _without_moment(calibration: Statistics | StatisticsFile | Text) -> str:
    known = cast(Mapping[str, InputStatistics], calibration)
    for name in known:
        about = calibration.about(name) if isinstance(calibration, StatisticsFile) else known[name]
        if about.second_moment is None:
            return f"{name} has no second moment (calibrate(..., second_moment=True) makes them)"
    return "has no layers"


def described(calibration: Calibration) -> str:
    """The name of a calibration in reports and errors."""
    if isinstance(calibration, Text):
        return calibration.name
    return str(calibration.path) if isinstance(calibration, StatisticsFile) else repr(calibration)


def key_of(calibration: Calibration) -> dict[str, Any]:
    """Identify the calibration of an interrupted conversion: the size and time of a file, or a hash."""
    if isinstance(calibration, Text):
        return calibration.key
    if isinstance(calibration, StatisticsFile):
        status = calibration.path.stat()
        return {"file": [status.st_size, status.st_mtime_ns]}
    return {"sha256": fingerprint(calibration)}


def fingerprint(statistics: Statistics) -> str:
    """SHA-256 of the names and numbers of statistics."""
    total = hashlib.sha256()
    for name, layer in statistics.items():
        for part in PARTS:
            value = getattr(layer, part)
            if value is not None:
                total.update(f"{name}.{part} {tuple(value.shape)}".encode())
                total.update(value.detach().cpu().contiguous().numpy())
    return total.hexdigest()


class Place(NamedTuple):
    """The place of the statistics of a matrix: the name of a layer, and which expert of it."""

    name: str
    expert: int | None = None


def place_of(matrix: Matrix) -> tuple[Place, Place | None]:
    """The place of a matrix under its own name, and its place in a stack of experts if it can have one."""
    one = _names.expert_of(matrix.module)
    if one is not None:
        owner, expert, child = one
        return Place(matrix.module), Place(f"{owner}.{_names.product_of(child)}", expert)
    stack = _names.stack_of(matrix.module)
    if stack is not None and matrix.expert is not None:
        owner, child = stack
        return Place(matrix.module), Place(f"{owner}.{_names.product_of(child)}", matrix.expert)
    return Place(matrix.module), None


class Inputs:
    """The statistics of the inputs of matrices.

    Args:
        known: of layers under the names of modules in the checkpoint; of stacked experts ``NAME.w13`` and
            ``NAME.w2``, or of each expert's projections.
        has_moment: whether second moments are needed.
        residual_channels: how many layers have, for which their quantization errors are needed.
    """

    def __init__(
        self, known: Statistics | StatisticsFile, has_moment: bool, residual_channels: int = 0
    ) -> None:
        self._known, self._has_moment, self._residual_channels = known, has_moment, residual_channels
        self._means: dict[str, InputStatistics] = {}
        self._lock = threading.Lock()

    def check(self, sets: Sequence[FusedSet], tensors: Mapping[str, TensorInfo]) -> None:
        """Compare the names and shapes with those of a plan.

        Raises:
            CheckpointError: a matrix has no statistics, or those of another k or number of experts, or none
                of the second moment that is needed; or statistics belong to no module of the checkpoint. The
                text names the module.
        """
        experts: dict[str, int] = {}
        pairs = [(one, matrix) for one in sets if one.layer is None for matrix in one.matrices]
        for one, matrix in pairs:
            place = self._place(matrix)
            about = self._about(place.name)
            if place.expert is not None:
                experts[place.name] = max(experts.get(place.name, 0), place.expert + 1)
            k, shape = matrix.shape[1], tuple(about.mean_square.shape)
            if shape[-1] != k or len(shape) != 1 + (place.expert is not None):
                wanted = f"({k},)" if place.expert is None else f"(experts, {k})"
                raise CheckpointError(
                    f"calibration: mean_square of {place.name} has shape {shape}, must be {wanted} for "
                    f"{matrix.module}"
                )
            if self._has_moment and about.second_moment is None:
                raise CheckpointError(f"calibration: {place.name} has no second moment, must have for 'gptq'")
            if one.residual_channels(self._residual_channels) and about.quantization_error is None:
                raise CheckpointError(
                    f"calibration: {place.name} has no quantization_error, must have for residual_channels "
                    "(calibrate(..., quantization_error=True) makes it)"
                )
        for name, number in experts.items():
            found = self._about(name).mean_square.shape[0]
            if found != number:
                raise CheckpointError(f"calibration: {name} is of {found} experts, must be of {number}")
        modules = _modules(tensors)
        for name in self._known:
            if name not in modules:
                raise CheckpointError(
                    f"calibration: has statistics of {name!r}, which is no module of the checkpoint, such as "
                    f"{sets[0].name}"
                )

    def of(self, matrix: Matrix, device: torch.device) -> tuple[InputStatistics, str]:
        """The statistics of a matrix on a device, and a note if those of other experts were added to them."""
        place = self._place(matrix)
        own, note = self._read(place), ""
        if place.expert is not None and 0 < int(own.num_tokens) < own.k:
            own = completed(own, self._mean(place.name))
            note = f"{int(own.num_tokens)} tokens, fewer than {own.k}: those of all experts added"
        return own.to(device), note

    def _place(self, matrix: Matrix) -> Place:
        alone, stacked = place_of(matrix)
        if alone.name in self._known:
            return alone
        if stacked is not None and stacked.name in self._known:
            return stacked
        also = f" (or {stacked.name})" if stacked is not None else ""
        some = next(iter(self._known), None)
        raise CheckpointError(
            f"calibration: has no statistics of {alone.name}{also}, must have those of every module that is "
            f"quantized; it has {len(self._known)}" + (f", such as {some}" if some is not None else "")
        )

    def _about(self, name: str) -> InputStatistics:
        known = self._known
        return known.about(name) if isinstance(known, StatisticsFile) else known[name]

    def _read(self, place: Place) -> InputStatistics:
        if isinstance(self._known, StatisticsFile):
            return self._known.read(place.name, place.expert, has_moment=self._has_moment)
        own = self._known[place.name]
        moment = own.second_moment if self._has_moment else None
        if place.expert is None:
            return InputStatistics(own.num_tokens, own.mean_square, moment, own.quantization_error)
        e = place.expert
        return InputStatistics(own.num_tokens[e], own.mean_square[e], None if moment is None else moment[e])

    def _mean(self, name: str) -> InputStatistics:
        """The means over the tokens of all experts of a stack, read one by one; the last result is cached."""
        with self._lock:
            if name not in self._means:
                count = self._about(name).num_tokens.shape[0]
                total, square, moment = 0, None, None
                for e in range(count):
                    one = self._read(Place(name, e))
                    tokens = int(one.num_tokens)
                    total += tokens
                    square = _plus(square, one.mean_square, tokens)
                    moment = None if one.second_moment is None else _plus(moment, one.second_moment, tokens)
                if square is None:
                    raise CheckpointError(f"calibration: {name} is of 0 experts, must have one")
                self._means.clear()
                self._means[name] = InputStatistics(
                    torch.tensor(total), square / total, None if moment is None else moment / total
                )
            return self._means[name]


def inputs_of(plan: Plan) -> Inputs | None:
    """The statistics of a plan's calibration, compared with the plan; None for a method that needs none.

    Raises:
        CheckpointError: they do not fit the plan; the text names the module. ValueError: the calibration is a
            text.
    """
    known = plan.options.calibration
    if known is None:
        return None
    if not isinstance(known, Statistics | StatisticsFile):
        raise ValueError("calibration: got a text, must be statistics here, as fp4gemm.calibrate makes them")
    made = Inputs(known, plan.options.method == "gptq", plan.options.residual_channels)
    made.check(plan.sets, plan.tensors)
    return made


def _plus(total: torch.Tensor | None, x: torch.Tensor, weight: int) -> torch.Tensor:
    return x * float(weight) if total is None else total.add_(x, alpha=weight)


def _modules(tensors: Mapping[str, TensorInfo]) -> set[str]:
    """The names that statistics may have: of modules, and of the products of stacked experts."""
    found = {name.removesuffix(".weight") for name in tensors}
    for name in list(found):
        part = _names.expert_of(name) or _names.stack_of(name)
        if part is not None:
            found |= {f"{part[0]}.w13", f"{part[0]}.w2"}
    return found


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
    batches, about = tokens_of(source, text)
    count = sum(batch.numel() for batch in batches)
    model = causal_model(source, torch.float32 if device.type == "cpu" else torch.bfloat16)
    wanted = _names_in(plan, model, source)
    modules = set(wanted.values()) | {name.rpartition(".")[0] for name in wanted.values()}
    options: dict[str, Any] = {
        "second_moment": plan.options.method == "gptq",
        "quantization_error": plan.options.residual_channels > 0,
        "include": lambda name, module: name in modules,
        "progress": progress,
    }
    try:
        made = _calibrated(model, batches, device, options)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"calibration: {error}") from error
    found: dict[str, InputStatistics] = {name: made[own] for name, own in wanted.items() if own in made}
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


def _transformers() -> Any:
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        raise ModuleNotFoundError(
            "transformers is not installed, which calibration by a text needs (pip install transformers); "
            "statistics that fp4gemm.calibrate made need it not"
        ) from error


def tokens_of(source: Source, text: Text) -> tuple[list[Tensor], str]:
    """The tokens of a text as batches (1, tokens), by the tokenizer of a checkpoint, and what they are.

    Raises:
        CheckpointError: the checkpoint has no tokenizer, or the text no token. ModuleNotFoundError:
            transformers is not installed.
    """
    transformers = _transformers()
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
    used = f"the first {count} of the {total} tokens of" if count < total else f"the {total} tokens of"
    return batches, f"{used} {text.name}"


def causal_model(source: Source, dtype: torch.dtype) -> Any:
    """The float model of a checkpoint in eval mode, in CPU memory.

    Raises:
        CheckpointError: transformers cannot load it. ModuleNotFoundError: transformers is not installed.
    """
    try:
        model = _transformers().AutoModelForCausalLM.from_pretrained(
            source.folder, dtype=dtype, local_files_only=True
        )
    except ModuleNotFoundError:
        raise
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


def _names_in(plan: Plan, model: Any, source: Source) -> dict[str, str]:
    """The name in the model of each entry of the statistics, by its name in the checkpoint.

    Raises:
        CheckpointError: the model has no such module.
    """
    rename = renaming(model)
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
            owner = rename(f"{experts}.{_names.STACKED.down}").rpartition(".")[0]
            if stacked is None or owner not in modules:
                raise CheckpointError(
                    f"{source.folder}: {matrix.module} is no module of the model that transformers loads, so "
                    "that a text cannot calibrate it; exclude it, or choose a method without calibration"
                )
            found[stacked.name] = f"{owner}.{product}"
    return found


def renaming(model: Any) -> Callable[[str], str]:
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
