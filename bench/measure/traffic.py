"""The bytes that a quantizer must move, as formulas."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Traffic:
    """Bytes that must move, each tensor read or written once.

    The names of the terms make the formula that is printed: "x" is the input, "2 x" the input read twice, "q"
        an
    NVFP4 tensor (codes, padded scales and amax).
    """

    terms: dict[str, int]

    @property
    def num_bytes(self) -> int:
        return sum(self.terms.values())

    def __str__(self) -> str:
        return " + ".join(self.terms)


def scale_bytes(m: int, k: int, block: int = 16) -> int:
    """Bytes of the scales of (m, k), padded to 128 x 4; the quantizer writes the padding, so it counts."""
    return -(-m // 128) * 128 * (-(-k // (4 * block)) * 4)


def packed_bytes(m: int, k: int, num_amax: int) -> int:
    """Bytes of an NVFP4 tensor: codes, padded scales, and amax, which is read where given, else written."""
    return m * k // 2 + scale_bytes(m, k) + 4 * num_amax


def grouped_rows(m: int, g: int) -> int:
    """Rows of the scales of g groups with m rows in all: as many as the worst sizes of groups need."""
    return (m + 127 * min(g, m)) // 128 * 128


def grouped_bytes(m: int, k: int, g: int) -> int:
    """As packed_bytes with one amax a row; each group is padded on its own, and its int32 end is read."""
    return m * k // 2 + scale_bytes(grouped_rows(m, g), k) + 4 * m + 4 * g
