"""The read floor: the time of a kernel that reads the same bytes once and does nothing else.

No product whose time is that of reading its weights can be faster. The kernel is written in Triton, which
comes with torch on Linux, and is timed as the products are: in a graph, on rotating buffers. A copy would not
do, since it writes as much as it reads; and a copy node of a graph is slower than a kernel.
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from .library import Call, time_interleaved

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

# Bytes that a Triton program reads, and its warps: the best pair depends on how much there is to read.
VARIANTS = ((8192, 2), (8192, 4), (16384, 4), (16384, 8), (32768, 8))
# Words that equal it are written, so that the compiler can drop no load; of random words one in 2^64 does.
SENTINEL = 0x0123456789ABCDEF

if triton is not None:

    @triton.jit
    def _read(source, sink, num_words, SENTINEL: tl.constexpr, WORDS: tl.constexpr):  # type: ignore[no-untyped-def]
        offsets = tl.program_id(0).to(tl.int64) * WORDS + tl.arange(0, WORDS)
        words = tl.load(source + offsets, mask=offsets < num_words, other=0)
        tl.store(sink + tl.arange(0, WORDS), words, mask=words == SENTINEL)


def absent() -> str | None:
    """Why the floor cannot be measured, or None."""
    return "triton is not installed" if triton is None else None


def read(data: Tensor, num_bytes: int, variant: tuple[int, int], sink: Tensor) -> None:
    """Reads the first num_bytes (a multiple of 8) of a contiguous tensor, on the current stream."""
    words, num_warps = variant[0] // 8, variant[1]
    source = data.view(torch.uint8).view(-1)[:num_bytes].view(torch.int64)
    grid = (triton.cdiv(source.numel(), words),)
    _read[grid](source, sink, source.numel(), SENTINEL, words, num_warps=num_warps)


def calls(buffers: Sequence[Tensor], num_bytes: int, variant: tuple[int, int]) -> list[Call]:
    """The same read of each buffer."""
    sink = torch.empty(max(size for size, _ in VARIANTS) // 8, dtype=torch.int64, device=buffers[0].device)
    return [partial(read, data, num_bytes, variant, sink) for data in buffers]


def best_variant(buffers: Sequence[Tensor], num_bytes: int) -> tuple[int, int]:
    """The fastest of VARIANTS for so many bytes."""
    contenders = {str(i): calls(buffers, num_bytes, variant) for i, variant in enumerate(VARIANTS)}
    timings = time_interleaved(contenders, rounds=5)
    return VARIANTS[int(min(timings, key=lambda name: timings[name].median_us))]
