"""Whether fp4gemm serves on the device of an engine, decided without touching the device."""

from __future__ import annotations

from ... import kernel_table, support
from ...recipe import INPUTS, StoredActivations

__all__ = ["Device"]

_UNQUANTIZED = "of unquantized activations"


class Device:
    """The device of an engine, as its platform names it: torch.cuda is not initialised for the answer.

    Args:
        kind: "cpu", "cuda", or another name, where fp4gemm has nothing.
        capability: (major, minor) of a CUDA device; None where the platform does not know it.
    """

    def __init__(self, kind: str, capability: tuple[int, int] | None = None) -> None:
        self._gaps: dict[str, str] = {}
        if kind == "cpu":
            return
        where = (
            kind if capability is None else f"{kind} of compute capability {capability[0]}.{capability[1]}"
        )
        if kind != "cuda" or capability is None:
            self._gaps["mm"] = f"fp4gemm runs on cuda and cpu devices only, and this is {where}"
        else:
            self._gaps = support.gaps_of(10 * capability[0] + capability[1], where)

    def reason(self) -> str | None:
        """Why fp4gemm serves nothing on the device: kernels are missing; None if it serves layers."""
        return next((self._gaps[name] for name in ("quantize", "mm") if name in self._gaps), None)

    def reason_against(self, activations: StoredActivations, is_experts: bool) -> str | None:
        """Why fp4gemm does not serve layers with these activations on the device; None if it does."""
        mode = "grouped_mm" if is_experts else "mm"
        names = [mode] if INPUTS[activations].is_nvfp4 else [mode, f"{mode} {_UNQUANTIZED}"]
        return next((self._gaps[name] for name in names if name in self._gaps), None)

    def built(self) -> str:
        """The text for the log that says which kernels this build of fp4gemm has."""
        return kernel_table.built_text()
