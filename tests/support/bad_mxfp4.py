"""Wrong arguments of MXFP4; a part of bad_cases.py."""

from __future__ import annotations

from bad_base import NOT, TYPE, VALUE, Cases, M, grad, ones

CASES = Cases()
add = CASES.add

F = "quantize_mxfp4"
add(F, "x", "type", lambda: [1.0], TYPE, "must be a torch.Tensor")
add(F, "x", "float64", lambda: ones(M, 32).double(), TYPE, "dtype is torch.float64, must be")
add(F, "x", "rank", lambda: ones(1, 32)[0], VALUE, "shape is (32,), must be (n, k) or (g, n, k), without a 0")
add(F, "x", "empty", lambda: ones(0, 32), VALUE, "shape is (0, 32), must be (n, k) or (g, n, k), without a 0")
add(F, "x", "k", lambda: ones(M, 48), VALUE, "k is 48, must be a positive multiple of 32")
add(F, "x", "grad", lambda: grad(ones(M, 32)), NOT, "requires grad")
add(F, "scale", "even", lambda: "even", VALUE, "got 'even', must be 'floor' or 'ceil'")
add(F, "scale", "type", lambda: 1, TYPE, "must be 'floor' or 'ceil'")
