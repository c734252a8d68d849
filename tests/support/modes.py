"""Every mode of the quantizers: options of fp4gemm.quantize and the operator arguments they stand for."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import fp4gemm
import torch
from fp4gemm import NVFP4Tensor, reference
from helpers import assert_parts
from torch import Tensor

SEED, OFFSET = -0x0123456789ABCDEF, 2**63 - 1  # offset + 1 wraps
SIGNS = 0xD7E8


class Mode(NamedTuple):
    """A mode: the options besides x, axis, amax and offs."""

    name: str
    options: dict[str, Any]
    arguments: dict[str, Any]

    @property
    def tiles(self) -> bool:
        return self.arguments["block_rows"] == 16

    @property
    def adaptive(self) -> bool:
        return self.arguments["four_over_six"] > 0

    @property
    def rotated(self) -> bool:
        return self.arguments["hadamard"] > 0

    @property
    def stochastic(self) -> bool:
        return bool(self.options.get("stochastic"))

    def on(self, device: torch.device) -> dict[str, Any]:
        """The options, with the random state on that device."""
        return {**self.options, "rng_state": state(device)} if self.stochastic else self.options

    def operator(self) -> dict[str, Any]:
        """The operator arguments, with the random state on the CPU."""
        return (
            {**self.arguments, "rng_state": state(torch.device("cpu"))} if self.stochastic else self.arguments
        )


def state(device: torch.device) -> Tensor:
    return torch.tensor([SEED, OFFSET], device=device)


def mode(name: str, options: dict[str, Any], **arguments: Any) -> Mode:
    scaling = options["scaling"]
    defaults = {"block_rows": 1, "encode": 0, "four_over_six": 0, "fast_error": False, "e4m3_max": 448}
    more = {"hadamard": 0, "signs": 0, "per_row": scaling == "row"}
    return Mode(f"{scaling}-{name}", options, {**defaults, **more, **arguments})


def plain_modes() -> Iterator[Mode]:
    rotations = ((None, None), ("bf16", SIGNS), ("fp32", 0xACE1), ("fp32", 0))
    for scaling, encode, (hadamard, signs), stochastic in itertools.product(
        ("row", "tensor"), ("te", "te_per_token"), rotations, (False, True)
    ):
        options: dict[str, Any] = {"scaling": scaling, "encode": encode, "stochastic": stochastic}
        arguments: dict[str, Any] = {"encode": ("te", "te_per_token").index(encode)}
        if hadamard is not None:
            options |= {"hadamard": hadamard, "hadamard_signs": signs}
            arguments |= {"hadamard": (None, "bf16", "fp32").index(hadamard), "signs": signs}
        name = (
            f"{encode}-{hadamard or 'plain'}{f'-{signs:x}' if hadamard else ''}{'-sr' if stochastic else ''}"
        )
        yield mode(name, options, **arguments)


def adaptive_modes() -> Iterator[Mode]:
    layouts = (("row", (1, 16)), ("tensor", (1, 16)), ("tensor", (16, 16)))
    for (scaling, block), rule, error, bound in itertools.product(
        layouts, ("mae", "mse"), ("exact", "fast"), (None, 448)
    ):
        options = {
            "scaling": scaling,
            "block": block,
            "four_over_six": rule,
            "four_over_six_error": error,
            "e4m3_max": bound,
        }
        yield mode(
            f"{block[0]}x16-{rule}-{error}-{bound or 256}",
            options,
            block_rows=block[0],
            four_over_six=("mae", "mse").index(rule) + 1,
            fast_error=error == "fast",
            e4m3_max=bound or 256,
        )


# For one direction alone, so that they are no part of MODES, which quantize_both has too.
EDEN = [
    mode(
        f"eden-{signs:x}",
        {
            "scaling": scaling,
            "encode": "eden",
            "hadamard": "fp32",
            "hadamard_signs": signs,
            "stochastic": True,
        },
        encode=2,
        hadamard=2,
        signs=signs,
        e4m3_max=256,
    )
    for scaling, signs in (("row", SIGNS), ("tensor", 0))
]
TILES = mode("tiles", {"scaling": "tensor", "block": (16, 16)}, block_rows=16)
MODES = [*plain_modes(), *adaptive_modes(), TILES]
GROUPED_MODES = [m for m in MODES if not m.tiles]
# One or two modes of each kind, for tests in which every mode would last too long.
FEW = [m for m in MODES if m.name in {
    "row-te-plain",
    "tensor-te-plain",
    "row-te_per_token-plain-sr",
    "row-te-bf16-d7e8",
    "tensor-te_per_token-fp32-ace1-sr",
    "tensor-te-bf16-d7e8-sr",
    "row-1x16-mae-exact-256",
    "tensor-1x16-mse-fast-448",
    "tensor-16x16-mae-exact-256",
    "tensor-tiles",
}]  # fmt: skip


def parts(t: NVFP4Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return t.codes, t.scales, t.amax


def assert_same(got: NVFP4Tensor, want: NVFP4Tensor, where: str = "") -> None:
    assert_parts(parts(got), parts(want), where)
    assert (got.e4m3_max, got.hadamard_signs) == (want.e4m3_max, want.hadamard_signs)


def expected(
    x: Tensor, m: Mode, axis: int = -1, amax: Tensor | None = None, offs: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """The reference's result for a CPU tensor, with the given amax if there is one."""
    codes, scales, measured = reference.quantize(x, amax, axis=axis, offs=offs, **m.operator())
    return codes, scales, measured if amax is None or measured.numel() else amax


def quantize(x: Tensor, m: Mode, device: torch.device, **more: Any) -> NVFP4Tensor:
    """fp4gemm.quantize on the device; x and the other tensors are copied there."""
    moved = {key: value.to(device) if isinstance(value, Tensor) else value for key, value in more.items()}
    return fp4gemm.quantize(x.to(device), **m.on(device), **moved)


def by_name(m: Mode) -> str:
    return m.name
