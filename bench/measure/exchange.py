"""The contenders of ``bench ep``: what is called, and what its result is compared with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import fp4gemm
import torch
import torch.distributed as dist
from fp4gemm import ranks as fp4_ranks
from fp4gemm.distributed import ExpertParallel, _arrival
from fp4gemm.distributed._agreement import Transfer
from fp4gemm.distributed._arrival import Arrived, arrive
from torch import Tensor

from ..baselines.all_to_all import AllToAll
from .ranks import Clock, Row

RIVAL = "bf16 all_to_all"  # as it is used: splits from the host
EXACT = "bf16 all_to_all, planned"  # everything that follows from the ids was computed before


class Sizes(NamedTuple):
    """The sizes of a block of experts."""

    hidden: int
    intermediate: int
    num_experts: int
    top_k: int


class Exchange:
    """Experts of these sizes on this rank, in bf16 and in NVFP4."""

    def __init__(self, sizes: Sizes, engines: list[str], device: torch.device) -> None:
        self.sizes, self.engines, self.device = sizes, engines, device
        d, f, e, _ = sizes
        self.gen = torch.Generator(device).manual_seed(dist.get_rank())
        local = e // dist.get_world_size()
        self.w13, self.w2 = (
            torch.randn(local, *shape, generator=self.gen, device=device, dtype=torch.bfloat16)
            * shape[1] ** -0.5
            for shape in ((2 * f, d), (d, f))
        )
        self.experts: fp4gemm.nn.Experts | None = None  # quantized once

    def rows(self, tokens: int, clock: Clock) -> list[Row]:
        """A row for each contender and part, of this number of tokens on each rank."""
        d, _, e, top_k = self.sizes
        gen, device = self.gen, self.device
        x = torch.randn(tokens, d, generator=gen, device=device).bfloat16()
        ids = torch.rand(tokens, e, generator=gen, device=device).topk(top_k).indices
        weights = torch.rand(tokens, top_k, generator=gen, device=device).softmax(-1)
        rival = AllToAll(e)
        rows, plan = rival.dispatch(x, ids)
        of_rows = rival.combine(rows, plan, weights)
        of_layer = rival.layer(x, ids, weights, self.w13, self.w2)
        found: list[Row] = []
        for engine in self.engines:
            found += self._own(engine, x, ids, weights, clock, (rows, plan.offs, of_rows, of_layer))
        stack = (self.w13, self.w2)
        found += [
            clock.row("dispatch", RIVAL, lambda: rival.dispatch(x, ids)[0], True, in_graph=False),
            clock.row("layer", RIVAL, lambda: rival.layer(x, ids, weights, *stack), True, in_graph=False),
            clock.row("dispatch", EXACT, lambda: rival.dispatch(x, ids, plan)[0], rows.equal),
            clock.row("combine", EXACT, lambda: rival.combine(rows, plan, weights), of_rows.equal),
            clock.row(
                "layer", EXACT, lambda: rival.layer(x, ids, weights, *stack, plan), _near(of_layer, 0.02)
            ),
        ]
        return found

    def _own(
        self,
        engine: Any,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        clock: Clock,
        wanted: tuple[Tensor, Tensor, Tensor, Tensor],
    ) -> list[Row]:
        d, _, e, top_k = self.sizes
        rows, offs, of_rows, of_layer = wanted
        options: dict[str, Any] = {"num_experts": e, "top_k": top_k, "hidden": d, "max_tokens": len(x)}
        exchanges = {"slots": ExpertParallel(**options, engine=engine)}
        if dist.get_world_size() in (1, 2, 4, 8):
            exchanges["tree"] = ExpertParallel(**options, engine=engine, combine="tree")
        ep = exchanges["slots"]
        a, handle = ep.dispatch(x, ids)
        is_right = torch.equal(handle.offs, offs)
        is_right &= _error(a.dequantize(torch.bfloat16)[: len(rows)], rows) < 0.15
        y = torch.zeros(a.shape, dtype=torch.bfloat16, device=self.device)
        y[: len(rows)] = rows

        def exchanged() -> Tensor:
            return ep.combine(y, ep.dispatch(x, ids)[1], weights)

        def dispatch() -> Tensor:
            return ep.dispatch(x, ids)[0].codes

        found = [clock.row("dispatch", f"fp4gemm {engine}", dispatch, is_right, before=exchanged)]
        if engine == "symm":
            found += _pulls(ep, x, ids, rows, clock, exchanged)
        if self.experts is None:
            self.experts = fp4gemm.nn.Experts.from_float(self.w13, self.w2, ep=ep)
        for name, exchange in exchanges.items():
            _, handle = exchange.dispatch(x, ids)
            layer = self.experts
            layer.ep = exchange

            def combine(exchange: ExpertParallel = exchange, handle: Any = handle) -> Tensor:
                # Not combine, which takes a handle once.
                return exchange._sum(y, handle, weights, y.dtype, "bench", "y")

            def dispatched(exchange: ExpertParallel = exchange) -> Tensor:
                return exchange.dispatch(x, ids)[0].codes

            def whole(layer: fp4gemm.nn.Experts = layer) -> Tensor:
                out: Tensor = layer(x, ids, weights)
                return out

            label = f"fp4gemm {engine} {name}"
            found.append(clock.row("combine", label, combine, _near(of_rows, 0.01), before=dispatched))
            found.append(clock.row("layer", label, whole, _near(of_layer, 0.4)))
        for exchange in exchanges.values():
            exchange.close()
        return found


def _pulls(
    ep: ExpertParallel,
    x: Tensor,
    ids: Tensor,
    rows: Tensor,
    clock: Clock,
    exchanged: Callable[[], Tensor],
) -> list[Row]:
    """A dispatch of bf16 rows by the same engine, and the loads of NVFP4 and bf16 rows alone."""
    d, tokens = ep.hidden, len(x)

    def write(out: Tensor) -> None:
        out.copy_(x.view(torch.uint8))

    def pulled(arrived: Arrived) -> Tensor:
        token = arrived.handle._places.routing.token_of_row.unsqueeze(1)
        ones = torch.ones(token.shape, dtype=torch.float32, device=x.device)
        return fp4_ranks.combine_ranks([t.view(x.dtype) for t in arrived.tokens], token, ones)

    sent = Transfer("there", "bench", "x", tokens, d, x.dtype)

    def dispatch() -> Tensor:
        return pulled(arrive(ep, ids, sent, 2 * d, write))

    is_right = torch.equal(dispatch()[: len(rows)], rows)
    found = [clock.row("dispatch", "symm of bf16 rows", dispatch, is_right, before=exchanged)]
    copied, _arrival._COPIED_TOKENS = _arrival._COPIED_TOKENS, 1 << 30  # rows are read where they lie
    in_place: dict[str, Any] = {"call": lambda: ep.dispatch(x, ids)[0].codes, "before": exchanged}
    found.append(clock.row("dispatch", "symm without a copy", is_right=True, **in_place))
    of_records = sent._replace(dtype=None), fp4gemm.records.record_bytes(d)
    packed = arrive(ep, ids, *of_records, lambda out: _records(x, out))
    found.append(_pull("fp4gemm symm", packed, lambda: ep._rows(packed, d).codes, clock))
    mb = sum(block.nbytes for block in packed.blocks[1:]) / 1e6
    found.append(clock.row("pull", "blocks", lambda: torch.stack(packed.blocks), True, remote_mb=mb))
    clock.agree(True)  # no rank writes into the slot that another one still reads
    plain = arrive(ep, ids, sent, 2 * d, write)
    found.append(_pull("symm of bf16 rows", plain, lambda: pulled(plain), clock))
    clock.agree(True)
    _arrival._COPIED_TOKENS = copied
    return found


def _records(x: Tensor, out: Tensor) -> None:
    fp4gemm.records.quantize_records(x, out=out)


def _pull(contender: str, arrived: Arrived, call: Any, clock: Clock) -> Row:
    """The rate counts each row that is read from another rank, once for each expert that reads it."""
    handle = arrived.handle
    of_rank = handle._places.routing.token_of_row[: int(handle.offs[-1])]
    rank, tokens = dist.get_rank(), arrived.message.max_tokens
    remote = (of_rank.div(tokens, rounding_mode="floor") != rank).sum().item()
    return clock.row("pull", contender, call, True, remote_mb=remote * arrived.message.row_bytes / 1e6)


def _near(want: Tensor, bound: float) -> Callable[[Tensor], bool]:
    return lambda got: _error(got, want) < bound


def _error(got: Tensor, want: Tensor) -> float:
    norm = float(want.float().norm())
    return float((got.float() - want.float()).norm()) / norm if norm else 0.0
