"""The checkpoint formats: how a weight is stored, and how config.json says so.

==================  ========================  ==============================  ========================
tensor              ModelOpt                  compressed-tensors              fp4gemm
==================  ========================  ==============================  ========================
codes               ``weight``                ``weight_packed``               ``weight``
block scales        ``weight_scale``          ``weight_scale``                ``weight_scale``
outer scale         ``weight_scale_2`` ()     ``weight_global_scale`` (1,)    ``weight_amax`` (1,), (n,)
  its number        fl(A / 6B), decodes       fl(6B / A), encodes             A
outer scale of x    ``input_scale`` ()        ``input_global_scale`` (1,)     ``input_amax`` (1,)
KV cache            ``k_proj.k_scale``,       ``k_scale``, ``v_scale`` of     as ModelOpt
                    ``v_proj.v_scale``        the attention
==================  ========================  ==============================  ========================

Codes are uint8 (n, k/2), the low nibble holds the even k. Block scales are float8_e4m3fn (n, k/16) in plain
order. Outer scales are float32. A is the amax of the weight, or of the weights that share it, and 6B is 2688,
or 1536 for a weight of four over six with the bound B = 256. The weights of experts are stored one by one.

The first two formats are what other loaders read. They multiply codes by block scales and by the outer scale,
so that a weight with B = 256 has the right values there too: its outer scale already is A / 1536.

The third is ours, for an amax for each row. Its config has ``quant_method: fp4gemm``, which vLLM and SGLang
refuse by name. transformers warns that it skips an unknown method, and then refuses ``weight``, which has
half the columns that it expects.

Sources: ModelOpt 0.47.0 (``export/convert_hf_config.py``, ``qtensor/nvfp4_tensor.py``), compressed-tensors
0.20.0 (``quantization/quant_config.py``, ``compressors/nvfp4``), and the readers in vLLM and SGLang.
"""

from __future__ import annotations

from ._format import FORMATS, Format, FormatName
from ._ignore import is_ignored
from ._read import read_quantization_config, read_scheme
from ._scheme import Activations, KVCache, Producer, Scheme
from ._stored import StoredWeight
from ._write import hf_quant_config, quantization_config

__all__ = [
    "FORMATS",
    "Activations",
    "Format",
    "FormatName",
    "KVCache",
    "Producer",
    "Scheme",
    "StoredWeight",
    "hf_quant_config",
    "is_ignored",
    "quantization_config",
    "read_quantization_config",
    "read_scheme",
]
