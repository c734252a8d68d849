"""fp4gemm.training.MoE: a mixture of experts that trains in NVFP4, with its router.

Names of modules and arguments are those of torchtitan and DeepSeek-V3. :mod:`fp4gemm.training.moe_keys` reads
and writes the state of other libraries' blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from .. import _checks
from ..experts import Routing, route
from ..ops import operators
from ..ops.moe import MAX_EXPERTS
from ._step import QuantizedInput, unsafe_view
from .functional import swiglu, without_autocast
from .linear import GroupedLinear, Linear, shared, shared_recipe
from .recipe import Recipe

if TYPE_CHECKING:
    import torch.distributed

    from ..distributed import ExpertParallel

__all__ = ["Experts", "FeedForward", "MoE", "Router", "update_expert_bias"]

ScoreFunction = Literal["softmax", "sigmoid"]
SCORE_FUNCTIONS = ("softmax", "sigmoid")


class Router(torch.nn.Module):
    """The experts of each token and their weights, computed in float32 whatever dtype x and the gate have::

        s       = softmax(x @ gate.weight.T)  or  sigmoid(x @ gate.weight.T)          (t, num_experts)
        ids     = the top_k largest of s + expert_bias
        weights = s[ids] [/ sum over the token's ids of s[ids]] * route_scale

    The bias chooses experts and does not enter the weights (DeepSeek-V3, section 2.1.2). Gradients reach x
    and the gate through ``weights``. ``gate`` is a torch.nn.Linear(dim, num_experts) without a bias.

    The arguments are those of :class:`MoE`.
    """

    def __init__(
        self,
        dim: int,
        num_experts: int,
        *,
        top_k: int,
        score_func: ScoreFunction = "softmax",
        route_norm: bool = True,
        route_scale: float = 1.0,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        for name, value in (("dim", dim), ("num_experts", num_experts), ("top_k", top_k)):
            _checks.is_int(name, value, 1)
        if top_k > num_experts:
            raise ValueError(f"top_k: got {top_k}, must be at most num_experts, which is {num_experts}")
        _checks.is_one_of("score_func", score_func, SCORE_FUNCTIONS)
        _checks.is_bool("route_norm", route_norm)
        super().__init__()
        self.top_k = top_k
        self.score_func = score_func
        self.route_norm = route_norm
        self.route_scale = _positive("route_scale", route_scale)
        self.gate = torch.nn.Linear(dim, num_experts, bias=False, device=device, dtype=dtype)

    def forward(self, x: Tensor, expert_bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Weights and ids, float32 and int64 (t, top_k), in descending order of s + expert_bias.

        Args:
            x: float (t, dim).
            expert_bias: float32 (num_experts,), or None.

        Does not synchronise.
        """
        with without_autocast(x):
            logits = torch.nn.functional.linear(x.float(), self.gate.weight.float())
            scores = logits.softmax(-1) if self.score_func == "softmax" else logits.sigmoid()
            chosen = scores.detach() if expert_bias is None else scores.detach() + expert_bias
            ids = chosen.topk(self.top_k, dim=-1).indices
            weights = scores.gather(-1, ids)
            if self.route_norm:
                weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)  # sigmoids may all be 0
            return weights * self.route_scale, ids

    def extra_repr(self) -> str:
        return (
            f"top_k={self.top_k}, score_func={self.score_func!r}, route_norm={self.route_norm}, "
            f"route_scale={self.route_scale}"
        )


class Experts(torch.nn.Module):
    """Feed-forward networks of experts, each for its own rows: (w * silu(x @ w1.T) * (x @ w3.T)) @ w2.T.

    ``w1`` and ``w3`` are GroupedLinear (g, hidden_dim, dim), ``w2`` (g, dim, hidden_dim). silu(..) * .. is
    rounded to the dtype of x, and its product with the float32 weight w of the row once more.
    """

    def __init__(self, dim: int, hidden_dim: int, num_experts: int, **options: Any) -> None:
        super().__init__()
        self.w1 = GroupedLinear(num_experts, dim, hidden_dim, **options)
        self.w2 = GroupedLinear(num_experts, hidden_dim, dim, **options)
        self.w3 = GroupedLinear(num_experts, dim, hidden_dim, **options)

    def forward(self, rows: Tensor | QuantizedInput, offs: Tensor, weights: Tensor) -> Tensor:
        """(m, dim) for rows (m, dim) sorted by expert, their ends int32 (g,) and weights float32 (m,)."""
        x = rows if isinstance(rows, QuantizedInput) else shared(rows, self.w1, self.w3, offs)
        result: Tensor = self.w2(swiglu(self.w1(x, offs), self.w3(x, offs), weights), offs)
        return result


class FeedForward(torch.nn.Module):
    """silu(x @ w1.T) * (x @ w3.T) @ w2.T with three :class:`fp4gemm.training.Linear`: the shared expert."""

    def __init__(self, dim: int, hidden_dim: int, **options: Any) -> None:
        super().__init__()
        self.w1 = Linear(dim, hidden_dim, bias=False, **options)
        self.w2 = Linear(hidden_dim, dim, bias=False, **options)
        self.w3 = Linear(dim, hidden_dim, bias=False, **options)

    def forward(self, x: Tensor) -> Tensor:
        rows = shared(x, self.w1, self.w3)
        result: Tensor = self.w2(swiglu(self.w1(rows), self.w3(rows)))
        return result


class MoE(torch.nn.Module):
    """A mixture of experts for training: a router, gated experts with products in NVFP4, a shared expert.

    With the ids and weights of :class:`Router`, for token i and the experts e = ids[i, j]::

        h[i, j] = weights[i, j] * silu(x[i] @ w1[e].T) * (x[i] @ w3[e].T)
        y[i]    = sum over j of h[i, j] @ w2[e].T  [+ shared_experts(x[i])]

    The products are those of :class:`GroupedLinear`, so that ``recipe`` says which of them are in NVFP4; the
    router is always in float32. The weight multiplies h before w2, so that the router has its gradient. Rows
    are sorted by (expert, token, slot); the sum over j is in float32, in ascending order of j, forward and
    backward. The result is the same in every run, and nothing synchronises: the sizes depend on the shape of
    x alone. Any number of tokens is accepted, 0 too, and any expert may be empty.

    State: ``router.gate.weight`` (num_experts, dim), ``experts.w1.weight``, ``experts.w3.weight``
    (num_experts, hidden_dim, dim), ``experts.w2.weight`` (num_experts, dim, hidden_dim), ``expert_bias``,
    ``shared_experts.w1.weight`` and so on. ``expert_bias`` stays float32 when the module is cast.

    Args:
        dim: d, elements of a token; a multiple of 32.
        hidden_dim: f, elements of h of one expert; a multiple of 32.
        num_experts: g, 1 to 2048.
        top_k: experts of each token, 1 to num_experts.
        num_shared_experts: 0 is none; s makes one shared expert of s * hidden_dim elements.
        score_func: "softmax" over all experts, or "sigmoid" (DeepSeek-V3).
        route_norm: whether the weights of a token are divided by their sum.
        route_scale: multiplies the weights; positive.
        load_balance_coeff: the step of :func:`update_expert_bias`, DeepSeek-V3's gamma; positive. None: the
            module has no expert_bias.
        recipe: a Recipe or the name of a preset, of every product of the experts and the shared expert.
        device, dtype: of the parameters; dtype None is torch's default dtype.
        ep: None, or the exchange of tokens between ranks, each of which has the weights of num_experts /
            ranks experts, those from ``ep.first_expert`` on (docs/distributed.md). Every rank then calls the
            module, forward and backward, also without tokens.

    Raises:
        TypeError, ValueError: naming the argument, its value and what it must be.
    """

    expert_bias: Tensor | None
    tokens_per_expert: Tensor

    def __init__(
        self,
        dim: int,
        hidden_dim: int,
        num_experts: int,
        *,
        top_k: int,
        num_shared_experts: int = 0,
        score_func: ScoreFunction = "softmax",
        route_norm: bool = True,
        route_scale: float = 1.0,
        load_balance_coeff: float | None = 1e-3,
        recipe: Recipe | str = "per_token",
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        ep: ExpertParallel | None = None,
    ) -> None:
        for name, size in (("dim", dim), ("hidden_dim", hidden_dim)):
            _checks.is_int(name, size, 1)
            _checks.is_multiple(name, "the size", size, _checks.K_STEP_MM)
        if device is not None:
            _checks.as_device("device", device)
        if dtype is not None:
            _checks.is_float_dtype("dtype", dtype)
        _checks.is_int("num_experts", num_experts, 1)
        if num_experts > MAX_EXPERTS:
            raise ValueError(f"num_experts: got {num_experts}, must be at most {MAX_EXPERTS}")
        _checks.is_int("num_shared_experts", num_shared_experts, 0)
        if load_balance_coeff is not None:
            load_balance_coeff = _positive("load_balance_coeff", load_balance_coeff)
        if ep is not None:
            _check_exchange(ep, num_experts=num_experts, top_k=top_k, hidden=dim)
        super().__init__()
        self.ep = ep
        self.dim, self.hidden_dim, self.num_experts = dim, hidden_dim, num_experts
        self.load_balance_coeff = load_balance_coeff
        self.router = Router(
            dim,
            num_experts,
            top_k=top_k,
            score_func=score_func,
            route_norm=route_norm,
            route_scale=route_scale,
            device=device,
            dtype=dtype,
        )
        options: dict[str, Any] = {"recipe": recipe, "device": device, "dtype": dtype}
        num_local = num_experts if ep is None else ep.num_local_experts
        self.experts = Experts(dim, hidden_dim, num_local, **options)
        self.shared_experts = (
            FeedForward(dim, num_shared_experts * hidden_dim, **options) if num_shared_experts else None
        )
        bias = None
        if load_balance_coeff is not None:
            bias = torch.zeros(num_experts, dtype=torch.float32, device=device)
        self.register_buffer("expert_bias", bias)
        counts = torch.zeros(num_experts, dtype=torch.int64, device=device)
        self.register_buffer("tokens_per_expert", counts, persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> MoE:
        """Apply ``fn`` to the tensors, but keep expert_bias in float32: its steps of 1e-3 vanish in bfloat16.

        After ``to_empty`` the counts are zero, since no state_dict has them.
        """
        bias, was_meta = self.expert_bias, self.tokens_per_expert.is_meta
        super()._apply(fn, recurse)
        if bias is not None and self.expert_bias is not None and self.expert_bias.dtype != torch.float32:
            self.expert_bias = bias.to(self.expert_bias.device)
        if was_meta and not self.tokens_per_expert.is_meta:
            self.tokens_per_expert.zero_()
        return self

    def reset_parameters(self) -> None:
        """Set expert_bias and tokens_per_expert to zero; the weights belong to the modules inside."""
        for buffer in self.buffers(recurse=False):
            buffer.zero_()

    def forward(self, x: Tensor) -> Tensor:
        """The weighted sum of the experts of each token, and of the shared expert.

        In training mode the pairs of each expert are added to ``tokens_per_expert``, int64 (num_experts,),
        for balancing and for statistics. A recomputation (activation checkpointing) adds them twice, which
        :func:`update_expert_bias` does not notice. DistributedDataParallel copies the counts of rank 0 to
        every rank before each forward pass; give it ``broadcast_buffers=False``.

        Args:
            x: bfloat16, float16 or float32 (..., dim), any leading dimensions.

        Returns:
            (..., dim), of the dtype of x. Does not synchronise.

        Raises:
            TypeError, ValueError: naming x.
            NotImplementedError: the device has no kernel.
        """
        _checks.has_dtype("x", _checks.is_tensor("x", x), _checks.FLOAT_DTYPES)
        if x.dim() == 0 or x.shape[-1] != self.dim:
            raise ValueError(f"x: shape is {tuple(x.shape)}, must be (..., {self.dim})")
        _checks.same_device("x", x, self.router.gate.weight.device, "the parameters")
        tokens = x.reshape(-1, self.dim)
        weights, ids = self.router(tokens, self.expert_bias)
        y = self._local(tokens, ids, weights) if self.ep is None else self._parallel(tokens, ids, weights)
        if self.shared_experts is not None:
            y = y + self.shared_experts(tokens)
        result: Tensor = unsafe_view(y.to(x.dtype), x.shape)
        return result

    def _counts(self) -> Tensor:
        """tokens_per_expert; load_state_dict(assign=True) leaves it on the meta device."""
        gate = self.router.gate.weight
        if self.tokens_per_expert.is_meta and not gate.is_meta:
            self.tokens_per_expert = torch.zeros_like(self.tokens_per_expert, device=gate.device)
        return self.tokens_per_expert

    def _local(self, tokens: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """The sum over the experts of each token, all of which are on this rank."""
        routing = route(ids, self.num_experts)
        if self.training:
            with torch.no_grad():
                self._counts().add_(routing.offs.diff(prepend=routing.offs.new_zeros(1)))
        rows = gather(tokens, routing)
        y = self.experts(rows, routing.offs, row_weights(weights, routing))
        return scatter(y, routing)

    def _parallel(self, tokens: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """The sum over each token's experts on all ranks; tokens_per_expert counts this rank's tokens."""
        ep = self.ep
        if ep is None:
            raise RuntimeError("the module has no exchange")
        if self.training:
            with torch.no_grad():
                pairs = ids.flatten()
                self._counts().scatter_add_(0, pairs, torch.ones_like(pairs))
        recipe = shared_recipe(self.experts.w1, self.experts.w3)
        rows, of_rows, handle = ep.train_dispatch(tokens, ids, weights, recipe)
        y = self.experts(rows, handle.offs, of_rows)
        return ep.train_combine(y, handle)

    def extra_repr(self) -> str:
        return f"load_balance_coeff={self.load_balance_coeff}"


@torch.no_grad()
def update_expert_bias(
    model: torch.nn.Module, *, group: torch.distributed.ProcessGroup | None = None
) -> None:
    """Balance the experts of every :class:`MoE` of a model without an auxiliary loss; call it once a step.

    As DeepSeek-V3 (section 2.1.2, after Wang et al., 2408.15664)::

        expert_bias += load_balance_coeff * sign(mean(tokens_per_expert) - tokens_per_expert)
        tokens_per_expert = 0

    Args:
        model: a module; a MoE itself, or any module that contains some.
        group: the ranks that hold other tokens: their counts are added first (one all-reduce for each MoE).
            None: the counts of this process alone.

    Raises:
        TypeError: model is no module, or group is no process group.
        ValueError: the model contains no MoE with an expert_bias, or this process is not in the group.
            Nothing is changed then.

    Does not synchronise with the device.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model: got {_checks.describe(model)}, must be a torch.nn.Module")
    found = [layer for layer in model.modules() if isinstance(layer, MoE) and layer.expert_bias is not None]
    if not found:
        raise ValueError("model: has no MoE with an expert_bias, must have one at least")
    if group is not None:
        _check_group(group)
    for layer in found:
        counts, bias, coeff = layer.tokens_per_expert, layer.expert_bias, layer.load_balance_coeff
        if group is not None:
            torch.distributed.all_reduce(counts, group=group)
        # In integers, so that the sign is exact: sign(sum - g * count).
        lack = (counts.sum() - counts.numel() * counts).sign()
        if bias is not None and coeff is not None:
            bias.add_(lack, alpha=coeff)
        counts.zero_()


def _check_group(group: object) -> None:
    """Raise unless this process belongs to the process group."""
    dist = torch.distributed
    if dist.is_available() and group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError("group: this process is not a member, must be one of the ranks that call")
    if not dist.is_available() or not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            f"group: got {_checks.describe(group)}, must be a torch.distributed.ProcessGroup or None"
        )


def _check_exchange(ep: object, **sizes: int) -> None:
    """Raise unless ep exchanges tokens of these sizes."""
    if not all(hasattr(ep, name) for name in ("train_dispatch", "train_combine", *sizes)):
        raise TypeError(
            f"ep: got {_checks.describe(ep)}, must be an fp4gemm.distributed.ExpertParallel or None"
        )
    for name, size in sizes.items():
        if getattr(ep, name) != size:
            raise ValueError(f"ep: its {name} is {getattr(ep, name)}, must be {size}, as of the module")


def _positive(name: str, value: object) -> float:
    """A positive finite number as a float; TypeError or ValueError otherwise."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name}: got {_checks.describe(value)}, must be a number")
    if not 0 < value < float("inf"):
        raise ValueError(f"{name}: got {value}, must be positive and finite")
    return float(value)


# ---- rows of experts with gradients
#
#     rows = gather(x, routing)        (t, d) -> (t * top_k, d)        backward: the sum over slots
#     y    = scatter(rows, routing)    (t * top_k, d) -> (t, d)        backward: the gather
#
# Both sums are those of fp4gemm.combine with weights of one: in float32, in ascending order of the slots. No
# atomic addition takes part, so that gradients are the same in every run, on every device. Nothing
# synchronises.


def _sum(rows: Tensor, row_of_pair: Tensor) -> Tensor:
    ones = torch.ones(row_of_pair.shape, dtype=torch.float32, device=rows.device)
    # The operator itself: torch.compile refuses the checks of fp4gemm.combine in a backward pass.
    result: Tensor = operators.combine(_checks.readable(rows), row_of_pair, ones, rows.dtype)
    return result


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, token_of_row: Tensor, row_of_pair: Tensor) -> Tensor:
        ctx.save_for_backward(row_of_pair)
        return x.index_select(0, token_of_row)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        (row_of_pair,) = ctx.saved_tensors
        return _sum(dy, row_of_pair), None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, token_of_row: Tensor, row_of_pair: Tensor) -> Tensor:
        ctx.save_for_backward(token_of_row)
        return _sum(rows, row_of_pair)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        (token_of_row,) = ctx.saved_tensors
        return dy.index_select(0, token_of_row), None, None


class _Permute(torch.autograd.Function):
    """x[order] for a permutation; ``inverse`` is the inverse permutation."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return x.index_select(0, order)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        (inverse,) = ctx.saved_tensors
        return dy.index_select(0, inverse), None, None


def gather(x: Tensor, routing: Routing) -> Tensor:
    """The token of every row, (t * top_k, d), for x (t, d). Every pair must name an expert."""
    result: Tensor = _Gather.apply(x, routing.token_of_row, routing.row_of_pair)
    return result


def scatter(rows: Tensor, routing: Routing) -> Tensor:
    """The sum of the rows of each token, (t, d), for rows (t * top_k, d). Every pair must name an expert."""
    result: Tensor = _Scatter.apply(rows, routing.token_of_row, routing.row_of_pair)
    return result


def row_weights(topk_weights: Tensor, routing: Routing) -> Tensor:
    """The routing weight of every row, (t * top_k,), for topk_weights (t, top_k)."""
    row_of_pair = routing.row_of_pair.flatten().long()
    pairs = torch.arange(row_of_pair.numel(), device=row_of_pair.device)
    pair_of_row = torch.empty_like(pairs).scatter_(0, row_of_pair, pairs)
    result: Tensor = _Permute.apply(topk_weights.flatten(), pair_of_row, row_of_pair)
    return result
