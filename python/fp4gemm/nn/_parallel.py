"""The forward pass of fp4gemm.nn.Experts with experts on many ranks (fp4gemm.distributed)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .. import _checks, kernel_table
from ..activations import by_name
from ..ops import operators
from ..ops.gemm import GemmCall
from ..ops.gemm import formats as gemm_formats
from ..quantize import decode, quantize

if TYPE_CHECKING:
    from ..containers.decoded import DecodedTensor
    from ..containers.nvfp4 import NVFP4Tensor
    from ..distributed import ExpertParallel, Handle
    from ..ops.parts import OperandParts

__all__ = ["check_exchange", "exchanged"]


def check_exchange(
    ep: object, num_local: int | None, num_experts: int | None, hidden: int, activations: object
) -> None:
    """Raise unless ep is None or exchanges the tokens of experts of these sizes."""
    if ep is None:
        return
    if not all(hasattr(ep, name) for name in ("dispatch", "combine", "num_local_experts")):
        raise TypeError(
            f"ep: got {_checks.describe(ep)}, must be an fp4gemm.distributed.ExpertParallel or None"
        )
    if activations != "per-token":
        raise NotImplementedError(
            f"activations: got {activations!r}, must be 'per-token' with ep, whose tokens travel in NVFP4 "
            "with the options of that cast"
        )
    for name, got, of_ep in (
        ("num_experts", num_experts, "num_experts"),
        ("w13: the number of experts", num_local, "num_local_experts"),
        ("hidden", hidden, "hidden"),
    ):
        wanted = getattr(ep, of_ep)
        if got is not None and got != wanted:
            raise ValueError(f"{name}: is {got}, must be {wanted}, {of_ep} of ep")


def exchanged(
    ep: ExpertParallel,
    x: Tensor,
    ids: Tensor,
    scores: Tensor,
    w13: OperandParts,
    w2: OperandParts,
    activation: str | None,
    formats: tuple[str, str],
) -> Tensor:
    """The weighted sum of the experts of each token of this rank: every rank takes part, also without tokens.

    The definition is that of the operator ``experts``.

    Args:
        x: (t, d), contiguous; ids, scores: (t, top_k).
        w13, w2: the experts of this rank.
        formats: the formats of the operands, as :func:`fp4gemm.support.ready_for` names them.
    """
    a, handle = ep.dispatch(x, ids)
    hidden_dtype = x.dtype if x.dtype in _checks.HALF_DTYPES else torch.bfloat16
    decodes = formats[0] == "fp16"
    h = _product(ep, handle, decode(a) if decodes else a, w13, activation, hidden_dtype)
    hidden = quantize(h, offs=handle.offs, decoded=decodes)
    return ep.combine(_product(ep, handle, hidden, w2, None, x.dtype), handle, scores)


def _product(
    ep: ExpertParallel,
    handle: Handle,
    a: NVFP4Tensor | DecodedTensor,
    weight: OperandParts,
    activation: str | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """The grouped product of rows and a weight, by the kernel that one process would select."""
    left = a._operand_parts()
    number = by_name[activation].number
    call = GemmCall.of(left, weight, handle.offs, activation=number, out_dtype=out_dtype)
    if a.device.type == "cuda":
        n = weight.rows or weight.data.shape[1]
        formats = gemm_formats(left.data, weight.data, left.scales, weight.scales, weight.rows)
        call = call._replace(
            kernel_name=kernel_of(ep, handle, a.device, n, a.shape[1], formats, activation, out_dtype)
        )
    y: Tensor = operators.gemm(*call)
    return y


def kernel_of(
    ep: ExpertParallel,
    handle: Handle,
    device: torch.device,
    n: int,
    k: int,
    formats: tuple[str, str],
    activation: str | None,
    out_dtype: torch.dtype,
) -> str | None:
    """The kernel that one process with the tokens of all ranks would select on this device."""
    properties = torch.cuda.get_device_properties(device)
    kernel = kernel_table.select_kernel(
        10 * properties.major + properties.minor,
        properties.multi_processor_count,
        handle.global_pairs,
        n,
        k,
        ep.num_experts,
        out_dtype=out_dtype,
        format_a=formats[0],  # type: ignore[arg-type]
        format_b=formats[1],  # type: ignore[arg-type]
        activation=activation,
    )
    return None if kernel is None else kernel.name
