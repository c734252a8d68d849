"""ExpertParallel: the tokens of all ranks to the experts of this rank in NVFP4, and their results back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from .. import _checks, records
from ..containers.nvfp4 import NVFP4Tensor
from ..layout import record_bytes
from ..ops import moe as moe_ops
from . import _combine, _gradients
from ._agreement import Transfer, require_equal
from ._arguments import (
    CombineName,
    EngineName,
    GradientName,
    Handle,
    bound_of,
    check_handle,
    group_of,
    ids_of,
    is_initialized,
    problem_of,
    tokens_of,
)
from ._arrival import Arrived, arrive
from ._engines import Engine, engine_of
from ._places import Sizes

if TYPE_CHECKING:
    from ..training import QuantizedInput
    from ..training.recipe import Recipe

__all__ = ["ExpertParallel", "Handle"]


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
        engine: "gather": all_gather and all_to_all with equal parts, of NCCL or gloo. "symm": every rank
            reads the rows that it needs from the memory of the others, by torch's symmetric memory, between
            GPUs of one host with peer access. "auto" chooses "gather" until "symm" has been measured on two.
            ``ep.engine`` says what was chosen, ``ep.engine_reason`` why.
        combine: "slots": the rows of all experts of a token travel back and are added in float32 in the order
            of the slots, the bits of one process. "tree": each rank adds what it has of a token first, as a
            binary tree over eight blocks of experts with nodes of the dtype of y. Fewer bytes travel, and the
            bits are the same for 1, 2, 4 and 8 ranks; E is a multiple of 8.
        gradient: what travels of the gradients of results in training: "original", themselves, or "nvfp4",
            the values of their cast with one amax for each token and stochastic rounding, whose random
            numbers belong to the token, whatever rank has it.
        seed: the seed of these random numbers.
        capacity: None: no row is ever dropped, and an operand has R * max_tokens * min(top_k, E/R) rows. Or
            the number of rows of an operand: pairs beyond it are dropped, and contribute nothing;
            :meth:`check` raises.

    Raises:
        TypeError, ValueError: naming the argument; on every rank, also if one rank has a wrong or another
            argument. A ``group`` that is no group is refused on its rank alone.
        RuntimeError: torch.distributed is not initialised; engine is "symm" and a rank cannot read the memory
            of the others, with the reason, on every rank.
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
        gradient: GradientName = "original",
        seed: int = 0,
    ) -> None:
        own: dict[str, Any] = {
            "num_experts": num_experts,
            "top_k": top_k,
            "hidden": hidden,
            "max_tokens": max_tokens,
        }
        own |= {"engine": engine, "combine": combine, "capacity": capacity}
        own |= {"gradient": gradient, "seed": seed}
        problem = problem_of(**own)
        if problem is not None and not is_initialized():
            raise problem
        self.group: dist.ProcessGroup | None = group_of(group)  # None once the object is closed
        ranks = dist.get_world_size(self.group)
        require_equal(own, problem, self.group)
        if num_experts % ranks:
            raise ValueError(f"num_experts: got {num_experts}, must be a multiple of {ranks}, the ranks")
        if combine == "tree" and (ranks not in (1, 2, 4, 8) or num_experts % _combine.BLOCKS):
            raise ValueError(
                f"combine: 'tree' is for 1, 2, 4 or 8 ranks and a multiple of {_combine.BLOCKS} experts, "
                f"must be 'slots' for {ranks} ranks and {num_experts} experts"
            )
        self.num_experts = num_experts
        self.top_k, self.hidden, self.max_tokens, self.capacity = top_k, hidden, max_tokens, capacity
        self.combine_order: CombineName = combine
        self.gradient, self.seed = gradient, seed
        self._sizes = Sizes(ranks, dist.get_rank(self.group), num_experts, top_k)
        self._transport: Engine | None
        self._transport, self.engine, self.engine_reason = engine_of(engine, self.group)
        self._meshes: dict[str, DeviceMesh] = {}
        self._count = 0  # dispatches so far
        self._train_dtype: torch.dtype | None = None
        self._random: Tensor | None = None  # it is on the device from the first use on
        self._rng_state = torch.tensor([seed, 0], dtype=torch.int64)
        self._status: Tensor | None = None  # int32 (2,): the most rows of a rank, and whether ids were wrong

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

        One phase moves packed rows and their ids: an all_gather of ``max_tokens`` of each rank, or loads of
        the rows that the experts of this rank need.

        Args:
            x: bfloat16, float16 or float32 (t, hidden), t >= 0, quantized with one amax for each row as
                :func:`fp4gemm.quantize` does; or an NVFP4Tensor that was quantized so.
            topk_ids: int32 or int64 (t, top_k), numbers of experts of all ranks. -1 names no expert. Another
                id outside of 0..num_experts-1, and an expert that a token names twice, are refused on the
                CPU, by every rank. On a GPU :meth:`check` refuses the former, which name no expert, and
                nothing looks for the latter, whose second row may be dropped.
            max_tokens: the most tokens that any rank has in this call, the same number on every rank; None is
                that of the constructor.

        Returns:
            The NVFP4Tensor (rows, hidden) with groups, one for each local expert, as
            ``fp4gemm.quantize(tokens, offs=offs)`` makes it, and a handle for :meth:`combine`. The handle is
            valid for one ``combine``, until the second dispatch after its own.

        Raises:
            TypeError, ValueError: naming the argument; apart from ids, on this rank alone, while the others
                wait for it until the time-out of the group.
            RuntimeError: the object was closed; a collective failed, a rank that does not take part included.
            NotImplementedError: x requires grad while grad mode is on; the device has no kernel.
        """
        self._engine()  # raises if the object was closed
        bound = bound_of(max_tokens, self.max_tokens)
        x = tokens_of(x, self.hidden, bound)
        ids = ids_of(topk_ids, (x.shape[0], self.top_k), x.device)

        def write(out: Tensor) -> None:
            if isinstance(x, NVFP4Tensor):
                records.make_records(x, out)
            else:
                records.quantize_records(x, out=out)

        sent = Transfer("there", "dispatch", "x", bound, self.hidden, None)
        arrived = arrive(self, ids, sent, record_bytes(self.hidden), write)
        return self._rows(arrived, self.hidden), arrived.handle

    def combine(
        self, y: Tensor, handle: Handle, topk_weights: Tensor, out_dtype: torch.dtype | None = None
    ) -> Tensor:
        """out[i] = cast(sum over j of topk_weights[i, j] * y of the pair (i, j)) for the tokens of this rank.

        Args:
            y: bfloat16, float16 or float32 (handle.num_rows, d), d a positive multiple of 8: the results of
                the rows of :meth:`dispatch`, of one dtype and d on all ranks.
            handle: the handle of that dispatch.
            topk_weights: float32, bfloat16 or float16 (t, top_k).
            out_dtype: bfloat16, float16 or float32; None is the dtype of y.

        Returns:
            (t, d), contiguous. Does not synchronise on a GPU.

        Raises:
            TypeError, ValueError: naming the argument; a handle that is stale or of another object.
            RuntimeError, NotImplementedError: as :meth:`dispatch`.
        """
        check_handle(handle, self, self._count, self._engine().reads_peers)
        y = _checks.readable(_checks.is_tensor("y", y))
        _checks.has_rank("y", y, 2, "(handle.num_rows, d)")
        if y.shape[0] != handle.num_rows:
            raise ValueError(f"y: has {y.shape[0]} rows, must have {handle.num_rows}, those of the dispatch")
        weights = _checks.is_tensor("topk_weights", topk_weights).contiguous()
        function = "fp4gemm.distributed.ExpertParallel.combine"
        dtype = moe_ops.check_combine(y, handle._own_ids, weights, out_dtype, function)
        handle._is_combined = True
        return self._sum(y, handle, weights, dtype, "combine", "y")

    def train_dispatch(
        self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, recipe: Recipe | None = None
    ) -> tuple[Tensor | QuantizedInput, Tensor, Handle]:
        """:meth:`dispatch` with gradients, for :class:`fp4gemm.training.MoE`: rows, their weights, a handle.

        Args:
            x: bfloat16, float16 or float32 (t, hidden), of one dtype on all ranks and in all calls.
            topk_ids: as for :meth:`dispatch`.
            topk_weights: float32 (t, top_k); they travel too, and their gradients come back.
            recipe: of the layers that multiply the rows, or None. x travels as NVFP4 where all that they need
                follows from the codes of ``recipe.x``: x_t is "dequantized" or has source "rowwise", or no
                gradient is recorded. Otherwise it travels in its own dtype.

        Returns:
            The rows (handle.num_rows, hidden) of the dtype of x, or a QuantizedInput of them; float32
            (handle.num_rows,), the weight of each row, 0 for rows of no pair; and a handle for
            :meth:`train_combine`, which stays valid. The gradient of x is the float32 sum over its slots,
            as :meth:`combine` adds with weights of one.

        Raises:
            As :meth:`dispatch`. The first call compares the dtype of x on all ranks, and raises on each.
        """
        return _gradients.dispatch(self, x, topk_ids, topk_weights, recipe)

    def train_combine(self, y: Tensor, handle: Handle) -> Tensor:
        """The sum of the rows of each token, (t, d), with gradients, which travel as ``gradient`` says.

        Args:
            y: bfloat16, float16 or float32 (handle.num_rows, d), d a multiple of 16, on every rank.
            handle: the handle of :meth:`train_dispatch`.
        """
        return _gradients.combine(self, y, handle)

    def get_rng_state(self) -> Tensor:
        """int64 (2,) on the CPU, {seed, offset}: what ``gradient="nvfp4"`` rounds with next; for checkpoints.

        The state is the same on every rank. Synchronises.
        """
        return (self._rng_state if self._random is None else self._random).to("cpu", copy=True)

    def set_rng_state(self, state: Tensor) -> None:
        """Continue from what :meth:`get_rng_state` returned, the same on every rank.

        Raises:
            TypeError, ValueError: state is no int64 tensor (2,).
        """
        state = _checks.is_tensor("state", state)
        _checks.has_dtype("state", state, (torch.int64,))
        _checks.has_shape("state", state, (2,))
        self._rng_state = state.to("cpu", copy=True)
        if self._random is not None:
            self._random.copy_(state)  # in place, for CUDA graphs

    def check(self) -> None:
        """Raise for what the device noticed in the dispatches since the last check, on every rank alike.

        Raises:
            RuntimeError: the experts of a rank got more rows than ``capacity``, or ids outside of
                -1..num_experts-1 were dispatched. With engine "symm" also, from the fault on in every call:
                the exchanges of a rank differ from those of the others, or a CUDA graph was replayed while an
                exchange was open. What was returned since is wrong, and the object must be closed.

        Synchronises.
        """
        self._engine().check()
        if self._status is None:
            return
        rows, has_wrong_ids = self._status.tolist()
        self._status.zero_()
        if has_wrong_ids:
            raise RuntimeError(
                f"topk_ids: an id was outside of -1..{self.num_experts - 1} since the last check, must not "
                "be; it named no expert"
            )
        if self.capacity is not None and rows > self.capacity:
            raise RuntimeError(
                f"capacity: is {self.capacity}, must be at least {rows}, the rows of the experts of a rank "
                "in a dispatch since the last check; those beyond it were dropped"
            )

    def close(self) -> None:
        """Free the memory and the process group of the object. Later calls and handles are refused.

        It must come before ``torch.distributed.destroy_process_group()``: threads of a group that is still
        held live on, and the process may end with "terminate called without an active exception".
        ``with ExpertParallel(...) as ep:`` closes it at the end of the block. Nothing is communicated.
        With engine "symm" a CUDA graph that has calls of the object must not be replayed afterwards.
        """
        if self._transport is not None:
            self._transport.close()
        self._transport = self._status = self.group = None
        self._meshes.clear()

    def __enter__(self) -> ExpertParallel:
        self._engine()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

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

    def _mesh(self, device_type: str) -> DeviceMesh:
        """The ranks of the group as a mesh, for DTensors of this type of device."""
        group = self._open_group()
        if device_type not in self._meshes:
            self._meshes[device_type] = DeviceMesh.from_group(group, device_type)
        return self._meshes[device_type]

    def _open_group(self) -> dist.ProcessGroup:
        if self.group is None:
            raise RuntimeError("ExpertParallel: was closed, must not be used afterwards")
        return self.group

    def _engine(self) -> Engine:
        self._open_group()
        return cast(Engine, self._transport)

    def _next_state(self, device: torch.device) -> Tensor | None:
        """int64 (2,), {seed, offset}, the same on every rank; None where gradients travel as they are."""
        if self.gradient == "original":
            return None
        if self._random is None:
            with torch.inference_mode(False):  # later calls may be outside of inference mode, as in arrive
                self._random = self._rng_state.to(device, copy=True)
        self._random[1:] += 1
        return self._random.clone()

    def _rows(self, arrived: Arrived, d: int) -> NVFP4Tensor:
        """The rows of this rank's experts, of the packed rows of all ranks."""
        rows = arrived.handle._places.routing.token_of_row
        return records.gather_records(arrived.tokens, rows, arrived.handle.offs, d)

    def _sum(
        self, y: Tensor, handle: Handle, weights: Tensor, dtype: torch.dtype, call: str, tensor: str
    ) -> Tensor:
        """The weighted sum of the rows of each of this rank's tokens, (t, d) of dtype.

        Args:
            call: the method, or its backward pass, and ``tensor`` its name of y, for errors.
        """
        engine, bound = self._engine(), handle._max_tokens
        sent = Transfer("back", call, tensor, bound, y.shape[1], y.dtype)
        if self.combine_order == "slots":
            return _combine.by_slots(self, y, handle, weights, dtype, sent)
        everyone = weights.new_zeros((bound, self.top_k))
        everyone[: weights.shape[0]] = weights
        of_weights = Transfer("there", call, "topk_weights", bound, self.top_k, weights.dtype)
        weights = torch.cat(engine.gather(of_weights, everyone))
        return _combine.by_tree(self, y, handle, weights, dtype, sent)
