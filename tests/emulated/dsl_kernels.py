"""NVIDIA's NVFP4 GEMMs in the CUTLASS DSL, compiled for arguments on the emulated device.

The DSL reads its environment when this module imports it, and the annotations of its functions as objects,
so that this module does not postpone their evaluation.
"""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import cutlass
import torch
from cuda.bindings.driver import CUstream
from cutlass import cute
from cutlass.cute.runtime import make_ptr
from problems import Problem
from ptxemu.emulator import DeviceArray, Emulator

CODES, SCALES, NUMBERS = cutlass.Float4E2M1FN, cutlass.Float8E4M3FN, cutlass.BFloat16
BLOCK = 16  # elements with one scale
OPERANDS = (CODES, CODES, SCALES, SCALES, NUMBERS)  # a, b, their scales, d
TABLES = (cutlass.Int32, cutlass.Int32, cutlass.Int64, cutlass.Int64, cutlass.Int64)
MAPS = 5  # the tensor maps of a CTA of the grouped kernel, of 16 numbers each


def _pointers(types: tuple[Any, ...], addresses: list[int]) -> list[Any]:
    """The kernels ask for scales and vectors at multiples of 32 bytes, and for tensor maps at ones of 128."""
    align = {SCALES: 32, cutlass.Float32: 32, cutlass.Int64: 128}
    return [
        make_ptr(kind, at, cute.AddressSpace.gmem, assumed_align=align.get(kind, 16))
        for kind, at in zip(types, addresses, strict=True)
    ]


def _row_major(pointer: Any, shape: tuple[Any, ...]) -> Any:
    return cute.make_tensor(pointer, cute.make_ordered_layout(shape, order=tuple(range(len(shape)))[::-1]))


def _matrix(pointer: Any, rows: Any, columns: Any) -> Any:
    return cute.make_tensor(pointer, cute.make_ordered_layout((rows, columns, 1), order=(1, 0, 2)))


def _compile(host: Callable[..., None], *arguments: object) -> Callable[..., None]:
    compiled: Any = cute.compile(host, *arguments)
    compiled.__dict__["num_devices"] = 1  # it would ask the driver
    return compiled


def dense_100(
    module: ModuleType, tile: tuple[int, ...], cluster: tuple[int, int], num_sms: int
) -> Callable[[list[list[DeviceArray]], list[Problem]], None]:
    """dense_blockscaled_gemm_persistent.py, which has host code for pointers."""
    kernel = module.Sm100BlockScaledPersistentDenseGemmKernel(BLOCK, tile, cluster)
    clusters, stream = num_sms // (cluster[0] * cluster[1]), CUstream(0)
    compiled = module.scaled_mm(kernel, CODES, CODES, NUMBERS, SCALES, "k", "k", "n", clusters, stream)
    compiled.__dict__["num_devices"] = 1

    def launch(arrays: list[list[DeviceArray]], problems: list[Problem]) -> None:
        (operands,), (problem,) = arrays, problems
        pointers = _pointers(OPERANDS, [array.pointer for array in operands])
        compiled(*pointers, (problem.m, problem.n, problem.k, 1), stream)

    return launch


def dense_120(
    module: ModuleType, tile: tuple[int, ...], epilogue: tuple[int, int], num_sms: int
) -> Callable[[list[list[DeviceArray]], list[Problem]], None]:
    """dense_blockscaled_gemm_persistent_cooperative.py and _pingpong.py."""
    kernel = module.Sm120BlockScaledGemmKernel(cutlass.Float32, BLOCK, tile, epilogue)
    stream = CUstream(0)

    @cute.jit
    def host(a, b, scales_a, scales_b, d, m, n, k, ctas: cutlass.Constexpr, stream):
        n, k = cute.assume(n, 32), cute.assume(k, 32)
        scales = [cute.make_tensor(pointer, cute.make_layout(1)) for pointer in (scales_a, scales_b)]
        kernel(_matrix(a, m, k), _matrix(b, n, k), *scales, _matrix(d, m, n), ctas, stream)

    sizes = [cutlass.Int32(0)] * 3
    compiled = _compile(host, *_pointers(OPERANDS, [0] * 5), *sizes, num_sms, stream)

    def launch(arrays: list[list[DeviceArray]], problems: list[Problem]) -> None:
        (operands,), (problem,) = arrays, problems
        pointers = _pointers(OPERANDS, [array.pointer for array in operands])
        compiled(*pointers, problem.m, problem.n, problem.k, stream)

    return launch


def grouped_100(
    module: ModuleType,
    tile: tuple[int, ...],
    cluster: tuple[int, int],
    num_sms: int,
    num_groups: int,
    emulator: Emulator,
) -> Callable[[list[list[DeviceArray]], list[Problem]], None]:
    """grouped_blockscaled_gemm.py: sizes, strides and addresses of the groups are read from device memory."""
    kernel = module.Sm100GroupedBlockScaledGemmKernel(BLOCK, tile, cluster)
    clusters, stream = num_sms // (cluster[0] * cluster[1]), CUstream(0)

    # The first five tensors give the kernel its types and which dimension is contiguous.
    @cute.jit
    def host(
        a, b, scales_a, scales_b, d, m, n, k, sizes, strides, pointers, scale_pointers, maps,
        groups: cutlass.Constexpr, buffers: cutlass.Constexpr, clusters: cutlass.Constexpr, stream,
    ):  # fmt: skip
        n, k = cute.assume(n, 32), cute.assume(k, 32)
        first = [_matrix(*of) for of in ((a, m, k), (b, n, k), (d, m, n), (scales_a, m, k), (scales_b, n, k))]
        shapes = ((sizes, 4), (strides, 3, 2), (pointers, 3), (scale_pointers, 2))
        tables = [_row_major(pointer, (groups, *shape)) for pointer, *shape in shapes]
        kernel(*first, groups, *tables, clusters, _row_major(maps, (buffers, MAPS, 16)), clusters, stream)

    compiled = _compile(
        host,
        *_pointers(OPERANDS, [0] * 5),
        *[cutlass.Int32(0)] * 3,
        *_pointers(TABLES, [0] * 5),
        num_groups,
        num_sms,
        clusters,
        stream,
    )
    maps = emulator.empty((num_sms, MAPS, 16), torch.int64)

    def launch(arrays: list[list[DeviceArray]], problems: list[Problem]) -> None:
        sizes = [(p.m, p.n, p.k) for p in problems]
        addresses = [[array.pointer for array in operands] for operands in arrays]
        tables = [
            emulator.upload(torch.tensor([[m, n, k, 1] for m, n, k in sizes], dtype=torch.int32)),
            emulator.upload(torch.tensor([[[k, 1], [k, 1], [n, 1]] for m, n, k in sizes], dtype=torch.int32)),
            emulator.upload(torch.tensor([[a, b, d] for a, b, _, _, d in addresses])),
            emulator.upload(torch.tensor([[a, b] for _, _, a, b, _ in addresses])),
            maps,
        ]
        compiled(
            *_pointers(OPERANDS, addresses[0]),
            *sizes[0],
            *_pointers(TABLES, [table.pointer for table in tables]),
            stream,
        )
        emulator.synchronize()  # the tables are freed

    return launch


def _frost_module(family: str, config: str | None, num_sms: int, problem: Problem) -> Any:
    """The source that cuDNN's FROST engine generates for D = alpha_col (alpha_row (A B^T)), as a module.

    FROST asks the driver for the device's properties, which are given here. config: a name of its catalog of
    tiles, or None for its own choice.
    """
    import cudnn
    from cudnn import _device
    from cudnn.frost import device, occupancy

    capability, shared = ((10, 0), 232448) if family == "sm100" else ((12, 0), 101376)
    vars(_device.device_info(0)).update(
        compute_capability=capability,
        sm_count=num_sms,
        shared_memory_per_block_optin=shared,
        oversized_shared_memory_per_block=0,
        l2_cache_bytes=1 << 26,
        device_name="emulator",
    )
    for module in (_device, device, occupancy):
        module.is_available = lambda: True
    _device.device_count = device.device_count = lambda: 1
    occupancy._OCCUPANCY_MAPS[0] = [num_sms // size for size in range(1, 17)]

    kinds, layout = cudnn.data_type, cudnn.tensor_reordering.F8_128x4
    m, n, k = problem.m, problem.n, problem.k
    rows_a, rows_b, words = -(-m // 128) * 128, -(-n // 128) * 128, -(-k // 64) * 4
    graph = cudnn.pygraph(io_data_type=kinds.FLOAT, compute_data_type=kinds.FLOAT)

    def tensor(name: str, dim: list[int], stride: list[int], kind: Any, **options: object) -> Any:
        return graph.tensor(name=name, dim=dim, stride=stride, data_type=kind, **options)

    a = tensor("a", [1, m, k], [m * k, k, 1], kinds.FP4_E2M1)
    b = tensor("b", [1, k, n], [n * k, 1, k], kinds.FP4_E2M1)
    scales = {"kind": kinds.FP8_E4M3, "reordering_type": layout}
    scale_a = tensor("scale_a", [1, rows_a, words], [rows_a * words, words, 1], **scales)
    scale_b = tensor("scale_b", [1, words, rows_b], [rows_b * words, 1, words], **scales)
    row = tensor("alpha_row", [1, m, 1], [m, 1, 1], kinds.FLOAT)
    col = tensor("alpha_col", [1, 1, n], [n, n, 1], kinds.FLOAT)
    values_a = graph.block_scale_dequantize(input=a, descale=scale_a, block_size=[1, BLOCK])
    values_b = graph.block_scale_dequantize(input=b, descale=scale_b, block_size=[BLOCK, 1])
    d = graph.mul(a=graph.mul(a=graph.matmul(A=values_a, B=values_b), b=row), b=col)
    d.set_output(True).set_data_type(kinds.BFLOAT16)

    from cudnn.gemm.frost import compiler, tile_config
    from cudnn.gemm.frost.graph_analyzer import analyze

    made: list[Any] = []
    import_kernel = compiler._import_kernel

    def imported(source: str) -> Any:
        module = import_kernel(source)
        module.compile = lambda: None  # the call of its host code takes pointers, below
        made.append(module)
        return module

    compiler._import_kernel = imported
    with device.build_device(0):
        chosen = tile_config.by_name(config) if config else compiler.plan_config(analyze(graph))
        compiler.jit_from_cudnn_graph(graph, config=chosen)
    return made[0]


def frost(
    family: str, config: str | None, num_sms: int, problem: Problem
) -> Callable[[list[list[DeviceArray]], list[Problem]], None]:
    """The kernel of cuDNN's FROST engine for a problem, with both scale vectors in its epilogue."""
    module = _frost_module(family, config, num_sms, problem)
    stream, packed = CUstream(0), cutlass.Float4E2M1FNx2
    types = (packed, packed, SCALES, SCALES, NUMBERS, cutlass.Float32, cutlass.Float32)
    d_is_last = family == "sm100"

    @cute.jit
    def host(a, b, scales_a, scales_b, d, row, col, m, n, k, stream):
        half = k // 2  # two codes are one element
        sizes = (m, n, k, 1, half, 1, m * half, half, 1, n * half, n, 1, m * n)
        scales = [cute.make_tensor(one, cute.make_layout((1, 1, 1))) for one in (scales_a, scales_b)]
        vectors = [
            cute.make_tensor(row, cute.make_layout((1, m, 1), stride=(m, 1, 1))),
            cute.make_tensor(col, cute.make_layout((1, 1, n), stride=(n, n, 1))),
        ]
        result = _matrix(d, m, n)
        rest = [*vectors, result] if d_is_last else [result, *vectors]
        module._host(sizes, _matrix(a, m, half), _matrix(b, n, half), *scales, *rest, stream)

    compiled = _compile(host, *_pointers(types, [0] * 7), *[cutlass.Int64(0)] * 3, stream)

    def launch(arrays: list[list[DeviceArray]], problems: list[Problem]) -> None:
        (operands,), (problem,) = arrays, problems
        pointers = _pointers(types, [array.pointer for array in operands])
        compiled(*pointers, problem.m, problem.n, problem.k, stream)

    return launch
