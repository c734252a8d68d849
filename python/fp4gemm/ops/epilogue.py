"""The operator gemm_epilogue: a product whose epilogue is a program (:mod:`fp4gemm.epilogues`)."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
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
from ._call import Operator, accepts, has_parameters, narrowed, parameters_of
from .gemm import GemmCall

__all__ = [
    "OPERATORS",
    "EpilogueCall",
    "check_inputs",
    "check_outputs",
    "check_terms",
    "compute_on_cuda",
    "gemm_epilogue",
    "gemm_epilogue_out",
]

WITH_LIBRARIES = 10  # the least major compute capability whose kernels are compiled ahead of time
_FUNCTION = "fp4gemm.mm"
DTYPES = _checks.FLOAT_DTYPES  # by their numbers in aux_dtypes, those of fp4gemm_dtype_t


class EpilogueCall(NamedTuple):
    """``gemm_epilogue``: operands and terms as in :class:`~.gemm.GemmCall`, and a program with its inputs.

    ``gemm_epilogue_out`` has ``out`` in place of out_dtype and ``aux`` in place of aux_dtypes.
    """

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


_WITHOUT_DTYPES = [name for name in EpilogueCall._fields if name not in ("aux_dtypes", "out_dtype")]


def _given_outputs(args: tuple[Any, ...], kwargs: dict[str, Any]) -> EpilogueCall:
    """The call of the arguments of ``gemm_epilogue_out``, with the dtypes of its outputs."""
    given = dict(zip(_WITHOUT_DTYPES, args, strict=False)) | kwargs
    out, aux = given.pop("out"), given.pop("aux")
    if not isinstance(aux, list | tuple):
        raise TypeError(f"aux: got {_checks.describe(aux)}, must be a list of tensors")
    for name, x in [("out", out), *((f"aux[{i}]", x) for i, x in enumerate(aux))]:
        _checks.has_dtype(name, _checks.is_tensor(name, x), DTYPES)
    program = given.get("program")
    if isinstance(program, str) and len(aux) != (count := len(parse(program).aux)):
        raise ValueError(f"aux: has {len(aux)} tensors, must have {count}")
    dtypes = [DTYPES.index(x.dtype) for x in aux]
    return EpilogueCall(**given, aux_dtypes=dtypes, out_dtype=out.dtype)


def _accepts_outputs(
    function: Callable[[EpilogueCall, Tensor, list[Tensor]], None],
) -> Callable[..., None]:
    """Turn a function of a call and its outputs into one with the parameters of ``gemm_epilogue_out``."""

    @functools.wraps(function)
    def with_parameters(*args: Any, **kwargs: Any) -> None:
        function(_given_outputs(args, kwargs), kwargs["out"], kwargs["aux"])

    shared = [p for p in parameters_of(EpilogueCall) if p.name in _WITHOUT_DTYPES]
    outputs = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=kind)
        for name, kind in (("out", "Tensor"), ("aux", "list[Tensor]"))
    ]
    has_parameters(with_parameters, [*shared, *outputs], function)
    return with_parameters


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
    kinds = program.vectors
    if len(inputs) != len(kinds):
        raise ValueError(f"inputs: has {len(inputs)} tensors, must have {len(kinds)}: {', '.join(kinds)}")
    n = shape[-1]
    for dtype in out_dtypes:
        step = 16 // dtype.itemsize * (2 if program.halves else 1)
        if n % step:
            raise ValueError(f"b: n is {n}, must be a multiple of {step} for the epilogue and {dtype}")
    found = []
    for kind, name, value in zip(kinds, names, inputs, strict=True):
        x = _checks.is_tensor(name, value)
        _checks.has_dtype(name, x, _checks.FLOAT_DTYPES)
        wanted = _shapes(kind, shape, program.pairs, offs)
        if x.shape not in wanted:
            raise ValueError(f"{name}: shape is {tuple(x.shape)}, must be {_checks.listing(wanted)}")
        _checks.same_device(name, x, device, "the operands")
        _checks.no_grad(name, x, function)
        if kind == "matrices":
            gemm_ops.check_rows(name, x)
            found.append(x)
        else:
            _checks.is_contiguous(name, x)
            found.append(x if x.dtype is torch.float32 else x.to(torch.float32))
    return found


def _shapes(
    kind: str, shape: tuple[int, ...], pairs: bool, offs: Tensor | None
) -> tuple[tuple[int, ...], ...]:
    """The shapes that an input may have, by the shape of the accumulator."""
    *lead, m, n = shape
    width = n // 2 if pairs else n
    if kind == "matrices":
        return ((*lead, m, width),)
    if kind == "rows":
        return ((m,), *((g, m) for g in lead))
    groups = () if offs is None else (offs.shape[0],)
    return ((width,), *((g, width) for g in groups)) if kind == "columns" else (groups,)


def check_outputs(
    outputs: Sequence[tuple[str, Tensor]],
    shape: tuple[int, ...],
    c: Tensor | None,
    read: Sequence[tuple[str, Tensor]],
    device: torch.device,
    function: str,
    has_aux: bool,
) -> None:
    """Check tensors that are to be written: D, which is called "out", and auxiliary outputs.

    No output may overlap another one or a tensor that is read. c may be D itself if there are no auxiliary
    outputs: a kernel may write D before it reads c for an auxiliary output of another dtype.

    Args:
        outputs: the names and the tensors, D and then the auxiliary ones, all or some of them.
        shape: theirs. c, read: what the product reads, after their checks.
        has_aux: whether the product has auxiliary outputs, also if none of them is in ``outputs``.
    """
    for i, (name, x) in enumerate(outputs):
        gemm_ops.check_out(x, shape, None, device, function, name)
        others = [*outputs[:i], *read]
        if c is not None:
            if name == "out" and not has_aux:
                _checks.no_overlap(c, x)
            else:
                others.append(("c", c))
        gemm_ops.check_apart(name, x, others)


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


def _check_named(
    outputs: Sequence[Tensor],
    shape: tuple[int, ...],
    call: EpilogueCall,
    program: Program,
    inputs: Sequence[Tensor],
    function: str,
) -> None:
    """:func:`check_outputs` with the names of the operator's parameters."""
    named = [("out", outputs[0]), *((f"aux[{i}]", x) for i, x in enumerate(outputs[1:]))]
    read = [*gemm_ops.tensors_read(call), *zip(_names(call), inputs, strict=True)]
    check_outputs(named, shape, call.c, read, call.a.device, function, len(outputs) > 1)


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


@_accepts_outputs
def gemm_epilogue_out(call: EpilogueCall, out: Tensor, aux: list[Tensor]) -> None:
    """Write the results of :func:`gemm_epilogue` to out and aux, whose dtypes are the types of the outputs.

    Rows that belong to no group are not written.
    """
    _by(call, multiply, [out, *aux])


def _by(call: EpilogueCall, product: Product, outputs: list[Tensor] | None = None) -> list[Tensor]:
    program, dtypes = _parsed(call)
    plain, shape, terms = gemm_ops.checked(call.product())
    device, function = plain.a.device, gemm_ops.function_of(plain)
    inputs = check_inputs(program, _names(call), call.inputs, shape, dtypes, plain.offs, device, function)
    out_shape = (*shape[:-1], program.width(shape[-1]))
    if call.c is not None:
        gemm_ops.check_c(call.c, out_shape, call.out_dtype, device, function)
    if outputs is None:
        outputs = [torch.empty(out_shape, dtype=dtype, device=device) for dtype in dtypes]
    else:
        _check_named(outputs, out_shape, call, program, inputs, function)
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


@_accepts_outputs
def gemm_epilogue_out_compiled(call: EpilogueCall, out: Tensor, aux: list[Tensor]) -> None:
    """:func:`gemm_epilogue_out`, whose right operand is decoded a part at a time."""
    _by(call, gemm_ops.multiply_compiled, [out, *aux])


@accepts(EpilogueCall)
def gemm_epilogue_cuda(call: EpilogueCall) -> list[Tensor]:
    """:func:`gemm_epilogue` on a GPU, by a kernel that is compiled for the program."""
    program, dtypes = _parsed(call)
    *lead, n = gemm_ops.shape_of(call.product())
    outputs = [call.a.new_empty((*lead, program.width(n)), dtype=dtype) for dtype in dtypes]
    compute_on_cuda(call, outputs)
    return outputs


@_accepts_outputs
def gemm_epilogue_out_cuda(call: EpilogueCall, out: Tensor, aux: list[Tensor]) -> None:
    """:func:`gemm_epilogue_out` on a GPU, by a kernel that is compiled for the program."""
    _parsed(call)
    compute_on_cuda(call, [out, *aux])


def compute_on_cuda(call: EpilogueCall, outputs: list[Tensor]) -> None:
    """Write D and the auxiliary outputs of a call with a valid program, whose tensors are on a GPU."""
    generated = _generated(call.program)
    capability = _capability(call.a.get_device())
    if capability[0] >= WITH_LIBRARIES:
        library = _epilogue_library.find(generated.hash, capability)
        compute_by_library(library, call, generated, outputs)
        return
    header, form, (out, *aux) = generated.header, generated.form, outputs
    _jit.launch(header, form, call.inputs, call.scalars, out, aux, call.a, call.b, *call[6:-1])


@functools.cache
def _capability(device: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


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
    library: EpilogueLibrary, call: EpilogueCall, generated: Generated, outputs: list[Tensor]
) -> None:
    """Write D and the auxiliary outputs by a library that was compiled ahead of time."""
    if reason := refusal(library, call):
        raise NotImplementedError(reason)
    program, dtypes = _parsed(call)
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
    _check_named(outputs, out_shape, call, program, inputs, _FUNCTION)
    operands = _epilogue_library.Operands(
        *(product.a, product.b, product.scale_a, product.scale_b, product.offs, alpha),
        *(product.alpha_groups, product.alpha_row, product.alpha_col, bias, call.c),
    )
    scalars = [gemm_ops.number("scalars", x) for x in call.scalars]
    _epilogue_library.compute(library, operands, generated.form, inputs, scalars, outputs)


class Generated(NamedTuple):
    """What a GPU needs of a program."""

    header: str  # the C++ header
    form: list[int]  # the parameter of the operator ``gemm_generated``
    hash: str


@functools.lru_cache(maxsize=1024)
def _generated(text: str) -> Generated:
    program = parse(text)
    terms = (int(program.takes("bias")), int(program.takes("c")))
    counts = (program.count(kind) for kind in VECTORS)
    form = [int(program.pairs), len(program.results), *terms, *counts]
    return Generated(cpp.header(program), form, program.hash)


@accepts(EpilogueCall)
def gemm_epilogue_fake(call: EpilogueCall) -> list[Tensor]:
    program, dtypes = _parsed(call)
    *lead, n = gemm_ops.fake_shape(call.product())
    return [call.a.new_empty((*lead, program.width(n)), dtype=dtype) for dtype in dtypes]


@_accepts_outputs
def gemm_epilogue_out_fake(call: EpilogueCall, out: Tensor, aux: list[Tensor]) -> None:
    _parsed(call)
    gemm_ops.fake_shape(call.product())


def gemm_epilogue_flops(*args: Any, out_val: Any = None, out: Any = None, **kwargs: Any) -> int:
    """2 m n k, as of gemm."""
    return gemm_ops.gemm_flops(*EpilogueCall(*args, **kwargs).product())


def gemm_epilogue_out_flops(*args: Any, out_val: Any = None, **kwargs: Any) -> int:
    """2 m n k, as of gemm."""
    return gemm_ops.gemm_flops(*_given_outputs(args, kwargs).product())


OPERATORS = {
    "gemm_epilogue": Operator(
        EpilogueCall,
        gemm_epilogue,
        gemm_epilogue_fake,
        gemm_epilogue_compiled,
        gemm_epilogue_flops,
        gemm_epilogue_cuda,
    ),
    "gemm_epilogue_out": Operator(
        EpilogueCall,
        gemm_epilogue_out,
        gemm_epilogue_out_fake,
        gemm_epilogue_out_compiled,
        gemm_epilogue_out_flops,
        gemm_epilogue_out_cuda,
    ),
}
