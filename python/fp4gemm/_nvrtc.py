"""One compilation by NVRTC; as a script, in a process of its own.

The script reads an object of JSON and writes the cubin. It is run by its path, without the package, whose
import would take longer than the compilation.
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Sequence

__all__ = ["compiled", "opened"]


def opened(names: Sequence[str]) -> ctypes.CDLL:
    """The last one of these libraries; those before it are ones that it opens by their names."""
    for name in names[:-1]:
        ctypes.CDLL(name, mode=ctypes.RTLD_GLOBAL)
    return ctypes.CDLL(names[-1])


def compiled(library: ctypes.CDLL, source: str, header: str, name: str, options: Sequence[str]) -> bytes:
    """The cubin of a source that includes a header by this name.

    Raises:
        RuntimeError: the text does not compile, with NVRTC's messages.
    """
    program = ctypes.c_void_p()

    def check(status: int) -> None:
        if status != 0:
            library.nvrtcGetErrorString.restype = ctypes.c_char_p
            what = (library.nvrtcGetErrorString(status) or b"").decode()
            size = ctypes.c_size_t()
            library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
            messages = ctypes.create_string_buffer(max(1, size.value))
            library.nvrtcGetProgramLog(program, messages)
            raise RuntimeError(
                f"fp4gemm: NVRTC could not compile an epilogue: {what}\n{messages.value.decode()}"
            )

    headers = (ctypes.c_char_p * 1)(header.encode())
    names = (ctypes.c_char_p * 1)(name.encode())
    check(
        library.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"fp4gemm.cu", 1, headers, names)
    )
    try:
        arguments = [option.encode() for option in options]
        check(
            library.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*arguments))
        )
        size = ctypes.c_size_t()
        check(library.nvrtcGetCUBINSize(program, ctypes.byref(size)))
        cubin = ctypes.create_string_buffer(size.value)
        check(library.nvrtcGetCUBIN(program, cubin))
        return cubin.raw
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def main() -> int:
    """The script; returns 1 if the text does not compile."""
    request = json.load(sys.stdin.buffer)
    library = opened(request.pop("libraries"))
    try:
        cubin = compiled(library, **request)
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 1
    sys.stdout.buffer.write(cubin)
    return 0


if __name__ == "__main__":
    sys.exit(main())
