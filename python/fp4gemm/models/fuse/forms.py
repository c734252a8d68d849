"""The form of ``fp4gemm._fusions`` that a module computes: an RMS norm or a gated MLP."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from ..._fusions import GATES, LLAMA_NORMS, aten, half_of, result_of, trace
from ...activations import ActivationName
from ...nn._hooks import accelerate_hook, hooks_of
from ...nn.linear import Linear
from ...nn.merged import Part
from .capture import BY_POSITION, Capture, CaptureError, contents, unshared

LINEARS = (Linear, Part, torch.nn.Linear)


def norm_epsilon(norm: torch.nn.Module) -> float | None:
    """eps of a norm that computes what rms_norm_quantize does; None of every other module."""
    weight = norm._parameters.get("weight")
    has_own_forward = "forward" in vars(norm) and accelerate_hook(norm) is None
    if weight is None or len(norm._parameters) > 1 or norm._modules or weight.dim() != 1 or has_own_forward:
        return None
    parameters = [*inspect.signature(type(norm).forward).parameters.values()][1:]
    if [p.kind in BY_POSITION for p in parameters] != [True]:
        return None

    def forward(x: Tensor, weight: Tensor) -> Tensor:
        return cast(Tensor, _called(norm, {"_parameters": {"weight": weight}}, type(norm).forward, x))

    # In bfloat16, since a cast of float32 to float32 would not show.
    graph = _traced(forward, (2, weight.shape[0]), (weight.shape[0],))
    if graph is None:
        return None
    for pattern in LLAMA_NORMS:
        found = pattern.match(result_of(graph), may_be_decomposed=False)
        if found is not None and found.inputs == list(graph.find_nodes(op="placeholder")):
            return found.number
    return None


def _traced(function: Callable[..., Tensor], *shapes: tuple[int, ...]) -> Graph | None:
    """The operations of a function of bfloat16 tensors on the CPU; None if it does not run."""
    with torch.inference_mode(False):
        inputs = [torch.zeros(shape, dtype=torch.bfloat16, device="cpu") for shape in shapes]
    try:
        graph = trace(function, *inputs)
    except Exception:  # any code may be behind it
        return None
    return graph if isinstance(result_of(graph), Node) else None


class GatedForward(NamedTuple):
    """``down(act(gate(x)) * up(x))``, the names of the children.

    ``up`` is None where one layer computes both: its first half of rows is the gate.
    """

    input: str  # the name of the argument
    gate: str
    up: str | None
    down: str
    activation: ActivationName


def gated_forward(module: torch.nn.Module) -> GatedForward | str | None:
    """The children and the activation of a module that computes a gated MLP; None for every other module.

    The result is a text, the reason, if only the activation is not supported.
    """
    parameters = [*inspect.signature(type(module).forward).parameters.values()][1:]
    if [p.kind in BY_POSITION for p in parameters] != [True]:
        return None
    graph = Capture(module).whole
    if isinstance(graph, str):
        return None
    (x,) = graph.find_nodes(op="placeholder")
    layers = [n for n in graph.find_nodes(op="call_module") if isinstance(_child(module, n), LINEARS)]
    *first, down = layers or [None]
    if down is None or result_of(graph) is not down or not 1 <= len(first) <= 2:
        return None
    if any(not is_call_of(layer, x) for layer in first) or len({n.target for n in layers}) < len(layers):
        return None
    if len(down.args) != 1 or down.kwargs or not isinstance(down.args[0], Node):
        return None
    between = [n for n in graph.nodes if n not in (x, *layers) and n.op != "output"]
    computed = _computed(module, first, between, down.args[0])
    if computed is None:
        return _other_activation(module, first, between)
    results = dict(zip(computed.find_nodes(op="placeholder"), (str(n.target) for n in first), strict=True))
    for name, pattern in GATES:
        found = pattern.match(result_of(computed), may_be_decomposed=False)
        if found is None:
            continue
        halves = [half for half in map(half_of, found.inputs) if half is not None]
        if all(node in results for node in found.inputs) and len(set(found.inputs)) == 2:
            gate, up = (results[node] for node in found.inputs)
        elif [half for _, half in halves] == [0, 1] and len(first) == 1:
            gate, up = str(first[0].target), None
        else:
            return None
        return GatedForward(parameters[0].name, gate, up, str(down.target), cast(ActivationName, name))
    return _other_activation(module, first, between) if _is_gated(computed) else None


def is_call_of(node: Node, x: Node) -> bool:
    """Whether the node calls something with x alone."""
    return node.args == (x,) and not node.kwargs


def _child(module: torch.nn.Module, call: Node) -> torch.nn.Module:
    return module.get_submodule(str(call.target))


def _computed(module: torch.nn.Module, layers: list[Node], between: list[Node], result: Node) -> Graph | None:
    """The operations that make result of what the layers return."""
    if any(node.op == "call_module" and hooks_of(_child(module, node)) for node in between):
        return None

    def function(*tensors: Tensor) -> Any:
        values: dict[Node, Any] = dict(zip(layers, tensors, strict=True))
        for node in between:
            args, kwargs = map_arg((node.args, node.kwargs), values.__getitem__)
            if node.op == "call_module":
                # In training, where a dropout shows.
                child = _child(module, node)
                values[node] = _called(child, {"training": True}, type(child).__call__, *args, **kwargs)
            elif node.op == "call_method":
                values[node] = getattr(args[0], str(node.target))(*args[1:], **kwargs)
            else:
                values[node] = cast(Callable[..., Any], node.target)(*args, **kwargs)
        return values[result]

    return _traced(function, *((2, int(_child(module, n).out_features)) for n in layers))  # type: ignore[arg-type]


def _called(
    module: torch.nn.Module,
    attributes: dict[str, Any],
    function: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """function(copy of the module with these attributes, ...); raises CaptureError if it changes a list."""
    copied = object.__new__(type(module))
    vars(copied).update(unshared(vars(module)), **attributes)
    before = contents(copied)
    result = function(copied, *args, **kwargs)
    if contents(copied) != before:
        raise CaptureError("it changes a list of the module")
    return result


def _is_gated(graph: Graph) -> bool:
    """Whether the result is the product of an input, or of a half of it, and of a function of one other."""
    result = result_of(graph)
    factors: Any = result.args
    if result.target is not aten.mul.Tensor or not all(isinstance(factor, Node) for factor in factors):
        return False
    for up, gate in (factors, factors[::-1]):
        if _is_input(up) and len(_inputs(gate)) == 1 and _inputs(gate) != {up}:
            return True
    return False


def _is_input(node: Any) -> bool:
    return node.op == "placeholder" or half_of(node) is not None


def _inputs(node: Node) -> set[Node]:
    if _is_input(node):
        return {node}
    return functools.reduce(set.union, map(_inputs, node.all_input_nodes), set())


def _other_activation(module: torch.nn.Module, layers: list[Node], between: list[Node]) -> str | None:
    """Why a gated MLP's activation is not supported; None if nothing between its layers looks like one."""
    for node in between:
        if node.op == "call_module":
            shown = repr(_child(module, node))
        elif node.op == "call_function" and node.all_input_nodes and node.args[0] in layers:
            shown = str(getattr(node.target, "__name__", node.target))
        else:
            continue
        return f"its activation, {shown}, is not one of the gated ones of fp4gemm.mm"
    return None
