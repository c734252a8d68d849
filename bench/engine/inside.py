"""What runs in the engine's worker, sent there by ``LLM.collective_rpc``: checks, memory, profiles."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .weights import decoded, decoded_mxfp4

FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
ROWS = 24  # of the inputs of a check
# Attributes of vLLM's methods that name their kernels.
KERNELS = ("kernel", "nvfp4_backend", "mxfp4_backend", "fp8_linear", "fp8_backend", "unquantized_backend")
# Calls of which a step of the engine's core consists, in its thread: (attribute of the core, method).
PARTS = {
    "schedule": ("scheduler", "schedule"),
    "execute": ("model_executor", "execute_model"),  # prepares the inputs and launches the model
    "sample": ("model_executor", "sample_tokens"),
    "update": ("scheduler", "update_from_output"),
}
Span = tuple[float, float]  # of time.perf_counter()
_PROFILERS: list[Any] = []
_CLOCKS: list[Clock] = []


def methods(worker: Any) -> dict[str, int]:
    """How many layers have which method and kernel."""
    found: dict[str, int] = {}

    def count(name: str) -> None:
        found[name] = found.get(name, 0) + 1

    for module in _model(worker).modules():
        method = getattr(module, "quant_method", None)
        if method is None or isinstance(method, str):
            continue
        count(f"{type(method).__module__.partition('.')[0]}:{type(method).__name__}")
        for name in KERNELS:
            kernel = getattr(method, name, None)
            if kernel is not None:
                count(f"{name}={getattr(kernel, 'value', type(kernel).__name__)}")
    return found


def memory(worker: Any) -> dict[str, float]:
    """GiB of the model's weights and buffers, and of the largest allocation of its process by torch."""
    model = _model(worker)
    held = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in _tensors(model)}
    made = {"weights_gib": round(sum(held.values()) / 2**30, 3)}
    if torch.cuda.is_available():
        made["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 3)
        made["reserved_gib"] = round(torch.cuda.memory_reserved() / 2**30, 3)
    return made


def _tensors(model: nn.Module) -> list[Tensor]:
    found = [*model.parameters(), *model.buffers()]
    for module in model.modules():
        for of in (module, getattr(module, "quant_method", None)):
            for value in vars(of).values() if hasattr(of, "__dict__") else ():
                found += _in_triton_kernels(value)
    return [t for t in found if t.device.type != "meta"]


def _in_triton_kernels(value: object) -> Iterator[Tensor]:
    """The tensors in an object of the package triton_kernels, which are no parameters of their layer."""
    if type(value).__module__.startswith("triton_kernels."):
        for each in vars(value).values():
            if isinstance(each, Tensor):
                yield each
            else:
                yield from _in_triton_kernels(each)


def off_by(worker: Any, folder: str) -> dict[str, float]:
    """How far each quantized layer of the first decoder layer is from the product with its weights.

    The distance is the norm of the difference from the float32 product of unquantized inputs and decoded
    weights of the checkpoint, as a fraction of the norm of that product.
    """
    from vllm.forward_context import set_forward_context

    tensors = _tensors_of(Path(folder), "model.layers.0.")
    modules = dict(_model(worker).named_modules())
    runner = worker.model_runner
    made = {}
    with torch.inference_mode(), set_forward_context(None, runner.vllm_config, num_tokens=ROWS):
        for name, module in modules.items():
            if not name.startswith("model.layers.0.") or getattr(module, "quant_method", None) is None:
                continue
            parent, _, last = name.rpartition(".")
            parts = FUSED.get(last, (last,))
            if last == "routed_experts":
                made[parent] = _off(*_experts(modules[parent], tensors, parent, runner.device))
            elif f"{parent}.{parts[0]}.weight_scale" in tensors:
                w = torch.cat([_weight(tensors, f"{parent}.{part}", runner.device) for part in parts])
                x = _inputs(w.shape[1], runner.device)
                made[name] = _off(module.quant_method.apply(module, x, None), x.float() @ w.T)
    return made


def _experts(
    mixture: Any, tensors: dict[str, Tensor], owner: str, device: torch.device
) -> tuple[Tensor, Tensor]:
    """(what a mixture of experts returns, what it has to be near)."""
    count, top_k = mixture.moe_config.num_experts, mixture.moe_config.experts_per_token
    k, expert = _expert_of(tensors, owner, device)
    x = _inputs(k, device)
    gen = torch.Generator("cpu").manual_seed(1)
    # Multiples of 1/8 are exact in bfloat16, and no two of a row are equal.
    logits = torch.stack([torch.randperm(count, generator=gen) for _ in range(ROWS)]).to(device) / 8
    padded, _, _ = mixture._maybe_pad_hidden_states(None, x.clone())
    _, y = mixture._apply_quant_method(padded, logits.bfloat16(), None)
    scores, ids = logits.topk(top_k)
    scores = scores.softmax(1)
    wanted = torch.zeros(ROWS, k, device=device)
    for e in ids.unique().tolist():
        token, slot = (ids == e).nonzero(as_tuple=True)
        wanted.index_add_(0, token, scores[token, slot, None] * expert(e, x[token].float()))
    return y[:, :k], wanted


def _expert_of(
    tensors: dict[str, Tensor], owner: str, device: torch.device
) -> tuple[int, Callable[[int, Tensor], Tensor]]:
    """(the columns of a token, a function of the number of an expert and its tokens)."""
    if f"{owner}.gate_up_proj_blocks" in tensors:
        gate_up, down = (
            [tensors[f"{owner}.{name}_{of}"] for of in ("blocks", "scales", "bias")]
            for name in ("gate_up_proj", "down_proj")
        )

        def product(x: Tensor, of: list[Tensor], e: int) -> Tensor:
            blocks, scales, bias = (tensor[e].to(device) for tensor in of)
            return x @ decoded_mxfp4(blocks, scales).T + bias.float()

        def gpt_oss(e: int, x: Tensor) -> Tensor:
            both = product(x, gate_up, e)
            gate, up = both[:, ::2].clamp(max=7), both[:, 1::2].clamp(-7, 7)
            return product((up + 1) * gate * torch.sigmoid(1.702 * gate), down, e)

        return gate_up[0].shape[-2] * 32, gpt_oss

    def silu(e: int, x: Tensor) -> Tensor:
        gate, up, down = (
            _weight(tensors, f"{owner}.{e}.{part}_proj", device) for part in ("gate", "up", "down")
        )
        return (nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T

    return tensors[f"{owner}.0.gate_proj.weight"].shape[1] * 2, silu


def _inputs(k: int, device: torch.device) -> Tensor:
    return torch.randn(ROWS, k, generator=torch.Generator("cpu").manual_seed(0)).bfloat16().to(device)


def _off(y: Tensor, wanted: Tensor) -> float:
    difference = (y.float() - wanted).norm() / wanted.norm()
    return float(difference) if bool(y.isfinite().all()) else float("inf")


def _weight(tensors: dict[str, Tensor], owner: str, device: torch.device) -> Tensor:
    codes, scales, outer = (tensors[f"{owner}.{of}"] for of in ("weight", "weight_scale", "weight_scale_2"))
    return decoded(codes.to(device), scales.to(device), outer.to(device))


def _tensors_of(folder: Path, prefix: str) -> dict[str, Tensor]:
    from safetensors import safe_open

    files = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    found: dict[str, Tensor] = {}
    for file in sorted({file for name, file in files.items() if name.startswith(prefix)}):
        with safe_open(folder / file, "pt") as opened:
            found |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    return found


def _model(worker: Any) -> nn.Module:
    return worker.model_runner.get_model()  # type: ignore[no-any-return]


def start_profile(worker: Any) -> None:
    """Begin to record the kernels of this process."""
    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
    profiler.__enter__()
    _PROFILERS.append(profiler)


def stop_profile(worker: Any) -> list[tuple[str, float, float]]:
    """(name, begin, microseconds) of each kernel and copy since :func:`start_profile`, in their order."""
    profiler = _PROFILERS.pop()
    torch.cuda.synchronize()
    profiler.__exit__(None, None, None)
    kernels = [
        (event.name, float(event.time_range.start), float(event.time_range.elapsed_us()))
        for event in profiler.events()
        if event.device_type == torch._C._autograd.DeviceType.CUDA
    ]
    return sorted(kernels, key=lambda kernel: kernel[1])


class Clock:
    """Records when the calls of PARTS, and the whole "step", begin and end in an engine's core."""

    def __init__(self, core: Any) -> None:
        self.spans: dict[str, list[Span]] = {name: [] for name in (*PARTS, "step")}
        self._before: list[tuple[Any, str, Any]] = []
        for name, (owner, method) in PARTS.items():
            self._time(getattr(core, owner), method, self.spans[name])
        self._time(core, "step_fn", self.spans["step"])

    def _time(self, owner: Any, method: str, spans: list[Span]) -> None:
        call = getattr(owner, method)

        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                spans.append((began, time.perf_counter()))

        self._before.append((owner, method, vars(owner).get(method)))
        setattr(owner, method, timed)

    def stop(self) -> dict[str, list[Span]]:
        """Undo the changes of the core, and return what was recorded."""
        for owner, method, before in self._before:
            if before is None:
                delattr(owner, method)
            else:
                setattr(owner, method, before)
        return self.spans


def start_clock(worker: Any) -> str | None:
    """Begin to record the parts of steps; why that cannot be done, or None.

    The engine's core calls the worker in its own thread, so that it is one of the callers of this function.
    """
    frame = sys._getframe()
    while (caller := frame.f_back) is not None:
        frame = caller
        core = frame.f_locals.get("self")
        if hasattr(core, "step_fn") and all(hasattr(core, owner) for owner, _ in PARTS.values()):
            _CLOCKS.append(Clock(core))
            return None
    return "no caller of the worker is vLLM's EngineCore"


def stop_clock(worker: Any) -> dict[str, list[Span]]:
    """What was recorded since :func:`start_clock`."""
    return _CLOCKS.pop().stop()
