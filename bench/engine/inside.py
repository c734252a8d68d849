"""What runs in the engine's worker, sent there by ``LLM.collective_rpc``: checks, memory, profiles."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .checkpoints import decoded

FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
ROWS = 24  # of the inputs of a check
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
        for name in ("kernel", "nvfp4_backend", "fp8_linear", "fp8_backend", "unquantized_backend"):
            kernel = getattr(method, name, None)
            if kernel is not None:
                count(f"{name}={getattr(kernel, 'value', type(kernel).__name__)}")
    return found


def memory(worker: Any) -> dict[str, float]:
    """GiB of the model's parameters and buffers, and of the largest allocation of its process by torch."""
    model = _model(worker)
    held = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in _tensors(model)}
    made = {"weights_gib": round(sum(held.values()) / 2**30, 3)}
    if torch.cuda.is_available():
        made["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 3)
        made["reserved_gib"] = round(torch.cuda.memory_reserved() / 2**30, 3)
    return made


def _tensors(model: nn.Module) -> list[Tensor]:
    return [t for t in (*model.parameters(), *model.buffers()) if t.device.type != "meta"]


def off_by(worker: Any, folder: str) -> dict[str, float]:
    """How far each layer of the first decoder layer is from the product with the checkpoint's weights.

    The distance is the norm of the difference from the float32 product of unquantized inputs and decoded
    weights, as a fraction of the norm of that product.
    """
    tensors = _tensors_of(Path(folder), "model.layers.0.")
    made = {}
    with torch.inference_mode():
        for name, module in _model(worker).named_modules():
            parent, _, last = name.removesuffix(".routed_experts").rpartition(".")
            if not name.startswith("model.layers.0.") or getattr(module, "quant_method", None) is None:
                continue
            weight = next(iter(module.parameters(recurse=False)), None)
            if weight is None:
                continue
            device = weight.device
            if last in (*FUSED, "o_proj", "down_proj"):
                parts = [_weight(tensors, f"{parent}.{part}", device) for part in FUSED.get(last, (last,))]
                w = torch.cat(parts)
                x = _inputs(w.shape[1], device)
                y = module.quant_method.apply(module, x, None)
                made[name] = _off(y, x.float() @ w.T)
            elif last == "experts" and hasattr(module.quant_method, "product"):  # vLLM's need their runner
                made[name] = _off(*_experts(module, tensors, f"{parent}.experts", device))
    return made


def _experts(
    module: Any, tensors: dict[str, Tensor], owner: str, device: torch.device
) -> tuple[Tensor, Tensor]:
    count = sum(name.startswith(owner) and name.endswith("down_proj.weight") for name in tensors)
    top_k = min(8, count)
    k = tensors[f"{owner}.0.gate_proj.weight"].shape[1] * 2
    x = _inputs(k, device)
    gen = torch.Generator("cpu").manual_seed(1)
    scores, ids = torch.rand(ROWS, count, generator=gen).topk(top_k)
    scores = (scores / scores.sum(1, keepdim=True)).to(device)
    ids = ids.to(device, torch.int32)
    y = module.quant_method.apply(module, x, scores, ids)
    wanted = torch.zeros(ROWS, k, device=device)
    for e in ids.unique().tolist():
        gate, up, down = (
            _weight(tensors, f"{owner}.{e}.{part}_proj", device) for part in ("gate", "up", "down")
        )
        token, slot = (ids == e).nonzero(as_tuple=True)
        h = nn.functional.silu(x[token].float() @ gate.T) * (x[token].float() @ up.T)
        wanted.index_add_(0, token, scores[token, slot, None] * (h @ down.T))
    return y, wanted


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
