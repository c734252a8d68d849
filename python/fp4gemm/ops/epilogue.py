"""The operator gemm_epilogue: a product whose epilogue is a program (:mod:`fp4gemm.epilogues`)."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import _checks, _epilogue_library, _jit
from .._epilogue_library import EpilogueLibrary
from ..epilogues import cpp
from ..epilogues.program import VECTORS, Program, parse
from ..reference.chunks import fp32
from ..reference.gemm import Product, multiply
from ..reference.generated import GeneratedEpilogue
from . import gemm as gemm_ops
from ._call import Operator, accepts, narrowed
from .gemm import GemmCall

__all__ = ["OPERATORS", "EpilogueCall", "check_inputs", "check_terms", "gemm_epilogue"]

WITH_LIBRARIES = 10  # the least major compute capability whose kernels are compiled ahead of time
_FUNCTION = "fp4gemm.mm"
DTYPES = _checks.FLOAT_DTYPES  # by their numbers in aux_dtypes, those of fp4gemm_dtype_t


class EpilogueCall(NamedTuple):
    """``gemm_epilogue``: operands and terms as in :class:`~.gemm.GemmCall`, and a program with its inputs."""

    a: Tensor
    b: Tensor
    program: str
    inputs: list[Tensor]
    scalars: list[float]
    aux_dtypes: list[int]
    scale_a: Tensor | None = None
    scale_b: Tensor | None = None
    offs: Tensor | None = None
    alpha: float = 1.0
    alpha_groups: Tensor | None = None
    alpha_row: Tensor | None = None
    alpha_col: Tensor | None = None
    bias: Tensor | None = None
    c: Tensor | None = None
    batch_invariant: bool = False
    use_fast_accum: bool = False
    b_rows: int = 0
    kernel_name: str | None = None
    out_dtype: torch.dtype = torch.bfloat16

    @classmethod
    def of(
        cls,
        product: GemmCall,
        program: str,
        inputs: list[Tensor],
        scalars: list[float],
        aux_dtypes: list[int],
    ) -> EpilogueCall:
        """The call of a product, with its operands and terms, and a program."""
        own = {"program": program, "inputs": inputs, "scalars": scalars, "aux_dtypes": aux_dtypes}
        call: EpilogueCall = narrowed(cls, product, **own)
        return call

    def product(self) -> GemmCall:
        """The call of the product alone: its operands, factors and bias."""
        product: GemmCall = narrowed(GemmCall, self, c=None)
        return product


# ---- checks


def check_terms(program: Program, name: str, bias: object, c: object, is_grouped: bool) -> None:
    """Raise unless the bias, the c and the groups are given that the program takes, and no others."""
    for term, value in (("bias", bias), ("c", c)):
        if program.takes(term) and value is None:
            raise TypeError(f"{term}: got None, must be a tensor because {name} takes it")
        if not program.takes(term) and value is not None:
            raise TypeError(
                f"{term}: got {_checks.describe(value)}, must be None because {name} does not take it"
            )
    if program.count("groups") and not is_grouped:
        raise ValueError(f"offs: got None, must be the ends of groups because {name} has values by group")


def check_inputs(
    program: Program,
    names: Sequence[str],
    inputs: Sequence[object],
    shape: tuple[int, ...],
    out_dtypes: Sequence[torch.dtype],
    offs: Tensor | None,
    device: torch.device,
    function: str,
) -> list[Tensor]:
    """Check the tensors of the user and the width of the outputs.

    Args:
        program: the program. names: those of the inputs, for errors.
        inputs: rows, columns, groups and matrices, in this order.
        shape: that of the accumulator, (m, n) or (g, m, n).
        out_dtypes: those of D and the auxiliary outputs.

    Returns:
        The inputs, of which the vectors are float32.
    """
    kinds = [kind for kind in VECTORS for _ in range(program.count(kind))]
    if len(inputs) != len(kinds):
        raise ValueError(f"inputs: has {len(inputs)} tensors, must have {len(kinds)}: {', '.join(kinds)}")
    *lead, m, n = shape
    groups = [] if offs is None else [offs.shape[0]]
    width = n // 2 if program.pairs else n
    for dtype in out_dtypes:
        step = 16 // dtype.itemsize * (2 if program.halves else 1)
        if n % step:
            raise ValueError(f"b: n is {n}, must be a multiple of {step} for the epilogue and {dtype}")
    wanted: dict[str, list[tuple[int, ...]]] = {
        "rows": [(m,), *((g, m) for g in lead)],
        "columns": [(width,), *((g, width) for g in groups)],
        "groups": [(g,) for g in groups],
        "matrices": [(*lead, m, width)],
    }
    found = []
    for kind, name, value in zip(kinds, names, inputs, strict=True):
        x = _checks.is_tensor(name, value)
        _checks.has_dtype(name, x, _checks.FLOAT_DTYPES)
        if tuple(x.shape) not in wanted[kind]:
            raise ValueError(f"{name}: shape is {tuple(x.shape)}, must be {_checks.listing(wanted[kind])}")
        _checks.same_device(name, x, device, "the operands")
        _checks.no_grad(name, x, function)
        if kind == "matrices":
            gemm_ops.check_rows(name, x)
            found.append(x)
        else:
            _checks.is_contiguous(name, x)
            found.append(x.to(torch.float32))
    return found


def _parsed(call: EpilogueCall) -> tuple[Program, list[torch.dtype]]:
    """The program of a call that has what it takes, and the dtypes of D and of the auxiliary outputs."""
    if not isinstance(call.program, str):
        raise TypeError(f"program: got {_checks.describe(call.program)}, must be the text of a program")
    program = parse(call.program)
    for what, given, count in (
        ("scalars", call.scalars, program.count("scalars")),
        ("aux_dtypes", call.aux_dtypes, len(program.aux)),
    ):
        if len(given) != count:
            raise ValueError(f"{what}: has {len(given)} numbers, must have {count}")
    for number in call.aux_dtypes:
        _checks.is_one_of("aux_dtypes", number, range(len(DTYPES)))
    _checks.is_float_dtype("out_dtype", call.out_dtype)
    check_terms(program, "the program", call.bias, call.c, call.offs is not None)
    return program, [call.out_dtype, *(DTYPES[number] for number in call.aux_dtypes)]


def _names(call: EpilogueCall) -> list[str]:
    return [f"inputs[{i}]" for i in range(len(call.inputs))]


# ---- the reference


@accepts(EpilogueCall)
def gemm_epilogue(call: EpilogueCall) -> list[Tensor]:
    """D and auxiliary outputs: the outputs of a program, of acc = fl(sum_k a b) and its inputs, then a cast.

    The program reads acc with those of the factors alpha_row, alpha_col and alpha applied, in this order,
    that it does not read itself; a factor that is None is 1. Each operation rounds once to float32
    (:mod:`fp4gemm.epilogues.operations`), and each output once to its dtype.

    Args:
        a, b, scale_a, scale_b, offs, alpha, alpha_groups, alpha_row, alpha_col, bias: as for :func:`gemm`.
        program: the text of a program (:mod:`fp4gemm.epilogues.program`).
        inputs: its rows (m,), columns (n,), groups (g,) and matrices (m, n), in this order; float32, bfloat16
            or float16. For groups, columns may be (g, n); for ragged k, rows may be (g, m) and matrices are
            (g, m, n). With pairs n/2 in place of n.
        scalars: its numbers, rounded to float32.
        aux_dtypes: the dtypes of its auxiliary outputs: 0 bfloat16, 1 float16, 2 float32.
        bias, c: tensors if and only if the program reads them. c has the shape of D.
        batch_invariant, use_fast_accum, b_rows, kernel_name, out_dtype: as for :func:`gemm`.

    Returns:
        D and the auxiliary outputs, (m, n) or (g, m, n), or with n/2 columns if the program has one value for
        each pair of columns. Rows that belong to no group are not written.
    """
    return _by(call, multiply)


def _by(call: EpilogueCall, product: Product) -> list[Tensor]:
    program, dtypes = _parsed(call)
    plain, shape, terms = gemm_ops.checked(call.product())
    device, function = plain.a.device, gemm_ops.function_of(plain)
    inputs = check_inputs(program, _names(call), call.inputs, shape, dtypes, plain.offs, device, function)
    out_shape = (*shape[:-1], program.width(shape[-1]))
    if call.c is not None:
        gemm_ops.check_c(call.c, out_shape, call.out_dtype, device, function)
    outputs = [torch.empty(out_shape, dtype=dtype, device=device) for dtype in dtypes]
    tensors: dict[str, list[Tensor]] = {
        "scalars": [fp32(gemm_ops.number("scalars", x), device) for x in call.scalars],
        "aux": outputs[1:],
    }
    for kind in VECTORS:
        count = program.count(kind)
        tensors[kind], inputs = inputs[:count], inputs[count:]
    generated = GeneratedEpilogue(program, terms._replace(c=call.c), tensors)
    gemm_ops.compute(outputs[0], plain, generated, product)
    return outputs


# ---- compiled code on the CPU, CUDA, fake


@accepts(EpilogueCall)
def gemm_epilogue_compiled(call: EpilogueCall) -> list[Tensor]:
    """:func:`gemm_epilogue`, whose right operand is decoded a part at a time."""
    return _by(call, gemm_ops.multiply_compiled)


@accepts(EpilogueCall)
def gemm_epilogue_cuda(call: EpilogueCall) -> list[Tensor]:
    """:func:`gemm_epilogue` on a GPU, by a kernel that is compiled for the program."""
    program, dtypes = _parsed(call)
    header, form = _generated(call.program)
    capability = torch.cuda.get_device_capability(call.a.device)
    if capability[0] >= WITH_LIBRARIES:
        library = _epilogue_library.find(_hash(call.program), capability)
        return compute_by_library(library, call, program, form, dtypes)
    return _jit.launch(
        header, list(form), call.inputs, call.scalars, call.aux_dtypes, call.a, call.b, *call[6:]
    )


def refusal(library: EpilogueLibrary, call: EpilogueCall) -> str:
    """Why a library has no kernel for a call, or ""."""
    here = "for an epilogue in Python on this device"
    scales = (call.scale_a, call.scale_b)
    if not all(x is not None and x.dtype in _checks.SCALE_DTYPES for x in scales):
        return f"a, b: must both be NVFP4 codes with scales {here}"
    if gemm_ops.is_ragged_k(call.product()):
        return f"offs: the groups divide k, must divide m {here}"
    if call.kernel_name is not None:
        return f"kernel: got {call.kernel_name!r}, must be None {here}"
    mode = "dense" if call.offs is None else "grouped"
    if mode not in library.modes:
        return f"offs: {library.path.name} was built for {library.modes[0]} products alone"
    if call.out_dtype not in library.dtypes:
        return f"out_dtype: got {call.out_dtype}, must be {_checks.listing(library.dtypes)} as built"
    return ""


def compute_by_library(
    library: EpilogueLibrary,
    call: EpilogueCall,
    program: Program,
    form: Sequence[int],
    dtypes: Sequence[torch.dtype],
) -> list[Tensor]:
    """D and auxiliary outputs by a library that was compiled ahead of time, on the device of the operands."""
    if reason := refusal(library, call):
        raise NotImplementedError(reason)
    product = gemm_ops.checked_operands(call.product())
    shape = gemm_ops.checked_shape(product, call.out_dtype)
    alpha, bias, device = gemm_ops.check_alpha(product, _FUNCTION), product.bias, product.a.device
    groups = None if product.offs is None else product.offs.shape[0]
    if bias is not None:
        bias = gemm_ops.check_bias(bias, shape[-1], device, _FUNCTION, groups)
    inputs = check_inputs(program, _names(call), call.inputs, shape, dtypes, product.offs, device, _FUNCTION)
    out_shape = (shape[0], program.width(shape[1]))
    if call.c is not None:
        gemm_ops.check_c(call.c, out_shape, call.out_dtype, device, _FUNCTION)
    outputs = [product.a.new_empty(out_shape, dtype=dtype) for dtype in dtypes]
    operands = _epilogue_library.Operands(
        *(product.a, product.b, product.scale_a, product.scale_b, product.offs, alpha),
        *(product.alpha_groups, product.alpha_row, product.alpha_col, bias, call.c),
    )
    scalars = [gemm_ops.number("scalars", x) for x in call.scalars]
    _epilogue_library.compute(library, operands, form, inputs, scalars, outputs)
    return outputs


@functools.lru_cache(maxsize=1024)
def _hash(text: str) -> str:
    return parse(text).hash


@functools.lru_cache(maxsize=1024)
def _generated(text: str) -> tuple[str, tuple[int, ...]]:
    """The C++ header of a program, and the parameter ``form`` of the operator ``gemm_generated``."""
    program = parse(text)
    terms = (int(program.takes("bias")), int(program.takes("c")))
    counts = (program.count(kind) for kind in VECTORS)
    return cpp.header(program), (int(program.pairs), len(program.results), *terms, *counts)


@accepts(EpilogueCall)
def gemm_epilogue_fake(call: EpilogueCall) -> list[Tensor]:
    program, dtypes = _parsed(call)
    *lead, n = gemm_ops.fake_shape(call.product())
    return [call.a.new_empty((*lead, program.width(n)), dtype=dtype) for dtype in dtypes]


def gemm_epilogue_flops(*args: Any, out_val: Any = None, out: Any = None, **kwargs: Any) -> int:
    """2 m n k, as of gemm."""
    return gemm_ops.gemm_flops(*EpilogueCall(*args, **kwargs).product())


OPERATORS = {
    "gemm_epilogue": Operator(
        EpilogueCall,
        gemm_epilogue,
        gemm_epilogue_fake,
        gemm_epilogue_compiled,
        gemm_epilogue_flops,
        gemm_epilogue_cuda,
    ),
}
