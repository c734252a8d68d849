"""The code that the families of operators share: calls, and the table of the functions of an operator.

Each operator has a call, a NamedTuple of its parameters in the order of its schema in cpp/torch/ops.cpp. The
functions of this package build calls, and the implementations receive them, so that no parameter list is
written down a second time in Python. A test compares calls and schemas: names, order, types and defaults.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple, ParamSpec, TypeVar

from torch import Tensor

from .. import _checks

__all__ = ["Operator", "accepts", "has_parameters", "narrowed", "on_cpu", "parameters_of", "succeeded"]


class Operator(NamedTuple):
    """The Python functions of one operator. Every function has the parameters of the operator."""

    call: Any  # the NamedTuple
    reference: Callable[..., Any]  # in plain torch, for any device, after the checks of the call
    fake: Callable[..., Any]  # the shapes, dtypes and strides of the results, without memory, for tracers
    compiled: Callable[..., Any] | None = None  # the CPU code if it is not the reference; same bits
    flops: Callable[..., int] | None = None  # what torch.utils.flop_counter counts
    cuda: Callable[..., Any] | None = None  # for CUDA, if it is in Python and not in libfp4gemm_torch.so

    @property
    def cpu(self) -> Callable[..., Any]:
        """The implementation that is registered for the CPU."""
        return self.compiled or self.reference


def narrowed(schema: Any, call: NamedTuple, **changed: Any) -> Any:
    """The call of another schema with the arguments that ``call`` has under the same names."""
    same = {field: value for field, value in call._asdict().items() if field in schema._fields}
    return schema(**{**same, **changed})


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

        has_parameters(with_parameters, parameters_of(schema), function)
        return with_parameters

    return decorate


def parameters_of(schema: Callable[..., Any]) -> list[inspect.Parameter]:
    """The parameters of a call, for signatures."""
    return [
        # A NamedTuple keeps its annotations as forward references.
        p.replace(annotation=getattr(p.annotation, "__forward_arg__", p.annotation))
        for p in inspect.signature(schema).parameters.values()
    ]


def has_parameters(
    function: Callable[..., Any], parameters: list[inspect.Parameter], wrapped: Callable[..., Any]
) -> None:
    """Set what inspect.signature says of a function: these parameters, and the result of the wrapped one."""
    returned = inspect.signature(wrapped).return_annotation
    signature = inspect.Signature(parameters, return_annotation=returned)
    function.__signature__ = signature  # type: ignore[attr-defined]


# ---- for compiled code on the CPU


def on_cpu(x: object) -> bool:
    """Whether x is a tensor on the CPU whose memory can be read."""
    return _checks.has_memory(x) and isinstance(x, Tensor) and x.device.type == "cpu"


def succeeded(status: int) -> None:
    """Raise RuntimeError for the status of a C function of the torch library that is not 0."""
    if status != 0:
        raise RuntimeError("fp4gemm: torch could not run a loop on its threads")
