"""ExpertParallel: the tokens of all ranks to the experts of this rank in NVFP4, and their results back."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from .. import _checks
from .._checks import moe as moe_checks
from ..containers.nvfp4 import NVFP4Tensor
from ..support import ready
from . import _combine, _rows
from ._agreement import require_equal
from ._gather import Engine, GatherEngine
from ._message import Message
from ._places import Places, Sizes, at_experts, check_ids

__all__ = ["ExpertParallel", "Handle"]

EngineName = Literal["auto", "gather"]
CombineName = Literal["slots", "tree"]
_IN_FLIGHT = 2  # dispatches whose handles are valid: what a double-buffered engine can hold


@dataclasses.dataclass(eq=False)
class Handle:
    """What :meth:`ExpertParallel.combine` needs to know of a dispatch. Its fields are on the device.

    Attributes:
        offs: int32 (num_local_experts,), the ends of the rows of this rank's experts.
        num_tokens: t, of this rank.
        num_rows: rows of the operand, a bound that the routing does not change.
        global_pairs: pairs of tokens and experts on all ranks at most, by which a kernel is selected.
    """

    offs: Tensor
    num_tokens: int
    num_rows: int
    global_pairs: int
    _owner: ExpertParallel
    _number: int
    _all_ids: Tensor  # int32 (ranks * max_tokens, top_k)
    _own_ids: Tensor  # int32 (t, top_k)
    _row_of_pair: Tensor  # int32 (ranks * max_tokens, top_k)
    _is_combined: bool = False


class ExpertParallel:
    """The exchange of tokens between ranks that hold different experts; each token travels as NVFP4.

    Rank r of R has the experts r * E/R .. (r+1) * E/R - 1 of E = num_experts, and tokens of its own::

        ep = ExpertParallel(num_experts=128, top_k=8, hidden=2048, max_tokens=4096)
        a, handle = ep.dispatch(x, topk_ids)          # NVFP4Tensor: the rows of this rank's experts
        y = experts(a)                                # (handle.num_rows, hidden)
        out = ep.combine(y, handle, topk_weights)     # (t, hidden)

    A token that is quantized with an amax of its own needs no amax of other ranks: its codes, block scales
    and amax are k/2 + k/16 + 4 bytes in place of 2k. The rows of an expert are sorted by (rank, token, slot),
    so that they are those of :func:`fp4gemm.route` in one process that has the tokens of all ranks, one rank
    after the other. docs/distributed.md says what travels and which bits are equal.

    Every rank of the group makes the object, and calls ``dispatch`` and ``combine`` equally often and in the
    same order, also without tokens. Nothing synchronises with the host on a GPU, and all sizes follow from
    the arguments, so that calls can be captured in a CUDA graph and replayed with other tokens and ids.

    Args:
        group: a ProcessGroup, or a DeviceMesh of one dimension; None is the default group.
        num_experts: E, 1 to 2048; a multiple of the number of ranks.
        top_k: slots of each token, 1 to num_experts.
        hidden: d, elements of a token; a multiple of 32.
        max_tokens: the most tokens that any rank has in a call.
        engine: "gather": all_gather and all_to_all with equal parts, of NCCL or gloo. "auto" chooses it.
        combine: "slots": the rows of all experts of a token travel back and are added in float32 in the order
            of the slots, the bits of one process. "tree": each rank adds what it has of a token first, as a
            binary tree over eight blocks of experts with nodes of the dtype of y. Fewer bytes travel, and the
            bits are the same for 1, 2, 4 and 8 ranks; E is a multiple of 8.
        capacity: None: no row is ever dropped, and an operand has R * max_tokens * min(top_k, E/R) rows. Or
            the number of rows of an operand: pairs beyond it are dropped, and contribute nothing;
            :meth:`check` raises.

    Raises:
        TypeError, ValueError: naming the argument; also, on every rank, if ranks have different arguments.
        RuntimeError: torch.distributed is not initialised.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | DeviceMesh | None = None,
        *,
        num_experts: int,
        top_k: int,
        hidden: int,
        max_tokens: int,
        engine: EngineName = "auto",
        combine: CombineName = "slots",
        capacity: int | None = None,
    ) -> None:
        self.num_experts = moe_checks.num_experts(num_experts)
        for name, value in (("top_k", top_k), ("hidden", hidden), ("max_tokens", max_tokens)):
            _checks.is_int(name, value, 1)
        if top_k > num_experts:
            raise ValueError(f"top_k: got {top_k}, must be at most num_experts, which is {num_experts}")
        _checks.is_multiple("hidden", "the size", hidden, _checks.K_STEP_MM)
        _checks.is_one_of("engine", engine, get_args(EngineName))
        _checks.is_one_of("combine", combine, get_args(CombineName))
        if capacity is not None:
            _checks.is_int("capacity", capacity, 1)
        self.group = _group(group)
        ranks = dist.get_world_size(self.group)
        own: dict[str, Any] = {
            "num_experts": num_experts,
            "top_k": top_k,
            "hidden": hidden,
            "max_tokens": max_tokens,
        }
        own |= {"engine": engine, "combine": combine, "capacity": capacity}
        require_equal("ExpertParallel", own, self.group)
        if num_experts % ranks:
            raise ValueError(f"num_experts: got {num_experts}, must be a multiple of {ranks}, the ranks")
        if combine == "tree" and (ranks not in (1, 2, 4, 8) or num_experts % _combine.BLOCKS):
            raise ValueError(
                f"combine: 'tree' is for 1, 2, 4 or 8 ranks and a multiple of {_combine.BLOCKS} experts, "
                f"must be 'slots' for {ranks} ranks and {num_experts} experts"
            )
        self.top_k, self.hidden, self.max_tokens, self.capacity = top_k, hidden, max_tokens, capacity
        self.combine_order: CombineName = combine
        self.engine: str = "gather"
        self._sizes = Sizes(ranks, dist.get_rank(self.group), num_experts, top_k)
        self._transport: Engine | None = GatherEngine(self.group)
        self._count = 0  # dispatches so far
        self._state: Tensor | None = None  # int64 (2,): the most rows that were wanted, and ids out of range

    @property
    def num_ranks(self) -> int:
        return self._sizes.ranks

    @property
    def rank(self) -> int:
        """This rank in the group."""
        return self._sizes.rank

    @property
    def num_local_experts(self) -> int:
        """E/R, the experts of each rank."""
        return self._sizes.num_local

    @property
    def first_expert(self) -> int:
        """The first of this rank's experts."""
        return self.rank * self.num_local_experts

    def dispatch(
        self, x: Tensor | NVFP4Tensor, topk_ids: Tensor, *, max_tokens: int | None = None
    ) -> tuple[NVFP4Tensor, Handle]:
        """Send the tokens of this rank to their experts, and return the rows of the experts of this rank.

        One collective moves ``max_tokens`` packed rows and their ids from each rank to each other.

        Args:
            x: bfloat16, float16 or float32 (t, hidden), t >= 0, quantized with one amax for each row as
                :func:`fp4gemm.quantize` does; or an NVFP4Tensor that was quantized so.
            topk_ids: int32 or int64 (t, top_k), numbers of experts of all ranks. -1 names no expert. Another
                id outside of 0..num_experts-1, and an expert that a token names twice, are refused on the
                CPU, by every rank; on a GPU :meth:`check` refuses such ids, and they name no expert.
            max_tokens: the most tokens that any rank has in this call, the same number on every rank; None is
                that of the constructor.

        Returns:
            The NVFP4Tensor (rows, hidden) with groups, one for each local expert, as
            ``fp4gemm.quantize(tokens, offs=offs)`` makes it, and a handle for :meth:`combine`. The handle is
            valid for one ``combine``, until the second dispatch after its own.

        Raises:
            TypeError, ValueError: naming the argument.
            RuntimeError: the object was closed; a collective failed, a rank that does not take part included.
            NotImplementedError: x requires grad while grad mode is on; the device has no kernel.
        """
        bound = self._bound(max_tokens)
        x = self._tokens(x, bound)
        ids = _checked_ids(topk_ids, (x.shape[0], self.top_k), x.device)
        message = Message(bound, _rows.row_bytes(self.hidden), self.top_k)
        block = message.new(x.device)
        _rows.pack(x, block[: x.shape[0]])
        sent_ids = message.matrix(block, 0, torch.int32)[0]
        own_ids = ids.clamp(-2, self.num_experts).to(torch.int32)
        sent_ids[: x.shape[0]] = own_ids
        sent_ids[x.shape[0] :] = -1
        blocks = self._engine().gather(block)
        all_ids = message.matrix(blocks, 0, torch.int32).flatten(0, 1).contiguous()
        if x.device.type == "cpu":
            check_ids(all_ids, self._sizes)
        places = at_experts(all_ids, self._sizes, self.capacity)
        self._note(places, all_ids)
        a = _rows.unpack(blocks, message.row_of_token(places.token_of_row), places.offs, self.hidden)
        self._count += 1
        handle = Handle(
            places.offs,
            x.shape[0],
            a.shape[0],
            all_ids.numel(),
            self,
            self._count,
            all_ids,
            own_ids,
            places.row_of_pair,
        )
        return a, handle

    def combine(
        self, y: Tensor, handle: Handle, topk_weights: Tensor, out_dtype: torch.dtype | None = None
    ) -> Tensor:
        """out[i] = cast(sum over j of topk_weights[i, j] * y of the pair (i, j)) for the tokens of this rank.

        Args:
            y: bfloat16, float16 or float32 (handle.num_rows, d), d a positive multiple of 8: the results of
                the rows of :meth:`dispatch`, of one dtype and d on all ranks.
            handle: of that dispatch.
            topk_weights: float32, bfloat16 or float16 (t, top_k).
            out_dtype: bfloat16, float16 or float32; None is the dtype of y.

        Returns:
            (t, d), contiguous. Does not synchronise on a GPU.

        Raises:
            TypeError, ValueError: naming the argument; a handle that is stale or of another object.
            RuntimeError, NotImplementedError: as :meth:`dispatch`.
        """
        transport = self._engine()
        self._check_handle(handle)
        y = _checks.readable(_checks.is_tensor("y", y))
        _checks.has_rank("y", y, 2, "(handle.num_rows, d)")
        if y.shape[0] != handle.num_rows:
            raise ValueError(f"y: has {y.shape[0]} rows, must have {handle.num_rows}, those of the dispatch")
        weights = _checks.is_tensor("topk_weights", topk_weights).contiguous()
        own = handle._own_ids
        dtype = moe_checks.combine(y, own, weights, out_dtype, "fp4gemm.distributed.ExpertParallel.combine")
        handle._is_combined = True
        if self.combine_order == "slots":
            return _combine.by_slots(
                y, handle._all_ids, handle._row_of_pair, own, weights, dtype, self._sizes, transport
            )
        everyone = weights.new_zeros((handle._all_ids.shape[0] // self.num_ranks, self.top_k))
        everyone[: weights.shape[0]] = weights
        return _combine.by_tree(
            y,
            handle._all_ids,
            handle._row_of_pair,
            handle.num_tokens,
            transport.gather(everyone),
            dtype,
            self._sizes,
            transport,
        )

    def check(self) -> None:
        """Raise for what the device noticed in the dispatches since the last check; every rank calls it.

        Raises:
            RuntimeError: on every rank, naming the first rank whose experts got more rows than ``capacity``,
                or that ids outside of -1..num_experts-1 were dispatched.

        Synchronises.
        """
        transport = self._engine()
        if self._state is None:
            return
        wanted, wrong = transport.gather(self._state.unsqueeze(0)).unbind(1)
        self._state.zero_()
        if int(wrong.max()):
            raise RuntimeError(
                f"topk_ids: {int(wrong.max())} ids were outside of -1..{self.num_experts - 1} since the last "
                "check, must not be; they named no expert"
            )
        if self.capacity is not None and int(wanted.max()) > self.capacity:
            rank = int(wanted.argmax())
            raise RuntimeError(
                f"capacity: is {self.capacity}, must be at least {int(wanted[rank])}, the rows of the "
                f"experts of rank {rank} in a dispatch since the last check; those beyond it were dropped"
            )

    def close(self) -> None:
        """Free what the object holds. Later calls, and handles of earlier ones, are refused."""
        if self._transport is not None:
            self._transport.close()
        self._transport = self._state = None

    def __repr__(self) -> str:
        return (
            f"ExpertParallel(num_experts={self.num_experts}, top_k={self.top_k}, hidden={self.hidden}, "
            f"max_tokens={self.max_tokens}, engine={self.engine!r}, combine={self.combine_order!r}, "
            f"capacity={self.capacity}, rank={self.rank} of {self.num_ranks})"
        )

    def __reduce__(self) -> Any:
        raise TypeError(
            "ExpertParallel: is bound to a process group, must not be pickled; save the "
            "state_dict of the model"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> ExpertParallel:
        return self  # copies of a layer share the group and its buffers

    def _engine(self) -> Engine:
        if self._transport is None:
            raise RuntimeError("ExpertParallel: was closed, must not be used afterwards")
        return self._transport

    def _bound(self, max_tokens: object) -> int:
        if max_tokens is None:
            return self.max_tokens
        _checks.is_int("max_tokens", max_tokens, 1)
        if max_tokens > self.max_tokens:  # type: ignore[operator]
            raise ValueError(
                f"max_tokens: got {max_tokens}, must be at most {self.max_tokens}, the constructor's"
            )
        return int(max_tokens)  # type: ignore[call-overload, no-any-return]

    def _tokens(self, x: object, bound: int) -> Tensor | NVFP4Tensor:
        """x itself; raises unless it is (t, hidden) with t of at most bound."""
        if isinstance(x, NVFP4Tensor):
            t, k = x.shape[-2:]
            is_plain = x.offs is None and x.hadamard_signs is None and x.codes.dim() == 2
            if not is_plain or x.amax.shape != (t,) or x.e4m3_max != _rows.E4M3_MAX:
                raise ValueError(
                    f"x: got {x!r}, must have one amax for each row, e4m3_max {_rows.E4M3_MAX}, no groups "
                    "and no rotation, as fp4gemm.quantize(x) has"
                )
        else:
            tokens = _checks.is_tensor("x", x)
            _checks.has_dtype("x", tokens, _checks.FLOAT_DTYPES)
            _checks.has_rank("x", tokens, 2, "(t, hidden)")
            _checks.no_grad("x", tokens, "fp4gemm.distributed.ExpertParallel.dispatch")
            ready(tokens, "quantize")
            t, k = tokens.shape
            x = tokens
        if k != self.hidden:
            raise ValueError(f"x: shape is ({t}, {k}), must be (t, {self.hidden}), {self.hidden} = hidden")
        if t > bound:
            raise ValueError(f"x: has {t} tokens, must have at most {bound}, max_tokens")
        return x

    def _note(self, places: Places, all_ids: Tensor) -> None:
        """Keep, on the device, what check() reports."""
        if self._state is None:
            self._state = torch.zeros(2, dtype=torch.int64, device=all_ids.device)
        wrong = ((all_ids < -1) | (all_ids >= self.num_experts)).sum()
        self._state[:1] = torch.maximum(self._state[:1], places.wanted)
        self._state[1:] += wrong

    def _check_handle(self, handle: object) -> None:
        if not isinstance(handle, Handle):
            raise TypeError(f"handle: got {_checks.describe(handle)}, must be what dispatch returned")
        if handle._owner is not self:
            raise ValueError("handle: is of another ExpertParallel, must be of a dispatch of this one")
        if handle._is_combined:
            raise ValueError("handle: is stale, it was combined already, must be combined once")
        if self._count - handle._number >= _IN_FLIGHT:
            raise ValueError(
                f"handle: is stale, {self._count - handle._number} dispatches followed its own, must be "
                f"combined before dispatch {_IN_FLIGHT} after it"
            )


def _group(group: object) -> dist.ProcessGroup:
    """The process group of an argument."""
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(
            "ExpertParallel: torch.distributed is not initialised; call torch.distributed.init_process_group "
            "first, as torchrun's environment lets it"
        )
    if group is None:
        return dist.distributed_c10d._get_default_group()
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(
                f"group: the mesh has {group.ndim} dimensions, must have 1; pass mesh['ep'], say"
            )
        return group.get_group()
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            f"group: got {_checks.describe(group)}, must be a ProcessGroup, a DeviceMesh of one "
            "dimension or None"
        )
    return group


def _checked_ids(value: object, shape: tuple[int, int], device: torch.device) -> Tensor:
    ids = _checks.is_tensor("topk_ids", value)
    ids = moe_checks.topk_ids(ids.contiguous())
    _checks.has_shape("topk_ids", ids, shape)
    _checks.same_device("topk_ids", ids, device, "x")
    return ids
