"""Comparison of a contender's result with the right one; a contender whose result is wrong is not timed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from fp4gemm import DecodedTensor, MXFP8Tensor, NVFP4Tensor
from torch import Tensor

from .library import Call, Product, product_difference

ERRORS = (AttributeError, RuntimeError, TypeError, ValueError)
# The largest difference that passes, as a fraction of the norm of a row or column. One that was rounded to 8
# bits, once or twice, differs by 1e-3, at worst among thousands by 7e-3; where one number of a thousand is
# wrong, the difference is 3e-2 or more.
TOLERANCE = 1.5e-2
# The same of sums that stay in the accumulators of FP8 tensor cores, of which single elements are compared
# where there is one token.
TOLERANCE_OF_FAST = 5e-2
CHUNK = 4096  # rows of b in float64 at a time


def parts(result: object) -> list[tuple[str, Tensor]]:
    """(name, tensor) of each tensor of a result, in the order in which the reference returns them."""
    if isinstance(result, Tensor):
        return [("result", result)]
    if isinstance(result, NVFP4Tensor):
        return [("codes", result.codes), ("scales", result.scales), ("amax", result.amax)]
    if isinstance(result, MXFP8Tensor):
        return [("values", result.values), ("scales", result.scales)]
    if isinstance(result, DecodedTensor):
        return [("data", result.data)]
    if isinstance(result, tuple):
        return [(f"{name} of result {i}", x) for i, one in enumerate(result) for name, x in parts(one)]
    raise TypeError(
        f"result: got a {type(result).__name__}, must be a tensor, a container of fp4gemm or a tuple of them"
    )


def same_bits(a: Tensor, b: Tensor) -> Tensor | None:
    """Which bytes differ between tensors of one dtype and shape, a flat bool tensor; None if none does."""
    x, y = (t.contiguous().view(-1).view(torch.uint8) for t in (a, b))
    return None if torch.equal(x, y) else x != y


def difference(got: object, want: Sequence[Tensor]) -> str | None:
    """None if ``got`` has the bits of ``want``, else the part that differs and in how many bytes."""
    named = parts(got)
    if len(named) != len(want):
        return f"{len(named)} tensors, the reference gives {len(want)}"
    for (name, x), y in zip(named, want, strict=True):
        if (x.dtype, x.shape) != (y.dtype, y.shape):
            return f"{name}: {x.dtype} {tuple(x.shape)}, the reference gives {y.dtype} {tuple(y.shape)}"
        differ = same_bits(x, y)
        if differ is not None:
            return f"{name}: {int(differ.sum())} of {differ.numel()} bytes differ from the reference"
    return None


def filled(want: Iterable[Tensor], given: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """``want`` with its empty tensors replaced by those of ``given``, in order.

    The reference returns an empty amax where one was given, the library the given one.
    """
    rest = list(given)
    return tuple(rest.pop(0) if rest and x.shape == (0,) else x for x in want)


def off_by(got: Tensor, a: Tensor, b: Tensor, tolerance: float = TOLERANCE) -> str | None:
    """None if ``got`` is a @ b.T (of any float types) but for roundings, else a sentence with the difference.

    Freivalds' check in float64 covers every element: the sum of each row and of each column of the product,
    with random signs, must be that of the operands.
    """
    if got.shape != (a.shape[0], b.shape[0]):
        return f"has shape {tuple(got.shape)}, must have {(a.shape[0], b.shape[0])}"
    if not got.isfinite().all():
        return "holds numbers that are not finite"
    by_column, by_row = _signs(got, torch.Generator().manual_seed(1))
    right = torch.zeros(a.shape[1], dtype=torch.float64, device=got.device)
    left = by_row @ a.double()
    columns = []
    for begin in range(0, b.shape[0], CHUNK):
        part = b[begin : begin + CHUNK].double()
        right += by_column[begin : begin + CHUNK] @ part
        columns.append(part @ left)
    found = got.double()
    for what, dim, seen, want in (
        ("row", 1, found @ by_column, a.double() @ right),
        ("column", 0, by_row @ found, torch.cat(columns)),
    ):
        norms = found.norm(dim=dim)
        # A row with a small norm may be a sum of larger terms, whose roundings it has.
        error = (seen - want).abs() / norms.clamp_min(float(norms.mean()))
        worst = int(error.argmax())
        if not float(error[worst]) < tolerance:
            return f"{what} {worst} is off by {float(error[worst]):.1e} of its norm"
    return None


def _signs(got: Tensor, gen: torch.Generator) -> tuple[Tensor, Tensor]:
    """Random signs: one for each column, one for each row."""
    m, n = got.shape
    drawn = torch.randint(0, 2, (n + m,), generator=gen).double().mul_(2).sub_(1).to(got.device)
    return drawn[:n], drawn[n:]


def _forget(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    """Fills with NaN the memory that the next result may get, which might hold an older result."""
    torch.full(shape, torch.nan, dtype=dtype, device=device)


def wrong(call: Call, product: Product) -> str | None:
    """None if a call returns the bits that the reference has for a product, else the difference.

    On the CPU, where the library is the reference itself, the result is compared with float64 as well.
    """
    _forget(product.shape, torch.bfloat16, product.weights.device)
    got = call()
    if not isinstance(got, Tensor) or got.shape != product.shape:
        return f"returned {_described(got)}, must be a tensor of shape {product.shape}"
    reason = product_difference(product, got)
    if reason is None and got.device.type == "cpu" and product.offs is None:
        reason = off_by(got, _values(product.a), product.weights.dequantize())
    return reason


def _values(a: NVFP4Tensor | DecodedTensor | Tensor) -> Tensor:
    if isinstance(a, DecodedTensor):
        return a.data.float() * (a.amax.view(-1, 1) / (6 * a.e4m3_max))
    return a.dequantize() if isinstance(a, NVFP4Tensor) else a


Block = tuple[slice, Tensor, Callable[[], Tensor]]  # rows of a result, and the a and b whose product they are


def far(
    call: Call,
    shape: tuple[int, int],
    blocks: Iterable[Block],
    dtype: torch.dtype,
    tolerance: float = TOLERANCE,
) -> str | None:
    """None if each block of a call's result is its a @ b.T but for roundings, else the difference."""
    blocks = list(blocks)
    _forget(shape, dtype, blocks[0][1].device)
    got = call()
    if not isinstance(got, Tensor) or got.shape != shape:
        return f"returned {_described(got)}, must be a tensor of shape {shape}"
    for rows, a, b in blocks:
        reason = off_by(got[rows], a, b(), tolerance)
        if reason is not None:
            return reason if len(blocks) == 1 else f"rows {rows.start} to {rows.stop}: {reason}"
    return None


def near(
    call: Call,
    shape: tuple[int, int],
    a: Callable[[], Tensor],
    b: Callable[[], Tensor],
    dtype: torch.dtype,
    tolerance: float = TOLERANCE,
) -> Callable[[], str | None]:
    """A check that a call returns a @ b.T but for roundings."""
    return lambda: far(call, shape, [(slice(0, shape[0]), a(), b)], dtype, tolerance)


def _described(got: object) -> str:
    return f"shape {tuple(got.shape)}" if isinstance(got, Tensor) else f"a {type(got).__name__}"


def replayed(result: object, call: Call, exact: bool) -> str | None:
    """None if the replay of a graph left the result of a call, else the difference.

    ``exact``: the bits must be those of the call; otherwise roundings may differ, since a baseline may sum in
    another order each time.
    """
    for (name, x), (_, y) in zip(parts(result), parts(call()), strict=True):
        if same_bits(x, y) is None:
            continue
        if exact:
            return f"{name}: a replay of its graph gives other bits than a call"
        error = float((x.double() - y.double()).norm() / y.double().norm())
        if not error < TOLERANCE:
            return f"{name}: a replay of its graph differs by {error:.1e} of the norm of what a call returns"
    return None
