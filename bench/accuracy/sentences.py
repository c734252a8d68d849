"""What quantization costs a model that embeds sentences: the cosine to the embeddings of the float model."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..report.results import Row

MOST = 64  # tokens of a sentence that are used; rows of a batch


def batches_of(tokenizer: Any, sentences: Sequence[str]) -> list[Tensor]:
    """Token ids, int64 (count, length): the sentences of each length together, so that none is padded."""
    by_length: dict[int, list[list[int]]] = {}
    for ids in tokenizer(list(sentences), truncation=True, max_length=MOST)["input_ids"]:
        by_length.setdefault(len(ids), []).append(ids)
    batches = []
    for _, rows in sorted(by_length.items()):
        batches += [torch.tensor(rows[i : i + MOST]) for i in range(0, len(rows), MOST)]
    return batches


class Sentences:
    """A float model of sentences on the evaluation's batches: the embeddings, mean over tokens.

    Args:
        model: called with ids, returns ``last_hidden_state`` (count, length, hidden).
        batches: int64 (count, length) each.
    """

    def __init__(self, model: torch.nn.Module, batches: Sequence[Tensor]) -> None:
        self.batches = list(batches)
        self.sample = max(self.batches, key=lambda ids: ids.numel())
        self._embedded = self._embeddings(model)
        self._nearest = _nearest(self._embedded)

    def row(self, model: torch.nn.Module) -> Row:
        """The figures of another model on the same sentences.

        cosine is the mean cosine to the float model's embedding, spread its standard error over the
        sentences, worst the smallest, and nearest how often the nearest other sentence is the same.
        """
        found = self._embeddings(model)
        cosines = torch.nn.functional.cosine_similarity(found.double(), self._embedded.double()).tolist()
        same = (_nearest(found) == self._nearest).float().mean()
        return {
            "cosine": statistics.fmean(cosines),
            "spread": statistics.stdev(cosines) / math.sqrt(len(cosines)) if len(cosines) > 1 else 0.0,
            "worst": min(cosines),
            "nearest": float(same),
        }

    def _embeddings(self, model: torch.nn.Module) -> Tensor:
        with torch.inference_mode():
            return torch.cat([model(ids).last_hidden_state.float().mean(1) for ids in self.batches])


def _nearest(embedded: Tensor) -> Tensor:
    """The index of the nearest other row of (count, hidden), by cosine; int64 (count,)."""
    unit = torch.nn.functional.normalize(embedded, dim=1)
    return (unit @ unit.T).fill_diagonal_(-2).argmax(1)
