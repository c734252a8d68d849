"""The text that train_moe.py learns: documentation and sources of Python packages on this machine.

Files .py, .rst and .txt of the standard library and of installed packages, without copies, in the order of
their hashes; one file in 16 is held out. Nothing is downloaded. ``Corpus.checksum`` names the text: runs are
comparable if it is the same.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

SUFFIXES = (".py", ".rst", ".txt")
HELD_OUT = 16  # one file in so many, by its hash
MAX_FILE_BYTES = 1 << 20  # larger files are tables, not text
SEPARATOR = 0  # the byte, or the token, between files
VOCAB_BPE = 8192
BPE_SAMPLE_BYTES = 16 << 20  # of the training text, from which the merges are learnt


@dataclass(frozen=True)
class Corpus:
    """Tokens of the files to train on and of those held out, int32 vectors on the CPU."""

    train: torch.Tensor
    held_out: torch.Tensor
    vocab: int
    tokenizer: str  # "bytes" or "bpe"
    num_files: int
    num_bytes: int
    bytes_per_token: float  # of the text that is held out
    checksum: str  # of both token vectors


def default_folders() -> list[Path]:
    """The standard library and the folders of installed packages."""
    names = ("stdlib", "purelib", "platlib")
    return [Path(path) for path in dict.fromkeys(sysconfig.get_path(name) for name in names)]


def text_files(folders: Sequence[Path]) -> Iterator[Path]:
    """Every text file below the folders, each path once; fp4gemm's own are left out."""
    seen = set()
    for top in folders:
        for folder, subfolders, names in os.walk(top):
            subfolders[:] = sorted(set(subfolders) - {"__pycache__", "fp4gemm"})
            for name in sorted(names):
                path = Path(folder, name)
                if name.endswith(SUFFIXES) and path not in seen:
                    seen.add(path)
                    yield path


def texts(folders: Sequence[Path], limit_bytes: int) -> tuple[list[bytes], list[bytes]]:
    """The texts to train on and those held out, in the order of their SHA-256, up to ``limit_bytes``.

    The hash decides about the limit and about the split, so that neither depends on where a file lies.
    Files that are empty, larger than 1 MiB, not UTF-8 or not readable are left out.
    """
    found: dict[str, bytes] = {}
    for path in text_files(folders):
        try:
            if not 0 < path.stat().st_size <= MAX_FILE_BYTES:
                continue
            text = path.read_bytes()
            text.decode()
        except (OSError, UnicodeDecodeError):
            continue
        if SEPARATOR not in text:
            found[hashlib.sha256(text).hexdigest()] = text
    train: list[bytes] = []
    held_out: list[bytes] = []
    total = 0
    for digest in sorted(found):
        if total + len(found[digest]) > limit_bytes:
            break
        total += len(found[digest])
        # Other digits than those that decide about the order.
        (held_out if int(digest[-8:], 16) % HELD_OUT == 0 else train).append(found[digest])
    return train, held_out


def _byte_tokens(files: Sequence[bytes]) -> torch.Tensor:
    joined = bytearray(bytes([SEPARATOR]).join(files))
    return torch.frombuffer(joined, dtype=torch.uint8).int() if joined else torch.empty(0, dtype=torch.int32)


def _bpe_tokens(train: Sequence[bytes], held_out: Sequence[bytes]) -> tuple[torch.Tensor, torch.Tensor]:
    """Byte-level BPE, learnt from a part of ``train`` by the package tokenizers."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    sample, size = [], 0
    for text in train:
        if size > BPE_SAMPLE_BYTES:
            break
        sample.append(text.decode())
        size += len(text)
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_BPE,
        special_tokens=["<sep>"],  # 0, which is SEPARATOR
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(sample, trainer)

    def encode(files: Sequence[bytes]) -> torch.Tensor:
        parts = []
        for i in range(0, len(files), 256):
            for one in tokenizer.encode_batch_fast([text.decode() for text in files[i : i + 256]]):
                parts += [torch.tensor(one.ids, dtype=torch.int32), torch.tensor([SEPARATOR]).int()]
        return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int32)

    return encode(train), encode(held_out)


def _checksum(*tokens: torch.Tensor) -> str:
    digest = hashlib.sha256()
    for each in tokens:
        digest.update(len(each).to_bytes(8, "little"))
        digest.update(each.numpy().tobytes())
    return digest.hexdigest()[:16]


def load(
    tokenizer: str, limit_bytes: int, cache: Path | None = None, folders: Sequence[Path] | None = None
) -> Corpus:
    """Read the files and turn them into tokens.

    Args:
        tokenizer: "bytes", or "bpe" with a vocabulary of 8192 (needs the package tokenizers).
        limit_bytes: of text at most.
        cache: a file that keeps the corpus; one that exists is read in place of everything else, so that a
            run that is resumed has its text even if a package was installed in between.
        folders: where to look; None is the standard library and the installed packages.

    Raises:
        ValueError: the folders hold too little text, or the cache was made with other arguments.
    """
    if cache is not None and cache.exists():
        saved = torch.load(cache, weights_only=True)
        if saved.pop("wanted") != [tokenizer, limit_bytes]:
            raise ValueError(
                f"{cache}: holds another corpus, must be removed or --out must name another file"
            )
        return Corpus(**saved)
    train_texts, held_out_texts = texts(folders or default_folders(), limit_bytes)
    num_bytes = sum(map(len, train_texts)) + sum(map(len, held_out_texts))
    if tokenizer == "bpe":
        train, held_out = _bpe_tokens(train_texts, held_out_texts)
    else:
        train, held_out = _byte_tokens(train_texts), _byte_tokens(held_out_texts)
    if len(held_out) < 1 << 12:
        raise ValueError(f"corpus: {num_bytes} bytes were found and {len(held_out)} tokens held out, must be "
                         "4096 at least")  # fmt: skip
    corpus = Corpus(
        train=train,
        held_out=held_out,
        vocab=VOCAB_BPE if tokenizer == "bpe" else 256,
        tokenizer=tokenizer,
        num_files=len(train_texts) + len(held_out_texts),
        num_bytes=num_bytes,
        bytes_per_token=sum(map(len, held_out_texts)) / len(held_out),
        checksum=_checksum(train, held_out),
    )
    if cache is not None:
        cache.parent.mkdir(parents=True, exist_ok=True)
        partial = cache.with_suffix(".partial")
        torch.save(vars(corpus) | {"wanted": [tokenizer, limit_bytes]}, partial)
        partial.replace(cache)
    return corpus


class Batches:
    """Windows of a token vector at places that depend on the seed and the step alone.

    Args:
        tokens: int32 (t,), t > length; moved to ``device``.
        length: L, tokens of a window; the targets are those one later.
        size: windows of a batch.
    """

    def __init__(self, tokens: torch.Tensor, length: int, size: int, device: torch.device) -> None:
        if len(tokens) <= length:
            raise ValueError(f"tokens: there are {len(tokens)}, must be more than a window of {length}")
        self.tokens, self.length, self.size = tokens.to(device), length, size

    def at(self, seed: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets of a step, int64 (size, length) each. Does not wait for the device."""
        # torch's generator on the CPU reads 32 bits of its seed.
        digest = hashlib.sha256(f"{seed} {step}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:4], "little"))
        starts = torch.randint(len(self.tokens) - self.length, (self.size,), generator=generator)
        device = self.tokens.device
        if device.type == "cuda":
            starts = starts.pin_memory().to(device, non_blocking=True)
        places = starts.unsqueeze(1) + torch.arange(self.length + 1, device=device)
        windows = self.tokens[places].long()
        return windows[:, :-1], windows[:, 1:]
