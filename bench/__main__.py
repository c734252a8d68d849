"""``python -m bench quantize|dense|grouped|hopper|overhead|errors``: the benches; JSON by --json."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable

import fp4gemm

from . import dense, errors, grouped, hopper, machine, quantize

Row = dict[str, object]


def _shape(text: str) -> tuple[int, ...]:
    sizes = tuple(int(part) for part in text.split("x"))
    if len(sizes) != 3:
        raise argparse.ArgumentTypeError(f"{text} is not 3 sizes like 4096x4096x4096")
    return sizes


def _common(**defaults: object) -> argparse.ArgumentParser:
    """--json and --rounds, taken before the command and behind it; one of the two has the defaults."""
    parser = argparse.ArgumentParser(add_help=False, argument_default=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true", help="JSON lines with the facts of the machine")
    parser.add_argument("--rounds", type=int, help="replays of each contender (20)")
    parser.set_defaults(**defaults)
    return parser


def parser() -> argparse.ArgumentParser:
    """The whole command line."""
    top = argparse.ArgumentParser(
        prog="python -m bench", description=__doc__, parents=[_common(json=False, rounds=20)]
    )
    commands = top.add_subparsers(dest="command", required=True)

    def command(
        name: str, run: Callable[[argparse.Namespace], Iterable[Row]], text: str
    ) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, parents=[_common()])
        sub.set_defaults(run=run)
        return sub

    quantize.add_arguments(command("quantize", quantize.run, "every quantizer against device-copy bandwidth"))
    sub = command("dense", dense.bench_dense, "mm against torch's fp16 and bf16 matmul")
    sub.add_argument("--shapes", type=_shape, nargs="+", default=[(8192, 8192, 8192)], metavar="MxNxK")
    sub.add_argument(
        "--kernels",
        action="store_true",
        help="also every kernel of the table, forced by name, on the operands that it reads itself",
    )
    grouped.add_arguments(command("grouped", grouped.run, "products of experts against torch's grouped_mm"))
    hopper.add_arguments(command("hopper", hopper.run, "prepacked weights against the bars of Hopper"))
    command("overhead", dense.bench_overhead, "host microseconds a call")
    errors.add_arguments(command("errors", errors.run, "quantization error of every mode, on any device"))
    return top


def _line(row: Row) -> str:
    return "  ".join(f"{key} {value}" for key, value in row.items())


def main() -> int:
    """Runs one bench and prints its rows; 1 where one was refused."""
    args = parser().parse_args()
    table = {"quantize": quantize.show, "errors": errors.show}.get(args.command)
    if args.command in ("dense", "grouped", "hopper", "overhead"):
        supported, reason = fp4gemm.is_supported("cuda")
        if not supported:
            sys.exit(f"nothing to measure: {reason}")
    facts = machine.describe()
    if not args.json:
        print(*(f"{key}: {value}" for key, value in facts.items()), sep="\n", flush=True)
    rows = []
    for row in args.run(args):
        rows.append(row)
        if args.json:
            print(json.dumps(row | facts), flush=True)
        elif table is None:
            print(_line(row), flush=True)
    if table is not None and not args.json:
        table(rows)
    return int(any("refused" in row for row in rows))


if __name__ == "__main__":
    sys.exit(main())
