"""Operands of products in every form, as many as keep the caches cold, made when asked for."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Sequence
from functools import cached_property, partial
from typing import Any, TypeVar

import fp4gemm
import torch
from fp4gemm import DecodedTensor, NVFP4Tensor, PrepackedTensor, kernel_table, reference, selection
from fp4gemm.device import products
from torch import Tensor

from .harness import Harness
from .timing import Call, sets
from .verify import difference

Packed = TypeVar("Packed", bound=NVFP4Tensor | DecodedTensor | PrepackedTensor)
# For torch the same numbers by powers of two smaller: its fp16 output would overflow.
FP16_SCALE = 2**-8


class Weights:
    """A weight (n, k), or a stack (groups, n, k) of which ``active`` are read, in every form."""

    def __init__(self, harness: Harness, n: int, k: int, groups: int = 0, active: int = 1) -> None:
        self.harness, self.n, self.k, self.groups = harness, n, k, groups
        self.active = active
        self.gen = harness.generator(n + k)

    def _count(self, bytes_an_elem: float) -> int:
        num_bytes = int(self.active * self.n * self.k * bytes_an_elem)
        # One set of a stack, whose experts are read one after the other, may do.
        return sets(num_bytes, self.harness.l2_bytes) if self.groups else self.harness.rotations(num_bytes)

    @cached_property
    def packed(self) -> list[NVFP4Tensor]:
        make = partial(
            products.gaussian_weights, self.n, self.k, self.harness.device, self.gen, num_groups=self.groups
        )
        return [make() for _ in range(self._count(9 / 16))]

    @cached_property
    def prepacked(self) -> list[PrepackedTensor]:
        return [fp4gemm.prepack(w) for w in self.packed]

    @cached_property
    def decoded(self) -> list[DecodedTensor]:
        return [fp4gemm.decode(w) for w in self.packed]

    @property
    def buffers(self) -> list[Tensor]:
        """The bytes of each: prepacked where that is read; else codes, whose scales are an eighth more."""
        if self.harness.major == 9:
            return [w.data for w in self.prepacked]
        return [w.codes for w in self.packed]

    @cached_property
    def plain(self) -> list[Tensor]:
        """Of harness.dtype, as many as it takes of these."""
        shape = (self.groups, self.n, self.k) if self.groups else (self.n, self.k)
        elem_bytes = torch.empty((), dtype=self.harness.dtype).element_size()
        return [self.harness.gaussian(self.gen, *shape) for _ in range(self._count(elem_bytes))]

    @cached_property
    def fp16(self) -> list[Tensor]:
        """Values times block scales of the first of ``packed``."""
        return [fp4gemm.decode(w).data.mul_(FP16_SCALE) for w in self.packed[: self._count(2)]]

    @cached_property
    def values(self) -> Tensor:
        """float32 (n, k): what the first of ``packed`` stands for."""
        return self.packed[0].dequantize()


class Tokens:
    """Activations (m, k) in every form; groups of them where there are offs."""

    def __init__(self, weights: Weights, m: int, offs: Tensor | None = None) -> None:
        harness = weights.harness
        self.offs = offs
        # A call reads a weight and writes D as well: with many rows few sets keep the caches cold.
        one = weights.packed[0].nbytes + m * weights.k // 2 + 2 * m * weights.n
        self.count = min(len(weights.packed), harness.rotations(one)) if offs is None else 1
        self.plain = [harness.gaussian(weights.gen, m, weights.k) for _ in range(self.count)]

    @cached_property
    def packed(self) -> list[NVFP4Tensor]:
        return [fp4gemm.quantize(x, offs=self.offs) for x in self.plain]

    @cached_property
    def decoded(self) -> list[DecodedTensor]:
        return [fp4gemm.quantize(x, offs=self.offs, decoded=True) for x in self.plain]

    @cached_property
    def halves(self) -> list[Tensor]:
        return [x.to(torch.float16) for x in self.plain]

    def wrong(self, form: str) -> str | None:
        """None where the first tokens in that form are what the reference makes of them, else why not."""
        if form == "bf16":
            return None
        reason = self._packed_wrong
        if reason is None and form == "fp16":
            reason = self._decoded_wrong
        return None if reason is None else f"its tokens: {reason}"

    # Looked at once for all contenders that take them.

    @cached_property
    def want(self) -> tuple[Tensor, Tensor, Tensor]:
        """Codes, scales and amax that the reference makes of the first tokens."""
        return reference.quantize(self.plain[0], None, True, offs=self.offs)

    @cached_property
    def _packed_wrong(self) -> str | None:
        return difference(self.packed[0], self.want)

    @cached_property
    def _decoded_wrong(self) -> str | None:
        if self.offs is None:
            return difference(self.decoded[0], (reference.decode(*self.want[:2]),))
        if torch.equal(self.decoded[0].data, fp4gemm.decode(self.packed[0]).data):
            return None
        return "quantize(decoded=True) differs from decode(quantize(x))"


# The names of the forms of a product's operands (kernel_table.FORMATS), and where they are.
_OF_TOKENS = {"nvfp4": "packed", "fp16": "decoded", "bf16": "plain"}
_OF_WEIGHTS = {"nvfp4": "packed", "fp16": "decoded", "prepacked": "prepacked"}
FORMS = ("nvfp4", "nvfp4")  # of the fastest product, but on Hopper
HOPPER_FORMS = ("fp16", "prepacked")
# What a kernel of the table reads itself, by KernelInfo.operand.
_READ_BY = {
    "nvfp4": ("nvfp4", "nvfp4"),
    "fp16": ("fp16", "fp16"),
    "prepacked": ("fp16", "prepacked"),
    "prepacked_bf16": ("bf16", "prepacked"),
}


def fastest_forms(harness: Harness) -> tuple[str, str]:
    """The forms of tokens and weight that a device multiplies fastest."""
    return HOPPER_FORMS if harness.major == 9 else FORMS


def in_forms(weights: Weights, tokens: Tokens, forms: tuple[str, str]) -> tuple[list[Any], list[Any]]:
    """Tokens and weights in these forms.

    Raises:
        NotImplementedError: the device has no kernel that makes them.
    """
    first, second = getattr(tokens, _OF_TOKENS[forms[0]]), getattr(weights, _OF_WEIGHTS[forms[1]])
    return first, second[: tokens.count] if tokens.offs is None else second


def forced(
    harness: Harness, mode: str, pattern: re.Pattern[str] | None
) -> Iterator[tuple[str, tuple[str, str]]]:
    """This device's kernels whose name the pattern is found in, and the forms that they read."""
    if pattern is None or not harness.is_cuda:
        return
    arch = kernel_table.kernel_arch(harness.device.index)
    for kernel in fp4gemm.kernels():
        fits = kernel.mode == mode and kernel.epilogue == "rowcol" and kernel.out_dtype is torch.bfloat16
        if fits and kernel.arch == arch and pattern.search(kernel.name):
            yield kernel.name, _READ_BY[kernel.operand]


def unit(t: Packed) -> Packed:
    """The same data with an amax of 1, one for all or one a matrix: what a GEMM with a scalar alone makes."""
    amax = t.amax
    ones = torch.ones_like(amax[..., :1]) if amax.dim() == 2 else torch.ones_like(amax[:1])
    return dataclasses.replace(t, amax=ones.contiguous())


def calls(function: Any, *operands: Sequence[object]) -> list[Call]:
    """The same call on each set of operands; one that there is once is in all of them."""
    count = max(len(one) for one in operands)
    rows = [[one[i % len(one)] for one in operands] for i in range(count)]
    return [partial(function, *row) for row in rows]


def chosen_kernel(
    harness: Harness, shape: tuple[int, int, int], format_a: str, format_b: str, groups: int = 0
) -> str | None:
    """The name of the kernel that mm or grouped_mm takes for (m, n, k), as the library chooses."""
    if not harness.is_cuda:
        return "reference"
    m, n, k = shape
    properties = torch.cuda.get_device_properties(harness.device)
    if selection.RULES:
        mode, formats = ("grouped" if groups else "dense"), (format_a, format_b)
        a = torch.empty(0, m, device=harness.device).t()
        named = selection.find(a, n, k, torch.bfloat16, mode, False, formats)
        if named is not None:
            return named
    found = kernel_table.select_kernel(
        10 * properties.major + properties.minor,
        properties.multi_processor_count,
        m,
        n,
        k,
        groups,
        format_a=format_a,
        format_b=format_b,
    )
    return None if found is None else found.name


def nbytes(*tensors: Tensor | NVFP4Tensor | DecodedTensor | PrepackedTensor) -> int:
    return sum(t.nbytes for t in tensors)
