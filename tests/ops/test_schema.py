"""One parameter list for each operator: the registered schemas, the calls, and the signatures in Python."""

from __future__ import annotations

import inspect
from typing import Any, get_args

import fp4gemm
import pytest
import torch
from fp4gemm import _operands, _products, activations
from fp4gemm.activations import ACTIVATIONS
from fp4gemm.ops import options as option_checks
from fp4gemm.ops.gemm import GemmCall
from fp4gemm.ops.operators import OPERATORS
from fp4gemm.ops.quantize import QuantizeCall
from fp4gemm.reference.nvfp4 import Quantization

# Every operator but those with given outputs, whose parameters follow from those of the others.
WITH_OUT = ("gemm_out", "gemm_epilogue_out")
SCHEMAS = {name: operator.call for name, operator in OPERATORS.items() if name not in WITH_OUT}
TYPES = {
    "Tensor": "Tensor",
    "Tensor | None": "Optional[Tensor]",
    "list[Tensor]": "List[Tensor]",
    "list[int]": "List[int]",
    "list[float]": "List[float]",
    "bool": "bool",
    "int": "int",
    "float": "float",
    "str": "str",
    "str | None": "Optional[str]",
    "torch.dtype": "int",  # torch's name for ScalarType
    "torch.dtype | None": "Optional[int]",
}


def registered(name: str) -> list[Any]:
    return list(getattr(torch.ops.fp4gemm, name).default._schema.arguments)


def annotations(call: Any) -> list[str]:
    return [str(getattr(hint, "__forward_arg__", hint)) for hint in call.__annotations__.values()]


def default_of(argument: Any, annotation: str) -> object:
    """The default of a registered argument; a ScalarType has a number."""
    if annotation == "torch.dtype" and argument.has_default_value():
        return {15: torch.bfloat16}[argument.default_value]
    return argument.default_value


@pytest.mark.parametrize("name", SCHEMAS)
def test_the_call_is_the_schema(name: str) -> None:
    """Names, order, types and defaults."""
    call, arguments = SCHEMAS[name], registered(name)
    assert [a.name for a in arguments] == list(call._fields)
    hints = annotations(call)
    assert [str(a.type) for a in arguments] == [TYPES[hint] for hint in hints]
    assert not any(a.kwarg_only for a in arguments)
    with_default = {
        a.name: default_of(a, hint) for a, hint in zip(arguments, hints, strict=True) if a.has_default_value()
    }
    assert with_default == call._field_defaults


def test_every_operator_has_a_call() -> None:
    names = {
        str(op).removeprefix("fp4gemm::") for op in torch._C._dispatch_get_all_op_names() if "fp4gemm" in op
    }
    of_epilogues = {
        "gemm_generated",
        "gemm_generated_load",
        "gemm_generated_source",
    }  # in gemm_epilogue, on CUDA
    assert names == {*SCHEMAS, *WITH_OUT, *of_epilogues}


def test_gemm_out_is_gemm_with_out_for_out_dtype() -> None:
    *shared, out = registered("gemm_out")
    assert [(a.name, str(a.type), a.default_value) for a in shared] == [
        (a.name, str(a.type), a.default_value) for a in registered("gemm")[:-1]
    ]
    assert (out.name, out.kwarg_only, out.alias_info is not None) == ("out", True, True)
    assert GemmCall._fields[-1] == "out_dtype"


def test_gemm_epilogue_out_is_gemm_epilogue_with_outputs_for_dtypes() -> None:
    *shared, out, aux = registered("gemm_epilogue_out")
    kept = [a for a in registered("gemm_epilogue") if a.name not in ("aux_dtypes", "out_dtype")]
    assert [(a.name, str(a.type), a.default_value) for a in shared] == [
        (a.name, str(a.type), a.default_value) for a in kept
    ]
    for argument, name, kind in ((out, "out", "Tensor"), (aux, "aux", "List[Tensor]")):
        assert (argument.name, str(argument.type), argument.kwarg_only) == (name, kind, True)
        assert argument.alias_info.is_write


@pytest.mark.parametrize("kind", ["reference", "fake", "cpu"])
@pytest.mark.parametrize("name", OPERATORS)
def test_implementations_have_the_parameters_of_the_schema(name: str, kind: str) -> None:
    parameters = inspect.signature(getattr(OPERATORS[name], kind)).parameters.values()
    assert [p.name for p in parameters] == [a.name for a in registered(name)]


@pytest.mark.parametrize("name", OPERATORS)
def test_the_reference_of_an_operator_is_public(name: str) -> None:
    assert getattr(fp4gemm.reference, name) is OPERATORS[name].reference
    assert name in fp4gemm.reference.__all__


def test_every_option_reaches_the_formulas() -> None:
    """All parameters of quantize but offs and rows, with the same defaults."""
    reach = tuple(name for name in QuantizeCall._fields if name not in ("offs", "rows"))
    assert reach == Quantization._fields
    defaults = {
        name: value for name, value in QuantizeCall._field_defaults.items() if name in Quantization._fields
    }
    assert defaults == Quantization._field_defaults


def test_quantizer_options_reach_the_operators() -> None:
    """Each option stands for a parameter of quantize, and each parameter comes from somewhere."""
    arguments = option_checks.operator_arguments(option_checks.defaults_of(option_checks.QuantizeOptions))
    given = {"x", "amax", "axis", "rng_state", "offs", "rows", "residual_channels"}
    assert {*arguments, *given} == set(SCHEMAS["quantize"]._fields)
    assert {**SCHEMAS["quantize"]._field_defaults, **arguments} == {
        **SCHEMAS["quantize"]._field_defaults,
        "per_row": True,
    }


def test_operands_are_the_leading_arguments() -> None:
    names = _operands.Operands(*_operands.Operands._fields).leading()  # type: ignore[arg-type]
    assert names == GemmCall._fields[: len(names)]
    assert names[-1] == "alpha_col"


def test_help_shows_every_keyword() -> None:
    terms = list(_products.GemmTerms.__annotations__)
    assert terms == list(_products.Terms._fields)
    for name in ("mm", "scaled_mm", "grouped_mm", "scaled_grouped_mm", "fprop", "dgrad", "wgrad"):
        parameters = inspect.signature(getattr(fp4gemm, name)).parameters
        assert [p for p in parameters if p in terms] == terms
        assert not any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    shared = set(option_checks.OPTIONS)
    alone = {"x", "axis", "amax", "offs", "rows", "residual_channels", "decoded"}
    alone |= {"scale_search", "importance", "fp8_operand"}
    assert shared | alone == set(inspect.signature(fp4gemm.quantize).parameters)
    assert shared | {"x", "amax", "amax_t", "offs"} == set(
        inspect.signature(fp4gemm.quantize_both).parameters
    )


@pytest.mark.parametrize("name", ["mm", "grouped_mm", "wgrad", "quantize", "quantize_both"])
def test_unknown_keywords_are_refused(name: str) -> None:
    function = getattr(fp4gemm, name)
    operands = [torch.ones(32, 32)] * (1 if "quantize" in name else 2)
    with pytest.raises(TypeError, match=rf"{name}\(\) got an unexpected keyword argument 'scalings'"):
        function(*operands, scalings=1)


def test_activation_names_for_type_checkers() -> None:
    assert list(get_args(activations.ActivationName)) == [a.name for a in ACTIVATIONS if a.name is not None]
    assert [a.number for a in ACTIVATIONS] == list(range(len(ACTIVATIONS)))
