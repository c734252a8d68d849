"""What a result was measured on: device, clocks, driver, versions, revision."""

from __future__ import annotations

import datetime
import subprocess

import fp4gemm
import torch

_QUERY = "name,driver_version,clocks.sm,clocks.mem,clocks.max.sm,power.limit"


def describe() -> dict[str, object]:
    """Facts that go with every result."""
    facts: dict[str, object] = {
        "date": datetime.date.today().isoformat(),
        "fp4gemm": fp4gemm.__version__,
        "torch": torch.__version__,
        "revision": _output("git", "rev-parse", "--short", "HEAD"),
    }
    if torch.cuda.is_available():
        facts["device"] = torch.cuda.get_device_name()
        facts["cuda"] = torch.version.cuda
        values = _output(
            "nvidia-smi",
            f"--query-gpu={_QUERY}",
            "--format=csv,noheader",
            f"--id={torch.cuda.current_device()}",
        )
        if values:
            facts |= dict(
                zip(_QUERY.split(","), (value.strip() for value in values.split(",")), strict=False)
            )
    return facts


def device() -> torch.device:
    """The current CUDA device."""
    return torch.device("cuda", torch.cuda.current_device())


def l2_bytes() -> int:
    """Size of the current device's L2 cache."""
    return torch.cuda.get_device_properties(device()).L2_cache_size


def _output(*command: str) -> str | None:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
