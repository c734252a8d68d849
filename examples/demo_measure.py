"""What the demo measures: embeddings of a page of sentences, and the error of NVFP4 in each linear layer.

Definitions, where a token t is one row of a linear layer's input x:

    cosine of a sentence      <e, e'> / (|e| |e'|); e is the fp32 embedding, e' that of the quantized model
    error of a token          |y'_t - y_t|_2 / |x_t W^T|_2; y = x W^T + b in fp32, y' is the same in NVFP4
    outlier batch, factor f   before every linear layer x_t is multiplied by f for a few tokens t, and after
                              the layer that is undone: y_t -> (y_t - b) / f + b. In exact arithmetic the
                              function stays the same, so only the loss by quantization changes.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import fp4gemm
import torch
from torch import Tensor

LOST = 0.5  # a token with an error above this counts as lost


@dataclass(frozen=True)
class Page:
    """A batch of tokenized sentences."""

    ids: Tensor  # int64 (sentences, length)
    mask: Tensor  # int64 (sentences, length): 1 for a token, 0 for padding

    def to(self, device: torch.device) -> Page:
        return Page(self.ids.to(device), self.mask.to(device))


@dataclass(frozen=True)
class Exact:
    """What the fp32 model computes for a page: embeddings, and inputs and outputs of its linear layers."""

    embeddings: Tensor  # (sentences, d)
    inputs: dict[str, Tensor]  # layer name -> (tokens, k), without padding
    outputs: dict[str, Tensor]  # (tokens, n)
    biases: dict[str, Tensor | None]  # (n,)


@dataclass(frozen=True)
class Variant:
    """One line of the first table."""

    name: str
    cosines: Tensor  # float32 (sentences,)
    same_nearest: int  # sentences whose nearest other sentence is the one that fp32 finds
    weight_bytes: int  # weights and biases of the linear layers
    seconds: float  # median time of one pass over the page


@dataclass(frozen=True)
class OutlierResult:
    """The errors of the ordinary tokens (those that are not outliers) for one scaling and one factor."""

    scaling: str
    factor: float
    layer_errors: dict[
        str, float
    ]  # mean error of the ordinary tokens; each layer's input is that of the fp32 model
    lost: float  # share of (token, layer) pairs whose error is above LOST
    cosines: Tensor  # float32: sentences without an outlier token, whole model

    @property
    def error(self) -> float:
        return statistics.fmean(self.layer_errors.values())


def mean_pool(hidden: Tensor, mask: Tensor) -> Tensor:
    """``e = normalize(sum_t mask_t h_t / sum_t mask_t)``: (b, length, d), (b, length) -> (b, d), norm 1."""
    weight = mask.unsqueeze(-1).to(hidden.dtype)
    mean = (hidden * weight).sum(dim=1) / weight.sum(dim=1).clamp(min=1.0)
    return torch.nn.functional.normalize(mean, dim=-1)


@torch.no_grad()
def embed(model: torch.nn.Module, page: Page) -> Tensor:
    """Sentence embeddings, float32 (sentences, d), each of length 1."""
    hidden: Tensor = model(input_ids=page.ids, attention_mask=page.mask).last_hidden_state
    return mean_pool(hidden, page.mask)


def cosines(a: Tensor, b: Tensor) -> Tensor:
    """``<a_i, b_i> / (|a_i| |b_i|)`` for each row, in float64 so that values close to 1 differ."""
    return torch.nn.functional.cosine_similarity(a.double(), b.double(), dim=-1).float()


def nearest(embeddings: Tensor) -> Tensor:
    """For each row the index of the other row with the largest cosine."""
    return (embeddings @ embeddings.T).fill_diagonal_(-2.0).argmax(dim=1)


def token_errors(y: Tensor, exact: Tensor, bias: Tensor | None) -> Tensor:
    """``|y_t - exact_t| / |exact_t - bias|`` for each row: the bias is not quantized and must not count."""
    product = exact if bias is None else exact - bias
    errors: Tensor = (y - exact).norm(dim=1) / product.norm(dim=1)
    return errors


def linear_layers(model: torch.nn.Module) -> dict[str, torch.nn.Linear | fp4gemm.nn.Linear]:
    """The linear layers of a float or a quantized model by their names."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, (torch.nn.Linear, fp4gemm.nn.Linear))
    }


def timed(device: torch.device, repeats: int, call: Callable[[], Tensor]) -> tuple[Tensor, float]:
    """The result of ``call`` and the median seconds of ``repeats`` calls after one untimed call."""
    result, seconds = call(), []
    for _ in range(repeats):
        _finish(device)
        start = time.perf_counter()
        result = call()
        _finish(device)
        seconds.append(time.perf_counter() - start)
    return result, statistics.median(seconds)


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def exact_pass(model: torch.nn.Module, page: Page) -> Exact:
    """Run the fp32 model on the page and keep the inputs and outputs of its linear layers."""
    inputs: dict[str, Tensor] = {}
    outputs: dict[str, Tensor] = {}
    real = page.mask.bool().reshape(-1)

    def keep(name: str) -> Callable[[torch.nn.Module, tuple[Tensor, ...], Tensor], None]:
        def hook(module: torch.nn.Module, args: tuple[Tensor, ...], y: Tensor) -> None:
            inputs[name] = args[0].flatten(0, -2)[real]
            outputs[name] = y.flatten(0, -2)[real]

        return hook

    layers = linear_layers(model)
    handles = [layer.register_forward_hook(keep(name)) for name, layer in layers.items()]
    try:
        embeddings = embed(model, page)
    finally:
        for handle in handles:
            handle.remove()
    biases = {name: None if layer.bias is None else layer.bias.detach() for name, layer in layers.items()}
    return Exact(embeddings, inputs, outputs, biases)


@contextmanager
def outliers(model: torch.nn.Module, positions: Tensor, factor: float) -> Iterator[None]:
    """In this context the inputs of every linear layer at ``positions`` are multiplied by ``factor``.

    ``positions`` is (count, 2): sentence and token. The outputs of these tokens are scaled back, so that the
    model computes the same function.
    """
    sentence, place = positions.unbind(1)

    def grow(module: torch.nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        x = args[0].clone()
        x[sentence, place] *= factor
        return (x, *args[1:])

    def shrink(module: torch.nn.Linear | fp4gemm.nn.Linear, args: tuple[Tensor, ...], y: Tensor) -> Tensor:
        bias = torch.zeros((), device=y.device) if module.bias is None else module.bias
        y = y.clone()
        y[sentence, place] = (y[sentence, place] - bias) / factor + bias
        return y

    handles = []
    for layer in linear_layers(model).values():
        handles += [layer.register_forward_pre_hook(grow), layer.register_forward_hook(shrink)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def first_tokens(page: Page, count: int) -> Tensor:
    """Positions (count, 2) of the first tokens of ``count`` sentences, evenly spread over the page.

    Large models put their massive activations on the first token above all (Sun et al., "Massive Activations
    in Large Language Models", 2024).
    """
    sentences = torch.arange(count, device=page.ids.device) * page.ids.shape[0] // count
    return torch.stack([sentences, torch.zeros_like(sentences)], dim=1)


@torch.no_grad()
def outlier_result(
    scaling: str, model: torch.nn.Module, page: Page, exact: Exact, positions: Tensor, factor: float
) -> OutlierResult:
    """Measure a quantized model on the page with outliers at ``positions``: each layer, then the model."""
    is_outlier = torch.zeros_like(page.mask, dtype=torch.bool)
    is_outlier[positions[:, 0], positions[:, 1]] = True
    rows = is_outlier[page.mask.bool()]  # (tokens,), as the rows of exact.inputs
    layers = linear_layers(model)
    errors, lost = {}, []
    for name, x in exact.inputs.items():
        y = layers[name](torch.where(rows.unsqueeze(1), x * factor, x))
        ordinary = token_errors(y[~rows], exact.outputs[name][~rows], exact.biases[name])
        errors[name] = float(ordinary.mean())
        lost.append(float((ordinary > LOST).float().mean()))
    with outliers(model, positions, factor):
        found = embed(model, page)
    others = ~is_outlier.any(dim=1)
    similarity = cosines(exact.embeddings[others], found[others])
    return OutlierResult(scaling, factor, errors, statistics.fmean(lost), similarity)


def variant(
    name: str, model: torch.nn.Module, page: Page, exact: Tensor, weight_bytes: int, repeats: int
) -> Variant:
    """Measure ``model`` on the page against the fp32 embeddings ``exact``."""
    found, seconds = timed(page.ids.device, repeats, lambda: embed(model, page))
    agree = int((nearest(found) == nearest(exact)).sum())
    return Variant(name, cosines(exact, found), agree, weight_bytes, seconds)


def mean_errors(results: Sequence[OutlierResult], scaling: str) -> tuple[list[float], list[float]]:
    """(factors, mean error of the ordinary tokens) of one scaling, in the order of the results."""
    chosen = [result for result in results if result.scaling == scaling]
    return [result.factor for result in chosen], [result.error for result in chosen]
