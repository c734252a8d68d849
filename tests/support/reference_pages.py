"""The generated parts of docs/commands.md and docs/operators.md; ``python tests/support/reference_pages.py``
writes them. They come from the argument parsers and from the registered schemas."""

from __future__ import annotations

import argparse
import re
import textwrap
from pathlib import Path

import torch
from fp4gemm.commands import COMMANDS

DOCS = Path(__file__).resolve().parents[2] / "docs"
WIDTH = 110


def commands() -> str:
    """A section for each subcommand, with a table of its arguments."""
    lines: list[str] = []
    for name, command in COMMANDS.items():
        parser = argparse.ArgumentParser(prog=f"python -m fp4gemm {name}")
        command.add_arguments(parser)
        summary = f"`python -m fp4gemm {name}`: {command.SUMMARY}."
        lines += [f"## {name}", "", *textwrap.wrap(summary, WIDTH, break_on_hyphens=False), ""]
        rows = [row for row in map(argument, parser._actions) if row is not None]
        lines += ["| argument | meaning |", "|---|---|", *rows, ""] if rows else []
    return "\n".join(lines).rstrip()


def argument(action: argparse.Action) -> str | None:
    """The row of an argument; None for --help and for old names, which --help does not show."""
    if isinstance(action, argparse._HelpAction) or action.help == argparse.SUPPRESS:
        return None
    value = ""
    if action.nargs != 0 and action.option_strings:
        choices = "{" + ",".join(map(str, action.choices)) + "}" if action.choices else None
        metavar = choices or action.metavar or action.dest.upper()
        value = f" {metavar}" + (f" [{metavar} ...]" if action.nargs in ("+", "*") else "")
    name = (
        ", ".join(action.option_strings) + value if action.option_strings else action.metavar or action.dest
    )
    help_text = re.sub(r"\s+", " ", (action.help or "") % {**vars(action), "prog": ""})
    name, help_text = (text.replace("|", r"\|") for text in (name, help_text))
    return f"| `{name}` | {help_text} |"


def operators() -> str:
    """The schemas of the registered operators, in alphabetical order."""
    names = sorted(n for n in torch._C._dispatch_get_all_op_names() if re.fullmatch(r"fp4gemm::\w+", n))
    lines = []
    for name in names:
        schema = str(getattr(torch.ops.fp4gemm, name.partition("::")[2]).default._schema)
        lines += textwrap.wrap(
            schema.removeprefix("fp4gemm::"), WIDTH, subsequent_indent="    ", break_long_words=False
        )
    return "\n".join(["```text", *lines, "```"])


PAGES = {"commands": commands, "operators": operators}


def with_block(text: str, name: str, block: str) -> str:
    """``text`` with ``block`` between the marks of that name; raises ValueError if there are none."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    before, _, rest = text.partition(begin)
    _, mark, after = rest.partition(end)
    if not mark:
        raise ValueError(f"the page must hold {begin} and after it {end}")
    return f"{before}{begin}\n{block}\n{mark}{after}"


def main() -> None:
    for name, make in PAGES.items():
        page = DOCS / f"{name}.md"
        page.write_text(with_block(page.read_text(), name, make()))


if __name__ == "__main__":
    main()
