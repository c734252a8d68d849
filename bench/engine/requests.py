"""``vllm serve`` over HTTP, and a client with arrivals: throughput, times to the first and later tokens."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import random
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from .run import Started, wait_until_ready

SECONDS_OF_A_REQUEST = 120.0


@dataclasses.dataclass
class Answer:
    """What became of a request.

    Args:
        status: of HTTP; 0: the connection ended before the answer.
        text: of the answer, or of the error.
        times: seconds since the request was sent, of each piece of text that came.
    """

    status: int
    text: str
    times: list[float]
    tokens: int


@dataclasses.dataclass(frozen=True)
class Load:
    """Requests that arrive as a Poisson process; a rate of 0: all at once.

    The lengths of the prompts are uniform from half of ``input`` to one and a half of it.
    """

    count: int
    rate: float
    input: int
    output: int
    vocabulary: int

    def requests(self) -> list[tuple[float, dict[str, Any]]]:
        """(seconds after the first, the body) of each request; equal loads are equal."""
        drawn = random.Random(repr(self))
        at, made = 0.0, []
        for _ in range(self.count):
            length = drawn.randint(self.input // 2, self.input * 3 // 2)
            prompt = drawn.choices(range(10, self.vocabulary), k=length)
            made.append((at, body(prompt, self.output)))
            at += drawn.expovariate(self.rate) if self.rate else 0.0
        return made


def body(prompt: Sequence[int], tokens: int, **more: Any) -> dict[str, Any]:
    """A streaming completion of exactly this many tokens, greedily chosen."""
    return {
        "model": "model",
        "prompt": list(prompt),
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        **more,
    }


class Server(Started):
    """A process of ``vllm serve`` on a free port of this machine."""

    def __init__(
        self,
        checkpoint: Path,
        folder: Path,
        environment: Mapping[str, str],
        arguments: Mapping[str, Any],
    ) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        folder.mkdir(parents=True, exist_ok=True)
        # The module of `vllm serve`, whose command line needs the metadata of a package "vllm".
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", f"--model={checkpoint}"]
        command += ["--host=127.0.0.1", f"--port={port}", "--served-model-name=model"]
        for name, value in arguments.items():
            option = f"--{name.replace('_', '-')}"
            if value is True:
                command.append(option)
            else:
                command += [option, json.dumps(value) if isinstance(value, dict) else str(value)]
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(
                command,
                env={**environment, "VLLM_SERVER_DEV_MODE": "1"},  # collective_rpc, for updates of weights
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        super().__init__(folder.name, process, folder)

    def is_ready(self) -> bool:
        """Whether the server answers."""
        import urllib.error
        import urllib.request

        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=2) as answer:
                return bool(answer.status == 200)
        except (OSError, urllib.error.URLError):
            return False


@contextlib.contextmanager
def serving(server: Server, seconds: float) -> Iterator[Server]:
    """A server that answers; it is ended at the end.

    Raises:
        RuntimeError: it does not answer in this time; the text has the end of its log.
    """
    try:
        wait_until_ready([server], seconds)
        if not server.is_ready():
            raise RuntimeError(f"vllm serve does not answer: {server.log()[-3000:]}")
        yield server
    finally:
        server.end()


async def complete(session: Any, url: str, what: Any, after: float = 0.0, abort_after: int = 0) -> Answer:
    """Send a completion, ``after`` seconds from now, and read its stream.

    Args:
        session: of aiohttp.
        what: the body: a dict, or a string that is sent as it is.
        abort_after: after this many pieces the client ends the connection; 0: never.
    """
    import aiohttp  # type: ignore[import-not-found,unused-ignore]

    await asyncio.sleep(after)
    try:
        return await _answer(session, url, what, abort_after)
    except (aiohttp.ClientError, asyncio.TimeoutError, OSError) as error:
        return Answer(0, f"{type(error).__name__}: {error}", [], 0)


async def _answer(session: Any, url: str, what: Any, abort_after: int) -> Answer:
    text, tokens = "", 0
    times: list[float] = []
    began = time.perf_counter()
    data = what if isinstance(what, str) else json.dumps(what)
    headers = {"Content-Type": "application/json"}
    async with session.post(f"{url}/v1/completions", data=data, headers=headers) as answer:
        if answer.status != 200:
            return Answer(answer.status, await answer.text(), times, tokens)
        async for line in answer.content:
            if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                continue
            piece = json.loads(line[6:])
            if "error" in piece:
                return Answer(int(piece["error"]["code"]), json.dumps(piece), times, tokens)
            if piece.get("usage"):
                tokens = piece["usage"]["completion_tokens"]
            if piece.get("choices"):
                text += piece["choices"][0]["text"]
                times.append(time.perf_counter() - began)
            if abort_after and len(times) >= abort_after:
                return Answer(0, text, times, len(times))
        return Answer(answer.status, text, times, tokens)


async def _all(
    url: str,
    requests: Sequence[tuple[float, Any]],
    abort_after: Sequence[int],
    meanwhile: Callable[[], object] | None,
) -> list[Answer]:
    import aiohttp  # type: ignore[import-not-found,unused-ignore]

    limit = aiohttp.ClientTimeout(total=SECONDS_OF_A_REQUEST)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=limit, connector=connector) as session:
        sent = [
            asyncio.create_task(complete(session, url, what, after, pieces))
            for (after, what), pieces in zip(requests, abort_after, strict=True)
        ]
        if meanwhile is not None:
            await asyncio.sleep(requests[len(requests) // 2][0])
            await asyncio.to_thread(meanwhile)
        return list(await asyncio.gather(*sent))


def answers(
    url: str,
    requests: Sequence[tuple[float, Any]],
    abort_after: Sequence[int] | None = None,
    meanwhile: Callable[[], object] | None = None,
) -> list[Answer]:
    """Send requests at their times and wait for all answers.

    Args:
        requests: (seconds from now, body) of each.
        abort_after: as of :func:`complete`, for each.
        meanwhile: called once, in a thread, when half of the requests have been sent.
    """
    return asyncio.run(_all(url, requests, abort_after or [0] * len(requests), meanwhile))


def measured(url: str, load: Load) -> dict[str, Any]:
    """Figures of a load. A request that is not answered in full is lost, and makes the figures an error.

    Raises:
        RuntimeError: some requests were lost; the text says how many and why.
    """
    began = time.perf_counter()
    found = answers(url, load.requests())
    seconds = time.perf_counter() - began
    lost = [each for each in found if each.status != 200 or each.tokens != load.output]
    if lost:
        what = f"{lost[0].status}, {lost[0].tokens} tokens: {lost[0].text[:200]}"
        raise RuntimeError(f"{len(lost)} of {len(found)} requests were not answered in full: {what}")
    first = sorted(1e3 * each.times[0] for each in found)
    later = sorted(1e3 * (each.times[-1] - each.times[0]) / (load.output - 1) for each in found)
    return {
        "requests": load.count,
        "rate": load.rate,
        "input": load.input,
        "output": load.output,
        "seconds": round(seconds, 3),
        "tokens_per_s": round(load.count * load.output / seconds, 1),
        "ttft_ms": round(statistics.median(first), 2),
        "ttft_p99_ms": round(first[int(0.99 * (len(first) - 1))], 2),
        "tpot_ms": round(statistics.median(later), 3),
        "tpot_p99_ms": round(later[int(0.99 * (len(later) - 1))], 3),
    }
