"""A training step of one layer: by a recipe, by torch in bf16, or of dequantized copies; and its comparison.

A step is y = x W^T, dx = dy W and dW = dy^T x, dense or in groups of rows that end at offs.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import fp4gemm
import torch
from fp4gemm import NVFP4Tensor, reference, training
from fp4gemm.training import Cast, Recipe, functional
from torch import Tensor

from .library import (
    Product,
    occupied_groups,
    operator_arguments,
    product_difference,
    training_copies,
    training_step,
)
from .verify import difference, off_by

EXPERTS = 4  # experts whose results are compared, at most


class Results(NamedTuple):
    """y (m, n), dx (m, k) and dW (n, k) or (g, n, k), bfloat16."""

    y: Tensor
    dx: Tensor
    dw: Tensor


COPIES = ("x", "w", "dy", "w_t", "dy_t", "x_t")


class Kept:
    """A cache of copies of weights: those of a second micro-batch, which casts no weight."""

    def __init__(self) -> None:
        self._parts: dict[tuple[int, Hashable], tuple[Tensor, ...]] = {}

    def keeps(self, weight: Tensor) -> bool:
        """True: every copy is kept."""
        return True

    def get(
        self, weight: Tensor, make: Callable[[], tuple[Tensor, ...]], variant: Hashable = None
    ) -> tuple[Tensor, ...]:
        """The copies of the first call for this weight and variant."""
        key = (id(weight), variant)
        if key not in self._parts:
            with torch.no_grad():
                self._parts[key] = make()
        return self._parts[key]


class Anew(Kept):
    """A cache of copies that are made in every call: those of a step whose forward casts the weight."""

    def get(
        self, weight: Tensor, make: Callable[[], tuple[Tensor, ...]], variant: Hashable = None
    ) -> tuple[Tensor, ...]:
        """The copies, made now."""
        with torch.no_grad():
            return make()


class Operands:
    """x (m, k), W and dy (m, n) of a step, bfloat16; x and W require gradients."""

    def __init__(self, x: Tensor, weight: Tensor, dy: Tensor, offs: Tensor | None) -> None:
        self.x, self.weight, self.dy, self.offs = x, weight, dy, offs
        self.leaves = (x.detach().requires_grad_(), weight.detach().requires_grad_())

    @cached_property
    def groups(self) -> list[tuple[int, int, int]]:
        """(index, begin, end) of some experts that have a row."""
        if self.offs is None:
            return []
        every = occupied_groups(self.offs)
        return [every[i * (len(every) - 1) // max(1, EXPERTS - 1)] for i in range(min(EXPERTS, len(every)))]

    def differentiated(self, y: Tensor) -> Results:
        """The results of a y that was computed from ``leaves``."""
        dx, dw = torch.autograd.grad(y, self.leaves, self.dy)
        return Results(y.detach(), dx, dw)

    def forward(self, recipe: Recipe, state: Tensor) -> Tensor:
        """y of a layer with this recipe, which casts W in the call and x along both of its directions."""
        x, weight = self.leaves
        return functional.linear(x, weight, None, recipe, state=state).detach()

    def backward(self, recipe: Recipe, state: Tensor) -> Callable[[], tuple[Tensor, Tensor]]:
        """A call of a layer's backward pass: the casts of dy, dgrad and wgrad; it returns dx and dW.

        The forward pass is made now. W is not cast in the call: its copies are kept.
        """
        x, weight = self.leaves
        step = training_step.begun(recipe, x, weight, None, state, Kept())
        with torch.no_grad():
            _, saved = step.output(x, weight, None)
        step = step._replace(x_t=saved)

        def call() -> tuple[Tensor, Tensor]:
            with torch.no_grad():
                dx, dw = step.gradients(self.dy, None)
            if dx is None or dw is None:
                raise RuntimeError("the step computes no gradient")
            return dx, dw

        return call

    def by_torch(self) -> Results:
        """The step in bf16, through autograd."""
        x, weight = self.leaves
        if self.offs is None:
            return self.differentiated(torch.nn.functional.linear(x, weight))
        y = torch.nn.functional.grouped_mm(x, weight.transpose(1, 2), offs=self.offs)
        return self.differentiated(y)

    def by_recipe(self, recipe: Recipe, state: Tensor, cache: Any) -> Results:
        """The step of a layer with this recipe, through autograd."""
        x, weight = self.leaves
        if self.offs is None:
            y = functional.linear(x, weight, None, recipe, state=state, cache=cache)
        else:
            y = functional.grouped_linear(x, weight, self.offs, None, recipe, state=state, cache=cache)
        return self.differentiated(y)


class Copies:
    """The six operands of a recipe, which quantizes all of them, in NVFP4 by the public quantizers."""

    def __init__(self, operands: Operands, recipe: Recipe, state: Tensor) -> None:
        self.operands, self.recipe, self.state = operands, recipe, state

    def _options(self, cast: Cast, shift: int) -> dict[str, Any]:
        names = ("scaling", "block", "encode", "four_over_six", "e4m3_max")
        made: dict[str, Any] = {name: getattr(cast, name) for name in names}
        if cast.hadamard is not None:
            made |= {"hadamard": cast.hadamard, "hadamard_signs": self.recipe.hadamard_signs}
        if cast.stochastic:
            made |= {"stochastic": True, "rng_state": self.state + self.state.new_tensor([0, shift])}
        return made

    def _made(self, t: Tensor, name: str, axis: int, shift: int = 0) -> NVFP4Tensor:
        cast = getattr(self.recipe, name)
        offs = None if t.dim() == 3 else self.operands.offs
        options: dict[str, Any] = {"axis": axis, "offs": offs, **self._options(cast, shift)}
        made: NVFP4Tensor = fp4gemm.quantize(t, **options)
        return made

    def _source(self, name: str, t: Tensor, forward: str) -> Tensor:
        is_followed = getattr(self.recipe, name).source == "rowwise"
        values: Tensor = getattr(self, forward).dequantize(t.dtype) if is_followed else t
        return values

    @cached_property
    def x(self) -> NVFP4Tensor:
        return self._made(self.operands.x, "x", -1, 2)

    @cached_property
    def w(self) -> NVFP4Tensor:
        return self._made(self.operands.weight, "w", -1, 4)

    @cached_property
    def dy(self) -> NVFP4Tensor:
        return self._made(self.operands.dy, "dy", -1)

    @cached_property
    def w_t(self) -> NVFP4Tensor:
        return self._made(self._source("w_t", self.operands.weight, "w"), "w_t", 0, 4)

    @cached_property
    def dy_t(self) -> NVFP4Tensor:
        return self._made(self.operands.dy, "dy_t", 0)

    @cached_property
    def x_t(self) -> NVFP4Tensor:
        return self._made(self._source("x_t", self.operands.x, "x"), "x_t", 0, 2)

    def wrong(self, names: Sequence[str] = COPIES) -> str | None:
        """None if these copies of whole tensors have the bits of the reference, else the difference."""
        for name in names:
            reason = self._wrong(name)
            if reason is not None:
                return f"{name}: {reason}"
        return None

    def _wrong(self, name: str) -> str | None:
        made, cast, axis = getattr(self, name), getattr(self.recipe, name), 0 if "_t" in name else -1
        source = getattr(self.operands, {"x": "x", "w": "weight", "dy": "dy"}[name.removesuffix("_t")])
        if cast.source == "rowwise":
            source = self._source(name, source, name.removesuffix("_t"))
        shift = {"x": 2, "w": 4, "dy": 0}[name.removesuffix("_t")]
        arguments = operator_arguments(self._options(cast, shift))
        arguments["rng_state"] = self._options(cast, shift).get("rng_state")
        if source.dim() == 2:
            want = reference.quantize(source, None, axis=axis, offs=self.operands.offs, **arguments)
            return difference(made, want)
        for e, _, _ in self.operands.groups:  # some matrices of a stack
            reason = difference(made[e], reference.quantize(source[e], None, axis=axis, **arguments))
            if reason is not None:
                return f"matrix {e}: {reason}"
        return None

    def differs(self, got: Results) -> str | None:
        """None if the results have the bits of the reference's products of these copies."""
        return self.products_differ({"y": got.y, "dx": got.dx, "dW": got.dw})

    def products_differ(self, got: Mapping[str, Tensor]) -> str | None:
        """:meth:`differs` for some of y, dx and dW, by name."""
        offs, checks = self.operands.offs, []
        if "y" in got:
            checks.append(("y", Product(self.x, self.w, self.w, offs), got["y"]))
        if "dx" in got:
            checks.append(("dx", Product(self.dy, self.w_t, self.w_t, offs), got["dx"]))
        if "dW" in got and offs is None:
            checks.append(("dW", Product(self.dy_t, self.x_t, self.x_t), got["dW"]))
        elif "dW" in got:
            for e, a, b in self.of_groups(self.dy_t, self.x_t):
                checks.append((f"dW[{e}]", Product(a, b, b), got["dW"][e]))
        for name, product, result in checks:
            reason = product_difference(product, result)
            if reason is not None:
                return f"{name}: {reason}"
        return None

    def of_groups(self, a: NVFP4Tensor, b: NVFP4Tensor) -> list[tuple[int, NVFP4Tensor, NVFP4Tensor]]:
        """(index, a, b) of some experts, of operands with groups of columns."""
        starts = self.column_ends - self._padded_sizes if self.operands.offs is not None else None
        made = []
        for e, _, _ in self.operands.groups:
            begin, end = int(starts[e]), int(self.column_ends[e])  # type: ignore[index]
            made.append((e, _columns(a, e, begin, end), _columns(b, e, begin, end)))
        return made

    @cached_property
    def _padded_sizes(self) -> Tensor:
        offs = self.operands.offs
        if offs is None:
            raise RuntimeError("the step has no groups")
        sizes = torch.diff(offs, prepend=offs.new_zeros(1))
        return (sizes + 63) // 64 * 64

    @cached_property
    def column_ends(self) -> Tensor:
        """int32 (g,): the ends of the groups of columns, each padded to a multiple of 64."""
        return self._padded_sizes.cumsum(0).to(torch.int32)


def _columns(t: NVFP4Tensor, e: int, begin: int, end: int) -> NVFP4Tensor:
    """The columns of group e of an operand as a matrix."""
    codes = t.codes[:, begin // 2 : end // 2].contiguous()
    scales = t.compact_scales().view(torch.uint8)[:, begin // 16 : end // 16].contiguous()
    return NVFP4Tensor.from_compact(codes, scales, t.amax[e].reshape(-1), t.e4m3_max)


# ---- dequantize-and-bf16


def qdq_products(copies: Copies, parts: Sequence[Tensor]) -> Results:
    """bf16 products of the values of x, w, dy, w_t, dy_t and x_t."""
    x, w, dy, w_t, dy_t, x_t = parts
    offs = copies.operands.offs
    if offs is None:
        return Results(x @ w.t(), dy @ w_t.t(), dy_t @ x_t.t())
    mm = torch.nn.functional.grouped_mm
    return Results(
        mm(x, w.transpose(1, 2), offs=offs),
        mm(dy, w_t.transpose(1, 2), offs=offs),
        mm(dy_t, x_t.t(), offs=copies.column_ends),
    )


def by_qdq(copies: Copies) -> Results:
    """The step that quantizes with our quantizers, dequantizes to bf16 and multiplies by torch."""
    o, recipe, state = copies.operands, copies.recipe, copies.state
    values: list[Tensor] = []
    for t, names, shift, offs in (
        (o.x, ("x", "x_t"), 2, o.offs),
        (o.weight, ("w", "w_t"), 4, None),
        (o.dy, ("dy", "dy_t"), 0, o.offs),
    ):
        of = state + state.new_tensor([0, shift])
        casts = [getattr(recipe, name) for name in names]
        if t is o.weight:
            made = training_copies.weight_copies(t, recipe, of, True, True)
        else:
            made = training_copies.both(t, casts[0], casts[1], recipe, of, offs, offs)
        copies_of_t = (training_copies.rebuilt(made[i], casts[i], recipe, offs, i) for i in (0, 1))
        values += [one.dequantize(torch.bfloat16) for one in copies_of_t]
    x, x_t, w, w_t, dy, dy_t = values
    return qdq_products(copies, (x, w, dy, w_t, dy_t, x_t))


def qdq_differs(copies: Copies, got: Results) -> str | None:
    """None if results are, but for roundings, the products of the copies' values."""
    values = {name: getattr(copies, name).dequantize(torch.float32) for name in ("x", "dy")} | {
        name: getattr(copies, name) for name in ("w", "w_t", "dy_t", "x_t")
    }
    return _far(copies, got, values)


def plain_differs(operands: Operands, got: Results) -> str | None:
    """None if results are those of float64 of the operands themselves, but for roundings."""
    o = operands
    if o.offs is None:
        pairs = (("y", got.y, o.x, o.weight), ("dx", got.dx, o.dy, o.weight.t()))
        checks = [*pairs, ("dW", got.dw, o.dy.t(), o.x.t())]
    else:
        checks = []
        for e, begin, end in o.groups:
            x, dy, w = o.x[begin:end], o.dy[begin:end], o.weight[e]
            checks += [(f"y[{e}]", got.y[begin:end], x, w), (f"dx[{e}]", got.dx[begin:end], dy, w.t())]
            checks.append((f"dW[{e}]", got.dw[e], dy.t(), x.t()))
    return _first(checks)


def _far(copies: Copies, got: Results, values: dict[str, Any]) -> str | None:
    x, dy = values["x"], values["dy"]
    if copies.operands.offs is None:
        w, w_t, dy_t, x_t = (values[name].dequantize() for name in ("w", "w_t", "dy_t", "x_t"))
        return _first([("y", got.y, x, w), ("dx", got.dx, dy, w_t), ("dW", got.dw, dy_t, x_t)])
    checks = []
    for e, begin, end in copies.operands.groups:
        rows = slice(begin, end)
        checks.append((f"y[{e}]", got.y[rows], x[rows], values["w"][e].dequantize()))
        checks.append((f"dx[{e}]", got.dx[rows], dy[rows], values["w_t"][e].dequantize()))
    for e, a, b in copies.of_groups(values["dy_t"], values["x_t"]):
        checks.append((f"dW[{e}]", got.dw[e], a.dequantize(), b.dequantize()))
    return _first(checks)


def _first(checks: Sequence[tuple[str, Tensor, Tensor, Tensor]]) -> str | None:
    """The first difference between a result and its a @ b.T, with the name of the result."""
    for name, result, a, b in checks:
        reason = off_by(result, a, b)
        if reason is not None:
            return f"{name} {reason}"
    return None


# ---- the parts of a step


def parts(operands: Operands, recipe: Recipe, state: Tensor) -> dict[str, Callable[[], object]]:
    """The calls that a layer makes in a step, by name: its quantizers and its three products."""
    p, o, offs = training_copies, operands, operands.offs
    decoded = training_copies.are_converted(o.x)

    def cast(t: Tensor, first: str | None, second: str | None, lefts: tuple[bool, bool]) -> Any:
        casts = [None if name is None else getattr(recipe, name) for name in (first, second)]
        return lambda: p.both(t, casts[0], casts[1], recipe, state, offs, offs, lefts)

    def pair(t: Tensor, first: str, second: str, lefts: tuple[bool, bool]) -> list[Any]:
        made, names = cast(t, first, second, lefts)(), (first, second)
        return [p.rebuilt(made[i], getattr(recipe, names[i]), recipe, offs, i) for i in (0, 1)]

    of_x, of_dy = (decoded, False), (decoded, decoded)
    copies_of_w = lambda: p.kept_copies(o.weight, recipe, state, Anew())  # noqa: E731
    x, x_t = pair(o.x, "x", "x_t", of_x)
    dy, dy_t = pair(o.dy, "dy", "dy_t", of_dy)
    kept, kept_t = copies_of_w()
    shape = o.weight.shape
    w = p.rebuilt(kept, recipe.w, recipe, shape=shape)
    w_t = p.rebuilt(kept_t, recipe.w_t, recipe, shape=torch.Size((*shape[:-2], shape[-1], shape[-2])))
    made: dict[str, Callable[[], object]] = {
        "quantize W and its transpose": copies_of_w,
        "quantize x and its transpose": cast(o.x, "x", "x_t", of_x),
        "quantize x": cast(o.x, "x", None, of_x),
        "quantize dy and its transpose": cast(o.dy, "dy", "dy_t", of_dy),
        "quantize dy": cast(o.dy, "dy", None, of_dy),
        "quantize the transpose of dy": cast(o.dy, None, "dy_t", of_dy),
        "fprop": lambda: training.fprop(x, w, out_dtype=torch.bfloat16),
        "dgrad": lambda: training.dgrad(dy, w_t, out_dtype=torch.bfloat16),
        "wgrad": lambda: training.wgrad(dy_t, x_t, out_dtype=torch.bfloat16),
    }
    if recipe.x_t.source == "original":  # type: ignore[union-attr]
        made["quantize the transpose of x"] = cast(o.x, None, "x_t", of_x)
    return made
