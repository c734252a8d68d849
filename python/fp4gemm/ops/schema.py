"""The parameters of every torch operator: one NamedTuple for each, in the order of its schema.

The facade builds these calls, and the CPU implementation, the fake implementations and
:mod:`fp4gemm.reference` receive them, so that no parameter list is written down a second time in Python. The
schemas themselves are in cpp/torch/ops.cpp; a test compares the two: names, order, types and defaults.
"""

from __future__ import annotations

import collections
import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor

from .rank_schema import RANK_SCHEMAS
from .train_schema import TRAIN_SCHEMAS

__all__ = [
    "SCHEMAS",
    "CombineCall",
    "DequantizeCall",
    "ExpertsCall",
    "GemmCall",
    "LinearCall",
    "MXFP8DequantizeCall",
    "MXFP8QuantizeCall",
    "PackedCall",
    "QuantizeBothCall",
    "QuantizeCall",
    "QuantizeDecodedCall",
    "QuantizeSearchedCall",
    "QuantizeStackCall",
    "RmsNormQuantizeCall",
    "RouteCall",
    "SiluAndMulQuantizeCall",
    "UnprepackCall",
    "ZeroOutsideGroupsCall",
    "accepts",
    "accepts_out",
    "narrowed",
]


class GemmCall(NamedTuple):
    """``gemm``, dense (offs is None) or grouped. ``gemm_out`` has ``out`` in place of out_dtype."""

    a: Tensor
    b: Tensor
    scale_a: Tensor | None = None
    scale_b: Tensor | None = None
    offs: Tensor | None = None
    alpha: float = 1.0
    alpha_groups: Tensor | None = None
    alpha_row: Tensor | None = None
    alpha_col: Tensor | None = None
    bias: Tensor | None = None
    activation: int = 0
    c: Tensor | None = None
    beta: float = 1.0
    batch_invariant: bool = False
    b_rows: int = 0  # n of a prepacked b; 0: b is not prepacked
    kernel_name: str | None = None  # not "kernel", which collides with a parameter inside torch's inductor
    out_dtype: torch.dtype = torch.bfloat16


class LinearCall(NamedTuple):
    """``linear``."""

    x: Tensor
    weight: Tensor
    weight_scales: Tensor | None
    weight_amax: Tensor
    bias: Tensor | None = None
    weight_rows: int = 0  # n of a prepacked weight; 0: it is not prepacked
    weight_e4m3_max: int = 448
    scaling: int = 1  # 0: x is not quantized; 1: an amax for each row of x; 2: one
    activation: int = 0
    c: Tensor | None = None
    beta: float = 1.0
    x_scales: Tensor | None = None
    x_amax: Tensor | None = None  # given: x was quantized before
    x_e4m3_max: int = 448
    batch_invariant: bool = False
    kernel_name: str | None = None
    out_dtype: torch.dtype | None = None  # None: that of x, or bfloat16 if x was quantized before


class QuantizeCall(NamedTuple):
    """``quantize``. The other quantizers have the same parameters, less those that do not apply to them."""

    x: Tensor
    amax: Tensor | None
    per_row: bool
    axis: int = -1
    block_rows: int = 1
    encode: int = 0
    four_over_six: int = 0
    fast_error: bool = False
    e4m3_max: int = 448
    hadamard: int = 0
    signs: int = 0
    rng_state: Tensor | None = None
    headroom: float = 1.0
    offs: Tensor | None = None
    rows: Tensor | None = None


def _derived(name: str, doc: str, without: tuple[str, ...], **inserted: str) -> Any:
    """A named tuple of QuantizeCall's parameters without some of them.

    ``inserted`` maps the name of an added parameter to the one that it follows, whose type it has.
    """
    types = QuantizeCall.__annotations__
    names = [field for field in QuantizeCall._fields if field not in without]
    for added, before in inserted.items():
        names.insert(names.index(before) + 1, added)
    known = QuantizeCall._field_defaults
    defaults = [known[field] for field in names if field in known]
    made: Any = collections.namedtuple(name, names, defaults=defaults, module=__name__)  # type: ignore[misc]
    made.__doc__ = doc
    made.__annotations__ = {field: types[inserted.get(field, field)] for field in names}
    made.__new__.__annotations__ = dict(made.__annotations__)
    return made


# To a type checker, which cannot read derived named tuples, these are Any.
QuantizeDecodedCall = _derived(
    "QuantizeDecodedCall", "``quantize_decoded``: blocks of one row.", without=("block_rows",)
)
QuantizeBothCall = _derived(
    "QuantizeBothCall",
    "``quantize_both``: x and x.T. amax_t is the amax of x.T.",
    without=("axis", "rows"),
    amax_t="amax",
)


class QuantizeSearchedCall(NamedTuple):
    """``quantize_searched``: quantize with a search for the block scales; blocks along k, without groups."""

    x: Tensor
    amax: Tensor | None
    importance: Tensor | None
    per_row: bool
    block_rows: int = 1
    e4m3_max: int = 448


class QuantizeStackCall(NamedTuple):
    """``quantize_stack``: the matrices of a stack, or their transposes, or both."""

    x: Tensor
    amax: Tensor | None
    rows: bool
    columns: bool
    per_row: bool = False
    block_rows: int = 16  # 1: columns alone
    encode: int = 0
    four_over_six: int = 0
    fast_error: bool = False
    e4m3_max: int = 448
    hadamard: int = 0
    signs: int = 0
    rng_state: Tensor | None = None
    headroom: float = 1.0


def narrowed(schema: Any, call: NamedTuple, **changed: Any) -> Any:
    """The call of another schema with the arguments that ``call`` has under the same names."""
    same = {field: value for field, value in call._asdict().items() if field in schema._fields}
    return schema(**{**same, **changed})


class SiluAndMulQuantizeCall(NamedTuple):
    """``silu_and_mul_quantize`` and ``silu_and_mul_quantize_decoded``."""

    x: Tensor
    offs: Tensor | None = None


class RmsNormQuantizeCall(NamedTuple):
    """``rms_norm_quantize`` and ``rms_norm_quantize_decoded``."""

    x: Tensor
    weight: Tensor | None
    residual: Tensor | None
    eps: float


class DequantizeCall(NamedTuple):
    """``dequantize``."""

    codes: Tensor
    scales: Tensor
    amax: Tensor
    e4m3_max: int
    dtype: torch.dtype
    swizzled: bool = True
    offs: Tensor | None = None


class PackedCall(NamedTuple):
    """``decode`` and ``prepack``."""

    codes: Tensor
    scales: Tensor


class UnprepackCall(NamedTuple):
    """``unprepack``."""

    packed: Tensor
    n: int
    k: int


class MXFP8QuantizeCall(NamedTuple):
    """``mxfp8_quantize``."""

    x: Tensor
    axis: int
    dtype: torch.dtype
    swizzled: bool


class MXFP8DequantizeCall(NamedTuple):
    """``mxfp8_dequantize``."""

    values: Tensor
    scales: Tensor
    dtype: torch.dtype
    swizzled: bool


class RouteCall(NamedTuple):
    """``route``."""

    topk_ids: Tensor
    num_experts: int


class CombineCall(NamedTuple):
    """``combine``."""

    y: Tensor
    row_of_pair: Tensor
    topk_weights: Tensor
    out_dtype: torch.dtype | None = None  # None: that of y


class ZeroOutsideGroupsCall(NamedTuple):
    """``zero_outside_groups``, which writes x and returns nothing."""

    x: Tensor
    offs: Tensor


class ExpertsCall(NamedTuple):
    """``experts``."""

    x: Tensor
    topk_ids: Tensor
    topk_weights: Tensor
    w13: Tensor
    w13_scales: Tensor | None
    w13_amax: Tensor
    w13_bias: Tensor | None
    w2: Tensor
    w2_scales: Tensor | None
    w2_amax: Tensor
    w2_bias: Tensor | None
    w13_rows: int = 0  # of prepacked weights; 0: codes and scales
    w2_rows: int = 0
    w13_e4m3_max: int = 448
    w2_e4m3_max: int = 448
    scaling: int = 1  # 1: one amax for each row of x and of h; 0: neither is quantized
    activation: int = 4
    batch_invariant: bool = False


# Every operator but gemm_out, whose parameters follow from those of gemm.
SCHEMAS: dict[str, Any] = {
    "gemm": GemmCall,
    "linear": LinearCall,
    "quantize": QuantizeCall,
    "quantize_both": QuantizeBothCall,
    "quantize_decoded": QuantizeDecodedCall,
    "quantize_searched": QuantizeSearchedCall,
    "quantize_stack": QuantizeStackCall,
    "silu_and_mul_quantize": SiluAndMulQuantizeCall,
    "silu_and_mul_quantize_decoded": SiluAndMulQuantizeCall,
    "rms_norm_quantize": RmsNormQuantizeCall,
    "rms_norm_quantize_decoded": RmsNormQuantizeCall,
    "dequantize": DequantizeCall,
    "decode": PackedCall,
    "prepack": PackedCall,
    "unprepack": UnprepackCall,
    "mxfp8_quantize": MXFP8QuantizeCall,
    "mxfp8_dequantize": MXFP8DequantizeCall,
    "route": RouteCall,
    "combine": CombineCall,
    "zero_outside_groups": ZeroOutsideGroupsCall,
    "experts": ExpertsCall,
    **RANK_SCHEMAS,
    **TRAIN_SCHEMAS,
}

_Parameters = ParamSpec("_Parameters")
_Call = TypeVar("_Call")
_Result = TypeVar("_Result")


def accepts(
    schema: Callable[_Parameters, _Call],
) -> Callable[[Callable[[_Call], _Result]], Callable[_Parameters, _Result]]:
    """Turn a function of a call into a function with the parameters of that call, as an operator has them."""

    def decorate(function: Callable[[_Call], _Result]) -> Callable[_Parameters, _Result]:
        @functools.wraps(function)
        def with_parameters(*args: _Parameters.args, **kwargs: _Parameters.kwargs) -> _Result:
            return function(schema(*args, **kwargs))

        _show(with_parameters, _parameters(schema), function)
        return with_parameters

    return decorate


def accepts_out(function: Callable[[GemmCall, Tensor], None]) -> Callable[..., None]:
    """Turn a function of a call and its out into one with the parameters of ``gemm_out``.

    The dtype of out takes the place of out_dtype.
    """

    @functools.wraps(function)
    def with_parameters(*args: Any, out: Tensor, **kwargs: Any) -> None:
        # out_dtype is the last parameter, so that the others have the same places as in gemm.
        call = GemmCall(*args, **kwargs)
        function(call._replace(out_dtype=getattr(out, "dtype", call.out_dtype)), out)

    out = inspect.Parameter("out", inspect.Parameter.KEYWORD_ONLY, annotation="Tensor")
    _show(with_parameters, [*_parameters(GemmCall)[:-1], out], function)
    return with_parameters


def _parameters(schema: Callable[..., Any]) -> list[inspect.Parameter]:
    return [
        # A NamedTuple keeps its annotations as forward references.
        p.replace(annotation=getattr(p.annotation, "__forward_arg__", p.annotation))
        for p in inspect.signature(schema).parameters.values()
    ]


def _show(
    function: Callable[..., Any], parameters: list[inspect.Parameter], wrapped: Callable[..., Any]
) -> None:
    """Set what inspect.signature says of a function: these parameters, and the result of the wrapped one."""
    returned = inspect.signature(wrapped).return_annotation
    signature = inspect.Signature(parameters, return_annotation=returned)
    function.__signature__ = signature  # type: ignore[attr-defined]
