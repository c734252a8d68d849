"""Products with an epilogue in Python: the checks of a call and the call of the operator."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from . import _checks
from ._operands import Operands, chosen_kernel
from .epilogues import BoundEpilogue, Epilogue
from .epilogues.program import VECTORS
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
    _without("activation", terms.activation, None)
    _without("beta", terms.beta, 1.0)
    _without("out", terms.out, None)
    _checks.is_bool("batch_invariant", terms.batch_invariant)
    _checks.fast_accum(terms.use_fast_accum, x.a.dtype is gemm_ops.FP8)
    kernel = None
    if terms.kernel is not None:
        formats = gemm_ops.formats(x.a, x.scale_a, x.scale_b, x.b_rows)
        kernel = chosen_kernel(
            *(x, x.shape[-1], terms.kernel, formats, dtype, bound.program.halves),
            *(terms.batch_invariant, terms.use_fast_accum),
        )
    bias, c = _given(bound, "bias", terms.bias), _given(bound, "c", terms.c)
    program, name, device, n = bound.program, bound.epilogue.name, x.a.device, x.shape[-1]
    epilogue_ops.check_terms(program, name, bias, c, x.offs is not None)
    if bias is not None:
        groups = None if x.offs is None else x.offs.shape[0]
        bias = gemm_ops.check_bias(bias, n, device, function, groups)
    if c is not None:
        gemm_ops.check_c(c, (*x.shape[:-1], program.width(n)), dtype, device, function)
    aux = [bound.aux_dtypes.get(name, dtype) for name in bound.epilogue.aux]
    names = [name for kind in VECTORS for name in bound.epilogue.names(kind)]
    given = [bound.arguments[name] for name in names]
    inputs = epilogue_ops.check_inputs(
        program, names, given, x.shape, [dtype, *aux], x.offs, device, function
    )
    scalars = [
        gemm_ops.number(bound.epilogue.name_of("scalars", i), value) for i, value in enumerate(bound.scalars)
    ]
    a, b, *factors = x.leading()
    call = EpilogueCall(
        *(a, b, bound.epilogue.text, inputs, scalars, [DTYPES.index(dtype) for dtype in aux]),
        *(*factors, bias, c, terms.batch_invariant, terms.use_fast_accum, x.b_rows, kernel, dtype),
    )
    d, *others = operators.gemm_epilogue(*call)
    if not others:
        return cast(Tensor, d)
    return cast(Tensor, (d, dict(zip(bound.epilogue.aux, others, strict=True))))


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
