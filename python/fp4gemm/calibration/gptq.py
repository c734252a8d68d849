"""GPTQ for NVFP4: a weight rounded so that the output of its layer changes least on given inputs.

Let W (n, k) be the weight and H (k, k) the second moment of the inputs, the mean of x x^T. GPTQ (Frantar et
al., 2022, arXiv:2210.17323) goes through the columns and adds what rounding a column costs to the columns
that are still to come, so that ``tr((W - Q) H (W - Q)^T)``, the squared error of the output, stays small.
Here it chooses the block scales as well::

    H' = H + damping * mean(diag(H)) * I         U upper triangular with U^T U = H'^-1
    for each block of 16 columns, in the order of the blocks:
        d = what rounding the block costs, and its codes and scales, as fp4gemm/reference/gptq.py has them
        w_i = w_i - sum over the block of d_j * U_ji / U_jj        for all columns i behind the block

A, the amax of the row or of the weight, is that before any error is added, and the bound of the scales is
256, so that a block which grows beyond A keeps a scale of its own. U is computed in float64, and U_ji / U_jj
and 1 / U_jj^2 are rounded to float32, in which everything else is computed. Within a block every operation is
defined to the bit. The sums over blocks have no defined order, so that devices may differ where a value lies
between two codes; one device gives the same bits in every run.

``block_order="importance"`` goes through the blocks in the order of the mean of diag(H), largest first, while
the columns keep their places: blocks of 16 remain contiguous in k, as the format wants.
"""

from __future__ import annotations

import warnings
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from .. import _checks, _native
from ..containers.nvfp4 import NVFP4Tensor
from ..ops._call import succeeded
from ..reference.formats import pack
from ..reference.gptq import E4M3_BOUND, GptqBlocks

__all__ = ["BlockOrder", "CompiledBlocks", "Rounded", "gptq", "rounded"]

BlockOrder = Literal["natural", "importance"]
Scaling = Literal["row", "tensor"]
BLOCK = _checks.BLOCK
PANEL = 128  # columns whose errors are added to the rest of the weight in one product
DAMPING = 0.01  # unless another is given
GROWTH, MOST_DAMPING = 10.0, 1.0  # the damping grows while H' is not positive definite
ASYMMETRY = 1e-3  # |H - H^T| that is taken for rounding, of the largest diagonal element
WORKSPACE = 4 << 30  # bytes of the float64 matrices of as many experts as are factored at a time


class CompiledBlocks:
    """:class:`fp4gemm.reference.gptq.GptqBlocks`, compiled; the bits are the same.

    Args:
        amax: A, float32 (g, n), or (g, 1) for one of each matrix.
        fp8_operand: whether the weight is multiplied as FP8 values too.
    """

    def __init__(self, amax: Tensor, fp8_operand: bool = False) -> None:
        self._amax, self._fp8_operand = amax.contiguous(), fp8_operand

    def __call__(self, w: Tensor, rows: Tensor, cost: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Round a block of each weight; the arguments and results are those of GptqBlocks."""
        g, _, n = w.shape
        w, rows, cost = w.contiguous(), rows.contiguous(), cost.contiguous()
        codes, differences = torch.empty_like(w, dtype=torch.uint8), torch.empty_like(w)
        scales = w.new_empty((g, n), dtype=torch.uint8)
        round_block = _native.torch_library().fp4gemm_torch_gptq_block
        for e in range(g):
            succeeded(
                round_block(
                    w[e].data_ptr(), n, rows[e].data_ptr(), cost[e].data_ptr(),
                    self._amax[e].data_ptr(), int(self._amax.shape[1] != 1), E4M3_BOUND,
                    int(self._fp8_operand),
                    codes[e].data_ptr(), scales[e].data_ptr(), differences[e].data_ptr(),
                )
            )  # fmt: skip
        return codes, scales, differences


class Factorization:
    """The factors of the second moment of the last weight.

    Layers that read the same tensor, as q, k and v do, have equal matrices, which are checked and factored
    once. Holds two matrices (k, k).
    """

    def __init__(self) -> None:
        self._key: tuple[Tensor, float, BlockOrder] | None = None
        self._made: _Prepared | None = None

    def of(self, moment: Tensor, damping: float, block_order: BlockOrder) -> _Prepared | None:
        """The factors that were kept for a matrix of these values, or None; those of another are freed."""
        if self._key is not None:
            last, *options = self._key
            is_same = last.device == moment.device and last.shape == moment.shape
            if is_same and options == [damping, block_order] and torch.equal(last, moment):
                return self._made
        self._key = self._made = None
        return None

    def keep(self, moment: Tensor, damping: float, block_order: BlockOrder, made: _Prepared) -> None:
        """Keep the factors of a matrix, which must not be written to."""
        self._key, self._made = (moment, damping, block_order), made


class Rounded(NamedTuple):
    """The result of GPTQ for a weight."""

    weight: NVFP4Tensor
    damping: tuple[float, ...]  # the damping that was used for each matrix


def gptq(
    weight: Tensor,
    second_moment: Tensor,
    *,
    scaling: Scaling = "row",
    amax: Tensor | None = None,
    fp8_operand: bool = False,
    damping: float = DAMPING,
    block_order: BlockOrder = "natural",
) -> NVFP4Tensor:
    """Round a weight to NVFP4 by GPTQ, with the least squared error of the layer's output on the inputs seen.

    The module :mod:`fp4gemm.calibration.gptq` has the definition. The result is in the standard format, with
    e4m3_max=256, and is multiplied like any other.

    Args:
        weight: bfloat16, float16 or float32 (n, k), finite; k a multiple of 16. Or (g, n, k), the weights of
            g experts.
        second_moment: float32 (k, k) on the device of weight, the mean of x x^T over the rows x of the input,
            as in :class:`fp4gemm.calibration.InputStatistics`; (g, k, k) for experts. Its scale has no
            effect.
        scaling: "row": each row has its own amax; "tensor": each matrix has one.
        amax: A, given instead of measured, such as that of several weights which share it: float32 (n,) or
            (1,) on the device of weight, (g, n) or (g, 1) for experts; finite and at least 0.
        fp8_operand: True: the weight will be multiplied by FP8 tokens too, where its values are rounded to
            e4m3 (reference/scale_search.py): what is kept small is the mean of the squared errors of both
            products. The result has the same format, and other products of it lose a little more.
        damping: what is added to the diagonal of second_moment, as a part of the mean of the diagonal; at
            least 0. If the sum is not positive definite, ten times as much is added, until it is, and a
            warning says so.
        block_order: "natural": blocks from left to right. "importance": those with the largest inputs first.

    Returns:
        NVFP4Tensor (n, k) or (g, n, k) on the device of weight. Synchronises.

    Raises:
        TypeError, ValueError: naming the argument; for values that are NaN or infinite, a second_moment that
            is not symmetric or has a negative diagonal, and one that is not positive definite with a damping
            of 1 either.
    """
    made = rounded(
        weight,
        second_moment,
        scaling=scaling,
        amax=amax,
        fp8_operand=fp8_operand,
        damping=damping,
        block_order=block_order,
    )
    for e, used in enumerate(made.damping):
        if used != damping:
            which = f" of expert {e}" if weight.dim() == 3 else ""
            warnings.warn(
                f"gptq: second_moment{which} is not positive definite with damping {damping:g}; {used:g} was "
                "used",
                stacklevel=2,
            )
    return made.weight


def rounded(
    weight: Tensor,
    second_moment: Tensor,
    *,
    scaling: Scaling = "row",
    amax: Tensor | None = None,
    fp8_operand: bool = False,
    damping: float = DAMPING,
    block_order: BlockOrder = "natural",
    factorization: Factorization | None = None,
) -> Rounded:
    """:func:`gptq`, which also returns the damping that was used and does not warn.

    Args:
        factorization: where the factors of the second moment of one weight are looked up and kept.
    """
    stack = _checked(weight, second_moment, scaling, damping, block_order)
    _checks.is_bool("fp8_operand", fp8_operand)
    known = None
    if factorization is not None and weight.dim() == 2:
        known = factorization.of(second_moment, damping, block_order)
    if known is None:
        _check_moment(second_moment)
    moments = second_moment if weight.dim() == 3 else second_moment[None]
    with torch.no_grad():
        g, n, k = stack.shape
        dims: tuple[int, ...] = (2,) if scaling == "row" else (1, 2)
        shape = (g, n if scaling == "row" else 1)
        if amax is None:
            amax = stack.abs().amax(dims).float().view(shape)
        else:
            amax = _given_amax(amax, shape if weight.dim() == 3 else shape[1:], weight.device).view(shape)
        nibbles = torch.empty((g, n, k), dtype=torch.uint8, device=stack.device)
        scales = torch.empty((g, n, k // BLOCK), dtype=torch.uint8, device=stack.device)
        step = max(1, WORKSPACE // (32 * k * k))
        used: list[float] = []
        for i in range(0, g, step):
            part = slice(i, min(i + step, g))
            made = known or _prepared(moments[part], damping, block_order, i if weight.dim() == 3 else None)
            if factorization is not None and weight.dim() == 2:
                factorization.keep(second_moment, damping, block_order, made)
            order, columns = made.order, _columns(made.order)
            w = stack[part].float().gather(2, columns[:, None].expand(-1, n, -1))
            codes, chosen = _round(w, made.factors, amax[part], fp8_operand)
            nibbles[part] = codes.scatter(2, columns[:, None].expand(-1, n, -1), codes)
            scales[part] = chosen.scatter(2, order[:, None].expand(-1, n, -1), chosen)
            used += made.damping
        codes = pack(nibbles.view(g * n, k)).view(g, n, k // 2)
        if weight.dim() == 2:
            codes, scales, amax = codes[0], scales[0], amax[0]
        result = NVFP4Tensor._of_compact(codes, scales, amax.contiguous(), E4M3_BOUND)
    return Rounded(result.to(weight.dtype), tuple(used))


def _checked(
    weight: object, second_moment: object, scaling: object, damping: object, block_order: object
) -> Tensor:
    """The weight as a stack (g, n, k)."""
    w, h = _checks.is_tensor("weight", weight), _checks.is_tensor("second_moment", second_moment)
    _checks.has_dtype("weight", w, _checks.FLOAT_DTYPES)
    if w.dim() not in (2, 3):
        raise ValueError(f"weight: shape is {tuple(w.shape)}, must be (n, k) or (g, n, k)")
    _checks.is_multiple("weight", "k", w.shape[-1], BLOCK)
    _checks.has_dtype("second_moment", h, (torch.float32,))
    _checks.has_shape("second_moment", h, (*w.shape[:-2], w.shape[-1], w.shape[-1]), " as of weight")
    _checks.same_device("second_moment", h, w.device, "weight")
    _checks.is_one_of("scaling", scaling, get_args(Scaling))
    _checks.is_one_of("block_order", block_order, get_args(BlockOrder))
    if isinstance(damping, bool) or not isinstance(damping, (int, float)):
        raise TypeError(f"damping: got {_checks.describe(damping)}, must be a number")
    if not 0 <= damping <= MOST_DAMPING:
        raise ValueError(f"damping: got {damping}, must be from 0 to {MOST_DAMPING:g}")
    _check_finite("weight", w)
    return w.detach() if w.dim() == 3 else w.detach()[None]


def _check_moment(h: Tensor) -> None:
    """Raise ValueError unless matrices (k, k) or (g, k, k) can be second moments. Synchronises."""
    _check_finite("second_moment", h)
    diagonal = h.diagonal(dim1=-2, dim2=-1)
    if bool((diagonal < 0).any()):
        raise ValueError(f"second_moment: its diagonal holds {diagonal.min().item():.4g}, must be at least 0")
    off = (h - h.transpose(-1, -2)).abs().amax((-2, -1)) > ASYMMETRY * diagonal.amax(-1)
    if bool(off.any()):
        raise ValueError("second_moment: is not symmetric, must be the mean of x x^T")


def _check_finite(name: str, x: Tensor) -> None:
    num_bad = int((~torch.isfinite(x)).sum())
    if num_bad:
        raise ValueError(f"{name}: {num_bad} values are NaN or infinite, must all be finite")


def _given_amax(amax: object, shape: tuple[int, ...], device: torch.device) -> Tensor:
    """The argument amax after its checks."""
    given = _checks.is_tensor("amax", amax)
    _checks.has_dtype("amax", given, (torch.float32,))
    _checks.has_shape("amax", given, shape, " as of weight and scaling")
    _checks.same_device("amax", given, device, "weight")
    bad = given[~(given.isfinite() & (given >= 0))]
    if bad.numel():
        raise ValueError(f"amax: has {bad[0].item()}, must be finite and at least 0")
    return given


def _order(moments: Tensor, block_order: BlockOrder) -> Tensor:
    """The blocks in the order in which they are rounded, int64 (g, k/16)."""
    importance = moments.diagonal(dim1=1, dim2=2).unflatten(1, (-1, BLOCK)).mean(2)
    if block_order == "natural":
        return torch.arange(importance.shape[1], device=moments.device).expand(importance.shape)
    order: Tensor = importance.argsort(dim=1, descending=True, stable=True)
    return order


def _columns(order: Tensor) -> Tensor:
    """The columns of blocks, int64 (g, k)."""
    return (order[:, :, None] * BLOCK + torch.arange(BLOCK, device=order.device)).flatten(1)


def _gathered(moments: Tensor, columns: Tensor) -> Tensor:
    """Rows and columns of matrices (g, k, k) in another order."""
    rows = moments.gather(1, columns[:, :, None].expand(moments.shape))
    return rows.gather(2, columns[:, None].expand(moments.shape))


class _Factors(NamedTuple):
    rows: Tensor  # float32 (g, k, k): U_ji / U_jj
    cost: Tensor  # float32 (g, k): 1 / U_jj^2


class _Prepared(NamedTuple):
    order: Tensor  # int64 (g, k/16): the blocks in the order in which they are rounded
    factors: _Factors
    damping: list[float]  # the damping that each matrix needed


def _prepared(moments: Tensor, damping: float, block_order: BlockOrder, first: int | None) -> _Prepared:
    """The order of the blocks and the factors of matrices (g, k, k); first is as of :func:`_factored`."""
    order = _order(moments, block_order)
    h = moments if block_order == "natural" else _gathered(moments, _columns(order))
    return _Prepared(order, *_factored(h, damping, first))


def _factored(moments: Tensor, damping: float, first: int | None) -> tuple[_Factors, list[float]]:
    """U of matrices (g, k, k), and the damping that each needed; ``first`` is the number of the first expert.

    H' = R R^T with an upper triangular R is the Cholesky factorization from the last column to the first, and
    U = R^-1.
    """
    g, k, _ = moments.shape
    flipped = moments.flip(1, 2).double()
    mean = flipped.diagonal(dim1=1, dim2=2).mean(1)
    used = [damping] * g
    lower = torch.empty_like(flipped)
    pending = list(range(g))
    while pending:
        h = flipped[pending]
        h.diagonal(dim1=1, dim2=2).add_((mean[pending] * h.new_tensor([used[e] for e in pending]))[:, None])
        lower[pending], info = torch.linalg.cholesky_ex(h)
        pending = [e for e, failed in zip(pending, info.tolist(), strict=True) if failed]
        for e in pending:
            if used[e] >= MOST_DAMPING:
                which = "" if first is None else f" of expert {first + e}"
                raise ValueError(
                    f"second_moment{which}: is not positive definite with damping {MOST_DAMPING:g} either, "
                    "must be the mean of x x^T of rows that are not all zero"
                )
            used[e] = min(max(used[e] * GROWTH, 1e-6), MOST_DAMPING)
    identity = torch.eye(k, dtype=torch.float64, device=moments.device).expand(g, k, k)
    upper = torch.linalg.solve_triangular(lower.flip(1, 2), identity, upper=True)
    diagonal = upper.diagonal(dim1=1, dim2=2)
    return _Factors((upper / diagonal[:, :, None]).float(), diagonal.pow(-2).float()), used


def _round(w: Tensor, factors: _Factors, amax: Tensor, fp8_operand: bool) -> tuple[Tensor, Tensor]:
    """Codes 0..15 uint8 (g, n, k) and scale codes uint8 (g, n, k/16) of w (g, n, k), in the order of w.

    amax is (g, n) or (g, 1).
    """
    g, n, k = w.shape
    device = w.device
    round_block = (CompiledBlocks if device.type == "cpu" else GptqBlocks)(amax, fp8_operand)
    rest = w.transpose(1, 2).contiguous()  # columns are contiguous
    codes = torch.empty((g, k, n), dtype=torch.uint8, device=device)
    chosen = torch.empty((g, k // BLOCK, n), dtype=torch.uint8, device=device)
    errors = torch.empty((g, PANEL, n), dtype=torch.float32, device=device)
    for begin in range(0, k, PANEL):
        end = min(begin + PANEL, k)
        for j in range(begin, end, BLOCK):
            block = slice(j, j + BLOCK)
            error = errors[:, j - begin : j - begin + BLOCK]
            codes[:, block], chosen[:, j // BLOCK], error[:] = round_block(
                rest[:, block], factors.rows[:, block, block], factors.cost[:, block]
            )
            if j + BLOCK < end:
                rows = factors.rows[:, block, j + BLOCK : end]
                rest[:, j + BLOCK : end].baddbmm_(rows.transpose(1, 2), error, alpha=-1)
        if end < k:
            rows = factors.rows[:, begin:end, end:]
            rest[:, end:].baddbmm_(rows.transpose(1, 2), errors[:, : end - begin], alpha=-1)
    return codes.transpose(1, 2), chosen.transpose(1, 2)
