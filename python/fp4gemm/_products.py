"""What fp4gemm.mm, scaled_mm, grouped_mm, scaled_grouped_mm and the products of training have in common."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple, TypedDict, TypeVar

import torch
from torch import Tensor

from . import _checks, _epilogues, activations, selection, support
from ._operands import Left, Operands, Right, chosen_kernel, of_containers
from ._operands_mx import of_mx
from .activations import ActivationName
from .containers._mx import MXTensor
from .epilogues import BoundEpilogue, Epilogue
from .ops import gemm as gemm_ops
from .ops import operators
from .ops.gemm import GemmCall

__all__ = ["GemmTerms", "Terms", "multiply", "run", "with_terms"]

_BETA = 1.0
_PACKED = ("nvfp4", "nvfp4")  # formats
_RULES = selection.RULES
_GEMM = operators.below_wrapper(operators.gemm)
_is_compiling = torch.compiler.is_compiling


class GemmTerms(TypedDict, total=False):
    """The keywords that every product accepts; :func:`fp4gemm.mm` documents them."""

    bias: Tensor | None
    activation: ActivationName | None
    c: Tensor | None
    beta: float
    out_dtype: torch.dtype | None
    out: Tensor | None
    batch_invariant: bool
    use_fast_accum: bool
    kernel: str | None
    epilogue: BoundEpilogue | Epilogue | None


class Terms(NamedTuple):
    """The keywords of :class:`GemmTerms`, with the defaults of those that are omitted."""

    bias: Tensor | None = None
    activation: str | None = None
    c: Tensor | None = None
    beta: float = _BETA
    out_dtype: torch.dtype | None = None
    out: Tensor | None = None
    batch_invariant: bool = False
    use_fast_accum: bool = False
    kernel: str | None = None
    epilogue: BoundEpilogue | Epilogue | None = None


_F = TypeVar("_F", bound=Callable[..., Any])


def with_terms(function: _F) -> _F:
    """Show the terms in the signature of a function that accepts them as ``**terms``."""
    own = inspect.signature(function)
    named = [p for p in own.parameters.values() if p.kind is not p.VAR_KEYWORD]
    types = GemmTerms.__annotations__
    named += [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=default,
            annotation=getattr(types[name], "__forward_arg__", types[name]),
        )
        for name, default in Terms._field_defaults.items()
    ]
    function.__signature__ = own.replace(parameters=named)  # type: ignore[attr-defined]
    return function


def completed(function: str, terms: GemmTerms) -> Terms:
    """The terms of a call of a function, with defaults."""
    try:
        return Terms(**terms)
    except TypeError:
        name = next(name for name in terms if name not in Terms._fields)
        raise TypeError(f"{function}() got an unexpected keyword argument {name!r}") from None


def multiply(
    function: str,
    names: tuple[str, str],
    a: Left,
    b: Right,
    offs: Tensor | None,
    is_grouped: bool,
    terms: GemmTerms,
) -> Tensor:
    """The product of containers, or of a plain a, for a function whose operands have these names."""
    every = completed(function, terms)
    dtype = gemm_ops.resolved_dtype(every.out_dtype, every.out)
    if isinstance(a, MXTensor) or isinstance(b, MXTensor):
        operands = of_mx(names, a, b, offs, is_grouped, dtype)
    else:
        operands = of_containers(function, names, a, b, offs, is_grouped, dtype)
    return run(function, operands, dtype, every)


def run(function: str, x: Operands, dtype: torch.dtype, terms: Terms) -> Tensor:
    """The product of operands that were checked, after the checks of the terms."""
    a, offs, shape = x.a, x.offs, x.shape
    mode, groups = ("mm", None) if offs is None else ("grouped_mm", offs.shape[0])
    formats = _PACKED
    if x.scale_a is None or x.scale_b is None or x.scale_a.dtype is not torch.float8_e4m3fn:
        formats = gemm_ops.formats(a, x.b, x.scale_a, x.scale_b, x.b_rows)
        support.ready_for(a, mode, formats)
    else:
        support.ready(a, mode)
    if terms.epilogue is not None:
        return _epilogues.run(function, x, dtype, terms)
    bias, activation_name, c, beta, out_dtype, out, batch_invariant, use_fast_accum, kernel, _ = terms
    n, is_gated = shape[-1], False
    more: dict[str, Any] = {"b_rows": x.b_rows, "out_dtype": dtype}
    if bias is not None:
        more["bias"] = gemm_ops.check_bias(bias, n, a.device, function, groups)
    if activation_name is not None:
        activation = activations.of_name(activation_name)
        more["activation"], is_gated = activation.number, activation.is_gated
        if is_gated:
            gemm_ops.check_gated(activation, n, dtype, c, x.is_ragged_k)
            shape = (*shape[:-1], activation.width(n))
    if beta is not _BETA:
        more["beta"] = gemm_ops.check_beta(beta, c)
    if batch_invariant is not False:
        _checks.is_bool("batch_invariant", batch_invariant)
        more["batch_invariant"] = batch_invariant
    if use_fast_accum is not False:
        _checks.fast_accum(use_fast_accum, formats[0] == "e4m3")
        more["use_fast_accum"] = use_fast_accum
    if kernel is not None or _RULES:
        more["kernel_name"] = chosen_kernel(
            x, n, kernel, formats, dtype, is_gated, batch_invariant, use_fast_accum
        )
    if out is not None:
        gemm_ops.check_out(out, shape, out_dtype, a.device, function)
    if c is not None:
        more["c"] = c
        gemm_ops.check_c(c, shape, dtype, a.device, function)
    call = GemmCall(*x.leading(), **more)
    if out is not None:
        try:
            operators.gemm_out(*call[:-1], out=out)  # all but out_dtype, which is that of out
        except RuntimeError:
            # On a GPU the C interface compares the addresses. Here the error gets the names of this function.
            gemm_ops.check_out_is_apart(out, call)
            raise
        return out
    result: Tensor = operators.gemm(*call) if _is_compiling() else _GEMM(*call)
    return result
