"""The arguments of ExpertParallel and of its methods: checks, and the handle of a dispatch."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from .. import _checks
from ..containers.nvfp4 import NVFP4Tensor
from ..ops import moe as moe_ops
from ..support import ready
from ._agreement import require_equal
from ._capture import capture_of
from ._places import Places

if TYPE_CHECKING:
    from .expert_parallel import ExpertParallel

_IN_FLIGHT = 2  # dispatches whose handles are valid: what a double-buffered engine can hold
E4M3_MAX = 448  # the bound of the block scales that travel

EngineName = Literal["auto", "gather", "symm"]
CombineName = Literal["slots", "tree"]
GradientName = Literal["original", "nvfp4"]

__all__ = [
    "E4M3_MAX",
    "CombineName",
    "EngineName",
    "GradientName",
    "Handle",
    "agree_on_dtype",
    "bound_of",
    "check_capture",
    "check_handle",
    "group_of",
    "ids_of",
    "is_initialized",
    "problem_of",
    "tokens_of",
]


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
    _max_tokens: int  # the most tokens of each rank in this call
    _all_ids: Tensor  # int32 (ranks * max_tokens, top_k)
    _own_ids: Tensor  # int32 (t, top_k)
    _places: Places
    _capture: int | None = None  # the capture of the dispatch, for engines that read their peers
    _is_combined: bool = False


def problem_of(**own: Any) -> TypeError | ValueError | None:
    """The fault of the arguments of ExpertParallel that this rank finds without those of other ranks."""
    try:
        num_experts = moe_ops.num_experts(own["num_experts"])
        for name in ("top_k", "hidden", "max_tokens"):
            _checks.is_int(name, own[name], 1)
        if own["top_k"] > num_experts:
            raise ValueError(
                f"top_k: got {own['top_k']}, must be at most num_experts, which is {num_experts}"
            )
        _checks.is_multiple("hidden", "the size", own["hidden"], _checks.K_STEP_MM)
        for name, allowed in (("engine", EngineName), ("combine", CombineName), ("gradient", GradientName)):
            _checks.is_one_of(name, own[name], get_args(allowed))
        _checks.is_int("seed", own["seed"], 0)
        if own["capacity"] is not None:
            _checks.is_int("capacity", own["capacity"], 1)
    except (TypeError, ValueError) as error:
        return error
    return None


def is_initialized() -> bool:
    """Whether there are process groups."""
    return dist.is_available() and dist.is_initialized()


def group_of(group: object) -> dist.ProcessGroup:
    """The process group of an argument."""
    if not is_initialized():
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


def bound_of(max_tokens: object, most: int) -> int:
    """``max_tokens`` of a call; for None the constructor's value ``most``, which is the limit."""
    if max_tokens is None:
        return most
    _checks.is_int("max_tokens", max_tokens, 1)
    if max_tokens > most:  # type: ignore[operator]
        raise ValueError(f"max_tokens: got {max_tokens}, must be at most {most}, the constructor's")
    return int(max_tokens)  # type: ignore[call-overload, no-any-return]


def ids_of(value: object, shape: tuple[int, int], device: torch.device) -> Tensor:
    ids = _checks.is_tensor("topk_ids", value)
    ids = moe_ops.topk_ids(ids.contiguous())
    _checks.has_shape("topk_ids", ids, shape)
    _checks.same_device("topk_ids", ids, device, "x")
    return ids


def tokens_of(x: object, hidden: int, bound: int) -> Tensor | NVFP4Tensor:
    """x itself; raises unless it is (t, hidden) with t of at most bound."""
    if isinstance(x, NVFP4Tensor):
        t, k = x.shape[-2:]
        is_plain = x.offs is None and x.hadamard_signs is None and x.codes.dim() == 2
        if not is_plain or x.amax.shape != (t,) or x.e4m3_max != E4M3_MAX:
            raise ValueError(
                f"x: got {x!r}, must have one amax for each row, e4m3_max {E4M3_MAX}, no groups "
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
    if k != hidden:
        raise ValueError(f"x: shape is ({t}, {k}), must be (t, {hidden}), {hidden} = hidden")
    if t > bound:
        raise ValueError(f"x: has {t} tokens, must have at most {bound}, max_tokens")
    return x


def agree_on_dtype(owner: ExpertParallel, x: Tensor) -> None:
    """Raise unless x has the dtype of all ranks: compared in the first call, and kept from then on.

    The bytes of another dtype would be read as those of this one, or a collective would wait for more.
    """
    if owner._train_dtype is None:
        where = "in the first train_dispatch"
        require_equal({"x, its dtype": str(x.dtype)}, None, owner._open_group(), where)
        owner._train_dtype = x.dtype
    elif x.dtype != owner._train_dtype:
        raise ValueError(
            f"x: dtype is {x.dtype}, must be {owner._train_dtype}, as in the first train_dispatch; another "
            "dtype needs an ExpertParallel of its own"
        )


def check_handle(handle: object, owner: ExpertParallel, num_dispatches: int, reads_peers: bool) -> None:
    """Raise unless this is the handle of a dispatch that may be combined now."""
    if not isinstance(handle, Handle):
        raise TypeError(f"handle: got {_checks.describe(handle)}, must be what dispatch returned")
    if handle._owner is not owner:
        raise ValueError("handle: is of another ExpertParallel, must be of a dispatch of this one")
    if handle._is_combined:
        raise ValueError("handle: is stale, it was combined already, must be combined once")
    later = num_dispatches - handle._number
    if later >= _IN_FLIGHT:
        raise ValueError(f"handle: is stale, {later} dispatches followed, must be combined before the second")
    check_capture(handle, reads_peers)


def check_capture(handle: Handle, reads_peers: bool) -> None:
    """Raise unless an engine that reads its peers combines in the capture of the dispatch, or in none."""
    if reads_peers and handle._capture != capture_of(handle.offs.device):
        where = "outside of" if handle._capture is None else "in"
        raise ValueError(
            f"handle: is of a dispatch {where} a capture, must be combined {where} it; with engine 'symm' a "
            "CUDA graph has whole exchanges"
        )
