"""Products with an epilogue in Python: the checks of a call and the call of the operator."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from . import _checks
from ._operands import Operands, chosen_kernel
from .epilogues import BoundEpilogue, Epilogue
from .ops import epilogue as epilogue_ops
from .ops import gemm as gemm_ops
from .ops import operators
from .ops.epilogue import DTYPES, EpilogueCall

if TYPE_CHECKING:
    from ._products import Terms

__all__ = ["run"]


def run(function: str, x: Operands, dtype: torch.dtype, terms: Terms) -> Tensor:
    """The product of checked operands, and with auxiliary outputs (D, {name: tensor})."""
    bound = _bound(terms.epilogue)
    epilogue, program = bound.epilogue, bound.epilogue.program
    _without("activation", terms.activation, None)
    _without("beta", terms.beta, 1.0)
    _checks.is_bool("batch_invariant", terms.batch_invariant)
    if terms.use_fast_accum is not False:
        _checks.fast_accum(terms.use_fast_accum, x.a.dtype is gemm_ops.FP8)
    kernel = None
    if terms.kernel is not None:
        formats = gemm_ops.formats(x.a, x.b, x.scale_a, x.scale_b, x.b_rows)
        kernel = chosen_kernel(
            *(x, x.shape[-1], terms.kernel, formats, dtype, program.halves),
            *(terms.batch_invariant, terms.use_fast_accum),
        )
    bias, c = _given(bound, "bias", terms.bias), _given(bound, "c", terms.c)
    device, n = x.a.device, x.shape[-1]
    shape = (*x.shape[:-1], program.width(n))
    epilogue_ops.check_terms(program, epilogue.name, bias, c, x.offs is not None)
    if bias is not None:
        groups = None if x.offs is None else x.offs.shape[0]
        bias = gemm_ops.check_bias(bias, n, device, function, groups)
    if c is not None:
        gemm_ops.check_c(c, shape, dtype, device, function)
    outputs = _outputs(bound, terms.out, terms.out_dtype)
    dtypes = [dtype]
    for name in epilogue.aux:
        given = bound.aux_out.get(name)
        dtypes.append(bound.aux_dtypes.get(name, dtype) if given is None else given.dtype)
    tensors = [bound.arguments[name] for name in epilogue.inputs]
    inputs = epilogue_ops.check_inputs(
        program, epilogue.inputs, tensors, x.shape, dtypes, x.offs, device, function
    )
    if outputs:
        read = [*gemm_ops.tensors_read(x), *zip(epilogue.inputs, tensors, strict=True)]
        if bias is not None:
            read.append(("bias", bias))
        has_aux = bool(epilogue.aux)
        epilogue_ops.check_outputs(list(outputs.items()), shape, c, read, device, function, has_aux)
    call = EpilogueCall(
        *(x.a, x.b, epilogue.text, inputs, bound.scalars, [DTYPES.index(dtype) for dtype in dtypes[1:]]),
        *(*x.leading()[2:], bias, c, terms.batch_invariant, terms.use_fast_accum, x.b_rows, kernel, dtype),
    )
    written = _written(call, epilogue, outputs, shape, dtypes)
    if not epilogue.aux:
        return written[0]
    return cast(Tensor, (written[0], dict(zip(epilogue.aux, written[1:], strict=True))))


def _outputs(bound: BoundEpilogue, out: Tensor | None, out_dtype: torch.dtype | None) -> dict[str, Tensor]:
    """The outputs that are given, by their names in errors; their dtypes are those of outputs."""
    outputs: dict[str, Tensor] = {}
    if out is not None:
        outputs["out"] = _checks.is_tensor("out", out)
        if out_dtype is not None and out_dtype is not out.dtype:
            raise ValueError(
                f"out_dtype: got {out_dtype}, must be {out.dtype}, the dtype of out (or omitted)"
            )
    outputs |= {_of_aux(name): y for name, y in bound.aux_out.items()}
    for name, y in outputs.items():
        _checks.has_dtype(name, y, DTYPES)
    return outputs


def _of_aux(name: str) -> str:
    return f"aux_out[{name!r}]"


def _written(
    call: EpilogueCall,
    epilogue: Epilogue,
    given: dict[str, Tensor],
    shape: tuple[int, ...],
    dtypes: list[torch.dtype],
) -> list[Tensor]:
    """D and the auxiliary outputs of a checked call, of which some tensors may be given."""
    tensors = (call.a, call.b, call.offs, call.bias, call.c, *call.inputs, *given.values())
    is_direct = call.a.is_cuda and _checks.is_direct(tensors)
    if not given and not is_direct:
        return cast("list[Tensor]", operators.gemm_epilogue(*call))
    names = ["out", *map(_of_aux, epilogue.aux)]
    outputs = [
        given[name] if name in given else call.a.new_empty(shape, dtype=dtype)
        for name, dtype in zip(names, dtypes, strict=True)
    ]
    if is_direct:
        # Below the dispatcher, which converts all arguments to C++ and back, since the implementation is in
        # Python.
        epilogue_ops.compute_on_cuda(call, outputs)
    else:
        operators.gemm_epilogue_out(*call[:5], *call[6:-1], out=outputs[0], aux=outputs[1:])
    return outputs


def _bound(value: object) -> BoundEpilogue:
    if isinstance(value, Epilogue):
        return value()
    if not isinstance(value, BoundEpilogue):
        raise TypeError(
            f"epilogue: got {_checks.describe(value)}, must be a function decorated by fp4gemm.epilogue, "
            "called with its arguments"
        )
    return value


def _without(name: str, value: object, default: object) -> None:
    if value is not default and value != default:
        raise ValueError(f"{name}: got {_checks.describe(value)}, must be omitted with an epilogue")


def _given(bound: BoundEpilogue, name: str, value: Tensor | None) -> Tensor | None:
    """bias or c, which the product or the epilogue may be called with."""
    own = bound.arguments.get(name)
    if own is not None and value is not None:
        raise TypeError(
            f"{name}: got {_checks.describe(value)}, must be omitted: {name} of the epilogue is given"
        )
    return value if own is None else own
