"""A stub of vLLM for the tests of its plug-in."""

from __future__ import annotations

import types
from collections.abc import Iterator

import pytest
import vllm_stub
import vllm_stub_configs


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> Iterator[types.SimpleNamespace]:
    """The stub, installed and registered with fp4gemm: its layers, its table, its platform."""
    for name in ("ENABLED", "ACTIVATIONS", "IGNORE", "WEIGHT_METHOD", "BATCH_INVARIANT", "USE_FAST_ACCUM"):
        monkeypatch.delenv(f"FP4GEMM_SERVING_{name}", raising=False)
    modules = vllm_stub_configs.modules()
    with vllm_stub.installed(modules):
        from fp4gemm.integrations.vllm import register

        register()
        yield types.SimpleNamespace(
            layers=vllm_stub,
            table=vllm_stub_configs.TABLE,
            platform=modules["vllm.platforms"].current_platform,
            config=modules["vllm.config"].get_current_vllm_config_or_none(),
            module=modules["vllm"],
            register=register,
        )
        vllm_stub._RANK.update(rank=0, size=1)
