"""MMA-Sim's model of a fused sum (arXiv 2511.10909) in exact integers, for comparison with the emulator."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

Term = tuple[Fraction, int]  # a significand, and the exponent by which it is aligned


def number(x: float, least: int) -> Term:
    """A number as a term. `least` is the exponent of the subnormal numbers of its format."""
    exponent = max(math.frexp(x)[1] - 1, least) if x else least
    return Fraction(x) / Fraction(2) ** exponent, exponent


def product(*terms: Term) -> Term:
    significand = Fraction(1)
    for factor, _ in terms:
        significand *= factor
    return significand, sum(exponent for _, exponent in terms)


def fused_sum(terms: Sequence[Term], fraction_bits: int) -> float:
    """Truncates each term to `fraction_bits` below the largest exponent, and their sum to fp32."""
    largest = max(exponent if significand else -126 for significand, exponent in terms)
    one = Fraction(2) ** (largest - fraction_bits)
    total = sum(math.trunc(significand * Fraction(2) ** exponent / one) for significand, exponent in terms)
    value = Fraction(total) * one
    if value == 0:
        return 0.0
    exponent = max(math.frexp(float(abs(value)))[1] - 1, -126)
    if Fraction(2) ** exponent > abs(value):  # the conversion to float has rounded up to a power of two
        exponent -= 1
    unit = Fraction(2) ** (exponent - 23)
    return float(math.trunc(value / unit) * unit)
