"""The C interface of fp4gemm from Python without torch: memory, streams and graphs by cuda-python.

    pip install 'fp4gemm[cuda-python]'
    python examples/c_interface.py

It quantizes x and W, multiplies them by ``fp4gemm_gemm``, captures both quantizers and the product in a CUDA
graph, replays the graph with another x, and compares D with numpy. ctypes calls the library, whose structs
are declared below as fp4gemm.h declares them. A program in another language does the same.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import sys
from collections.abc import Callable
from ctypes import POINTER, byref, c_char_p, c_float, c_int, c_int64, c_size_t, c_uint, c_void_p
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

try:
    from cuda.bindings import runtime
except ImportError:
    runtime = None

BF16, SCALING_ROW = 0, 1  # fp4gemm_dtype_t, fp4gemm_scaling_t
NVFP4, FP16, PREPACKED = 0, 1, 3  # fp4gemm_format_t
ALPHA = 1.0 / (36 * 448 * 448)  # of two operands that fp4gemm_quantize made
TOLERANCE = 2.0**-7  # of an element of D: a rounding to bf16, in parts of the sum of its terms' magnitudes

# ---- the structs of fp4gemm.h


class Args(ctypes.Structure):
    """A struct that begins with its size."""

    def __init__(self, **fields: object) -> None:
        super().__init__(struct_size=ctypes.sizeof(self), **fields)


class Quantized(ctypes.Structure):
    """fp4gemm_quantized_t: one direction of a quantized matrix."""

    _fields_ = [
        ("codes", c_void_p),
        ("scales", c_void_p),
        ("amax", c_void_p),
        ("amax_given", c_void_p),
        ("hadamard", c_int),
        ("decoded", c_void_p),
        ("fp8", c_void_p),
    ]


class QuantizeArgs(Args):
    """fp4gemm_quantize_args_t. FP4GEMM_QUANTIZE_ARGS_INIT sets scaling, block_rows and e4m3_max."""

    _fields_ = [
        ("struct_size", c_size_t),
        ("m", c_int64),
        ("k", c_int64),
        ("x", c_void_p),
        ("x_row_stride", c_int64),
        ("x_dtype", c_int),
        ("scaling", c_int),
        ("row", Quantized),
        ("column", Quantized),
        ("block_rows", c_int),
        ("encode", c_int),
        ("four_over_six", c_int),
        ("fast_error", c_int),
        ("e4m3_max", c_int),
        ("hadamard_signs", c_uint),
        ("rng_state", c_void_p),
        ("offs", c_void_p),
        ("num_groups", c_int),
        ("x_rows", c_void_p),
        ("x_num_rows", c_int64),
        ("residual_channels", c_void_p),
        ("num_residual_channels", c_int),
    ]

    def __init__(self, **fields: object) -> None:
        super().__init__(scaling=SCALING_ROW, block_rows=1, e4m3_max=448, **fields)


class Operand(ctypes.Structure):
    """fp4gemm_operand_t."""

    _fields_ = [("data", c_void_p), ("scales", c_void_p), ("format", c_int)]


class Vector(ctypes.Structure):
    """fp4gemm_vector_t."""

    _fields_ = [("data", c_void_p), ("numel", c_int64), ("group_stride", c_int64)]


class GemmArgs(Args):
    """fp4gemm_gemm_args_t. FP4GEMM_GEMM_ARGS_INIT sets alpha and beta to 1."""

    _fields_ = [
        ("struct_size", c_size_t),
        ("m", c_int64),
        ("n", c_int64),
        ("k", c_int64),
        ("num_groups", c_int),
        ("ragged", c_int),
        ("offs", c_void_p),
        ("a", Operand),
        ("b", Operand),
        ("b_is_constant", c_int),
        ("alpha_row", Vector),
        ("alpha_col", Vector),
        ("alpha", c_float),
        ("alpha_groups", c_void_p),
        ("bias", Vector),
        ("activation", c_int),
        ("c", c_void_p),
        ("c_row_stride", c_int64),
        ("beta", c_float),
        ("d", c_void_p),
        ("d_row_stride", c_int64),
        ("out_dtype", c_int),
        ("batch_invariant", c_int),
        ("use_fast_accum", c_int),
        ("kernel", c_char_p),
        ("quantize_a", c_int),
        ("a_row_stride", c_int64),
        ("a_rows", c_void_p),
        ("a_num_rows", c_int64),
    ]

    def __init__(self, **fields: object) -> None:
        super().__init__(**{"alpha": 1.0, "beta": 1.0, **fields})


def opened() -> ctypes.CDLL:
    """libfp4gemm.so of the installed package, or of $FP4GEMM_LIBRARY_DIR.

    Raises:
        ImportError: neither is there.
    """
    spec = importlib.util.find_spec("fp4gemm")  # finds the package without importing it, and torch with it
    package = spec.submodule_search_locations if spec is not None else None
    folder = os.environ.get("FP4GEMM_LIBRARY_DIR") or (f"{package[0]}/lib" if package else None)
    if folder is None or not (Path(folder) / "libfp4gemm.so").is_file():
        raise ImportError(f"libfp4gemm.so: is not in {folder}, must be there or in FP4GEMM_LIBRARY_DIR")
    library = ctypes.CDLL(str(Path(folder) / "libfp4gemm.so"))
    library.fp4gemm_last_error.restype = c_char_p
    library.fp4gemm_quantize.argtypes = [POINTER(QuantizeArgs), c_int, c_void_p]
    library.fp4gemm_gemm_workspace_bytes.argtypes = [POINTER(GemmArgs), c_int, POINTER(c_size_t)]
    library.fp4gemm_gemm.argtypes = [POINTER(GemmArgs), c_void_p, c_size_t, c_int, c_void_p]
    return library


def succeed(library: ctypes.CDLL, status: int) -> None:
    """Raises RuntimeError with the library's sentence unless a call succeeded."""
    if status != 0:
        raise RuntimeError(library.fp4gemm_last_error().decode())


# ---- memory, a stream and graphs by cuda-python


def checked(result: tuple[Any, ...]) -> Any:
    """What a call of cuda-python returned beside its status; raises RuntimeError if it failed."""
    status, *values = result
    if status != runtime.cudaError_t.cudaSuccess:
        raise RuntimeError(f"{runtime.cudaGetErrorName(status)[1].decode()}")
    return values[0] if len(values) == 1 else values


def unusable() -> str | None:
    """Why device 0 cannot be used through cuda-python, or None."""
    if runtime is None:
        return "cuda-python is not installed (pip install 'fp4gemm[cuda-python]')"
    status, count = runtime.cudaGetDeviceCount()
    if status != runtime.cudaError_t.cudaSuccess or count == 0:
        return "there is no CUDA device"
    return None


class Gpu:
    """Memory of a device and a stream of it, both released at the end of a ``with`` block."""

    def __init__(self, device: int = 0) -> None:
        self.device = device
        checked(runtime.cudaSetDevice(device))
        self.stream = int(checked(runtime.cudaStreamCreate()))
        self._pointers: list[int] = []
        self._graphs: list[Any] = []

    def __enter__(self) -> Gpu:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Waits for the stream, and frees everything."""
        checked(runtime.cudaStreamSynchronize(self.stream))
        for graph in self._graphs:
            checked(runtime.cudaGraphExecDestroy(graph))
        for pointer in self._pointers:
            checked(runtime.cudaFree(pointer))
        checked(runtime.cudaStreamDestroy(self.stream))
        self._pointers, self._graphs = [], []

    def empty(self, num_bytes: int) -> int:
        """The address of so many bytes."""
        self._pointers.append(int(checked(runtime.cudaMalloc(max(1, num_bytes)))))
        return self._pointers[-1]

    def put(self, array: NDArray[Any], pointer: int | None = None) -> int:
        """Copies an array to the device, to new memory or to an address, and returns the address."""
        pointer = self.empty(array.nbytes) if pointer is None else pointer
        kind = runtime.cudaMemcpyKind.cudaMemcpyHostToDevice
        checked(runtime.cudaMemcpyAsync(pointer, array.ctypes.data, array.nbytes, kind, self.stream))
        checked(runtime.cudaStreamSynchronize(self.stream))  # the array may be gone when the copy begins
        return pointer

    def get(self, pointer: int, array: NDArray[Any]) -> NDArray[Any]:
        """Fills an array from the device, after all work on the stream."""
        kind = runtime.cudaMemcpyKind.cudaMemcpyDeviceToHost
        checked(runtime.cudaMemcpyAsync(array.ctypes.data, pointer, array.nbytes, kind, self.stream))
        checked(runtime.cudaStreamSynchronize(self.stream))
        return array

    def captured(self, work: Callable[[], None]) -> Callable[[], None]:
        """A call that replays as a graph what ``work`` launches on the stream."""
        mode = runtime.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
        checked(runtime.cudaStreamBeginCapture(self.stream, mode))
        try:
            work()
        finally:
            graph = checked(runtime.cudaStreamEndCapture(self.stream))
        executable = checked(runtime.cudaGraphInstantiate(graph, 0))
        checked(runtime.cudaGraphDestroy(graph))
        self._graphs.append(executable)
        return lambda: checked(runtime.cudaGraphLaunch(executable, self.stream))


# ---- a quantizer and a product


class Matrix:
    """A bf16 matrix (rows, k) on the device and its NVFP4 parts, with one amax for each row."""

    def __init__(self, gpu: Gpu, library: ctypes.CDLL, values: NDArray[np.float32]) -> None:
        self.gpu, self.library = gpu, library
        self.rows, self.k = values.shape
        scale_rows, scale_columns = -(-self.rows // 128) * 128, -(-self.k // 64) * 4
        self.x = gpu.put(to_bf16(values))
        self.codes = gpu.empty(self.rows * self.k // 2)
        self.scales = gpu.empty(scale_rows * scale_columns)
        self.amax = gpu.empty(4 * self.rows)

    def quantize(self) -> None:
        """Launches the quantizer on the stream."""
        row = Quantized(self.codes, self.scales, self.amax)
        args = QuantizeArgs(m=self.rows, k=self.k, x=self.x, x_row_stride=self.k, x_dtype=BF16, row=row)
        succeed(self.library, self.library.fp4gemm_quantize(byref(args), self.gpu.device, self.gpu.stream))

    def operand(self) -> Operand:
        """The codes and scales, for a product."""
        return Operand(self.codes, self.scales, NVFP4)

    def values(self) -> NDArray[np.float64]:
        """The quantized values, decoded on the host."""
        codes = self.gpu.get(self.codes, np.empty((self.rows, self.k // 2), np.uint8))
        amax = self.gpu.get(self.amax, np.empty(self.rows, np.float32))
        tile_columns = -(-self.k // 64)
        tiles = np.empty((-(-self.rows // 128), tile_columns, 32, 4, 4), np.uint8)
        plain = self.gpu.get(self.scales, tiles).transpose(0, 3, 2, 1, 4)
        scales = e4m3(plain.reshape(-1, tile_columns * 4)[: self.rows, : self.k // 16])
        nibbles = np.stack([codes & 15, codes >> 4], axis=-1).reshape(self.rows, self.k)
        magnitudes = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])[nibbles & 7]
        signs = np.where(nibbles & 8, -1.0, 1.0)
        decoded = signs * magnitudes * np.repeat(scales, 16, axis=1)
        return np.asarray(decoded * (amax.astype(np.float64) / 2688)[:, None])


def to_bf16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """The upper halves of floats: bf16, rounded toward zero."""
    return (np.ascontiguousarray(values).view(np.uint32) >> 16).astype(np.uint16)


def of_bf16(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    """The floats of bf16 numbers."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def e4m3(codes: NDArray[np.uint8]) -> NDArray[np.float64]:
    """The numbers of e4m3 codes without a sign."""
    exponent, mantissa = (codes >> 3).astype(np.int64), (codes & 7).astype(np.float64)
    return np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10))


class Product:
    """D (m, n) bf16 = A B^T, of matrices or of other operands with an amax for each row."""

    def __init__(
        self,
        library: ctypes.CDLL,
        shape: tuple[int, int, int],
        a: tuple[Operand, int],
        b: tuple[Operand, int],
        empty: Callable[[int], int],
        device: int = 0,
    ) -> None:
        """Allocates D and the workspace.

        Args:
            shape: m, n, k.
            a, b: an operand and the address of its amaxes.
            empty: allocates so many bytes on the device.
        """
        m, n, k = shape
        self.library, self.device = library, device
        self.d = empty(2 * m * n)
        self.args = GemmArgs(
            m=m, n=n, k=k, a=a[0], b=b[0], alpha=ALPHA, d=self.d, d_row_stride=n, out_dtype=BF16
        )
        self.args.alpha_row, self.args.alpha_col = Vector(a[1], m, 0), Vector(b[1], n, 0)
        size = c_size_t(0)
        succeed(library, library.fp4gemm_gemm_workspace_bytes(byref(self.args), device, byref(size)))
        self.workspace, self.workspace_bytes = empty(size.value), size.value

    def launch(self, stream: int) -> None:
        """Launches the product on a stream."""
        succeed(
            self.library,
            self.library.fp4gemm_gemm(
                byref(self.args), self.workspace, self.workspace_bytes, self.device, stream
            ),
        )


# ---- the example


def wrong(gpu: Gpu, x: Matrix, w: Matrix, product: Product) -> int:
    """How many elements of D are not the product of the quantized values but for a rounding."""
    got = of_bf16(gpu.get(product.d, np.empty((x.rows, w.rows), np.uint16)))
    a, b = x.values(), w.values()
    allowed = TOLERANCE * (np.abs(a) @ np.abs(b).T)
    return int((~(np.abs(got - a @ b.T) <= allowed)).sum())


def main() -> int:
    """Runs the example; returns 1 if a result is wrong."""
    reason = unusable()
    if reason is not None:
        print(f"skipped: {reason}")
        return 0
    library = opened()
    m, n, k = 300, 512, 1024
    random = np.random.default_rng(0)
    failed = 0
    with Gpu() as gpu:
        x, w = (Matrix(gpu, library, random.standard_normal((rows, k), dtype=np.float32)) for rows in (m, n))
        product = Product(
            library, (m, n, k), (x.operand(), x.amax), (w.operand(), w.amax), gpu.empty, gpu.device
        )

        def work() -> None:
            x.quantize()
            w.quantize()
            product.launch(gpu.stream)

        work()
        failed += wrong(gpu, x, w, product)
        print(f"{m} x {n} x {k}: {failed} of {m * n} elements are wrong")
        replay = gpu.captured(work)
        # Rows of other magnitudes, which their amaxes carry.
        other = random.standard_normal((m, k), dtype=np.float32) * np.exp2(np.arange(m) % 7)[:, None]
        gpu.put(to_bf16(other.astype(np.float32)), x.x)
        replay()
        again = wrong(gpu, x, w, product)
        print(f"the same from a graph, with another x: {again} of {m * n} elements are wrong")
        failed += again
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
