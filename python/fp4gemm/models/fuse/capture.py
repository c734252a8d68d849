"""The forward of a module as graphs of torch.fx in which each of its children is called by one node.

The forward runs on proxies instead of tensors, on a copy of the module whose children only record that they
are called. So neither an example input nor the source text is needed, and the module itself is not touched.
Where the forward branches on a proxy, it runs again for the other decision: a capture has one graph for each
path through the forward.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
import dis
import functools
import inspect
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import CellType, CodeType, FrameType, FunctionType
from typing import Any, cast

import torch
from torch import Tensor
from torch.fx import Graph, Node, Proxy
from torch.fx.node import map_arg
from torch.fx.proxy import Attribute, GraphAppendingTracer

from ...nn._hooks import HOOKS, accelerate_hook
from ..moe import with_plain_attention

MAX_PATHS = 128  # the limit for all sets of arguments together
MAX_PATHS_OF_PART = 4  # if one of them cannot be traced to its end
MAX_BRANCHES = 256  # the limit of branches on one path
SIZE = 2  # what a value is where Python needs a number, for example a size in range(size)
LIVE = ("training", "layer_idx")  # attributes that a captured forward reads when it runs, as all floats
REST = "rest_of_keywords"  # the name under which a graph passes on what **kwargs holds
BY_POSITION = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
STAR, END = "values_of_star", "end_of_star"  # the names of nodes for the values that a star unpacks
STARS = ("LIST_EXTEND", "CALL_FUNCTION_EX")  # the instructions of (*x, 2) and f(*x)
NAME = "_Traced"  # is in the errors that a proxy causes
CONTAINERS = (torch.nn.ModuleList, torch.nn.ModuleDict)
COLLECTIONS = (list, dict, set, collections.OrderedDict, collections.defaultdict, collections.deque)
LEVELS = 3  # of collections in collections that are copied
OF_TORCH = frozenset(vars(torch.nn.Module()))  # the attributes of every module


class CaptureError(RuntimeError):
    """The forward does not go on with proxies; the text says why."""


class Capture:
    """All paths through the forward of a module.

    A branch on a proxy shows, a test for None and a look into **kwargs do not. So the forward is captured
    again without each argument whose default is None, and with each keyword that is a constant of its code.

    Args:
        module: of any class. Children of torch.nn.ModuleList and ModuleDict count as its own.

    Attributes:
        signature: the signature of the forward, without self.
        graphs: one for each path. Placeholders are the parameters, ``call_module`` nodes the calls of
            children; the target has their qualified names.
        whole: the graph that is the forward whatever the arguments are; or, as text, why no graph is.
        unknown: why some of the graphs end early or are missing; "" if they are all that the forward does.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._module, self._forward = module, type(module).forward
        parameters = [*inspect.signature(self._forward).parameters.values()][1:]
        self.signature = inspect.Signature(parameters)
        self.graphs: list[Graph] = []
        self.unknown, self._error = "", ""
        self._num_runs = 0
        self._refused: list[Graph] = []  # the graphs of paths on which the forward raises
        if "forward" in vars(module) and accelerate_hook(module) is None:
            self.unknown = "other code has replaced it"
        else:
            self._capture()
        if self.unknown:
            self.whole: Graph | str = self.unknown
        del self._module, self._refused  # a capture keeps no module alive

    def parameter(self, position: int | str) -> str | None:
        """The parameter for an argument by position or by name; None if *args or **kwargs have it."""
        parameters = self.signature.parameters.values()
        by_position = [p.name for p in parameters if p.kind in BY_POSITION]
        if isinstance(position, int):
            return by_position[position] if position < len(by_position) else None
        by_name = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
        return position if position in (*by_position, *by_name) else None

    def _capture(self) -> None:
        first: _Tracer | None = None
        reason = ""
        for changed in ({}, *self._other_arguments()):
            tracers = self._paths(changed)
            if not tracers:
                continue  # the forward accepts no such call
            first = first or tracers[0]
            graphs = [tracer.graph for tracer in tracers]
            if len(tracers) > 1 or first.hidden:
                reason = reason or first.hidden or "it branches on a value"
            elif _text(graphs[0], changed) != _text(first.graph, changed):
                reason = reason or f"it depends on whether {', '.join(changed)} is given"
            self.graphs += graphs
        if first is None:
            self.unknown, self.graphs = self.unknown or self._error, self._refused
        else:
            self.whole = reason or first.graph

    def _other_arguments(self) -> Iterator[dict[str, bool]]:
        """{name: False} leaves an argument out, {name: True} passes one more."""
        parameters = self.signature.parameters
        optional = [p.name for p in parameters.values() if p.default is None]
        yield from ({name: False} for name in optional)
        if len(optional) > 1:
            yield dict.fromkeys(optional, False)
        if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            code = getattr(inspect.unwrap(self._forward), "__code__", None)
            for name in dict.fromkeys(getattr(code, "co_consts", ())):
                if isinstance(name, str) and name.isidentifier() and name not in parameters:
                    yield {name: True}

    def _paths(self, changed: Mapping[str, bool]) -> list[_Tracer]:
        found: list[_Tracer] = []
        pending: list[list[bool]] = [[]]
        while self._num_runs < MAX_PATHS:
            if not pending or (self.unknown and len(found) >= MAX_PATHS_OF_PART):
                return found
            self._num_runs += 1
            decisions = pending.pop()
            given = len(decisions)
            tracer = self._run(changed, decisions)
            if tracer is not None:
                found.append(tracer)
            pending += [[*decisions[:i], False] for i in range(given, len(decisions))]
        self.unknown = self.unknown or f"it has {MAX_PATHS} paths or more"
        return found

    def _run(self, changed: Mapping[str, bool], decisions: list[bool]) -> _Tracer | None:
        """One path through the forward; None if the forward raises an error on it."""
        tracer = _Tracer(decisions)
        args, kwargs = self._arguments(tracer, changed)
        copied = _copy(self._module, tracer)
        before, collected = _ids(vars(copied), 1), contents(copied)
        try:
            forward: Callable[..., Any] = self._forward
            if type(forward) is FunctionType:
                forward = _guarding(forward, tracer)
            result = forward(copied, *args, **kwargs)
            tracer.create_node("output", "output", (tracer.create_arg(result),), {})
        except Exception as error:  # any code may be behind it
            text = _in_words(error)
            is_of_capture = isinstance(error, CaptureError) or NAME in text or not changed
            if _is_error_of_model(error) or not is_of_capture:
                self._error = text
                self._refused.append(tracer.graph)
                return None
            self.unknown = self.unknown or text
        if _ids(vars(copied), 1) != before:
            tracer.hide("it sets attributes of the module")
        elif contents(copied) != collected:
            tracer.hide("it changes a list of the module, or of a child")
        if any(n.target is not end and _splits_star([n.args, n.kwargs]) for n in tracer.graph.nodes):
            tracer.hide("it takes single values out of a sequence")
        for node in reversed(tracer.graph.nodes):
            if node.op == "get_attr" and not node.users:
                tracer.graph.erase_node(node)
        return tracer

    def _arguments(self, tracer: _Tracer, changed: Mapping[str, bool]) -> tuple[list[Any], dict[str, Any]]:
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        for p in self.signature.parameters.values():
            if p.kind is p.VAR_POSITIONAL:
                tracer.hide("it has *args")
            elif p.kind is p.VAR_KEYWORD:
                kwargs[REST] = tracer.create_proxy("placeholder", f"**{p.name}", (), {}, p.name)
            else:
                given: Proxy | None = tracer.create_proxy("placeholder", p.name, (), {})
                given = None if changed.get(p.name) is False else given
                if p.kind in BY_POSITION and p.default is p.empty:
                    args.append(given)
                else:
                    kwargs[p.name] = given
        more = [name for name, is_more in changed.items() if is_more]
        return args, kwargs | {name: tracer.create_proxy("placeholder", name, (), {}) for name in more}


class _Traced(Proxy):
    """A value of the forward."""

    def __repr__(self) -> str:
        return f"{NAME}({self.node.name})"

    def __getattr__(self, name: str) -> Any:
        return _TracedAttribute(self, name)

    def __setitem__(self, index: Any, value: Any) -> None:
        self.tracer.create_proxy("call_function", operator.setitem, (self, index, value), {})

    def __iter__(self) -> Iterator[Proxy]:
        frame = cast(FrameType, cast(FrameType, inspect.currentframe()).f_back)
        count = _unpacked(frame.f_code).get(frame.f_lasti)
        if count is not None:
            return iter([operator.getitem(cast(Any, self), i) for i in range(count)])
        if dis.opname[frame.f_code.co_code[frame.f_lasti]] not in STARS:
            cast(_Tracer, self.tracer).hide("it iterates over a value")
        return self.tracer.iter(self)

    @property
    def keys(self) -> Any:  # a method of Proxy
        return _TracedAttribute(self, "keys")

    def __index__(self) -> int:
        cast(_Tracer, self.tracer).hide("it computes with the value of a number")
        return SIZE

    def __float__(self) -> float:
        return float(self.__index__())

    __int__ = __index__

    def __len__(self) -> int:  # a TypeError, since Python also asks for it where it needs none: (*shape, 2)
        raise TypeError(f"object of type {NAME} has no len()")


@functools.cache
def _unpacked(code: CodeType) -> dict[int, int]:
    """How many values the instructions of a code unpack, ``a, b = x``, by their offsets."""
    return {i.offset: i.argval for i in dis.get_instructions(code) if i.opname == "UNPACK_SEQUENCE"}


class _TracedAttribute(Attribute, _Traced):
    pass


class _TracedTensor(_Traced):
    """A parameter or buffer of the module, whose shape is known."""

    def __init__(self, node: Node, tracer: _Tracer, tensor: Tensor) -> None:
        super().__init__(node, tracer)
        self.shape, self.ndim = tensor.shape, tensor.ndim
        self.size, self.dim, self.numel = tensor.size, tensor.dim, tensor.numel


class _Tracer(GraphAppendingTracer):
    """Records one run of a forward.

    Args:
        decisions: how the first branches on proxies go. Each further one is decided as True and appended.

    Attributes:
        hidden: what the forward does beyond its graph, as text.
    """

    def __init__(self, decisions: list[bool]) -> None:
        super().__init__(Graph())
        self.hidden = ""
        self._decisions, self._num_decided = decisions, 0
        self._state = _state_of_torch()

    def hide(self, what: str) -> None:
        self.hidden = self.hidden or what

    def proxy(self, node: Node) -> Proxy:
        return _Traced(node, self)

    def create_node(self, *args: Any, **kwargs: Any) -> Node:
        if _state_of_torch() != self._state:
            self.hide("it enters a context of torch, such as torch.autocast")
        return super().create_node(*args, **kwargs)

    def create_arg(self, a: Any) -> Any:
        is_plain = isinstance(a, (Proxy, type)) or not dataclasses.is_dataclass(a)
        if is_plain and not isinstance(a, (Tensor, torch.nn.Module)):
            try:
                return super().create_arg(a)
            except NotImplementedError:
                pass
        self.hide(f"it passes a {type(a).__name__} on")
        return None  # a graph keeps no object alive

    def to_bool(self, obj: Proxy) -> bool:
        if self._num_decided == len(self._decisions):
            if self._num_decided == MAX_BRANCHES:
                raise CaptureError(f"it has more than {MAX_BRANCHES} branches")
            self._decisions.append(True)
        self._num_decided += 1
        return self._decisions[self._num_decided - 1]

    def iter(self, obj: Proxy) -> Iterator[Proxy]:
        """Unpack ``*obj`` into two values, which represent all values of obj while they stay adjacent."""
        values = self.create_proxy("call_function", star, (obj,), {}, STAR)
        return iter([values, self.create_proxy("call_function", end, (values,), {}, END)])


def star(values: Iterable[object]) -> tuple[object, ...]:
    """Marks in a graph the values that a star unpacks into arguments or into a tuple; :func:`end` follows."""
    return tuple(values)


def end(values: object) -> None:
    """Marks in a graph where the values of :func:`star` end."""


def opaque(function: str, *args: object, **kwargs: object) -> None:
    """In a graph: the call of a function that proxies do not run through."""


def _guarding(
    function: FunctionType, tracer: _Tracer, inside: tuple[FunctionType, ...] = ()
) -> Callable[..., Any]:
    """A copy of a function in which the Python functions that it calls by name are guarded.

    The functions that it wraps, as a decorator does, are copied too.
    """

    def copied(cell: CellType) -> CellType:
        try:
            value = cell.cell_contents
        except ValueError:  # an empty one
            return cell
        if type(value) is not FunctionType or value in (function, *inside):
            return cell
        return CellType(_guarding(value, tracer, (function, *inside)))

    code, values = function.__code__, dict(function.__globals__)
    for name in code.co_names:
        if type(values.get(name)) is FunctionType:
            values[name] = _guard(values[name], tracer)
    cells = function.__closure__ and tuple(map(copied, function.__closure__))
    new = FunctionType(code, values, function.__name__, function.__defaults__, cells)
    new.__kwdefaults__ = function.__kwdefaults__
    vars(new).update(vars(function))
    return new


def _guard(function: FunctionType, tracer: _Tracer) -> Callable[..., Any]:
    """The function, whose call is one node where it does not run with proxies."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except Exception as error:  # any code may be behind it
            if isinstance(error, CaptureError) or _is_error_of_model(error):
                raise
            tracer.hide(f"it calls {function.__name__}, which cannot be traced: {_in_words(error)}")
            return tracer.create_proxy("call_function", opaque, (function.__qualname__, *args), kwargs)

    return call


def _in_words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".split("\n")[0]


def _splits_star(argument: Any) -> bool:
    """Whether values of a star are in a sequence without each other, or outside of one."""
    if isinstance(argument, dict):
        return any(map(_splits_star, argument.values()))
    if isinstance(argument, slice):
        return _splits_star([argument.start, argument.stop, argument.step])
    if not isinstance(argument, (tuple, list)):
        return isinstance(argument, Node) and argument.target in (star, end)
    rest = list(argument)
    while rest:
        value, *rest = rest
        following = rest[0] if rest else None
        if isinstance(following, Node) and following.target is end and following.args == (value,):
            del rest[0]
        elif _splits_star(value):
            return True
    return False


def _is_error_of_model(error: Exception) -> bool:
    """Whether the error is not one of proxies: a raise statement of other code than torch, or decisions that
    contradict each other, so that a variable has no value.
    """
    if isinstance(error, UnboundLocalError):
        return True
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    if traceback is None:
        return False
    frame = traceback.tb_frame
    package = str(frame.f_globals.get("__name__", "")).split(".")[0]
    instruction = dis.opname[frame.f_code.co_code[traceback.tb_lasti]]
    return package not in ("torch", "fp4gemm") and instruction == "RAISE_VARARGS"


def _state_of_torch() -> tuple[object, ...]:
    autocast = [(torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ("cpu", "cuda")]
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), autocast


def _copy(module: torch.nn.Module, tracer: _Tracer) -> Any:
    """The module with children that record calls, and with proxies for what a user may set later."""
    copied = object.__new__(type(module))
    state = vars(copied)
    state.update(unshared(vars(module)))
    state["_modules"] = {name: _recording(child, name, tracer) for name, child in module._modules.items()}
    for kind in ("_parameters", "_buffers"):
        tensors = vars(module)[kind].items()
        state[kind] = {name: None if t is None else _tensor(tracer, name, t) for name, t in tensors}
    for name, value in vars(module).items():
        if name in LIVE or type(value) is float:
            state[name] = tracer.create_proxy("get_attr", name, (), {})
        elif name == "config":
            state[name] = with_plain_attention(value)
    return copied


def unshared(attributes: dict[str, Any]) -> dict[str, Any]:
    """The attributes of a module, with copies of its collections: a forward would put proxies in them."""
    return {name: value if name in OF_TORCH else _copied(value) for name, value in attributes.items()}


def _copied(value: Any, levels: int = LEVELS) -> Any:
    """A copy of a collection and of those in it; any other value itself."""
    if type(value) not in COLLECTIONS or not levels:
        return value
    made = copy.copy(value)
    if isinstance(made, dict):
        made.update({key: _copied(inner, levels - 1) for key, inner in made.items()})
    elif isinstance(made, list):
        made[:] = [_copied(inner, levels - 1) for inner in made]
    return made


def contents(copied: Any) -> list[Any]:
    """What the collections of a copied module and of its children hold, by identity."""
    children = [child for child in vars(copied)["_modules"].values() if child is not None]
    return [
        _ids(value)
        for module in (copied, *children)
        for name, value in vars(module).items()
        if type(value) in COLLECTIONS and name not in OF_TORCH
    ]


def _ids(value: Any, levels: int = LEVELS) -> Any:
    if type(value) not in COLLECTIONS or not levels:
        return id(value)
    if isinstance(value, dict):
        return {key: _ids(inner, levels - 1) for key, inner in value.items()}
    return [_ids(inner, levels - 1) for inner in value]


def _tensor(tracer: _Tracer, name: str, tensor: Tensor) -> Proxy:
    return _TracedTensor(tracer.create_node("get_attr", name, (), {}), tracer, tensor)


def _recording(child: torch.nn.Module | None, name: str, tracer: _Tracer) -> Any:
    if child is None:
        return None
    copied = object.__new__(type(child))
    state = vars(copied)
    state.update(unshared(vars(child)))
    if isinstance(child, CONTAINERS):
        inner = child._modules.items()
        state["_modules"] = {key: _recording(module, f"{name}.{key}", tracer) for key, module in inner}
        return copied
    state.update({kind: {} for kind in HOOKS}, _compiled_call_impl=None)
    state["forward"] = functools.partial(_call, tracer, name)
    return copied


def _call(tracer: _Tracer, name: str, *args: Any, **kwargs: Any) -> Proxy:
    return tracer.create_proxy("call_module", name, args, kwargs)


def _text(graph: Graph, changed: Mapping[str, bool]) -> list[str]:
    """The nodes of a graph in words, without the arguments that are left out or added."""

    def named(node: Node) -> str | None:
        return None if node.op == "placeholder" and node.target in changed else f"%{node.name}"

    lines = []
    for node in graph.nodes:
        if node.op != "placeholder":
            kwargs = {k: a for k, a in node.kwargs.items() if not (changed.get(k) and REST in node.kwargs)}
            lines.append(f"{node.name} {node.target} {map_arg((node.args, kwargs), named)}")
    return lines
