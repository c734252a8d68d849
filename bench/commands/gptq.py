"""``python -m bench gptq``: how long GPTQ takes for a decoder of 8B parameters, from some of its layers."""

from __future__ import annotations

import argparse
import json
import time

import torch
from fp4gemm.calibration import gptq

from ..measure import machine

# The linear layers of one decoder layer of Llama 3.1 8B: name, n, k.
SHAPES = (
    ("q_proj", 4096, 4096),
    ("k_proj", 1024, 4096),
    ("v_proj", 1024, 4096),
    ("o_proj", 4096, 4096),
    ("gate_proj", 14336, 4096),
    ("up_proj", 14336, 4096),
    ("down_proj", 4096, 14336),
)
NUM_LAYERS = 32
TOKENS_PER_K = 2  # rows of the random inputs, as multiples of k


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this command."""
    parser.add_argument("--device", default=None, help="cpu or cuda (cuda if there is a GPU)")
    parser.add_argument("--divide", type=int, default=1, help="divide all sizes by this, to try the command")
    parser.add_argument("--json", action="store_true", help="print JSON lines")


def run(args: argparse.Namespace) -> int:
    """Times GPTQ of each weight of one decoder layer, after a small one, and extrapolates to 32 layers."""
    device = machine.device(args.device)
    gen = torch.Generator(device).manual_seed(0)
    _timed(64, 256, device, gen)  # libraries are loaded and kernels compiled
    total = 0.0
    for name, n, k in SHAPES:
        n, k = n // args.divide, k // args.divide
        seconds, gigabytes = _timed(n, k, device, gen)
        total += seconds
        row = {"bench": "gptq", "layer": name, "n": n, "k": k, "seconds": seconds, "peak_gb": gigabytes}
        line = f"{name:<10} {n:>6} x {k:<6} {seconds:8.2f} s {gigabytes:6.1f} GB"
        print(json.dumps(row) if args.json else line, flush=True)
    whole = {"bench": "gptq", "layer": "model", "seconds": total * NUM_LAYERS, "extrapolated_from": total}
    if args.json:
        print(json.dumps(whole))
    else:
        minutes = total * NUM_LAYERS / 60
        print(f"one decoder layer {total:.1f} s; {NUM_LAYERS} of them, extrapolated, {minutes:.1f} min")
    return 0


def _timed(n: int, k: int, device: torch.device, gen: torch.Generator) -> tuple[float, float]:
    """Seconds of GPTQ of a random weight (n, k), and GB of memory at most on a GPU (0 on a CPU)."""
    moment = torch.zeros(k, k, device=device)
    for _ in range(TOKENS_PER_K):
        x = torch.randn(k, k, device=device, generator=gen)
        moment += x.T @ x / (TOKENS_PER_K * k)
        del x
    w = torch.randn(n, k, device=device, generator=gen).to(torch.bfloat16)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
    begin = time.perf_counter()
    gptq(w, moment)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    seconds = time.perf_counter() - begin
    peak = torch.cuda.max_memory_allocated(device) / 1e9 if device.type == "cuda" else 0.0
    return seconds, peak
