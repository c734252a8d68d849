"""Text for calibration and evaluation that every machine has: modules of Python's standard library.

The calibration's text is the docstrings of some modules. The evaluation has two texts, both of other modules:
their docstrings, and their source code without docstrings and comments, which is foreign to the calibration.
A docstring that occurs in both sets of modules is removed from the evaluation. The texts depend on the
version of Python, so results name it, and rows of another version are not compared.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Iterator, Sequence
from functools import cache
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
        for node in ast.walk(tree):
            if isinstance(node, _DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
                node.body = node.body[1:] or [ast.Pass()]
        parts.append(ast.unparse(tree))
    return "\n\n".join(parts)


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
