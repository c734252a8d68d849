"""The quantizer that transformers calls while it loads and saves a model with fp4gemm's layers."""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only
from transformers import AutoTokenizer
from transformers.quantizers.base import HfQuantizer

from ... import patterns
from ...calibration.statistics import StatisticsFile
from ...checkpoint.calibration import batches_of, length_of
from ...checkpoint.formats import FORMATS, LAYERS
from ...checkpoint.formats.layers import Stored
from ...models import select
from ...models.automatic import settle
from ...models.fuse import fuse_blocks, fused
from ...models.quantize import quantize_model, quantized, statistics_of
from ...models.report import QuantizeReport
from ...models.select import Candidate
from ...nn._hooks import accelerate_hook, carry_over, materialized
from ...nn._inputs import check_fast_accum
from ...nn._weight import WeightModule
from ...nn.experts import Experts
from ...nn.linear import Linear
from ...recipe import AUTO, INPUTS, LayerActivations, Quantizer
from ._config import Fp4GemmConfig
from ._convert import FillStored, QuantizeFloat, StoredConverter
from ._plan import Plan, about_dequantized, make_plan, make_plan_of_stacks, swap
from ._save import state_dict
from ._stored import headers, packed_modules, refuse, stored_modules

__all__ = ["Fp4GemmQuantizer", "saver"]

BYTES_PER_ELEMENT = {"nvfp4": 9 / 16, "mxfp8": 33 / 32, "mxfp4": 17 / 32}  # of a weight with its block scales
logger = logging.getLogger("fp4gemm.integrations.transformers")


class Fp4GemmQuantizer(HfQuantizer):
    """Loads NVFP4 checkpoints into fp4gemm's layers, quantizes float ones, and writes NVFP4 checkpoints.

    ``pre_quantized`` is true for an NVFP4 checkpoint. Then empty layers are put into the model before the
    weights are read, and :class:`StoredConverter` brings the stored tensors into their buffers. Otherwise a
    float layer stays in the model until its tensors are there, and is replaced then.
    """

    quantization_config: Fp4GemmConfig

    def __init__(self, quantization_config: Fp4GemmConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self.plan: Plan | None = None
        self.unused: Counter[str] = Counter()
        self.problems: list[str] = []
        self.is_saver = False  # whether transformers has not loaded the model, see saver
        self._chosen: dict[str, Candidate] = {}  # float layers to quantize, by their first names
        self._names: dict[str, str] = {}  # maps each name of a module to be quantized to its first name

    def validate_environment(self, *args: Any, device_map: Any = None, **kwargs: Any) -> None:
        """Refuse what would be done in another way than asked for."""
        is_on_disk = isinstance(device_map, dict) and "disk" in device_map.values()
        if is_on_disk and not self.pre_quantized:
            raise ValueError(
                "device_map: has a module on 'disk', must not where a float checkpoint is quantized while it "
                "is loaded; save an NVFP4 checkpoint first (python -m fp4gemm convert) and load that"
            )

    # ---- before the weights are read

    def _process_model_before_weight_loading(
        self, model: Any, checkpoint_files: list[str] | None = None, dtype: Any = None, **kwargs: Any
    ) -> None:
        if self.pre_quantized:
            self._expect_stored(model, checkpoint_files, dtype)
        elif not self._waits:
            self._expect_float(model)

    def _expect_stored(self, model: Any, files: list[str] | None, dtype: torch.dtype | None) -> None:
        if files is None:
            raise ValueError(
                "state_dict: was given, must be absent for an NVFP4 checkpoint, which is read from its files"
            )
        config = self.quantization_config
        scheme = config.scheme
        if scheme is None:
            raise ValueError(
                "quantization_config: config.json has only the options of an Fp4GemmConfig, must describe "
                "the checkpoint; model.save_pretrained writes both, and a float checkpoint must have none"
            )
        unused: list[str] = []
        if config.source is not None:
            config.source.check_model(model.config.to_dict())
            try:
                stacks = config.source.stacks(headers(files))
            except ValueError as error:
                raise ValueError(f"checkpoint: {error}") from error
            wanted = INPUTS[self._loaded(scheme.activations)].weights
            self.plan = make_plan_of_stacks(model, stacks, config.source, wanted == config.source.weights)
        elif config.packed is not None:
            modules = packed_modules(headers(files), config.packed)
            self.plan = make_plan(model, modules, [], scheme.format, scheme.e4m3_max)
        else:
            modules, unused = stored_modules(headers(files), scheme)
            self.plan = make_plan(model, modules, unused, scheme.format, scheme.e4m3_max)
        if config.packed is not None and config.activations is not None:
            raise ValueError(
                f"activations: got {config.activations!r}, must be absent for a checkpoint in "
                f"{config.packed.name}, whose weights are multiplied by such tokens alone"
            )
        self._check_weights()
        if not scheme.groups:
            check_fast_accum(self._fast, self._loaded(scheme.activations))
        if scheme.residual_channels and self._activations == AUTO:
            raise ValueError(
                f"activations: got {AUTO!r} for a checkpoint with {scheme.residual_channels} residual "
                "channels, must be absent or another, since only 'per-token' and 'per-tensor' go with them"
            )
        swap(model, self.plan, self._loaded, self._fast, config.rounded_gate, dtype)
        self._warn_of_residual(self.plan)
        for line in about_dequantized(self.plan):
            logger.warning("%s", line)
        self.unused = Counter(name.rpartition(".")[2] for name in unused)
        # The scales of dynamic activations are 1.0, for other loaders.
        if INPUTS[scheme.activations].is_nvfp4 and INPUTS[scheme.activations].kind != "static":
            del self.unused[FORMATS[scheme.format].input_scale]
        if self.unused:
            logger.warning(
                "%s of the checkpoint are not used: activations are scaled per token, by their own amax, or "
                "stay in 16 bits, and the KV cache stays in the dtype of the model",
                ", ".join(f"{number} {name}" for name, number in sorted(self.unused.items())),
            )

    def _check_weights(self) -> None:
        """Raise ValueError for activations whose weights have a format that the checkpoint lacks."""
        config = self.quantization_config
        if config.packed is not None:
            return
        held = ("nvfp4",) if config.source is None else ("nvfp4", config.source.weights)
        if INPUTS[self._first].weights not in held:
            raise ValueError(
                f"activations: got {self._first!r}, must be a value with weights in "
                f"{' or '.join(each.upper() for each in held)}, which the checkpoint holds"
            )

    def _warn_of_residual(self, plan: Plan) -> None:
        """Warn if the activations that were asked for have no use for residual channels."""
        idle = [
            n for n, stored in plan.linears.items() if stored.residual_channels and n not in plan.residual
        ]
        if idle:
            logger.warning(
                "residual_channels of %s layers of the checkpoint are not used, since activations are %r",
                len(idle),
                self._activations,
            )

    def _loaded(self, stored: Stored) -> LayerActivations:
        """The activations of a layer of which a checkpoint says this."""
        if stored in LAYERS:
            return cast(LayerActivations, LAYERS[stored].activations)
        if self.quantization_config.activations is not None:
            return self._first
        return "per-token" if INPUTS[stored].kind == "static" else cast(LayerActivations, stored)

    def _expect_float(self, model: Any) -> None:
        config = self.quantization_config
        check_fast_accum(self._fast, self._first)
        candidates = select.find(model)
        with torch.device("cpu"):  # activations of experts are evaluated on the CPU
            select.select(
                model,
                candidates,
                patterns.checked("include", config.include),
                patterns.checked("exclude", config.exclude),
                (torch.nn.Linear,),
            )
            select.refuse_unsupported(model, candidates, self._first, raises=False)
        self._chosen = {c.names[0]: c for c in candidates if c.action == "quantized"}
        if config.calibration is not None:
            for c in self._chosen.values():
                statistics_of(c, self._statistics)  # refuses what they lack before a weight is read
        self._names = {name: first for first, c in self._chosen.items() for name in c.names}
        for c in candidates:
            if c.action == "skipped":
                logger.warning("%s stays in float: %s", c.names[0], c.reason)

    @property
    def _waits(self) -> bool:
        """Whether nothing is quantized before the whole float model has read the batches."""
        return isinstance(self.quantization_config.calibration, list)

    @property
    def _statistics(self) -> StatisticsFile:
        return cast(StatisticsFile, self.quantization_config.calibration)

    @property
    def _activations(self) -> Any:
        return self.quantization_config.activations or "per-token"

    @property
    def _options_of_recipe(self) -> dict[str, Any]:
        """The options of quantize_model that its recipe has, or the recipe itself."""
        config = self.quantization_config
        if config.given_recipe is not None:
            return {"recipe": config.given_recipe}
        options = {"weight_scaling": config.weight_scaling, "method": config.method}
        return {"activations": self._activations, **options}

    @property
    def _first(self) -> LayerActivations:
        """The activations with which layers are made; after "auto" they change once the weights are there."""
        activations = self._activations
        return "per-token" if activations == AUTO else cast(LayerActivations, activations)

    @property
    def _fast(self) -> bool:
        """use_fast_accum with which layers are made; "auto" sets it with the activations."""
        return self.quantization_config.use_fast_accum and self._activations != AUTO

    # ---- while they are read

    def update_weight_conversions(self, weight_conversions: list[Any], model: Any = None) -> list[Any]:
        """The converter of stored weights ahead of those of the model, which would match its names too."""
        if self.plan is None:
            return weight_conversions
        return [StoredConverter(self.plan, FillStored(self)), *weight_conversions]

    def fill(self, anchor: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """The buffers of a module; errors are collected, since the loader would not raise them unchanged."""
        try:
            return self.plan.buffers(anchor, tensors)  # type: ignore[union-attr]
        except (KeyError, TypeError, ValueError) as error:
            self.problems.append(str(error.args[0]))
            return {}

    def param_needs_quantization(self, model: Any, param_name: str, **kwargs: Any) -> bool:
        """Whether the parameter belongs to a float layer that is to be quantized."""
        return param_name.rpartition(".")[0] in self._names

    def param_element_size(self, model: Any, param_name: str, param: Tensor) -> float:
        """Bytes, by which device_map="auto" places modules."""
        if param.dim() > 1 and self.param_needs_quantization(model, param_name):
            return BYTES_PER_ELEMENT[INPUTS[self._first].weights]
        return param.element_size()

    def get_quantize_ops(self) -> QuantizeFloat:
        return QuantizeFloat(self)

    def take(self, model: Any, name: str, value: Tensor) -> bool:
        """Put a tensor into its float layer, and quantize that once it is whole; False: it is not for one."""
        owner, _, child = name.rpartition(".")
        first = self._names.get(owner)
        if first is None or first not in self._chosen:
            return False
        module = self._chosen[first].module
        module._parameters[child] = torch.nn.Parameter(value, requires_grad=False)
        if not any(p.is_meta for p in module.parameters(recurse=False)):
            self._quantize(model, first)
        return True

    def _quantize(self, model: Any, first: str) -> None:
        candidate, config = self._chosen.pop(first), self.quantization_config
        known = {} if config.calibration is None else statistics_of(candidate, self._statistics)
        quantizer = Quantizer(config.recipe, known)
        options: dict[str, Any] = {
            "activations": self._first,
            "use_fast_accum": self._fast,
            "method": quantizer,
            "recipe": config.given_recipe,
            "check_finite": "off",
        }
        try:
            with materialized(candidate.module):
                made = quantized(candidate, options)
        except (TypeError, ValueError) as error:
            logger.warning("%s stays in float: %s", first, error)
            return
        for note in dict.fromkeys(quantizer.notes):
            logger.warning("%s: %s", first, note)
        carry_over(candidate.module, made)
        if isinstance(made, WeightModule) and made.bias is not None:
            made.bias._is_hf_initialized = True  # type: ignore[attr-defined]  # transformers keeps it
        for name in candidate.names:
            owner, _, child = name.rpartition(".")
            setattr(model.get_submodule(owner), child, made)

    # ---- after that

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        refuse(f"checkpoint: {len(self.problems)} weights cannot be used", self.problems)
        for note in [] if self.plan is None else self.plan.notes:
            logger.warning("%s", note)
        if self._waits and not self.pre_quantized:
            return self._quantize_all(model)
        for first in list(self._chosen):  # layers whose weights were not in the checkpoint, or tied
            self._quantize(model, first)
        kept = 0
        for name, module in model.named_modules():
            if isinstance(module, WeightModule):
                module._notice()
                if not module._has_weight and module._device.type != "meta":
                    raise ValueError(f"checkpoint: {name} has no weight in it, must have one")
                hook = accelerate_hook(module)
                kept += bool(getattr(hook, "offload", False) and not hook.offload_buffers)
        if kept:
            logger.warning(
                "%s offloaded NVFP4 weights stay on the device where they run, since they are buffers: pass "
                "offload_buffers=True to from_pretrained",
                kept,
            )
        if self._activations == AUTO:
            self._settle(model)
        if self.quantization_config.fuse == "auto":
            fuse_blocks(model)
            self._compare_fused(model)
        return model

    def _settle(self, model: Any) -> None:
        """Give the layers the activations of their devices, and log which."""
        chosen: Counter[str] = Counter()
        for name, module in model.named_modules():
            if isinstance(module, (Linear, Experts)):
                reason = settle(module, self.quantization_config.use_fast_accum)
                if reason:
                    logger.warning("%s: %s", name, reason)
                chosen[module.activations] += 1
        _log_chosen(chosen)

    def _compare_fused(self, model: Any) -> None:
        """Warn if other blocks were fused than in the model that was saved."""
        want = self.quantization_config.fused
        got = fused(model)
        if want and got != want:
            logger.warning(
                "the model that was saved had the fused blocks %s, and the loaded one has %s, so that their "
                "results may differ by roundings: the code of the model or the activations of its layers "
                "differ, or it had hooks when it was quantized",
                want,
                got,
            )

    def _quantize_all(self, model: Any) -> Any:
        """Calibrate the float model with the batches, and quantize it."""
        config = self.quantization_config
        items = cast("list[Any]", config.calibration)
        if isinstance(items[0], str):
            items = self._read(model, items)
        device = model.device
        batches = [tree_map_only(Tensor, lambda x: x.to(device), item) for item in items]

        def report(done: QuantizeReport) -> None:
            for entry in done.swapped:
                if entry.reason and entry.action != "excluded":
                    logger.warning("%s: %s: %s", entry.name, entry.action, entry.reason)
            if config.activations == AUTO:
                _log_chosen(Counter(e.activations for e in done.swapped if e.action == "quantized"))

        return quantize_model(
            model,
            include=cast(Any, config.include),
            exclude=cast(Any, config.exclude),
            **self._options_of_recipe,
            use_fast_accum=config.use_fast_accum,
            calibration=batches,
            fuse=config.fuse,
            report=report,
        )

    def _read(self, model: Any, texts: list[str]) -> list[Tensor]:
        """The tokens of texts, by the tokenizer that lies beside the model."""
        name = model.config._name_or_path
        try:
            tokenizer = AutoTokenizer.from_pretrained(name)
        except Exception as error:  # what transformers raises has no common class
            raise ValueError(
                f"calibration: {name} has no tokenizer, which texts need; pass batches of token ids: {error}"
            ) from error
        return batches_of(tokenizer, texts, length_of(model.config))[0]

    # ---- what transformers asks

    def get_state_dict_and_metadata(self, model: Any) -> tuple[dict[str, Tensor], dict[str, str]]:
        if getattr(model, "_hf_peft_config_loaded", False):
            return model.state_dict(), {}  # transformers writes the adapters alone
        state = state_dict(model, self.quantization_config)
        model.config.quantization_config = self.quantization_config
        return state, {}

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return True  # adapters on top of the frozen weights, as Trainer asks of models with adapters alone

    @property
    def is_compileable(self) -> bool:
        return True


def _log_chosen(chosen: Counter[str]) -> None:
    """Log what "auto" has chosen, with the number of layers."""
    logger.info("%s", "; ".join(f"activations {kind!r} of {n} layers" for kind, n in chosen.items()))


def saver() -> Fp4GemmQuantizer:
    """The quantizer of a model that quantize_model made; the format that it writes holds all such models."""
    made = Fp4GemmQuantizer(Fp4GemmConfig(format="fp4gemm"), pre_quantized=True)
    made.is_saver = True
    return made
