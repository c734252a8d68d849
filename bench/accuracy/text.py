"""Text for calibration and evaluation that every machine has: modules of Python's standard library.

The calibration's text is the docstrings of some modules. The evaluation has two texts, both of other modules:
their docstrings, and their source code without docstrings and comments, which is foreign to the calibration.
A docstring that occurs in both sets of modules is removed from the evaluation. Training
(``python -m bench qad``) has the docstrings and the source code of all modules but those of the evaluation,
which are read as files and not imported. The texts depend on the version of Python, so results name it, and
rows of another version are not compared.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import sysconfig
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

CALIBRATION = (
    *("asyncio", "collections", "configparser", "csv", "datetime", "decimal", "difflib", "functools"),
    *("http.client", "inspect", "itertools", "json", "logging", "os", "pathlib", "pickle", "re", "shutil"),
    *("smtplib", "socket", "sqlite3", "ssl", "subprocess", "tempfile", "threading", "typing", "unittest"),
    *("urllib.request", "xml.etree.ElementTree", "zipfile"),
)
EVALUATION = (
    *("argparse", "ast", "calendar", "cmd", "codecs", "concurrent.futures", "email.message", "fractions"),
    *("ftplib", "gettext", "imaplib", "mailbox", "multiprocessing.pool", "optparse", "pdb", "poplib"),
    *("random", "sched", "statistics", "string", "tarfile", "textwrap", "uuid", "zipapp"),
)

# Folders and modules of the standard library that are no text to train on: tests, tables, and other programs.
NOT_TRAINED = ("test", "tests", "idlelib", "lib2to3", "turtledemo", "encodings", "pydoc_data", "ensurepip")

_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
TEXTS = ("docstrings", "source")  # of the evaluation


def _documents(module: Any) -> Iterator[str]:
    """The docstrings of a module, of its public functions and classes, and of their public methods."""
    yield inspect.getdoc(module) or ""
    for name, value in sorted(vars(module).items()):
        if name.startswith("_") or getattr(value, "__module__", None) != module.__name__:
            continue
        if inspect.isfunction(value) or inspect.isclass(value):
            yield f"{name}: {inspect.cleandoc(value.__doc__ or '')}"
        for method, inner in sorted(vars(value).items()) if inspect.isclass(value) else ():
            if inspect.isfunction(inner) and inner.__doc__ and not method.startswith("_"):
                yield f"{name}.{method}: {inspect.cleandoc(inner.__doc__)}"


@cache
def document(modules: Sequence[str], without: Sequence[str] = ()) -> str:
    """The docstrings of these modules, each once, without those of other modules."""
    seen = {text for name in without for text in _documents(importlib.import_module(name))}
    kept = []
    for name in modules:
        for text in _documents(importlib.import_module(name)):
            if len(text) > 40 and text not in seen:
                seen.add(text)
                kept.append(text)
    return "\n\n".join(kept)


@cache
def source(modules: Sequence[str]) -> str:
    """The source code of these modules without docstrings, written by ast.unparse, which omits comments."""
    parts = []
    for name in modules:
        tree = ast.parse(inspect.getsource(importlib.import_module(name)))
        parts.append(ast.unparse(_without_docstrings(tree)))
    return "\n\n".join(parts)


def _without_docstrings(tree: ast.Module) -> ast.Module:
    """The tree itself, from which the docstrings are removed."""
    for node in ast.walk(tree):
        if isinstance(node, _DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return tree


@cache
def training(name: str) -> str:
    """The text of this name, one of TEXTS, of the modules outside of the evaluation, in alphabetical order.

    Of these modules, docstrings and functions that the evaluation has too are left out.
    """
    if name == "source":
        evaluated = set(source(EVALUATION).split("\n\n"))
        trained = (ast.unparse(_without_docstrings(tree)).split("\n\n") for tree in _trees())
        return "\n\n".join(part for parts in trained for part in parts if part not in evaluated)
    documents = {text for module in EVALUATION for text in _documents(importlib.import_module(module))}
    seen = {_body(text) for text in documents}
    parts: list[str] = []
    for tree in _trees():
        for node in ast.walk(tree):
            if not isinstance(node, _DOCUMENTED):
                continue
            text = ast.get_docstring(node)
            if text is not None and len(text) > 40 and text not in seen:
                seen.add(text)
                parts.append(text if isinstance(node, ast.Module) else f"{node.name}: {text}")
    return "\n\n".join(parts)


def _body(text: str) -> str:
    """A docstring of :func:`_documents` without the name before it."""
    return re.sub(r"^[\w.]+: ", "", text)


def _trees() -> Iterator[ast.Module]:
    """The modules of the standard library outside of the evaluation and of NOT_TRAINED, parsed."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        parts = parts[:-1] if parts[-1] == "__init__" else parts
        is_public = not any(part.startswith("_") or "-" in part or part in NOT_TRAINED for part in parts)
        if parts and is_public and ".".join(parts) not in EVALUATION:
            yield ast.parse(path.read_text(encoding="utf-8"))


def evaluation(name: str) -> str:
    """The evaluation's text of this name, one of TEXTS."""
    return source(EVALUATION) if name == "source" else document(EVALUATION, CALIBRATION)


def sentences(document: str, count: int, without: Sequence[str] = ()) -> list[str]:
    """The first sentences of a document that are 6 to 40 words of plain text, each once.

    Args:
        document: paragraphs with empty lines between them.
        count: how many are wanted.
        without: sentences that are left out.

    Raises:
        ValueError: the document has fewer.
    """
    seen, found = set(without), []
    for paragraph in re.split(r"\n\s*\n", document):
        for sentence in re.split(r"(?<=[.?!])\s+", " ".join(paragraph.split())):
            if sentence not in seen and re.fullmatch(r"(?=[A-Z])(\S+ ){5,39}\S+[.?!]", sentence):
                seen.add(sentence)
                found.append(sentence)
    if len(found) < count:
        raise ValueError(f"the text has {len(found)} sentences, must have {count}")
    return found[:count]


def chunks(tokenizer: Any, text: str, count: int, length: int) -> Tensor:
    """The first tokens of a text, int64 (count, length).

    Raises:
        ValueError: the text has fewer tokens.
    """
    ids: Tensor = torch.tensor(tokenizer(text)["input_ids"])
    if ids.numel() < count * length:
        raise ValueError(f"the text has {ids.numel()} tokens, must have {count} x {length}")
    return ids[: count * length].view(count, length)
