"""The errors of y, dx and dW of one training step by recipe, of the small model of examples/train_moe.py.

:func:`rows` has the errors of all three, and :func:`token_rows` those of dW by kinds of tokens.

The model is trained in bf16 for some steps first. Then every quantized layer gets the x, W and dy that the
bf16 step gave it, so that the errors of its products are those of this recipe's casts alone; and the
gradients of a whole step by the recipe are compared with those of bf16, on the same weights and the same
batch.
"""

from __future__ import annotations

import dataclasses
import importlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from fp4gemm.training import PRESETS, QuantizedInput, Recipe, functional
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
CORPUS_BYTES = 4 << 20
ERRORS = ("y", "dx", "dx_own", "dW", "dx_scale", "dW_scale")
Row = dict[str, str | float]
# From nvidia to per_token and from per_token to nvidia, one change at a time.
ARMS = (
    "nvidia",
    *("nvidia+x_rows", "nvidia_1d"),
    *(f"nvidia+{change}" for change in ("w_rows", "w_rows+w_t_rowwise", "dy_rows", "wgrad_rows", "rht")),
    *("nvidia_no_rht", "nvidia_no_sr"),
    "per_token",
    *(f"per_token+{change}" for change in ("w_t_original", "2d")),
    *(f"per_token+{change}" for change in ("no_rht", "no_sr")),
    *("te_per_token", "te_per_token_rht", "te_per_token_sr", "te_per_token_rht_sr"),
    *("quartet2", "quartet2+sr", "quartet2+sr+no_rht"),
)

# Not of a recipe: for the part of the tokens that are the farthest outliers dW is computed in bf16, and added
# to the product of the quantized other tokens; after the outlier control of TetraJet-v2 (arXiv 2510.27527).
OUTLIERS_BF16 = {f"+outliers_bf16_{n}": 1 / n for n in (64, 32, 16)}
# dW of each recipe as it is, balanced, without a rotation, with outliers in bf16, and in bf16.
TOKEN_ARMS = (
    *("nvidia", "nvidia+balanced", "nvidia_no_rht", "nvidia_no_rht+balanced"),
    *(f"per_token{changes}" for changes in ("", "+balanced", "+balanced_rowwise")),
    *(f"per_token+no_rht{changes}" for changes in ("", "+balanced", "+balanced_rowwise")),
    *("te_per_token", "te_per_token+balanced", "te_per_token_rht", "te_per_token_rht+balanced"),
    *(f"{arm}{change}" for arm in ("per_token", "te_per_token") for change in OUTLIERS_BF16),
    *("quartet2", "quartet2+sr", "quartet2+sr+no_rht"),
    "per_token_wgrad_bf16",
)
# Gaussian tokens, and changes of them: every 32nd token times 64 and its dy divided by 64, as the outliers of
# examples/train_moe.py; every 256th token times 64 and its dy divided by 64 * 64; x of each token times the
# exponential of a Gaussian number; then the tokens of the model, and these with the same outliers.
OUTLIER_EVERY, OUTLIER_FACTOR = 32, 64.0
KINDS = ("ordinary", "outliers", "massive", "lognormal", "model", "model_outliers")
TOKENS, FEATURES = 1024, 256  # of the Gaussian tokens


class Step(NamedTuple):
    """What one quantized layer got in a step of bf16, and what it computed."""

    x: Tensor
    offs: Tensor | None
    weight: Tensor
    dy: Tensor
    results: tuple[Tensor, Tensor, Tensor]  # y, dx, dW


def rows(arms: Sequence[str], size: str, steps: int, device: torch.device) -> Iterator[Row]:
    """The errors of each arm, averaged over the layers.

    ``y``, ``dx`` and ``dW`` are the norms of the errors over those of bf16's results; ``dx_own`` is that of
    dx to dy times the quantized W that the forward pass multiplied. ``dx_scale`` and ``dW_scale`` are
    <got, want> / <want, want> - 1, by how much a gradient is too long. ``cosine`` and ``least`` are those of
    the gradients of a whole step, averaged and of the worst layer.

    Args:
        arms: names of examples/train_moe_arms.py.
        size: "tiny" or "small", of examples/train_moe_model.py.
        steps: of training in bf16 before the step that is measured.

    Raises:
        ValueError: an arm is unknown, or changes the model.
    """
    recipes, run, layers, captured = _prepared(arms, size, steps, device)
    exact = run.gradients()
    for name, recipe in recipes.items():
        errors = [_errors(step, recipe) for step in captured]
        means = [sum(values) / len(values) for values in zip(*errors, strict=True)]
        for _, layer in layers:
            layer.recipe = recipe
        torch.manual_seed(0)
        cosines = [float(_cosine(g, exact[key])) for key, g in run.gradients().items()]
        row: Row = {"arm": name, **dict(zip(ERRORS, means, strict=True))}
        yield row | {"cosine": sum(cosines) / len(cosines), "least": min(cosines)}


def token_rows(arms: Sequence[str], size: str, steps: int, device: torch.device) -> Iterator[Row]:
    """The errors of dW of each arm for the tokens of KINDS.

    ``<kind>`` is the norm of the error over that of dW, and ``<kind>_cosine`` the cosine of dW and that of
    bf16. Those of the model are averaged over its layers. An arm may end with a name of OUTLIERS_BF16.

    Args, Raises: as :func:`rows`.
    """
    parts = {name: without_outliers(name) for name in arms}
    recipes, _, _, captured = _prepared([arm for arm, _ in parts.values()], size, steps, device)
    gaussian = {kind: [_gaussian(kind, device)] for kind in KINDS[:4]}
    of_kinds = gaussian | {"model": captured, "model_outliers": [_with_outliers(step) for step in captured]}
    for name, (arm, part) in parts.items():
        row: Row = {"arm": name}
        for kind, of_layers in of_kinds.items():
            errors, cosines = [], []
            for step in of_layers:
                got, want = _weight_gradient(step, recipes[arm], part), step.results[2]
                errors.append(float((got - want).norm() / want.norm()))
                cosines.append(float(_cosine(got, want)))
            row |= {kind: sum(errors) / len(errors), f"{kind}_cosine": sum(cosines) / len(cosines)}
        yield row


def without_outliers(name: str) -> tuple[str, float]:
    """The name of an arm without a suffix of OUTLIERS_BF16, and the part of the tokens that it has, or 0."""
    for suffix, part in OUTLIERS_BF16.items():
        if name.endswith(suffix):
            return name.removesuffix(suffix), part
    return name, 0.0


def _weight_gradient(step: Step, recipe: Recipe, part: float) -> Tensor:
    """dW of a layer by a recipe, with this part of its tokens in bf16.

    The tokens are those whose amax of x or of dy is the largest multiple of its median.
    """
    x, offs, weight, dy = step[:4]
    if part == 0:
        return _results(x, offs, weight, dy, recipe)[2]
    amaxes = [t.abs().amax(-1).flatten() for t in (x, dy)]
    apart = torch.stack([amax / amax.median() for amax in amaxes]).amax(0)
    chosen = torch.zeros_like(apart)
    chosen[apart.topk(max(1, round(part * apart.numel()))).indices] = 1
    chosen = chosen.view(*x.shape[:-1], 1)
    of_outliers = _results(x * chosen, offs, weight, dy * chosen, PRESETS["bf16"])[2]
    return _results(x * (1 - chosen), offs, weight, dy * (1 - chosen), recipe)[2] + of_outliers


def _gaussian(kind: str, device: torch.device) -> Step:
    """A dense layer with the tokens of a kind."""
    gen = torch.Generator().manual_seed(0)
    x, dy = (torch.randn(TOKENS, FEATURES, generator=gen) for _ in range(2))
    weight = torch.randn(FEATURES, FEATURES, generator=gen)
    number = torch.arange(TOKENS).unsqueeze(1)
    if kind == "outliers":
        factor = torch.where(number % OUTLIER_EVERY == 0, OUTLIER_FACTOR, 1.0)
        x, dy = x * factor, dy / factor
    elif kind == "massive":
        factor = torch.where(number % 256 == 0, 64.0, 1.0)
        x, dy = x * factor, dy / factor.square()
    elif kind == "lognormal":
        x = x * torch.randn(TOKENS, 1, generator=gen).mul(2).exp()
    x, dy, weight = x.to(device), dy.to(device), weight.to(device)
    return Step(x, None, weight, dy, _results(x, None, weight, dy, PRESETS["bf16"]))


def _with_outliers(step: Step) -> Step:
    """The layer with outliers as add_outliers of examples/train_moe_model.py makes them; dW is the same."""
    tokens = step.x.shape[:-1]
    rows = torch.arange(tokens.numel(), device=step.x.device).view(*tokens, 1)
    factor = torch.where(rows % OUTLIER_EVERY == 0, OUTLIER_FACTOR, 1.0)
    return step._replace(x=step.x * factor, dy=step.dy / factor)


def _prepared(
    arms: Sequence[str], size: str, steps: int, device: torch.device
) -> tuple[dict[str, Recipe], Any, list[tuple[str, Any]], list[Step]]:
    """The recipes by name, the run after its steps in bf16, its layers, and what each gets in a step."""
    sys.path.insert(0, str(ROOT / "examples"))
    parts = ("arms", "corpus", "loop", "model")
    arm_of, corpora, loop, model = (importlib.import_module(f"train_moe_{part}") for part in parts)
    recipes = {}
    for name in arms:
        arm = arm_of.arm(name)
        if arm.model_changes:
            raise ValueError(f"--arms: {name!r} changes the model, must change the recipe alone")
        recipes[name] = arm.recipe
    corpus = corpora.load("bytes", CORPUS_BYTES, ROOT / "build" / "gradients" / "corpus.pt")
    sizes = dataclasses.replace(model.SIZES[size], steps=steps + 1)
    run = loop.Run(sizes, corpus, arm_of.arm("bf16"), 0, device, torch.float32)
    for _ in range(steps):
        run.step()
    layers = model.quantized_layers(run.model)
    captured = _captured(run, [layer for _, layer in layers])
    return recipes, run, layers, captured


def _captured(run: Any, layers: Sequence[Any]) -> list[Step]:
    """What each layer gets in the coming step of a run."""
    inputs: dict[int, tuple[Tensor, Tensor | None]] = {}
    gradients: dict[int, Tensor] = {}

    def hook(module: Any, args: Any, y: Tensor) -> None:
        x: Any = args[0]
        offs = args[1] if len(args) > 1 else None
        if isinstance(x, QuantizedInput):
            x, offs = x.x, x.offs
        inputs[id(module)] = (x.detach(), offs)
        y.register_hook(lambda dy: gradients.__setitem__(id(module), dy.detach()))

    handles = [layer.register_forward_hook(hook) for layer in layers]
    run.gradients()
    for handle in handles:
        handle.remove()
    steps = []
    for layer in layers:
        (x, offs), dy, weight = inputs[id(layer)], gradients[id(layer)], layer.weight.detach().clone()
        steps.append(Step(x, offs, weight, dy, _results(x, offs, weight, dy, PRESETS["bf16"])))
    return steps


def _results(
    x: Tensor, offs: Tensor | None, weight: Tensor, dy: Tensor, recipe: Recipe
) -> tuple[Tensor, Tensor, Tensor]:
    """y, dx and dW of a layer by a recipe, with the same random numbers in every call."""
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    torch.manual_seed(0)
    if offs is None:
        y = functional.linear(x, weight, None, recipe)
    else:
        y = functional.grouped_linear(x, weight, offs, None, recipe)
    y.backward(dy)
    return y.detach(), cast(Tensor, x.grad), cast(Tensor, weight.grad)


def _errors(step: Step, recipe: Recipe) -> list[float]:
    """ERRORS of a layer."""
    y, dx, dw = _results(*step[:4], recipe)
    own = step.results[1]
    if recipe.w is not None and recipe.x is not None:
        own = _results(*step[:4], Recipe(x=recipe.x, w=recipe.w, w_t="dequantized"))[1]
    pairs = ((y, step.results[0]), (dx, step.results[1]), (dx, own), (dw, step.results[2]))
    errors = [float((got - want).norm() / want.norm()) for got, want in pairs]
    scales = [float((got * want).sum() / (want * want).sum()) - 1 for got, want in (pairs[1], pairs[3])]
    return errors + scales


def _cosine(a: Tensor, b: Tensor) -> Tensor:
    return torch.cosine_similarity(a.flatten(), b.flatten(), dim=0)
