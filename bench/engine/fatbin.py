"""Reduces the CUDA code in a shared library to that of one GPU architecture, in place.

nvcc stores the code of all architectures of a source file in a fatbin: a header of 16 bytes, then entries,
each of which is a cubin or PTX with a header of its own. A fatbin that becomes shorter is followed by zeros,
so that no offset of the library changes and an archive of it is small.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import re
import struct
from collections.abc import Callable, Iterator

MAGIC = b"\x50\xed\x55\xba\x01\x00\x10\x00"  # the magic number, version 1, a header of 16 bytes
HEADER_BYTES = 16
ENTRY = struct.Struct("<HHIQIIHHIIIQQQ")
PTX, CUBIN = 1, 2
_NAMES = {CUBIN: re.compile(rb"\.text\.(_Z\w+)"), PTX: re.compile(rb"\.entry (_Z\w+)")}


@dataclasses.dataclass(frozen=True)
class Entry:
    """A cubin or PTX.

    Args:
        kind: PTX or CUBIN.
        arch: 90 for compute capability 9.0.
        data: the entry with its header.
        header_bytes: the size of that header.
        compressed_bytes, raw_bytes: of the code; 0 if it is not compressed.
    """

    kind: int
    arch: int
    data: bytes
    header_bytes: int
    compressed_bytes: int
    raw_bytes: int

    def kernels(self) -> set[str]:
        """The mangled names of its kernels."""
        code = self.data[self.header_bytes :]
        if self.raw_bytes:
            code = _decompressed(code[: self.compressed_bytes], self.raw_bytes)
        return {name.decode() for name in _NAMES[self.kind].findall(code)}


def smallest_cubin(library: bytes, newer_than: int) -> bytes:
    """The smallest cubin of a library for an architecture that is newer than this one.

    Raises:
        ValueError: it has none.
    """
    found = [
        entry.data
        for _, _, entries in _fatbins(library)
        for entry in entries
        if entry.kind == CUBIN and entry.arch > newer_than
    ]
    if not found:
        raise ValueError(f"the library has no cubin for an architecture newer than {newer_than}")
    return min(found, key=len)


def reduced(library: bytes, arch: int, is_wanted: Callable[[str], bool], nothing: bytes) -> bytes:
    """The library with the code that a GPU of this architecture runs, and no other.

    A fatbin keeps its cubins for ``arch`` or, if it has none, the PTX of the nearest older architecture. If
    it has neither, or none of its kernels is wanted, it becomes ``nothing``: the CUDA runtime accepts a
    fatbin without code for the device, and the launch of one of its kernels is an error.

    Args:
        library: the bytes of the file.
        arch: 90 for compute capability 9.0.
        is_wanted: called with the mangled name of a kernel.
        nothing: an entry that the GPU does not run; see :func:`smallest_cubin`.

    Raises:
        ValueError: a fatbin is not as described above.
    """
    made = bytearray(library)
    for begin, end, entries in _fatbins(library):
        kept = _kept(entries, arch)
        names = [name for entry in kept for name in entry.kernels()]
        if not kept or (names and not any(map(is_wanted, names))):
            new = nothing
        else:
            new = b"".join(entry.data for entry in kept)
        if len(new) > end - begin:
            raise ValueError(f"the fatbin at byte {begin} has {end - begin} bytes, needs {len(new)}")
        struct.pack_into("<Q", made, begin - 8, len(new))
        made[begin:end] = new + bytes(end - begin - len(new))
    return bytes(made)


def _kept(entries: list[Entry], arch: int) -> list[Entry]:
    cubins = [entry for entry in entries if entry.kind == CUBIN and entry.arch == arch]
    if cubins:
        return cubins
    ptx = [entry for entry in entries if entry.kind == PTX and entry.arch <= arch]
    return [max(ptx, key=lambda entry: entry.arch)] if ptx else []


def _fatbins(library: bytes) -> Iterator[tuple[int, int, list[Entry]]]:
    """(the first byte of the entries, the byte behind the last, the entries) of each fatbin."""
    at = library.find(MAGIC)
    while at >= 0:
        (size,) = struct.unpack_from("<Q", library, at + 8)
        begin, end = at + HEADER_BYTES, at + HEADER_BYTES + size
        entries, p = [], begin
        while p + ENTRY.size <= end:
            kind, _, header, padded, compressed, _, _, _, arch, _, _, _, _, raw = ENTRY.unpack_from(
                library, p
            )
            if kind not in (PTX, CUBIN) or not 32 <= header <= 4096 or p + header + padded > end:
                raise ValueError(f"byte {p} of the library is no entry of a fatbin")
            data = library[p : p + header + padded]
            entries.append(Entry(kind, arch, data, header, compressed, raw))
            p += header + padded
        yield begin, end, entries
        at = library.find(MAGIC, end)


@functools.cache
def _zstd() -> ctypes.CDLL:
    library = ctypes.CDLL("libzstd.so.1")
    library.ZSTD_decompress.restype = ctypes.c_size_t
    library.ZSTD_decompress.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p, ctypes.c_size_t]
    return library


def _decompressed(code: bytes, raw_bytes: int) -> bytes:
    out = ctypes.create_string_buffer(raw_bytes)
    size = _zstd().ZSTD_decompress(out, raw_bytes, code, len(code))
    if size != raw_bytes:
        raise ValueError(
            f"an entry of a fatbin has {size} bytes after decompression, its header says {raw_bytes}"
        )
    return out.raw
