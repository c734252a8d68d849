"""The rollout engine of examples/rollout.py: a process that receives weights and samples tokens.

:class:`OwnLayers` is a model of transformers with the layers of fp4gemm for inference. Its :class:`Measures`
say what it does as the trainer does.
"""

from __future__ import annotations

import dataclasses
import functools
import io
import traceback
from collections.abc import Callable, Mapping
from typing import Any, Literal

import fp4gemm
import torch
import transformers
from fp4gemm import models, nn, training
from fp4gemm.checkpoint.formats import StoredWeight
from rollout_models import built
from torch import Tensor
from transformers.integrations.sdpa_attention import sdpa_attention_forward

FORMAT: Literal["fp4gemm"] = "fp4gemm"  # of the weights that travel; it holds an amax for each row
BLOCK = 256  # rows of a call with fixed shapes


@dataclasses.dataclass(frozen=True)
class Measures:
    """What the rollout does as the trainer does.

    Attributes:
        casts: the layers have the casts of the trainer's recipe. Otherwise they have the defaults of
            quantize_model: weights by four over six, and an amax for each token.
        batch_invariant: the option of that name, on both sides.
        full_length: each token comes from a forward of the whole sequences, which are padded to their final
            length, as in the trainer. Otherwise keys and values are cached, and a forward has one token.
        whole_batch: a forward has all sequences of the batch. Otherwise each sequence has its own.
        all_logits: the output layer multiplies all positions. Otherwise it multiplies the last one alone.
        fixed_shapes: the output layer, routers and norms compute blocks of BLOCK rows, on both sides. Beside
            a cache, attention computes all rows of the whole sequences, of which one is used.
    """

    casts: bool = True
    batch_invariant: bool = True
    full_length: bool = True
    whole_batch: bool = True
    all_logits: bool = True
    fixed_shapes: bool = False


@dataclasses.dataclass(frozen=True)
class Setup:
    """What the engine has to know before the first weights arrive."""

    config: Any  # of transformers
    recipe: training.Recipe
    measures: Measures
    device: str
    length: int  # of the longest sequence


@dataclasses.dataclass(frozen=True)
class Samples:
    """Sequences (b, length) that begin with the prompts, and log-probabilities (b, length - prompt)."""

    ids: Tensor
    log_probabilities: Tensor


def log_probabilities(logits: Tensor, tokens: Tensor) -> Tensor:
    """The log-probability of each token, in float32 whatever the dtype of the logits is."""
    return logits.float().log_softmax(-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)


# ---- fixed shapes


def compute_in_blocks(model: torch.nn.Module, wanted: bool) -> None:
    """Let the output layer, routers and norms compute blocks of BLOCK rows, or not any more.

    A kernel of cuBLAS or of torch is chosen by the shape, and may sum in another order for another number of
    rows. With blocks of one shape it is the same kernel for one token and for all.
    """
    for name, module in model.named_modules():
        if name == "lm_head" or type(module).__name__.endswith(("Router", "RMSNorm")):
            vars(module).pop("forward", None)
            if wanted:
                module.forward = functools.partial(_in_blocks, module.forward)


def _in_blocks(forward: Callable[[Tensor], Any], x: Tensor) -> Any:
    """A function of single rows, computed in blocks of them; a router returns several tensors."""
    rows = x.reshape(-1, x.shape[-1])
    count = rows.shape[0]
    blocks = torch.nn.functional.pad(rows, (0, 0, 0, -count % BLOCK)).split(BLOCK)
    results = [forward(block) for block in blocks]
    if isinstance(results[0], tuple):
        return tuple(torch.cat(parts)[:count] for parts in zip(*results, strict=True))
    return torch.cat(results)[:count].unflatten(0, x.shape[:-1])


def allow_one_attention() -> None:
    """Let torch choose flash attention, or plain operations, so that both sides have the same kernel."""
    torch.backends.cuda.enable_cudnn_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)


class WholeAttention:
    """The attention of single queries with the shapes and so the bits of that of whole sequences.

    ``first`` is the position of the first query; keys and values have the final length.
    """

    first = 0

    def use(self, model: Any) -> None:
        """Make it the attention of a model of transformers."""
        transformers.AttentionInterface.register("whole", self)
        transformers.AttentionMaskInterface.register("whole", lambda *_, **__: None)
        model.set_attn_implementation("whole")

    def __call__(
        self, module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: None, **more: Any
    ) -> tuple[Tensor, None]:
        count = query.shape[2]
        after = key.shape[2] - self.first - count
        query = torch.nn.functional.pad(query, (0, 0, self.first, after))
        result, _ = sdpa_attention_forward(module, query, key, value, None, **more)
        return result[:, self.first : self.first + count], None


# ---- the engine


class OwnLayers:
    """A model of transformers whose linear layers and experts are those of fp4gemm.nn."""

    def __init__(self, setup: Setup) -> None:
        allow_one_attention()
        self.device, self.measures = torch.device(setup.device), setup.measures
        self.model = built(setup.config, self.device).requires_grad_(False)
        options: dict[str, Any] = {"batch_invariant": setup.measures.batch_invariant}
        self.attention = WholeAttention()
        if setup.measures.fixed_shapes:
            self.attention.use(self.model)
        if not setup.measures.casts:
            models.quantize_model(self.model, **options, report=lambda _: None)
        elif setup.recipe.w is not None:  # else the forward pass is in bf16
            recipe = setup.recipe.for_inference()
            models.quantize_model(self.model, recipe=recipe, **options, report=lambda _: None)
        compute_in_blocks(self.model, setup.measures.fixed_shapes)

    def update(self, tensors: Mapping[str, Tensor]) -> None:
        """Write the weights that the trainer sends: of layers in NVFP4 or in 16 bits, of the rest in 16."""
        here = {name: tensor.to(self.device) for name, tensor in tensors.items()}
        rest = dict(self.model.named_parameters())
        for name, module in self.model.named_modules():
            if isinstance(module, nn.Experts):
                module.update_(*self._stacks(module, name, here))
            elif isinstance(module, nn.Linear):
                module.update_(self._weight(here, name, module.e4m3_max))
        for name in rest.keys() & here.keys():
            rest[name].copy_(here[name])
        missing = rest.keys() - here.keys()
        if missing:
            raise KeyError(f"{min(missing)}: did not come with the weights")

    @staticmethod
    def _weight(tensors: Mapping[str, Tensor], name: str, bound: int) -> Any:
        """The NVFP4 weight that was sent, or the one in 16 bits, which the layer casts by its recipe."""
        if f"{name}.weight_scale" not in tensors:
            return tensors[f"{name}.weight"]
        return StoredWeight.read(tensors, name, FORMAT, bound).to_nvfp4()

    def _stacks(self, experts: nn.Experts, name: str, tensors: Mapping[str, Tensor]) -> tuple[Any, Any]:
        """Gate and up of all experts, and down of all experts."""
        if f"{name}.gate_up_proj" in tensors:
            return tensors[f"{name}.gate_up_proj"], tensors[f"{name}.down_proj"]
        first, second = [], []
        for e in range(experts.num_experts):
            of_expert = f"{name}.{e}"
            gate, up = (
                self._weight(tensors, f"{of_expert}.{part}", experts.w13.e4m3_max)
                for part in ("gate_proj", "up_proj")
            )
            both = fp4gemm.concat([gate, up])
            # One amax for the matrix is one for gate and up, which the recipe casts as one tensor.
            first.append(both if gate.amax.numel() > 1 else dataclasses.replace(both, amax=gate.amax))
            second.append(self._weight(tensors, f"{of_expert}.down_proj", experts.w2.e4m3_max))
        return fp4gemm.stack(first), fp4gemm.stack(second)

    @torch.no_grad()
    def sample(self, prompts: Tensor, length: int, seed: int) -> Samples:
        """Continue the prompts (b, p) to the length, each token drawn from the whole distribution."""
        prompts = prompts.to(self.device)
        (b, p), of_one = prompts.shape, [slice(i, i + 1) for i in range(prompts.shape[0])]
        parts = [slice(None)] if self.measures.whole_batch else of_one
        ids = prompts.new_zeros(b, length)
        ids[:, :p] = prompts
        caches: list[Any] = [None] * len(parts)
        gen = torch.Generator(self.device).manual_seed(seed)
        found = []
        for t in range(p, length):
            logits = torch.cat([self._logits(ids[part], t, caches, i) for i, part in enumerate(parts)])
            token = logits.float().softmax(-1).multinomial(1, generator=gen)
            ids[:, t : t + 1] = token
            found.append(log_probabilities(logits.unsqueeze(1), token))
        return Samples(ids.cpu(), torch.cat(found, 1).cpu())

    def _logits(self, ids: Tensor, t: int, caches: list[Any], i: int) -> Tensor:
        """The logits (b, vocabulary) of the token at t, from those before it."""
        last = t - 1
        if self.measures.full_length:
            # 0 keeps the logits of all positions.
            keep = 0 if self.measures.all_logits else torch.tensor([last], device=ids.device)
            whole: Tensor = self.model(ids, use_cache=False, logits_to_keep=keep).logits
            return whole[:, last if self.measures.all_logits else 0]
        is_first = caches[i] is None
        if is_first and self.measures.fixed_shapes:
            caches[i] = transformers.StaticCache(self.model.config, max_cache_len=ids.shape[1])
        new = ids[:, :t] if is_first else ids[:, last:t]
        self.attention.first = t - new.shape[1]
        of_model = self.model(new, past_key_values=caches[i], use_cache=True, logits_to_keep=1)
        caches[i] = of_model.past_key_values
        result: Tensor = of_model.logits[:, 0]
        return result


# ---- the process


def packed(message: object) -> bytes:
    """A message with tensors as bytes."""
    buffer = io.BytesIO()
    torch.save(message, buffer)
    return buffer.getvalue()


def unpacked(data: bytes) -> Any:
    """The message; only the two processes of one user write to the pipe."""
    return torch.load(io.BytesIO(data), weights_only=False)


def serve(connection: Any, threads: int) -> None:
    """Answer (method, arguments): "start" makes an engine, the others are its methods; None is the end."""
    torch.set_num_threads(threads)
    engine: Any = None
    while (message := unpacked(connection.recv_bytes())) is not None:
        method, *arguments = message
        try:
            if method == "start":
                kind, setup = arguments
                engine = None  # frees the memory of the engine before
                engine, answer = engine_of(kind)(setup), None
            else:
                answer = getattr(engine, method)(*arguments)
        except Exception:
            connection.send_bytes(packed(("error", traceback.format_exc())))
        else:
            connection.send_bytes(packed(("done", answer)))


def engine_of(kind: str) -> Any:
    """The class of an engine; vLLM is imported only for its own."""
    if kind == "vllm":
        from rollout_vllm import VLLM

        return VLLM
    return OwnLayers
