"""Running a model block by block: the decoder layers of a model, each on all batches before the next.

A first pass of the model, in which the blocks do nothing but return what they were given, records what each
block is called with. The second block must be called with what the first returned, and so on; otherwise
something lies between the blocks, which this file cannot run, and an error says so.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from . import collect
from .select import Candidate


class _Stop(Exception):
    """The last block was reached: what comes behind it need not run."""


class _Call(NamedTuple):
    """The arguments of a call of a block, without its hidden states."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    place: int | str  # the position or the keyword of the hidden states


class Walk:
    """The blocks of a model, and the hidden states of each batch in front of the current block. "
    "
    Args:
        model: its forward calls the blocks of one torch.nn.ModuleList one after the other.
        batches: as of :func:`fp4gemm.calibrate`.
        candidates: modules of which most lie in the blocks.
        device: where each block runs; None is where it lies.

    Raises:
        ValueError: there are no such blocks, something lies between them, or a batch is not accepted.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        batches: Sequence[object],
        candidates: Sequence[Candidate],
        device: torch.device | None,
    ) -> None:
        self.name, self.blocks = _blocks(model, candidates)
        self._device = device
        self._hidden: list[Tensor] = []
        self._calls: list[list[_Call]] = [[] for _ in self.blocks]  # each block's calls, one for each batch
        with _no_cache(model), torch.no_grad():
            for index, batch in enumerate(batches):
                self._record(model, batch, index)

    def refuse_outside(self, candidates: Sequence[Candidate]) -> None:
        """Raise ValueError unless every candidate lies in a block."""
        own = {id(module) for block in self.blocks for module in block.modules()}
        outside = [c.names[0] for c in candidates if id(c.module) not in own]
        if outside:
            raise ValueError(
                f"sequential: {len(outside)} selected layers, such as {outside[0]!r}, are not in the blocks "
                f"{self.name}, must be (exclude them, or use sequential=False)"
            )

    def inside(self, block: int, candidates: Sequence[Candidate]) -> list[Candidate]:
        """The candidates that lie in a block."""
        own = {id(module) for module in self.blocks[block].modules()}
        return [c for c in candidates if id(c.module) in own]

    def run(self, block: int, *, keep: bool) -> None:
        """Run a block on the hidden states of every batch, which its results replace if ``keep``."""
        module = self.blocks[block]
        with torch.no_grad():
            for i, hidden in enumerate(self._hidden):
                args, kwargs = _with_hidden(self._calls[block][i], hidden)
                if self._device is not None:
                    args, kwargs = _moved((args, kwargs), self._device)
                result = _first(module(*args, **kwargs))
                if keep:
                    self._hidden[i] = result.to(hidden.device)

    @contextlib.contextmanager
    def placed(self, block: int) -> Iterator[None]:
        """Bring a block to the device of the walk until the context ends."""
        module = self.blocks[block]
        places = {name: p.device for name, p in module.named_parameters()}
        if self._device is None:
            yield
            return
        home = next(iter(places.values()), torch.device("cpu"))
        module.to(self._device)
        try:
            yield
        finally:
            module.to(home)

    def _record(self, model: torch.nn.Module, batch: object, index: int) -> None:
        """Run a batch through a model whose blocks return what they were given, and note their calls."""
        returned: list[Any] = []  # what the first block returned, and the clone that the last one returned
        seen: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        problems: list[str] = []

        def stub(number: int, real: Any) -> Any:
            def forward(*args: Any, **kwargs: Any) -> Any:
                seen.append((args, kwargs))
                if number != len(seen) - 1:
                    problems.append(
                        f"block {self.name}.{number} is called as number {len(seen) - 1}, must be called "
                        "once and in order"
                    )
                    raise _Stop
                if number == 0:
                    returned[:] = [real(*args, **kwargs), None]
                else:
                    problems.extend(self._add(number, *seen[-1], returned[1]))
                    if problems or number == len(self.blocks) - 1:
                        raise _Stop
                hidden = _first(returned[0]).clone()
                returned[1] = hidden
                return hidden if isinstance(returned[0], Tensor) else (hidden, *returned[0][1:])

            return forward

        with contextlib.ExitStack() as stack:
            for number, block in enumerate(self.blocks):
                stack.enter_context(_patched(block, stub(number, block.forward)))
            stack.enter_context(contextlib.suppress(_Stop))
            collect.run(model, batch, index)
        if not problems and len(seen) < len(self.blocks):
            problems.append(
                f"{len(seen)} of the {len(self.blocks)} blocks {self.name} were called, must be all"
            )
        if problems:
            raise ValueError(f"sequential: {problems[0]}")
        self._add_first(*seen[0], self._calls[1][-1].place)

    def _add(self, number: int, args: tuple[Any, ...], kwargs: dict[str, Any], before: Tensor) -> list[str]:
        """Note a call; return what is wrong with it."""
        given: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
        places = [place for place, value in given if value is before]
        if not places:
            return [
                f"block {self.name}.{number} is not called with what block {number - 1} returned, must be; "
                "something lies between the blocks (use sequential=False)"
            ]
        self._calls[number].append(_call(args, kwargs, places[0]))
        return []

    def _add_first(self, args: tuple[Any, ...], kwargs: dict[str, Any], place: int | str) -> None:
        self._hidden.append((args[place] if isinstance(place, int) else kwargs[place]).detach())
        self._calls[0].append(_call(args, kwargs, place))


def _call(args: tuple[Any, ...], kwargs: dict[str, Any], place: int | str) -> _Call:
    if isinstance(place, int):
        return _Call((*args[:place], None, *args[place + 1 :]), kwargs, place)
    return _Call(args, {**kwargs, place: None}, place)


def _with_hidden(call: _Call, hidden: Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(call.place, int):
        return (*call.args[: call.place], hidden, *call.args[call.place + 1 :]), call.kwargs
    return call.args, {**call.kwargs, call.place: hidden}


def _first(result: Any) -> Tensor:
    """The hidden states of what a block returned, a tensor or a tuple that begins with one."""
    found = result[0] if isinstance(result, (tuple, list)) and result else result
    if not isinstance(found, Tensor):
        raise ValueError(f"sequential: a block returned a {type(result).__name__}, must return a tensor")
    return found


def _moved(values: Any, device: torch.device) -> Any:
    return pytree.tree_map(lambda x: x.to(device) if isinstance(x, Tensor) else x, values)


def _blocks(model: torch.nn.Module, candidates: Sequence[Candidate]) -> tuple[str, list[torch.nn.Module]]:
    """The ModuleList with the most candidates that is in no other such list, and its name."""
    wanted = {id(c.module) for c in candidates}
    best: tuple[int, str, list[torch.nn.Module]] = (0, "", [])
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.ModuleList) and len(module) > 1:
            count = sum(id(inner) in wanted for inner in module.modules())
            if count > best[0]:
                best = (count, name, list(module))
    if not best[0]:
        raise ValueError(
            "sequential: the model has no torch.nn.ModuleList of two or more blocks with selected layers, "
            "must have one (use sequential=False)"
        )
    return best[1], best[2]


@contextlib.contextmanager
def _patched(module: torch.nn.Module, forward: Any) -> Iterator[None]:
    """Give a module another forward until the context ends."""
    own = vars(module).get("forward")
    module.forward = forward
    try:
        yield
    finally:
        if own is None:
            del module.forward
        else:
            module.forward = own


@contextlib.contextmanager
def _no_cache(model: torch.nn.Module) -> Iterator[None]:
    """Let a model of transformers keep no keys and values: a block that ran twice would add them twice."""
    configs = [c for m in model.modules() if (c := getattr(m, "config", None)) is not None]
    found = {id(c): c for c in configs if getattr(c, "use_cache", None)}
    for config in found.values():
        config.use_cache = False
    try:
        yield
    finally:
        for config in found.values():
            config.use_cache = True
