"""The bytes that a quantizer must move, as formulas, and the targets that its time is held against."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Target:
    """A target: at least ``value`` of the copy's bandwidth or of a rival's speed, or at most that many us."""

    value: float
    of: str = "copy"  # "copy", "us", or the name of the case whose time is divided by ours

    def __str__(self) -> str:
        if self.of == "us":
            return f"<= {self.value:g} us"
        return f">= {self.value:.2f} of {self.of}"


@dataclass(frozen=True)
class Traffic:
    """Bytes that must move, each tensor read or written once; ``2 x`` is x twice, q a packed tensor."""

    terms: dict[str, int]

    @property
    def num_bytes(self) -> int:
        return sum(self.terms.values())

    def __str__(self) -> str:
        return " + ".join(self.terms)


def scale_bytes(m: int, k: int, block: int = 16) -> int:
    """Bytes of the padded 128x4 scales of (m, k); the padding is zeroed by the quantizer, so it moves too."""
    return -(-m // 128) * 128 * (-(-k // (4 * block)) * 4)


def packed_bytes(m: int, k: int, num_amax: int) -> int:
    """Bytes of an NVFP4 tensor: codes, padded scales, amax (read where it is given, else written)."""
    return m * k // 2 + scale_bytes(m, k) + 4 * num_amax


def grouped_rows(m: int, g: int) -> int:
    """Rows of the scales buffer of g groups with m rows in all: the most that any sizes can need."""
    return (m + 127 * min(g, m)) // 128 * 128


def grouped_bytes(m: int, k: int, g: int) -> int:
    """As packed_bytes with one amax a row, each group padded on its own, and the int32 ends of the groups."""
    return m * k // 2 + scale_bytes(grouped_rows(m, g), k) + 4 * m + 4 * g
