"""Operands of products in every form, in as many copies as keep the caches cold, made at first use."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Sequence
from functools import cached_property, partial
from typing import Any, TypeVar

import fp4gemm
import torch
from fp4gemm import DecodedTensor, FP8Tensor, NVFP4Tensor, PrepackedTensor, reference
from torch import Tensor

from ..baselines import fp8
from . import library, w4a8
from .harness import Harness
from .library import Call, gaussian_weights, sets
from .verify import difference

Packed = TypeVar("Packed", bound=NVFP4Tensor | DecodedTensor | PrepackedTensor)
Forms = tuple[str, str]  # of a and of b, each of kernel_table.Format
# torch's product of fp16 operands gets them scaled by this power of two: its fp16 output would overflow.
FP16_SCALE = 2**-8


class Weights:
    """A weight (n, k), or a stack (groups, n, k) of which a call reads ``active`` matrices, in every form."""

    def __init__(self, harness: Harness, n: int, k: int, groups: int = 0, active: int = 1) -> None:
        self.harness, self.n, self.k, self.groups = harness, n, k, groups
        self.active = active
        self.gen = harness.generator(n + k)

    def _count(self, bytes_an_elem: float) -> int:
        num_bytes = int(self.active * self.n * self.k * bytes_an_elem)
        # A single stack may be enough: its matrices are read one after the other.
        return sets(num_bytes, self.harness.l2_bytes) if self.groups else self.harness.rotations(num_bytes)

    @cached_property
    def packed(self) -> list[NVFP4Tensor]:
        make = partial(
            gaussian_weights, self.n, self.k, self.harness.device, self.gen, num_groups=self.groups
        )
        return [make() for _ in range(self._count(9 / 16))]

    @cached_property
    def prepacked(self) -> list[PrepackedTensor]:
        return [fp4gemm.prepack(w) for w in self.packed]

    @cached_property
    def prepacked_fp8(self) -> list[PrepackedTensor]:
        """``packed`` in the order of the kernels for FP8 tokens.

        Raises:
            NotImplementedError: k does not fit, or the device has no such kernels.
        """
        return [w4a8.prepack(w) for w in self.packed]

    @cached_property
    def decoded(self) -> list[DecodedTensor]:
        return [fp4gemm.decode(w) for w in self.packed]

    @property
    def buffers(self) -> list[Tensor]:
        """The memory of each weight in the fastest form: the prepacked bytes, or the codes alone.

        The scales, an eighth of the bytes of the codes, are omitted.
        """
        if fastest_forms(self.harness)[1] == "prepacked":
            return [w.data for w in self.prepacked]
        return [w.codes for w in self.packed]

    @cached_property
    def plain(self) -> list[Tensor]:
        """Unquantized weights of harness.dtype; fewer of them are enough, since they are larger."""
        elem_bytes = torch.empty((), dtype=self.harness.dtype).element_size()
        return [self._gaussian() for _ in range(self._count(elem_bytes))]

    @cached_property
    def in_fp8(self) -> list[fp8.Operand]:
        """Weights in FP8 with a scale for each row."""
        make = fp8.formula_of_stack if self.groups else fp8.formula
        return [make(self._gaussian()) for _ in range(self._count(1))]

    def _gaussian(self) -> Tensor:
        shape = (self.groups, self.n, self.k) if self.groups else (self.n, self.k)
        return self.harness.gaussian(self.gen, *shape)

    @cached_property
    def fp16(self) -> list[Tensor]:
        """Code values times block scales of the first of ``packed``, in fp16, times FP16_SCALE."""
        return [fp4gemm.decode(w).data.mul_(FP16_SCALE) for w in self.packed[: self._count(2)]]

    @cached_property
    def values(self) -> Tensor:
        """float32 (n, k): the first of ``packed``, dequantized."""
        return self.packed[0].dequantize()


class Tokens:
    """Activations (m, k) in every form; with ``offs`` they are groups of rows."""

    def __init__(self, weights: Weights, m: int, offs: Tensor | None = None) -> None:
        harness = weights.harness
        self.offs = offs
        # A call reads a weight and writes D as well: with many rows few copies keep the caches cold.
        one = weights.packed[0].nbytes + m * weights.k // 2 + 2 * m * weights.n
        self.count = min(len(weights.packed), harness.rotations(one)) if offs is None else 1
        self.plain = [harness.gaussian(weights.gen, m, weights.k) for _ in range(self.count)]

    def writers(self) -> list[Call]:
        """For each of ``plain`` a kernel of torch that writes it, as a norm or an activation of a model does.

        All of them write the values of the first, which stay in the L2 cache. These kernels let no kernel
        behind them start before they have ended.
        """
        source = self.plain[0].clone()
        return [partial(torch.mul, source, 1.0, out=x) for x in self.plain]

    @cached_property
    def packed(self) -> list[NVFP4Tensor]:
        return [fp4gemm.quantize(x, offs=self.offs) for x in self.plain]

    @cached_property
    def decoded(self) -> list[DecodedTensor]:
        return [fp4gemm.quantize(x, offs=self.offs, decoded=True) for x in self.plain]

    @cached_property
    def e4m3(self) -> list[FP8Tensor]:
        return [w4a8.quantize(x, self.offs) for x in self.plain]

    @cached_property
    def fp16(self) -> list[Tensor]:
        return [x.to(torch.float16) for x in self.plain]

    @cached_property
    def in_fp8(self) -> list[fp8.Operand]:
        """The tokens as torch's FP8 products read them."""
        return [fp8.quantize(x) for x in self.plain]

    def wrong(self, form: str) -> str | None:
        """None if the first tokens in this form are what the reference makes of them, else the difference."""
        if form == "bf16":
            return None
        if form == "e4m3":
            return w4a8.tokens_wrong(self.plain[0], self.offs)
        reason = self._packed_wrong
        if reason is None and form == "fp16":
            reason = self._decoded_wrong
        return None if reason is None else f"its tokens: {reason}"

    # The comparisons are made once, for all contenders that read the same tokens.

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


# Where the operands in each form are found.
_OF_TOKENS = {"nvfp4": "packed", "fp16": "decoded", "bf16": "plain", "e4m3": "e4m3"}
_OF_WEIGHTS = {
    "nvfp4": "packed",
    "fp16": "decoded",
    "prepacked": "prepacked",
    "prepacked_fp8": "prepacked_fp8",
}
# The forms that a kernel reads without a conversion, by its KernelInfo.operand.
READ_BY: dict[str, Forms] = {
    "nvfp4": ("nvfp4", "nvfp4"),
    "fp16": ("fp16", "fp16"),
    "prepacked": ("fp16", "prepacked"),
    "prepacked_bf16": ("bf16", "prepacked"),
    "prepacked_fp8": w4a8.FORMS,
}
OURS = "fp4gemm"
# Contenders of ours beside the fastest: the forms, and the operand that a kernel of the device must read.
OTHER_FORMS: tuple[tuple[str, Forms, str], ...] = (
    ("fp4gemm, prepacked", READ_BY["prepacked"], "prepacked"),
    ("fp4gemm, packed tokens", ("nvfp4", "prepacked"), "prepacked"),
    ("fp4gemm, both packed", READ_BY["nvfp4"], "nvfp4"),
    ("fp4gemm, both decoded", READ_BY["fp16"], "fp16"),
    ("fp4gemm W4A16", READ_BY["prepacked_bf16"], "prepacked_bf16"),
)


def fastest_forms(harness: Harness) -> Forms:
    """The forms in which the library's layers multiply quantized tokens on a device.

    Where tensor cores multiply NVFP4, these are codes and scales, even if kernels read prepacked weights too.
    """
    return READ_BY["prepacked" if harness.streams_prepacked else "nvfp4"]


def unit_of(harness: Harness, forms: Forms) -> str:
    """``roofline.Work.unit`` of our product of operands in these forms."""
    if forms == w4a8.FORMS:
        return harness.fp8_unit
    return harness.our_unit if forms == READ_BY["nvfp4"] else harness.unit


def our_forms(harness: Harness) -> list[tuple[str, Forms]]:
    """Our contenders on a device: OURS in the fastest forms, then every other form that its kernels read."""
    fastest = fastest_forms(harness)
    others: list[tuple[str, Forms]] = [
        (name, forms)
        for name, forms, operand in OTHER_FORMS
        if operand in harness.operands and forms != fastest
    ]
    return [(OURS, fastest), *others]


def in_forms(weights: Weights, tokens: Tokens, forms: Forms) -> tuple[list[Any], list[Any]]:
    """Tokens and weights in these forms.

    Raises:
        NotImplementedError: the device has no kernel that makes them.
    """
    first, second = getattr(tokens, _OF_TOKENS[forms[0]]), getattr(weights, _OF_WEIGHTS[forms[1]])
    return first, second[: tokens.count] if tokens.offs is None else second


def forced(harness: Harness, mode: str, pattern: re.Pattern[str] | None) -> Iterator[tuple[str, Forms]]:
    """The device's bf16 kernels in whose name the pattern is found, each with the forms that it reads."""
    if pattern is None:
        return
    for kernel in library.kernels_of(harness.device):
        fits = kernel.mode == mode and kernel.epilogue == "rowcol" and kernel.out_dtype is torch.bfloat16
        if fits and pattern.search(kernel.name):
            yield kernel.name, READ_BY[kernel.operand]


def unit(t: Packed) -> Packed:
    """The same data with an amax of 1, one for each matrix of a stack, for a GEMM with scalars."""
    amax = t.amax
    ones = torch.ones_like(amax[..., :1]) if amax.dim() == 2 else torch.ones_like(amax[:1])
    return dataclasses.replace(t, amax=ones.contiguous())


def calls(function: Any, *operands: Sequence[object]) -> list[Call]:
    """The same call on each set of operands; the shorter sequences are repeated."""
    count = max(len(one) for one in operands)
    rows = [[one[i % len(one)] for one in operands] for i in range(count)]
    return [partial(function, *row) for row in rows]


def chosen_kernel(harness: Harness, shape: tuple[int, int, int], forms: Forms, groups: int = 0) -> str | None:
    """The name of the kernel that the library chooses for mm or grouped_mm of (m, n, k) in these forms."""
    if not harness.is_cuda:
        return "reference"
    return library.chosen_kernel(harness.device, shape, forms, groups)


def nbytes(*tensors: Tensor | NVFP4Tensor | DecodedTensor | PrepackedTensor | fp8.Operand) -> int:
    return sum(t.nbytes for t in tensors)
