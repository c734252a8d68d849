"""The forward pass and the state of fp4gemm.nn.Experts with experts on many ranks (fp4gemm.distributed)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .. import _checks, kernel_table, support
from ..ops import operators
from ..ops.gemm import GemmCall
from ..quantize import decode, quantize
from ..reference.epilogue import ALPHA
from ._experts import check_tokens, formats_of
from ._inputs import refuse_not_finite
from ._stack import HeldWeight
from ._weight import BOUND

if TYPE_CHECKING:
    from ..containers.decoded import DecodedTensor
    from ..containers.nvfp4 import NVFP4Tensor
    from ..distributed import ExpertParallel, Handle
    from .experts import Experts

__all__ = ["DividedExperts", "check_exchange", "forward"]


class DividedExperts(torch.nn.Module):
    """A module whose state_dict has the experts of all ranks if it exchanges tokens between ranks.

    The entries of its children are then DTensors with the placement Shard(0), over the memory that the
    children hold, and not plain tensors: those would have one name and other contents on each rank, of which
    torch.distributed.checkpoint would silently save one rank's. The bounds of the scales stay plain.
    """

    ep: ExpertParallel | None = None

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the state_dict; with ``ep`` the stacks are DTensors (num_experts, ...), Shard(0)."""
        state = super().state_dict(*args, **kwargs)
        if self.ep is None:
            return state
        from torch.distributed.tensor import DTensor, Shard

        prefix = kwargs.get("prefix", args[1] if len(args) > 1 else "")
        inside = tuple(f"{prefix}{name}." for name, _ in self.named_children())
        for key, value in state.items():
            is_stack = isinstance(value, Tensor) and not isinstance(value, DTensor) and not value.is_meta
            if is_stack and key.startswith(inside) and not key.endswith(f".{BOUND}"):
                mesh = self.ep._mesh(value.device.type)
                state[key] = DTensor.from_local(value, mesh, [Shard(0)], run_check=False)
        return state

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Give the children, whose turn is next, this rank's part of each DTensor."""
        if self.ep is not None:
            from torch.distributed.tensor import DTensor

            for key, value in state_dict.items():
                if key.startswith(prefix) and isinstance(value, DTensor):
                    state_dict[key] = value.to_local()
        super()._load_from_state_dict(state_dict, prefix, *args)


def check_exchange(
    ep: object, num_local: int | None, num_experts: int | None, hidden: int, activation_scaling: object
) -> None:
    """Raise unless ep is None or exchanges the tokens of experts of these sizes."""
    if ep is None:
        return
    if not all(hasattr(ep, name) for name in ("dispatch", "combine", "num_local_experts")):
        raise TypeError(
            f"ep: got {_checks.describe(ep)}, must be an fp4gemm.distributed.ExpertParallel or None"
        )
    if activation_scaling != "row":
        raise NotImplementedError(
            f"activation_scaling: got {activation_scaling!r}, must be 'row' with ep, whose "
            "tokens travel in NVFP4"
        )
    for name, got, of_ep in (
        ("num_experts", num_experts, "num_experts"),
        ("w13: the number of experts", num_local, "num_local_experts"),
        ("hidden", hidden, "hidden"),
    ):
        wanted = getattr(ep, of_ep)
        if got is not None and got != wanted:
            raise ValueError(f"{name}: is {got}, must be {wanted}, {of_ep} of ep")


def forward(layer: Experts, ep: ExpertParallel, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
    """The weighted sum of the experts of each token of this rank: every rank takes part, also without tokens.

    The arguments are those of ``Experts.forward``, and the definition is the same.
    """
    w13, w2 = layer.w13(), layer.w2()
    d = layer.hidden
    x, ids, weights = check_tokens(x, topk_ids, topk_weights, d, w13.amax.device)
    if layer.check_finite != "off":
        refuse_not_finite(x, layer)
    formats = formats_of(layer, x, w13)
    support.ready_for(x, "grouped_mm", formats)
    rows = _checks.readable(x.reshape(-1, d))
    a, handle = ep.dispatch(rows, ids.reshape(-1, ids.shape[-1]))
    hidden_dtype = x.dtype if x.dtype in _checks.HALF_DTYPES else torch.bfloat16
    decodes = formats[0] == "fp16"
    left = decode(a) if decodes else a
    h = _product(ep, handle, left, w13, layer._activation, layer.activation, hidden_dtype)
    hidden = quantize(h, offs=handle.offs, decoded=decodes)
    y = _product(ep, handle, hidden, w2, 0, None, x.dtype)
    out = ep.combine(y, handle, weights.reshape(-1, ids.shape[-1]))
    return out if x.dim() == 2 else out.view(x.shape)


def _product(
    ep: ExpertParallel,
    handle: Handle,
    a: NVFP4Tensor | DecodedTensor,
    weight: HeldWeight,
    activation: int,
    activation_name: str | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """The grouped product of rows and a weight, by the kernel that one process would select."""
    data, scales = getattr(a, "codes", None), getattr(a, "scales", None)
    call = GemmCall(
        a=a.data if data is None else data,  # type: ignore[arg-type]
        b=weight.data,
        scale_a=scales,
        scale_b=weight.scales,
        offs=handle.offs,
        alpha=ALPHA[a.e4m3_max, weight.e4m3_max],
        alpha_row=a.amax,
        alpha_col=weight.amax,
        bias=weight.bias,
        activation=activation,
        b_rows=weight.rows,
        kernel_name=None,
        out_dtype=out_dtype,
    )
    if a.device.type == "cuda":
        n = weight.rows or weight.data.shape[1]
        formats = ("fp16" if scales is None else "nvfp4", "prepacked" if weight.scales is None else "nvfp4")
        call = call._replace(
            kernel_name=kernel_of(ep, handle, a.device, n, a.shape[1], formats, activation_name, out_dtype)
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
