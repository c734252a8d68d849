"""The sizes of whole models, as data, and the bytes that they need.

The sizes are those of the models' published config.json. gpt-oss-20b-shape has the sizes and experts of
GPT-OSS, and attends without sinks and sliding windows. llama-3.1-70b-shape and qwen3-235b-shape do not fit on
one GPU as a whole: the benchmark runs as many of their layers as fit. The tiny models are for machines
without a GPU.
"""

from __future__ import annotations

import dataclasses

ELEM_BYTES = 2  # of a bf16 element
NVFP4_BYTES = 9 / 16  # of an NVFP4 element: half a byte of code, and a scale for every 16


@dataclasses.dataclass(frozen=True)
class Shape:
    """The sizes of a decoder."""

    name: str
    num_layers: int
    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate: int  # of the MLP, or of one expert
    vocab: int
    num_experts: int = 0  # 0: a dense MLP
    top_k: int = 0  # experts that a token chooses
    qk_norm: bool = False  # whether q and k are normalised for each head
    bias: bool = False  # of the attention's linear layers, the router and the experts
    is_oss: bool = False  # experts as in GPT-OSS: transposed, gate and up interleaved, a clamped gate
    rope_theta: float = 500000.0

    @property
    def qkv_rows(self) -> int:
        """Rows of the weights of q, k and v together."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    @property
    def attention_elems(self) -> int:
        """Elements of the weights of one layer's attention."""
        return (self.qkv_rows + self.num_heads * self.head_dim) * self.hidden

    @property
    def expert_elems(self) -> int:
        """Elements of the weights of one expert, or of the dense MLP."""
        return 3 * self.intermediate * self.hidden

    @property
    def layer_elems(self) -> int:
        """Elements of all weights of one layer that are multiplied, except for the router."""
        return self.attention_elems + max(1, self.num_experts) * self.expert_elems

    @property
    def head_bytes(self) -> int:
        """Bytes of lm_head, which stays in bf16; the embedding has as many."""
        return ELEM_BYTES * self.vocab * self.hidden

    def cache_bytes(self, tokens: int) -> int:
        """Bytes of the keys and values of one layer for this many tokens."""
        return 2 * ELEM_BYTES * tokens * self.num_kv_heads * self.head_dim

    def flop(self, num_layers: int, tokens: int, last: int, attended: int) -> float:
        """Operations of a step over ``tokens`` tokens.

        ``last`` of the tokens get logits; ``attended`` is the sum over tokens of the positions that each of
        them attends to.
        """
        active = self.attention_elems + max(1, self.top_k) * self.expert_elems
        attention = 4.0 * attended * self.num_heads * self.head_dim
        return num_layers * (2.0 * tokens * active + attention) + 2.0 * last * self.vocab * self.hidden

    def bytes_needed(self, num_layers: int, tokens: int, has_float: bool, quantized_bytes: float) -> int:
        """Bytes of a run: the weights in bf16 (once, if ``has_float``) and quantized, ends, and the cache.

        ``quantized_bytes``: those of an element in all quantized models together.
        """
        elem_bytes = (ELEM_BYTES if has_float else 0) + quantized_bytes
        a_layer = self.layer_elems * elem_bytes + self.cache_bytes(tokens)
        made = ELEM_BYTES * self.layer_elems  # of one layer, while it is quantized
        return int(num_layers * a_layer + 2 * self.head_bytes + made)


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("llama-3.1-8b", 32, 4096, 32, 8, 128, 14336, 128256),
        Shape("llama-3.1-70b-shape", 80, 8192, 64, 8, 128, 28672, 128256),
        Shape("qwen3-8b", 36, 4096, 32, 8, 128, 12288, 151936, qk_norm=True, rope_theta=1e6),
        Shape("qwen3-30b-a3b", 48, 2048, 32, 4, 128, 768, 151936, 128, 8, qk_norm=True, rope_theta=1e6),
        Shape("qwen3-235b-shape", 94, 4096, 64, 4, 128, 1536, 151936, 128, 8, qk_norm=True, rope_theta=1e6),
        Shape("mixtral-8x7b", 32, 4096, 32, 8, 128, 14336, 32000, 8, 2, rope_theta=1e6),
        Shape("gpt-oss-20b-shape", 24, 2880, 64, 8, 64, 2880, 201088, 32, 4, bias=True, is_oss=True),
        Shape("tiny", 2, 128, 4, 2, 32, 192, 256),
        Shape("tiny-moe", 2, 128, 4, 2, 32, 64, 256, 8, 2, qk_norm=True),
        Shape("tiny-oss", 2, 128, 4, 2, 32, 64, 256, 8, 2, bias=True, is_oss=True),
    )
}
