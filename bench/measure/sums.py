"""The errors of products of FP8 tokens and NVFP4 weights: how exactly a device sums.

    error = |D' - D| / |D|        |.| is the norm over all elements

D is the float64 product of the values that the tensor cores multiply, and D' is what ``mm`` returns in
float32, so that no error of a quantization is in it. It is measured with both values of ``use_fast_accum``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import fp4gemm
import torch
from torch import Tensor

from . import w4a8

Row = dict[str, str | int | float]
SEED = 20261126


def _gaussian(rows: int, k: int, gen: torch.Generator) -> Tensor:
    return torch.randn(rows, k, generator=gen, device=gen.device)


def _with_outliers(rows: int, k: int, gen: torch.Generator) -> Tensor:
    is_outlier = torch.rand(rows, k, generator=gen, device=gen.device) < 1e-3
    return _gaussian(rows, k, gen) * torch.where(is_outlier, 50.0, 1.0)


def _of_one_sign(rows: int, k: int, gen: torch.Generator) -> Tensor:
    return _gaussian(rows, k, gen).abs()


# By name the functions that make the tokens and the weight.
Make = Callable[[int, int, torch.Generator], Tensor]
DATA: dict[str, tuple[Make, Make]] = {
    "Gaussian": (_gaussian, _gaussian),
    "one token element of 1000 is 50 times as large": (_with_outliers, _gaussian),
    "all of one sign": (_of_one_sign, _of_one_sign),
}


def rows(m: int, n: int, ks: Sequence[int], device: torch.device) -> Iterator[Row]:
    """The errors on each kind of data and each k.

    ``promoted`` and ``fast`` are the errors with use_fast_accum=False and True, ``bf16`` that of D alone when
    it is rounded to bf16. ``promoted_small`` and ``fast_small`` are the shares of the elements whose
    magnitude is below that of D: 0.5 where errors have either sign equally often.

    Raises:
        ValueError: the device does not multiply FP8 tokens, or a k is no multiple of 64.
    """
    for k in ks:
        if k % w4a8.K_STEP:
            raise ValueError(f"--k: got {k}, must be a multiple of {w4a8.K_STEP} for FP8 tokens")
    for name, (of_tokens, of_weight) in DATA.items():
        for k in ks:
            gen = torch.Generator(device).manual_seed(SEED)
            x = of_tokens(m, k, gen).bfloat16()
            w = fp4gemm.quantize(of_weight(n, k, gen).bfloat16())
            exact = w4a8.token_values(x).double() @ w4a8.weight_values(w).double().T
            row: Row = {"bench": "sums", "data": name, "m": m, "n": n, "k": k}
            try:
                a, b = w4a8.quantize(x), w4a8.prepack(w)
                for figure, use_fast_accum in (("promoted", False), ("fast", True)):
                    d = fp4gemm.mm(a, b, out_dtype=torch.float32, use_fast_accum=use_fast_accum).double()
                    row[figure] = _error(d, exact)
                    row[f"{figure}_small"] = float((d.abs() < exact.abs()).double().mean())
            except NotImplementedError as error:
                raise ValueError(str(error)) from error
            row["bf16"] = _error(exact.bfloat16().double(), exact)
            yield row


def _error(d: Tensor, exact: Tensor) -> float:
    return float((d - exact).norm() / exact.norm())
