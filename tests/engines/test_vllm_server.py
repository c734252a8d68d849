"""vLLM's server over HTTP with the plug-in: what requests get while others fail and while weights change.

It runs on the CPU's engine (``make test-serving``) and, where the engine has a GPU, on it.
"""

from __future__ import annotations

import importlib.metadata
import json
import socketserver
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="needs requirements/serving.txt: make test-serving")
pytest.importorskip("aiohttp", reason="aiohttp is not installed")

from bench.engine import requests
from bench.engine.arms import ARMS
from bench.engine.checkpoints import make
from bench.engine.run import environment
from bench.models.shapes import Shape

pytestmark = pytest.mark.slow
IS_GPU = torch.cuda.is_available()
SHAPE = Shape("tiny-llama", 2, 512, 4, 2, 128, 512, 1024)
PROMPT = list(range(11, 43))
TOKENS = 24
SECONDS = 400.0  # for the start


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two checkpoints with other weights."""
    made = []
    for seed in range(2):
        folder = tmp_path_factory.mktemp("checkpoints") / f"llama{seed}"
        make(folder, SHAPE, 2, True, torch.device("cpu"), seed)
        made.append(folder)
    return made[0], made[1]


@pytest.fixture(scope="module")
def server(folders: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[requests.Server]:
    assert "fp4gemm" in {
        point.name for point in importlib.metadata.entry_points(group="vllm.general_plugins")
    }
    folder = tmp_path_factory.mktemp("server")
    arguments: dict[str, Any] = {"dtype": "bfloat16", "max_model_len": 128, "max_num_seqs": 16}
    if IS_GPU:
        arguments |= {"kv_cache_memory_bytes": 1 << 30, "gpu_memory_utilization": 0.05}
        arguments["compilation_config"] = {"cudagraph_capture_sizes": [1, 4, 16]}
    else:
        arguments["enforce_eager"] = True
    # Without this a prompt that was seen before is answered from keys and values of the weights of then.
    arguments["no_enable_prefix_caching"] = True
    mine = environment(ARMS["w4a4"], folder / "cache")
    started = requests.Server(folders[0], folder, mine, arguments)
    with requests.serving(started, SECONDS):
        yield started


def _ask(server: requests.Server, *bodies: Any) -> list[requests.Answer]:
    return requests.answers(server.url, [(0.0, each) for each in bodies])


def _whole(answer: requests.Answer, tokens: int = TOKENS) -> bool:
    return answer.status == 200 and answer.tokens == tokens and len(answer.text.split()) == tokens


def _reload(server: requests.Server, folder: Path) -> None:
    what = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
    call = urllib.request.Request(
        f"{server.url}/collective_rpc", json.dumps(what).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(call, timeout=120) as answer:
        assert answer.status == 200


def test_the_plug_in_runs_the_layers(server: requests.Server) -> None:
    assert _whole(_ask(server, requests.body(PROMPT, TOKENS))[0])
    assert "fp4gemm: W4A4, an amax for each token: 2 x model.layers.*.self_attn.qkv_proj" in server.log()


def test_arrivals_are_answered_in_full(server: requests.Server) -> None:
    """Figures exist only if no request was lost."""
    load = requests.Load(count=12, rate=40.0, input=24, output=8, vocabulary=SHAPE.vocab)
    found = requests.measured(server.url, load)
    assert found["requests"] == 12
    assert found["tokens_per_s"] > 0
    assert 0 < found["ttft_ms"] <= found["ttft_p99_ms"]
    lengths = {len(what["prompt"]) for _, what in load.requests()}
    assert min(lengths) >= 12
    assert max(lengths) <= 36


@pytest.mark.parametrize(
    ("what", "named"),
    [
        ('{"model": "model", "prompt": [1, 2', "JSON"),
        (requests.body(PROMPT, -1), "max_tokens"),
        (requests.body(range(10, 10 + 200), 8), "128"),
        (requests.body([SHAPE.vocab + 7], 8), "vocab"),
        ({**requests.body(PROMPT, 8), "model": "another"}, "another"),
        ({**requests.body(PROMPT, 8), "temperature": "hot"}, "temperature"),
    ],
    ids=["json", "max_tokens", "length", "token", "model", "temperature"],
)
def test_a_malformed_request_is_refused_and_others_are_not(
    server: requests.Server, what: Any, named: str
) -> None:
    alone = _ask(server, requests.body(PROMPT, TOKENS))[0]
    bad, *good = _ask(server, what, *[requests.body(PROMPT, TOKENS)] * 3)
    assert 400 <= bad.status < 500, bad
    assert named in bad.text
    assert all(_whole(each) for each in good)
    assert _ask(server, requests.body(PROMPT, TOKENS))[0].text == alone.text


def test_a_client_that_leaves_takes_no_other_with_it(server: requests.Server) -> None:
    """Four of eight clients end the connection after two pieces; the others get all of their tokens."""
    alone = _ask(server, requests.body(PROMPT, TOKENS))[0]
    sent = [(0.0, requests.body(PROMPT[i:], 60 if i % 2 else TOKENS)) for i in range(8)]
    found = requests.answers(server.url, sent, abort_after=[2 if i % 2 else 0 for i in range(8)])
    assert [each.status for each in found] == [200, 0] * 4
    assert all(_whole(each) for each in found[0::2])
    assert _ask(server, requests.body(PROMPT, TOKENS))[0].text == alone.text


def test_weights_change_while_requests_run(server: requests.Server, folders: tuple[Path, Path]) -> None:
    """No request is lost, and afterwards the text is that of the new weights, there and back again."""
    first = _ask(server, requests.body(PROMPT, TOKENS))[0].text
    texts = []
    for folder in (folders[1], folders[0], folders[1]):
        sent = [(0.02 * i, requests.body(PROMPT[i:], 80)) for i in range(8)]
        during = requests.answers(server.url, sent, meanwhile=lambda folder=folder: _reload(server, folder))
        assert all(_whole(each, 80) for each in during), during
        texts.append(_ask(server, requests.body(PROMPT, TOKENS))[0].text)
    assert texts[0] == texts[2] != first
    assert texts[1] == first


@pytest.mark.parametrize("said", [b"", b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n"])
def test_a_connection_that_breaks_is_a_lost_request(said: bytes) -> None:
    """Of a server that ends it before the answer, or within, and of one that is not there."""

    class Breaks(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            self.request.recv(65536)
            self.request.sendall(said)

    load = requests.Load(count=3, rate=0.0, input=8, output=4, vocabulary=SHAPE.vocab)
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Breaks) as broken:
        threading.Thread(target=broken.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{broken.server_address[1]}"
        with pytest.raises(RuntimeError, match="3 of 3 requests were not answered in full: 0, 0 tokens: "):
            requests.measured(url, load)
        broken.shutdown()
    with pytest.raises(RuntimeError, match=r"3 of 3 requests .*Cannot connect"):
        requests.measured(url, load)


def test_the_server_is_alive_and_its_engine_logged_no_error(server: requests.Server) -> None:
    assert server.is_ready()
    assert server.process.poll() is None
    lines = server.log().splitlines()  # vLLM logs malformed requests as errors of the API server
    assert not [line for line in lines if "EngineCore" in line and " ERROR " in line]
