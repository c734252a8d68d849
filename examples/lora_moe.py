"""LoRA on a mixture of NVFP4 experts, beside LoRA of peft on the bfloat16 model.

    python examples/lora_moe.py                          # a tiny model, two minutes on a CPU
    python examples/lora_moe.py --rate 0.0003            # adapters that change the weights little
    python examples/lora_moe.py --size full              # 0.8 billion parameters, for a GPU

A Qwen3-MoE of random weights first learns the Python sources of the standard library, byte by byte. Adapters
of all attention layers and experts then learn another text, the C++ headers that come with torch, on three
copies of that model: bfloat16 with peft alone, and NVFP4 with activations in bfloat16 (W4A16) and in NVFP4
(W4A4). The tables have the loss on headers that no arm reads, the memory and the time of a step, and the
losses after the adapters were merged into the NVFP4 weights by each method. Nothing is downloaded. It needs
transformers and peft 0.21.
"""

from __future__ import annotations

import argparse
import copy
import sysconfig
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fp4gemm
import peft
import torch
import transformers
from device_option import pick_device
from fp4gemm.integrations.peft import get_peft_model, merge_and_unload

STACKS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
METHODS = ("four-over-six", "search", "gptq", "stochastic")
NUM_HELD_OUT = 8  # batches
MAX_BYTES = 8 << 20  # of each text


@dataclass(frozen=True)
class Size:
    """The model, and how long it trains."""

    hidden: int
    intermediate: int
    layers: int
    experts: int
    top_k: int
    batch: int
    length: int
    steps: int  # of the base model
    adapter_steps: int


SIZES = {
    "smoke": Size(64, 64, 1, 4, 2, 2, 64, 3, 2),
    "tiny": Size(128, 128, 2, 8, 2, 8, 128, 600, 120),
    "full": Size(1024, 512, 8, 64, 4, 16, 512, 300, 100),
}


def text(folder: Path, suffix: str) -> torch.Tensor:
    """The bytes of the files of a folder, in the order of their names, up to MAX_BYTES."""
    parts, total = [], 0
    for path in sorted(folder.rglob(f"*{suffix}")):
        if "site-packages" in path.parts[len(folder.parts) :] or total > MAX_BYTES:
            continue
        parts.append(path.read_bytes())
        total += len(parts[-1])
    if total < 1 << 16:
        raise FileNotFoundError(f"{folder}: has {total} bytes of *{suffix}, must have 64 KiB at least")
    return torch.frombuffer(bytearray(b"\0".join(parts)[:MAX_BYTES]), dtype=torch.uint8).long()


def batches(tokens: torch.Tensor, size: Size, seed: int, device: torch.device) -> Iterator[torch.Tensor]:
    """Random pieces of a text, (batch, length)."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(tokens) - size.length, (size.batch,), generator=generator)
        yield torch.stack([tokens[i : i + size.length] for i in starts.tolist()]).to(device)


def train(
    model: Any, found: Iterator[torch.Tensor], steps: int, rate: float, dtype: torch.dtype | None
) -> float:
    """Train what requires grad, and return the median seconds of a step."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda i: min(1.0, (i + 1) / 10) * (1 - i / steps)
    )
    device = parameters[0].device
    seconds = []
    model.train()
    for _ in range(steps):
        batch = next(found)
        begin = time.perf_counter()
        with torch.autocast(device.type, dtype or torch.bfloat16, enabled=dtype is not None):
            loss = model(input_ids=batch, labels=batch, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - begin)
    model.eval()
    return sorted(seconds)[len(seconds) // 2]


@torch.no_grad()
def loss_of(model: Any, held_out: Sequence[torch.Tensor]) -> float:
    losses = [model(input_ids=batch, labels=batch, use_cache=False).loss.float() for batch in held_out]
    return float(torch.stack(losses).mean())


def bytes_of(model: torch.nn.Module) -> int:
    return sum(t.nbytes for t in {id(t): t for t in (*model.parameters(), *model.buffers())}.values())


def base_model(size: Size, found: Iterator[torch.Tensor], device: torch.device) -> Any:
    """A model in bfloat16 that has learnt a text."""
    config = transformers.Qwen3MoeConfig(
        vocab_size=256,
        hidden_size=size.hidden,
        intermediate_size=size.intermediate,
        moe_intermediate_size=size.intermediate,
        num_hidden_layers=size.layers,
        num_attention_heads=size.hidden // 32,
        num_key_value_heads=max(size.hidden // 64, 1),
        head_dim=32,
        num_experts=size.experts,
        num_experts_per_tok=size.top_k,
        norm_topk_prob=True,
    )
    torch.manual_seed(0)
    model = transformers.Qwen3MoeForCausalLM(config).to(device)
    train(
        model,
        found,
        size.steps,
        3e-3 if size.hidden < 512 else 1e-3,
        torch.bfloat16 if device.type == "cuda" else None,
    )
    return model.bfloat16().requires_grad_(False)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--device", default="auto", help="cpu, cuda, or auto: cuda if fp4gemm runs there")
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--rate", type=float, default=5e-3, help="the learning rate of the adapters")
    options = parser.parse_args(arguments)
    size, device = SIZES[options.size], pick_device(options.device)
    python = text(Path(sysconfig.get_path("stdlib")), ".py")
    headers = text(Path(torch.__file__).parent / "include" / "ATen", ".h")
    end = len(headers) * 7 // 8
    found = batches(headers[end:], size, 2, device)
    held_out = [next(found) for _ in range(NUM_HELD_OUT)]
    base = base_model(size, batches(python, size, 0, device), device)
    number = sum(p.numel() for p in base.parameters())
    print(f"Qwen3-MoE of {number / 1e6:.1f} million parameters on {device}, rank {options.rank}")
    print(f"loss on C++ headers before fine-tuning: {loss_of(base, held_out):.3f}\n")
    calibration = batches(headers[:end], size, 3, device)
    statistics = fp4gemm.calibrate(base, [next(calibration) for _ in range(4)], second_moment=True)

    print(f"{'':16} {'before':>8} {'after':>8} {'weights':>10} {'peak':>10} {'step':>9}")
    adapted: dict[str, Any] = {}
    for name, activations in (("bf16, peft", None), ("W4A16", "a16"), ("W4A4", "per-token")):
        model = copy.deepcopy(base)
        if activations is not None:
            model = fp4gemm.models.quantize_model(model, activations=activations)
        config = peft.LoraConfig(
            r=options.rank,
            lora_alpha=2 * options.rank,
            target_modules=ATTENTION,
            target_parameters=STACKS,
            task_type="CAUSAL_LM",
        )
        before, weights = loss_of(model, held_out), bytes_of(model)
        torch.manual_seed(0)
        model = peft.get_peft_model(model, config) if activations is None else get_peft_model(model, config)
        if device.type == "cuda":
            torch.cuda.empty_cache()
            others = torch.cuda.memory_allocated(device) - bytes_of(model)
            torch.cuda.reset_peak_memory_stats(device)
        seconds = train(
            model, batches(headers[:end], size, 1, device), size.adapter_steps, options.rate, None
        )
        peak = "-"
        if device.type == "cuda":
            peak = f"{(torch.cuda.max_memory_allocated(device) - others) / 2**20:.0f} MiB"
        after = loss_of(model, held_out)
        shown = f"{weights / 2**20:.1f} MiB"
        print(f"{name:16} {before:8.3f} {after:8.3f} {shown:>10} {peak:>10} {seconds * 1e3:6.1f} ms")
        if activations is not None:
            adapted[name] = model

    print(f"\n{'merged by':16} {''.join(f'{name:>10}' for name in adapted)}")
    for method in METHODS:
        losses = []
        for model in adapted.values():
            known = {"calibration": statistics} if method in ("search", "gptq") else {}
            merged = merge_and_unload(copy.deepcopy(model), method=method, **known)
            losses.append(loss_of(merged, held_out))
        print(f"{method:16} {''.join(f'{loss:10.3f}' for loss in losses)}")


if __name__ == "__main__":
    main()
