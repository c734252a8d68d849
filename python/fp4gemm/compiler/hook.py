"""The hook into torch.compile: inductor's custom pass ahead of its own post-grad passes, or aot_eager."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar, cast, get_args

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.fx import Graph, GraphModule

from .. import _checks, _fusions
from .report import FusionReport, Rewrite

__all__ = ["FusionPass", "compile"]

log = logging.getLogger(__name__)

Backend = Literal["inductor", "aot_eager"]
OPTION = "post_grad_custom_pre_pass"
_Model = TypeVar("_Model", bound=Callable[..., Any])


class FusionPass(CustomGraphPass):
    """The rewrites as a pass of inductor: ``options={"post_grad_custom_pre_pass": FusionPass()}``.

    :func:`compile` makes one. A call with an FX graph rewrites it in place; the graph must be functional and
    have fake tensors in ``meta["val"]``, as all graphs of torch.compile do at this place.

    Args:
        exact: True makes only the rewrites that leave every bit of the layers in eager mode: ``"shared"``,
            and ``"addend"`` where the result is float32.
        skip: names of rewrites that are not made: "activation", "addend", "rms_norm", "silu_and_mul" or
            "shared".
        report: called with a FusionReport for every graph that has an operator ``linear``. torch's caches of
            compiled graphs, which would leave the pass out, are then not used.

    Raises:
        TypeError, ValueError: naming the argument.
    """

    def __init__(
        self,
        *,
        exact: bool = False,
        skip: Collection[Rewrite] = (),
        report: Callable[[FusionReport], object] | None = None,
    ) -> None:
        _checks.is_bool("exact", exact)
        if isinstance(skip, str) or not isinstance(skip, Collection):
            raise TypeError(f"skip: got {_checks.describe(skip)}, must be a collection of names of rewrites")
        for name in skip:
            _checks.is_one_of("skip", name, get_args(Rewrite))
        if report is not None and not callable(report):
            raise TypeError(f"report: got {_checks.describe(report)}, must be callable")
        self.exact, self.skip, self.report = exact, tuple(sorted(skip)), report

    def __call__(self, graph: Graph) -> None:
        from ._rewrites import rewrite

        done = rewrite(graph, exact=self.exact, skip=self.skip)
        if done.num_linears == 0:
            return
        graph.lint()
        log.info("%s", done)
        if self.report is not None:
            self.report(done)

    # torch compiles layers that share their code once, each given to compile(), if the passes are equal.
    def __eq__(self, other: object) -> bool:
        return isinstance(other, FusionPass) and self._options() == other._options()

    def __hash__(self) -> int:
        return hash(self._options())

    def _options(self) -> tuple[object, ...]:
        return self.exact, self.skip, self.report

    def uuid(self) -> Any:
        """What torch's caches of compiled graphs know the pass by; None, for no cache, with a report."""
        if self.report is not None:
            return None
        own = sorted(str(path) for path in Path(__file__).parent.glob("*.py"))
        files = (*own, _fusions.__file__)
        return get_hash_for_files(files, repr((self.exact, self.skip)))


def compile(
    model: _Model,
    *,
    exact: bool = False,
    skip: Collection[Rewrite] = (),
    report: Callable[[FusionReport], object] | None = None,
    backend: Backend = "inductor",
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
    **more: Any,
) -> _Model:
    """``torch.compile(model)`` that also fuses what is around the layers of :class:`fp4gemm.nn.Linear`.

    docs/compile.md defines the rewrites and says which roundings each of them changes.

    Args:
        model: a torch.nn.Module or a function, compiled for inference: run it under torch.no_grad() or
            torch.inference_mode().
        exact, skip, report: as for :class:`FusionPass`.
        backend: "inductor", or "aot_eager" for the rewrites without anything of inductor: each operation then
            rounds as in eager mode. It needs no C++ compiler, and takes no mode and no options.
        mode, options: as for torch.compile, but both may be given; options win.
        more: dynamic, fullgraph and the other arguments of torch.compile. ``dynamic=True`` turns the epsilon
            of a norm into a tensor, so that it is not rewritten; ``torch._dynamo.mark_dynamic`` does not.

    Returns:
        What torch.compile returns.

    Raises:
        TypeError, ValueError: naming the argument.
    """
    fuse = FusionPass(exact=exact, skip=skip, report=report)
    _checks.is_one_of("backend", backend, get_args(Backend))
    if backend == "aot_eager":
        for name, value in (("mode", mode), ("options", options)):
            if value is not None:
                raise ValueError(f"{name}: got {value!r}, must be None with backend='aot_eager'")
        return cast(_Model, torch.compile(model, backend=_aot_eager(fuse), **more))
    own = dict(options or {})
    if OPTION in own or getattr(torch._inductor.config, OPTION) is not None:
        raise ValueError(
            f"options: inductor's {OPTION} is set already, must not be; call both passes in one of your own"
        )
    if mode is not None:
        own = {**torch._inductor.list_mode_options(mode, more.get("dynamic")), **own}
    return cast(_Model, torch.compile(model, options={**own, OPTION: fuse}, **more))


def _aot_eager(fuse: FusionPass) -> Callable[..., Any]:
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    def run_nodes(module: GraphModule, inputs: object) -> Callable[..., Any]:
        fuse(module.graph)
        module.recompile()
        boxed: Callable[..., Any] = make_boxed_func(module.forward)
        return boxed

    compiler: Callable[..., Any] = aot_autograd(fw_compiler=run_nodes)
    return compiler
