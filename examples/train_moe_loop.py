"""The training loop of train_moe.py: steps, evaluation, checkpoints, and gradients beside those of bf16."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from fp4gemm.training import mark_step, update_expert_bias
from torch import Tensor
from train_moe_arms import BF16, Arm, arm
from train_moe_corpus import Batches, Corpus
from train_moe_model import (
    LanguageModel,
    Size,
    add_outliers,
    check_fp8,
    in_bf16,
    initialize,
    quantized_layers,
    use_fp8,
)

WARMUP, FINAL_RATE = 0.05, 0.1  # parts of the steps, and of the learning rate
WEIGHT_DECAY, CLIP = 0.1, 1.0
EVALUATIONS, HELD_OUT_BATCHES = 8, 16
HELD_OUT_SEED = 1_000_000  # of the held-out windows; the seeds of arms are below
JITTER_SEED = 2_000_000  # plus that of the arm
JITTER = 2.0**-9  # half of the distance of bf16 numbers: as far as rounding to bf16 moves a weight


class MasterAdamW:
    """AdamW on float32 copies of parameters that the model holds in another dtype.

    Args:
        model: whose parameters are float32 now; they may be cast after this.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.params = list(model.parameters())
        self.masters = [p.detach().clone() for p in self.params]
        groups = [
            {"params": [m for m in self.masters if m.dim() > 1], "weight_decay": WEIGHT_DECAY},
            {"params": [m for m in self.masters if m.dim() == 1], "weight_decay": 0.0},
        ]
        self.adam = torch.optim.AdamW(groups, betas=(0.9, 0.95), foreach=True)

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        """One step with the gradients of the parameters, which are dropped after it."""
        for master, parameter in zip(self.masters, self.params, strict=True):
            if parameter.grad is None:
                raise RuntimeError("a parameter has no gradient")
            master.grad = parameter.grad.float()
            parameter.grad = None
        torch.nn.utils.clip_grad_norm_(self.masters, CLIP, foreach=True)
        for group in self.adam.param_groups:
            group["lr"] = learning_rate
        self.adam.step()
        torch._foreach_copy_(self.params, self.masters)
        mark_step()  # each layer casts its weight anew
        for master in self.masters:
            master.grad = None

    @torch.no_grad()
    def jitter(self, seed: int) -> None:
        """Multiply each number by 1 + JITTER u, with a u of its own that is uniform in [-1, 1]."""
        generator = torch.Generator().manual_seed(JITTER_SEED + seed)
        for master in self.masters:
            u = 2 * torch.rand(master.shape, generator=generator) - 1
            master.mul_(1 + JITTER * u.to(master.device))
        torch._foreach_copy_(self.params, self.masters)
        mark_step()

    def state_dict(self) -> dict[str, Any]:
        return {"masters": self.masters, "adam": self.adam.state_dict()}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        torch._foreach_copy_(self.masters, state["masters"])
        self.adam.load_state_dict(state["adam"])


def model_of(size: Size, vocab: int, arm: Arm) -> LanguageModel:
    """The model of an arm without its outliers. ValueError if the arm does not go with the size."""
    model = LanguageModel(size, vocab, arm.recipes(size.layers))
    if "fp8" in arm.model_changes:
        use_fp8(model)
    return model


def check_arms(names: Sequence[str], size: Size, device: torch.device) -> None:
    """Raise ValueError for an arm that does not go with the size or with the device."""
    arms = [arm(name) for name in names]
    with torch.device("meta"):
        for each in arms:
            model_of(size, 1, each)  # the vocabulary, which the corpus has, is not needed for this
    if any("fp8" in each.model_changes for each in arms):
        check_fp8(device)


class Run:
    """One arm with one seed.

    Init and order of the data depend on the seed alone. The state is complete: a run that is saved, loaded
    and continued has the bits of one that was not interrupted.
    """

    def __init__(
        self, size: Size, corpus: Corpus, arm: Arm, seed: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.size, self.arm, self.seed, self.device = size, arm, seed, device
        torch.manual_seed(seed)  # stochastic rounding draws from this generator
        self.model = model_of(size, corpus.vocab, arm)
        initialize(self.model, seed)
        self.model.to(device)
        self.optimizer = MasterAdamW(self.model)
        self.model.to(dtype)
        if "outliers" in arm.model_changes:
            add_outliers(self.model)
        if "jittered" in arm.model_changes:
            self.optimizer.jitter(seed)
        self.batches = Batches(corpus.train, size.length, size.batch, device)
        self.held_out = Batches(corpus.held_out, size.length, size.batch, device)
        self.first_step = self.step_number = 0
        self.losses = torch.zeros(size.steps, device=device)
        self.evaluations: list[tuple[int, float]] = []
        self.seconds = 0.0

    def learning_rate(self) -> float:
        """The rate of the coming step: a linear warm-up, then half a cosine down to a tenth."""
        steps = self.size.steps
        warmup = max(1, round(WARMUP * steps))
        if self.step_number < warmup:
            return self.size.learning_rate * (self.step_number + 1) / warmup
        part = (self.step_number - warmup) / max(1, steps - warmup)
        cosine = 0.5 * (1 + math.cos(math.pi * part))
        return self.size.learning_rate * (FINAL_RATE + (1 - FINAL_RATE) * cosine)

    def step(self) -> None:
        """One step of training; the loss goes to ``losses``, on the device."""
        ids, targets = self.batches.at(self.seed, self.step_number)
        loss = self.model(ids, targets)
        loss.backward()
        self.losses[self.step_number] = loss.detach()
        self.optimizer.step(self.learning_rate())
        if self.size.experts:
            update_expert_bias(self.model)
        self.step_number += 1

    @torch.no_grad()
    def evaluate(self) -> float:
        """The loss on held-out windows, the same ones for every arm, seed and step, by the arm's recipe."""
        self.model.eval()
        total = torch.zeros((), device=self.device)
        for i in range(HELD_OUT_BATCHES):
            total += self.model(*self.held_out.at(HELD_OUT_SEED, i))
        self.model.train()
        return float(total) / HELD_OUT_BATCHES

    def train(
        self, is_time_up: Callable[[], bool], on_step: Callable[[Run], None], last: int | None = None
    ) -> bool:
        """Go on to step ``last``, or to that of the size; False if the time was up before it."""
        every = math.ceil(self.size.steps / EVALUATIONS)
        began = time.monotonic() - self.seconds
        while self.step_number < (self.size.steps if last is None else last):
            if is_time_up():
                return False
            self.step()
            if self.step_number % every == 0 or self.step_number == self.size.steps:
                self.evaluations.append((self.step_number, self.evaluate()))
            self.seconds = time.monotonic() - began
            on_step(self)
        return True

    def gradients(self) -> dict[str, Tensor]:
        """The gradients of the quantized layers' weights for the batch of the coming step, float32."""
        self.model.zero_grad()
        self.model.eval()  # does not count tokens for the expert bias
        self.model(*self.batches.at(self.seed, self.step_number)).backward()
        self.model.train()
        found = {name: layer.weight.grad.float() for name, layer in quantized_layers(self.model)}
        self.model.zero_grad()
        return found

    def cosines(self) -> dict[str, list[float]]:
        """By part of a block, for each block: the cosine of the gradients to those of bf16, same batch.

        The parts are those of train_moe.py's model: qkv, out, w1, w3, w2. The weights are those of this run.
        """
        own = self.gradients()
        with in_bf16(self.model):
            exact = self.gradients()
        found: dict[str, list[float]] = {}
        for name, gradient in own.items():
            cosine = torch.cosine_similarity(gradient.flatten(), exact[name].flatten(), dim=0)
            found.setdefault(name.rsplit(".", 1)[-1], []).append(round(float(cosine), 5))
        return found

    def result(self) -> dict[str, Any]:
        """What is written about a run that is done."""
        return {
            "arm": self.arm.name,
            "seed": self.seed,
            "steps": self.step_number,
            "loss": self.evaluations[-1][1],
            "losses": [round(loss, 5) for loss in self.losses.tolist()],
            "held_out": self.evaluations,
            "cosines": self.cosines(),
            "seconds": round(self.seconds, 2),
        }

    # ---- checkpoints

    def state_dict(self) -> dict[str, Any]:
        cuda = torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else None
        return {
            "of": [self.arm.name, self.seed, str(self.size)],
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "random": [torch.get_rng_state(), cuda],
            "first_step": self.first_step,
            "step_number": self.step_number,
            "losses": self.losses,
            "evaluations": self.evaluations,
            "seconds": self.seconds,
        }

    def save(self, path: Path) -> None:
        """Write the state; a file that exists is complete."""
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        torch.save(self.state_dict(), partial)
        partial.replace(path)

    def load(self, path: Path) -> None:
        """Go on from a state. ValueError if it is that of another run."""
        self._restore(path, self.arm.name)

    def branch(self, path: Path) -> None:
        """Begin with the state of the run of bf16 with this seed. ValueError if it is that of another run."""
        self._restore(path, BF16)
        self.first_step, self.seconds = self.step_number, 0.0
        if "jittered" in self.arm.model_changes:
            self.optimizer.jitter(self.seed)

    def _restore(self, path: Path, arm: str) -> None:
        state = torch.load(path, map_location="cpu", weights_only=True)
        wanted = [arm, self.seed, str(self.size)]
        if state["of"] != wanted:
            raise ValueError(f"{path}: holds the run {state['of']}, must be {wanted}")
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.first_step, self.step_number = state["first_step"], state["step_number"]
        self.losses.copy_(state["losses"])
        self.evaluations = [(step, loss) for step, loss in state["evaluations"]]
        self.seconds = state["seconds"]
        cpu, cuda = state["random"]
        torch.set_rng_state(cpu)
        if cuda is not None:
            torch.cuda.set_rng_state(cuda, self.device)


def checkpoint_path(folder: Path, arm: str, seed: int) -> Path:
    return folder / f"{arm}-{seed}.pt"


def arm_order(arms: Sequence[str], seeds: Sequence[int]) -> list[tuple[str, int]]:
    """Every arm with the first seed, then with the next: what a time limit leaves can be compared."""
    return [(name, seed) for seed in seeds for name in arms]
