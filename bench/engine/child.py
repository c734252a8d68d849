"""``python -m bench.engine.child SPEC``: one arm in a process of its own.

It starts the engine, creates the file ``ready``, waits until the file ``go`` exists, verifies, measures, and
appends a JSON line for each thing that it found to the file ``found``.
"""

from __future__ import annotations

import itertools
import json
import math
import random
import signal
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import host, inside
from .kernels import own_us, steps_of

SECONDS_OF_WAIT = 900.0
NUM_PROFILED = 10  # steps of a profile, from the prompts to the last token


class Steps:
    """Records when the outputs of each step were asked for and returned, and the number of its requests."""

    def __init__(self, llm: Any) -> None:
        self.seen: list[tuple[float, float, int]] = []
        core = llm.llm_engine.engine_core
        original = core.get_output

        def get_output() -> Any:
            asked = time.perf_counter()
            out = original()
            self.seen.append((asked, time.perf_counter(), len(out.outputs)))
            return out

        core.get_output = get_output

    def gaps(self, batch: int) -> list[float]:
        """Seconds between the steps of decode in which every request got a token."""
        times = [when for _, when, count in self.seen if count == batch][2:]
        return [b - a for a, b in itertools.pairwise(times)]

    def calls(self, batch: int) -> list[tuple[float, float]]:
        """When the outputs of these steps were asked for, and when they were returned."""
        return [(asked, when) for asked, when, count in self.seen if count == batch]


class Child:
    """The engine of one arm, as ``spec`` (:func:`bench.engine.run.spec_of`) describes it."""

    def __init__(self, spec: dict[str, Any]) -> None:
        from vllm import LLM

        self.spec = spec
        began = time.time()
        self.llm = LLM(spec["checkpoint"], **spec["engine"])
        self.steps = Steps(self.llm)
        self.start_s = round(time.time() - began, 1)

    def emit(self, **what: Any) -> None:
        """Append a line to what was found."""
        with Path(self.spec["found"]).open("a", encoding="utf-8") as file:
            file.write(json.dumps(what) + "\n")

    def prompts(self, count: int, length: int, seed: str) -> list[dict[str, list[int]]]:
        """Token ids, the same in every arm."""
        drawn = random.Random(f"{count} {length} {seed}")
        words = range(10, self.spec["vocabulary"])
        return [{"prompt_token_ids": drawn.choices(words, k=length)} for _ in range(count)]

    def generated(self, prompts: Sequence[Any], tokens: int, **options: Any) -> list[Any]:
        """vLLM's outputs, greedily chosen."""
        from vllm import SamplingParams

        sampling = SamplingParams(
            max_tokens=tokens, temperature=0.0, ignore_eos=True, detokenize=False, **options
        )
        made: list[Any] = self.llm.generate(prompts, sampling, use_tqdm=False)
        return made

    def run(self) -> None:
        """Verify, then measure. An arm that is wrong is not measured."""
        refused = self.verify()
        if refused is not None:
            self.emit(kind="refused", reason=refused)
            return
        for batch in self.spec["batches"]:
            self.decode(batch)
        for count in self.spec["prompts"]:
            self.prefill(count)
        self.emit(kind="memory", **self.llm.collective_rpc(inside.memory)[0])
        for batch in self.spec["batches"]:
            self.host(batch)
        if self.spec["has_gpu"]:  # last, since a profile slows the host
            for batch in self.spec["batches"]:
                self.profile_decode(batch)
            for count in self.spec["prompts"][:1]:  # more prompts keep the GPU busy without a break
                self.profile_prefill(count)
        self.emit(kind="done")

    def verify(self) -> str | None:
        """Why the arm is wrong, or None: finite logits, and layers near the product with their weights."""
        out = self.generated(self.prompts(8, 64, "verify"), 4, logprobs=5)
        first = [
            {str(i): round(one.logprob, 5) for i, one in each.outputs[0].logprobs[0].items()} for each in out
        ]
        tokens = [list(each.outputs[0].token_ids) for each in out]
        limit = self.spec["off_by"]
        off = self.llm.collective_rpc(inside.off_by, args=(self.spec["checkpoint"],))[0] if limit else {}
        methods = self.llm.collective_rpc(inside.methods)[0]
        self.emit(
            kind="verified", off_by=off, methods=methods, first=first, tokens=tokens, start_s=self.start_s
        )
        if not all(math.isfinite(value) for each in first for value in each.values()):
            return "a log-probability is not finite"
        for name, value in off.items():
            if not value < limit:
                return f"{name} is off by {value:.2g} of its norm, must be less than {limit}"
        if limit and not off:
            return "no layer was found that could be verified"
        return None

    def decode(self, batch: int) -> None:
        """Milliseconds between steps with this many requests, whose prompts have one length."""
        length, new = self.spec["input"], self.spec["output"]
        given = self.prompts(batch, length, "decode")
        self.generated(given, 2)  # fills the prefix cache, so that all requests decode together
        medians, means, counts = [], [], []
        for _ in range(self.spec["repeats"]):
            self.steps.seen.clear()
            self.generated(given, new)
            gaps = self.steps.gaps(batch)
            if gaps:
                medians.append(1e3 * statistics.median(gaps))
                means.append(1e3 * statistics.fmean(gaps))
                counts.append(len(gaps))
        if not medians:
            self.emit(kind="decode", batch=batch, error="in no step had all requests a token")
            return
        self.emit(
            kind="decode",
            batch=batch,
            input=length,
            output=new,
            steps=counts,
            ms=round(min(medians), 4),
            every_ms=[round(ms, 4) for ms in medians],
            mean_ms=round(min(means), 4),
            tokens_per_s=round(1e3 * batch / min(means), 1),
        )

    def prefill(self, count: int) -> None:
        """Seconds until prompts have their first token, and tokens a second; nothing is cached."""
        length, seconds = self.spec["prefill"], []
        for repeat in range(self.spec["repeats"] + 1):
            given = self.prompts(count, length, f"prefill {repeat}")
            began = time.perf_counter()
            self.generated(given, 1)
            seconds.append(time.perf_counter() - began)
        best = min(seconds[1:])
        self.emit(
            kind="prefill",
            prompts=count,
            input=length,
            ms=round(1e3 * best, 3),
            every_ms=[round(1e3 * s, 3) for s in seconds],
            tokens_per_s=round(count * length / best),
        )

    def host(self, batch: int) -> None:
        """How long the host needs for the parts of a step of decode."""
        given = self.prompts(batch, self.spec["input"], "decode")
        self.generated(given, 2)
        error = self.llm.collective_rpc(inside.start_clock)[0]
        if error is not None:
            self.emit(kind="host", batch=batch, error=error)
            return
        self.steps.seen.clear()
        self.generated(given, self.spec["output"])
        spans = self.llm.collective_rpc(inside.stop_clock)[0]
        us = host.parts_us(spans)
        if not us:
            self.emit(kind="host", batch=batch, error="there were too few steps")
            return
        self.emit(kind="host", batch=batch, us=us | host.client_us(self.steps.calls(batch)))

    def profile_decode(self, batch: int) -> None:
        """How long the GPU is busy in a step of decode, and the kernels of one step as they start."""
        given = self.prompts(batch, self.spec["input"], "decode")
        self.generated(given, 2)
        self.llm.collective_rpc(inside.start_profile)
        self.generated(given, NUM_PROFILED)
        steps = steps_of(self.llm.collective_rpc(inside.stop_profile)[0], NUM_PROFILED)
        if not steps:
            self.emit(kind="gpu", step="decode", size=batch, error="the profile has no whole steps")
            return
        busy = [sum(own_us(step)) for step in steps]
        us = round(statistics.median(busy), 1)
        self.emit(kind="gpu", step="decode", size=batch, gpu_us=us, every_gpu_us=[round(t, 1) for t in busy])
        if batch in self.spec["profiled"]:
            nearest = min(range(len(steps)), key=lambda i: abs(busy[i] - us))
            self.emit(kind="profile", batch=batch, kernels=steps[nearest])

    def profile_prefill(self, count: int) -> None:
        """How long the GPU is busy in a prefill."""
        given = self.prompts(count, self.spec["prefill"], "profile")
        self.llm.collective_rpc(inside.start_profile)
        self.generated(given, 1)
        kernels = self.llm.collective_rpc(inside.stop_profile)[0]
        self.emit(kind="gpu", step="prefill", size=count, gpu_us=round(sum(own_us(kernels)), 1))


def main() -> None:
    """Runs the arm of the spec in the file that the argument names, and waits until the parent ends it."""
    spec = json.loads(Path(sys.argv[1]).read_text())
    child = Child(spec)
    Path(spec["ready"]).touch()
    deadline = time.monotonic() + SECONDS_OF_WAIT
    while not Path(spec["go"]).exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{spec['go']} did not appear in {SECONDS_OF_WAIT:.0f} s")
        time.sleep(0.05)
    child.run()
    sys.stdout.flush()
    signal.pause()


if __name__ == "__main__":
    main()
