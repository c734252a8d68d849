"""A tokenizer of a few bytes for the small models of the tests: words that are numbers."""

from __future__ import annotations

from pathlib import Path

import pytest

TEXT = " ".join(str(i * 7 % 128) for i in range(300))


def save_tokenizer(folder: Path, num_words: int = 128) -> None:
    """Write the tokenizer of the words "0", "1" and so on, whose ids are these numbers."""
    tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    model = tokenizers.models.WordLevel({str(i): i for i in range(num_words)}, unk_token="0")
    made = tokenizers.Tokenizer(model)
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=made).save_pretrained(folder)
