"""What tests/training/test_megatron.py runs in each of two processes: layers and models of Megatron-Core.

Megatron-Core makes its tensors on a CUDA device and draws from its generators. :func:`on_cpu` replaces the
few functions of torch and of Megatron-Core by which it does so.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
import shutil
import tempfile
import unittest.mock
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fp4gemm
import torch
import torch.distributed as dist
from fp4gemm import training
from tensor_parallel import RECIPES, values
from torch import Tensor

WIDTH, HEADS, FFN, VOCAB, TOKENS, BATCH, STEPS = 64, 4, 128, 128, 32, 2, 3
EXPERTS, TOP_K, LAYERS = 4, 2, 2
IN, OUT = 64, 128
# Nothing in it is random, so that runs can be compared bit for bit.
EXACT = RECIPES["original"]
# GPT-2's architecture: biases, LayerNorm, and no gate.
WITH_BIASES: dict[str, Any] = {
    "add_bias_linear": True,
    "add_qkv_bias": True,
    "normalization": "LayerNorm",
    "gated_linear_unit": False,
    "activation_func": torch.nn.functional.gelu,
}
LAYOUTS = {"tp 1": (1, False), "tp 2": (2, False), "tp 2, sequence": (2, True)}


@contextlib.contextmanager
def on_cpu() -> Iterator[None]:
    """Megatron-Core on the CPU."""
    warnings.simplefilter("ignore")
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import moe_utils

    vars(moe_utils).setdefault("te_general_gemm", None)  # 0.16 reads it without defining it
    replaced = [
        (torch.cuda, "is_available", lambda: False),
        (torch.cuda, "current_device", lambda: torch.device("cpu")),
        (torch.cuda, "synchronize", lambda: None),
        (torch.cuda, "current_stream", lambda: unittest.mock.MagicMock()),  # 0.19 waits for it
        (random.CudaRNGStatesTracker, "fork", lambda self, name="": contextlib.nullcontext()),
    ]
    originals = [(owner, name, getattr(owner, name)) for owner, name, _ in replaced]
    for owner, name, value in replaced:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for owner, name, value in originals:
            setattr(owner, name, value)


@contextlib.contextmanager
def groups(tensor: int = 1, expert: int = 1, expert_tensor: int = 1) -> Iterator[None]:
    """The process groups of Megatron-Core for these sizes of tensor and expert parallelism."""
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(
        tensor, expert_model_parallel_size=expert, expert_tensor_parallel_size=expert_tensor
    )
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()
        parallel_state._GLOBAL_MEMORY_BUFFER = None


def config(tensor: int = 1, **changes: Any) -> Any:
    """A TransformerConfig of a small model, initialised on the CPU, so that each layout has its weights."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    options: dict[str, Any] = {
        "num_layers": LAYERS,
        "hidden_size": WIDTH,
        "num_attention_heads": HEADS,
        "num_query_groups": 2,
        "ffn_hidden_size": FFN,
        "tensor_model_parallel_size": tensor,
        "use_cpu_initialization": True,
        "params_dtype": torch.bfloat16,
        "bf16": True,
        "normalization": "RMSNorm",
        "add_bias_linear": False,
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "apply_rope_fusion": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    }
    return TransformerConfig(**{**options, **changes})


def moe_config(tensor: int = 1, **changes: Any) -> Any:
    options: dict[str, Any] = {
        "num_moe_experts": EXPERTS,
        "moe_router_topk": TOP_K,
        "moe_ffn_hidden_size": FFN,
        "moe_token_dispatcher_type": "allgather",
        "expert_tensor_parallel_size": tensor,
        "moe_router_load_balancing_type": "none",
        "moe_grouped_gemm": False,
    }
    return config(tensor, **{**options, **changes})


def local_spec(of: Any) -> Any:
    """Megatron-Core's own layers."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    return get_gpt_decoder_block_spec(
        of, use_transformer_engine=False, normalization=of.normalization, pp_rank=0
    )


def gpt(of: Any, recipe: Any = None, spec: Any = None, **options: Any) -> Any:
    """A GPT with the same weights for each recipe; None: Megatron-Core's own layers."""
    from fp4gemm.integrations import megatron
    from megatron.core.models.gpt.gpt_model import GPTModel

    spec = local_spec(of) if spec is None else spec
    if recipe is not None:
        spec = megatron.convert_spec(spec, recipe, **options)
    torch.manual_seed(0)
    made = GPTModel(
        of,
        spec,
        VOCAB,
        TOKENS,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    )
    return made.to(of.params_dtype)  # as Megatron-Core's Float16Module does


def loss_of(model: Any, step: int = 0) -> Tensor:
    gen = torch.Generator().manual_seed(step)
    ids = torch.randint(0, VOCAB, (BATCH, TOKENS + 1), generator=gen)
    positions = torch.arange(TOKENS).expand(BATCH, TOKENS)
    mask = torch.ones(1, 1, TOKENS, TOKENS, dtype=torch.bool).triu(1)
    return model(ids[:, :-1], positions, mask, labels=ids[:, 1:]).float().mean()


def data_parallel(of: Any, model: Any, overlap: bool = False) -> Any:
    """Megatron-Core's DistributedDataParallel, whose buffer holds the main_grad of each parameter.

    With overlap the hook on the last parameter of a bucket starts its all-reduce in the backward pass.
    """
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    how = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, overlap_grad_reduce=overlap, bucket_size=20000
    )
    return DistributedDataParallel(of, how, model)


def finish(ddp: Any) -> None:
    """All-reduce what Megatron-Core's training loop does after the last micro-batch."""
    from megatron.core.distributed import finalize_model_grads

    finalize_model_grads([ddp])


def whole(name: str, parameter: Any, value: Tensor) -> Tensor:
    """The tensor of all tensor-parallel ranks, of each rank's value for a parameter."""
    from megatron.core import parallel_state

    group = parallel_state.get_tensor_model_parallel_group()
    if not getattr(parameter, "tensor_model_parallel", False) or group.size() == 1:
        return value.detach().clone()
    parts = [torch.empty_like(value) for _ in range(group.size())]
    dist.all_gather(parts, value.detach().contiguous(), group=group)
    if "linear_fc1" in name:  # each rank has its rows of the gate and then those of up
        halves = [part.chunk(2, 0) for part in parts]
        parts = [half[i] for i in range(2) for half in halves]
    return torch.cat(parts, parameter.partition_dim)


def trained(layout: str, recipe: Any, steps: int = STEPS, **changes: Any) -> dict[str, Any]:
    """Losses of a few steps, the gradients of the first, and the last weights, of all ranks."""
    tensor, sequence = LAYOUTS[layout]
    with groups(tensor):
        of = config(tensor, sequence_parallel=sequence, **changes)
        model = gpt(of, recipe)
        ddp = data_parallel(of, model)
        losses, first = [], {}
        for step in range(steps):
            ddp.zero_grad_buffer()
            torch.manual_seed(step)
            loss = loss_of(ddp)
            loss.backward()
            finish(ddp)
            losses.append(loss.detach())
            with torch.no_grad():
                for name, p in model.named_parameters():
                    if step == 0:
                        first[name] = whole(name, p, p.main_grad)
                    p.sub_(p.main_grad.to(p.dtype), alpha=0.5)
        last = {name: whole(name, p, p) for name, p in model.named_parameters()}
        return {"losses": torch.stack(losses), "first": first, "last": last}


# ---- single layers


def _layer(kind: str, recipe: Any, of: Any, has_bias: bool = True) -> Any:
    from fp4gemm.integrations import megatron

    torch.manual_seed(0)
    common = {"config": of, "init_method": torch.nn.init.normal_, "recipe": recipe, "is_expert": False}
    if kind == "column":
        common["gather_output"] = False
        return megatron.ColumnParallelLinear(IN, OUT, bias=has_bias, skip_bias_add=False, **common)
    common["input_is_parallel"] = True
    return megatron.RowParallelLinear(IN, OUT, bias=has_bias, skip_bias_add=False, **common)


def _gradients(layer: Any, x: Tensor, dy: Tensor) -> list[Tensor]:
    """y, dx, dW and the gradient of the bias, of a layer of either library."""
    x = x.clone().requires_grad_()
    y = layer(x)
    y = y[0] if isinstance(y, tuple) else y
    y.backward(dy)
    return [y.detach(), x.grad, *(p.grad for p in (layer.weight, layer.bias))]


def _linear(weight: Tensor, bias: Tensor | None, recipe: Any) -> training.Linear:
    """A layer of one process with this weight."""
    n, k = weight.shape
    made = training.Linear(k, n, bias=bias is not None, dtype=weight.dtype, recipe=recipe)
    with torch.no_grad():
        made.weight.copy_(weight)
        if bias is not None and made.bias is not None:
            made.bias.copy_(bias)
    return made


def column(rank: int, recipe: Any, sequence: bool) -> list[list[Tensor]]:
    """What the ranks compute, and what one process computes, as this rank sees it."""
    of = config(2, sequence_parallel=sequence)
    layer = _layer("column", recipe, of)
    with torch.no_grad():
        layer.bias.normal_()
    weight = whole("", layer.weight, layer.weight)
    bias = whole("", layer.bias, layer.bias)
    x, dy = values(TOKENS, BATCH, IN), values(TOKENS, BATCH, OUT)
    own = x.chunk(2, 0)[rank] if sequence else x
    got = _gradients(layer, own, dy.chunk(2, -1)[rank])

    y, _, dw, db = _gradients(_linear(weight, bias, recipe), x, dy)
    halves = [
        _gradients(_linear(w, b, recipe), x, part)[1]
        for w, b, part in zip(weight.chunk(2), bias.chunk(2), dy.chunk(2, -1), strict=True)
    ]
    dx = halves[0] + halves[1]
    want = [t.chunk(2, d)[rank] for t, d in ((y, -1), (dx, 0), (dw, 0), (db, 0))]
    if not sequence:
        want[1] = dx
    return [got, want]


def row(rank: int, recipe: Any, sequence: bool) -> list[list[Tensor]]:
    of = config(2, sequence_parallel=sequence)
    layer = _layer("row", recipe, of)
    with torch.no_grad():
        layer.bias.fill_(0.5)
    weight = whole("", layer.weight, layer.weight)
    x, dy = values(TOKENS, BATCH, IN), values(TOKENS, BATCH, OUT)
    y, dx, dw, _ = _gradients(
        layer, x.chunk(2, -1)[rank].contiguous(), dy.chunk(2, 0)[rank] if sequence else dy
    )
    halves = []
    for w, part in zip(weight.chunk(2, 1), x.chunk(2, -1), strict=True):
        one = _linear(w, None, recipe)
        part = part.clone().requires_grad_()
        out = one(part)
        out.backward(dy)
        halves.append((out.detach(), part.grad, one.weight.grad))
    want = [halves[0][0] + halves[1][0] + layer.bias.detach(), *halves[rank][1:]]
    if sequence:
        want[0] = want[0].chunk(2, 0)[rank]
    return [[y, dx, dw], want]


def frozen(sequence: bool) -> list[Tensor]:
    """dx of a layer whose weight is frozen, with and without it."""
    found = []
    for is_frozen in (False, True):
        layer = _layer("column", EXACT, config(2, sequence_parallel=sequence))
        layer.weight.requires_grad_(not is_frozen)
        x = values(TOKENS, BATCH, IN)[: TOKENS // (2 if sequence else 1)].requires_grad_()
        layer(x)[0].sum().backward()
        found.append(x.grad)
    return found


# ---- main_grad


def accumulated(
    layout: str, recipe: Any, dtype: torch.dtype, is_fused: bool, number: int, overlap: bool = False
) -> dict[str, Any]:
    """main_grad of every parameter after micro-batches, and whether the layers added to it by themselves."""
    tensor, sequence = LAYOUTS[layout]
    with groups(tensor):
        of = config(
            tensor,
            sequence_parallel=sequence,
            params_dtype=dtype,
            bf16=dtype == torch.bfloat16,
        )
        model = gpt(of, recipe, fuse_main_grad=is_fused)
        own = {n: m for n, m in model.named_modules() if isinstance(m, training.linear.RecipeLayer)}
        ddp = data_parallel(of, model, overlap)
        ddp.zero_grad_buffer()
        # Replicas have batches of their own, but where one batch is rounded to bfloat16 by either way.
        replica = dist.get_rank() if tensor == 1 and number > 1 else 0
        for step in range(number):
            torch.manual_seed(step)
            is_last = step + 1 == number
            with contextlib.nullcontext() if is_last else ddp.no_sync():
                loss_of(ddp, step + 10 * replica).backward()
        added = {name: bool(module.weight.grad_added_to_main_grad) for name, module in own.items()}
        finish(ddp)
        return {"grads": {n: p.main_grad.clone() for n, p in model.named_parameters()}, "added": added}


# ---- experts


def experts(
    recipe: Any, dtype: torch.dtype = torch.bfloat16, tensor: int = 1, **options: Any
) -> dict[str, Any]:
    """Loss, gradients and shards of a model whose experts, or the weights of each, two ranks divide."""
    with groups(tensor, 2 // tensor, tensor):
        of = moe_config(
            tensor,
            expert_model_parallel_size=2 // tensor,
            sequence_parallel=tensor > 1,
            params_dtype=dtype,
            bf16=dtype == torch.bfloat16,
        )
        model = gpt(of, recipe, **options)
        _fill(model)
        ddp = data_parallel(of, model)
        ddp.zero_grad_buffer()
        loss = loss_of(ddp, dist.get_rank() if tensor == 1 else 0)
        loss.backward()
        finish(ddp)
        grads = {_sequential(n): p.main_grad.clone() for n, p in model.named_parameters()}
        return {
            "loss": loss.detach(),
            "grads": grads,
            "names": [n for n, _ in model.named_parameters()],
            "shards": _shards(model.sharded_state_dict()),
        }


def _sequential(name: str) -> str:
    """The name that a parameter of grouped experts has in SequentialMLP."""
    head, found, tail = name.partition("mlp.experts.linear_fc")
    if not found:
        return name
    number, weight = tail.split(".")
    return f"{head}mlp.experts.local_experts.{weight.removeprefix('weight')}.linear_fc{number}.weight"


@torch.no_grad()
def _fill(model: torch.nn.Module, seed: int = 0) -> None:
    """Give each parameter values that follow from its name in SequentialMLP and from the rank of experts."""
    for name, parameter in model.named_parameters():
        key = _sequential(name)
        rank = dist.get_rank() if "local_experts" in key else 0
        gen = torch.Generator().manual_seed(sum(map(ord, key)) + 1000 * rank + 10000 * seed)
        scale = 0.1 if parameter.dim() > 1 else 1.0
        parameter.copy_(torch.randn(parameter.shape, generator=gen) * scale)


def _shards(state: dict[str, Any]) -> dict[str, Any]:
    """What a distributed checkpoint sees of a model: keys, whole shapes, places and replicas."""
    found = {}
    for shard in state.values():
        for each in shard.build() if hasattr(shard, "build_fn") and hasattr(shard, "build") else [shard]:
            key = getattr(each, "unique_key", None) or each.key
            found[key] = tuple(
                getattr(each, what, None)
                for what in ("global_shape", "global_offset", "axis_fragmentations", "replica_id")
            )
    return found


# ---- checkpoints, and specs of TransformerEngine


def te_spec(of: Any) -> Any:
    """The spec of Megatron-Core's own layers with those of TransformerEngine, whose norms are inside.

    Without TransformerEngine its classes are stand-ins, which a spec may name.
    """
    from megatron.core.extensions import transformer_engine as te
    from megatron.core.transformer.identity_op import IdentityOp

    spec = local_spec(of)
    for index, layer in enumerate(spec.layer_specs):
        parts = layer.submodules
        attention = dataclasses.replace(
            parts.self_attention.submodules,
            linear_qkv=te.TELayerNormColumnParallelLinear,
            linear_proj=te.TERowParallelLinear,
        )
        mlp = dataclasses.replace(
            submodules_of(parts.mlp),
            linear_fc1=te.TELayerNormColumnParallelLinear,
            linear_fc2=te.TERowParallelLinear,
        )
        changed = dataclasses.replace(
            parts,
            input_layernorm=IdentityOp,
            self_attention=dataclasses.replace(parts.self_attention, submodules=attention),
            pre_mlp_layernorm=IdentityOp,
            mlp=with_submodules(parts.mlp, mlp),
            sharded_state_dict_keys_map={},
        )
        spec.layer_specs[index] = dataclasses.replace(layer, submodules=changed)
    return spec


def submodules_of(spec: Any) -> Any:
    return spec.keywords["submodules"] if isinstance(spec, functools.partial) else spec.submodules


def with_submodules(spec: Any, submodules: Any) -> Any:
    if isinstance(spec, functools.partial):
        return functools.partial(spec.func, *spec.args, **{**spec.keywords, "submodules": submodules})
    return dataclasses.replace(spec, submodules=submodules)


def normed(name: str) -> str:
    """The name that the parameter of a norm has in TransformerEngine's layer."""
    name = name.replace("input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight")
    return name.replace("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight")


@torch.no_grad()
def checkpoints(rank: int) -> dict[Any, Any]:
    """State of Megatron-Core's own layers in ours and back, whole and sharded."""
    from megatron.core import dist_checkpointing

    of = config(2)
    theirs, own = gpt(of), gpt(of, EXACT)
    inside = gpt(of, EXACT, spec=te_spec(of))
    found: dict[Any, Any] = {
        "names": [[n for n, _ in model.named_parameters()] for model in (theirs, own, inside)],
        "state": [list(model.state_dict()) for model in (theirs, own)],
        "shards": [_shards(model.sharded_state_dict()) for model in (theirs, own, inside)],
    }
    _fill(theirs)
    own.load_state_dict(theirs.state_dict())
    found["loaded"] = [_tensors(own), _tensors(theirs)]
    _fill(own, 7)
    theirs.load_state_dict(own.state_dict())
    found["loaded back"] = [_tensors(own), _tensors(theirs)]
    inside.load_state_dict({normed(name): value for name, value in own.state_dict().items()})
    found["norms inside"] = [loss_of(model) for model in (own, inside)]

    folder = [tempfile.mkdtemp() if rank == 0 else ""]
    dist.broadcast_object_list(folder)
    dist_checkpointing.save(own.sharded_state_dict(), folder[0])
    dist.barrier()  # a rank may return before the others have written
    for name, model in (("theirs", theirs), ("own", own), ("norms inside", inside)):
        _fill(model, 9)
        loaded = dist_checkpointing.load(model.sharded_state_dict(), folder[0])
        model.load_state_dict(loaded)
        found["saved", name] = _tensors(model)
    dist.barrier()
    if rank == 0:
        shutil.rmtree(folder[0])
    return found


def _tensors(model: Any) -> dict[str, Tensor]:
    return {normed(name): p.detach().clone() for name, p in model.named_parameters()}


def served(rank: int) -> list[Tensor]:
    """y of a trained layer for all features, and of a layer for inference that gets the trained weight."""
    layer = _layer("column", EXACT, config(2, sequence_parallel=True), has_bias=False)
    x = values(TOKENS, BATCH, IN)
    start = torch.nn.Linear(IN, OUT, bias=False, dtype=torch.bfloat16)
    server = fp4gemm.nn.Linear.from_float(start, method="round")
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)
    layer(x.chunk(2, 0)[rank])[0].float().square().sum().backward()
    optimizer.step()
    with torch.no_grad():
        (y, _) = layer(x.chunk(2, 0)[rank])
        server.update_(whole("", layer.weight, layer.weight))
        return [y, server(x).chunk(2, -1)[rank]]


def _parts(of: Any, name: str, value: Tensor) -> dict[str, Tensor]:
    """The rows of a weight of Megatron-Core under the names of a Llama of Hugging Face."""
    number = name.split(".")[2]
    start = f"model.layers.{number}."
    if "linear_qkv" in name:  # each group of queries is followed by its keys and values
        size, queries = of.kv_channels, of.num_attention_heads // of.num_query_groups
        groups = value.view(of.num_query_groups, (queries + 2) * size, *value.shape[1:])
        parts = groups.split([queries * size, size, size], 1)
        return {f"{start}self_attn.{n}_proj": p.flatten(0, 1) for n, p in zip("qkv", parts, strict=True)}
    if "linear_fc1" in name:
        return dict(zip((f"{start}mlp.gate_proj", f"{start}mlp.up_proj"), value.chunk(2), strict=True))
    return {start + ("self_attn.o_proj" if "linear_proj" in name else "mlp.down_proj"): value}


def exported(rank: int) -> dict[str, list[Tensor]]:
    """The tensors that an engine gets of trained weights, and the ranks' own copies of their rows.

    A rank of a row-parallel layer has another copy, with amaxes of its columns.
    """
    from fp4gemm.checkpoint import Options, Plan, quantize_named

    of = config(2, sequence_parallel=True)
    model = gpt(of, EXACT)
    loss_of(model).backward()
    floats: dict[str, Tensor] = {}
    copies: dict[str, list[Tensor]] = {}
    for name, p in model.named_parameters():
        p.data.sub_(p.grad, alpha=0.5)
        if ".linear_" not in name:
            continue
        trained = whole(name, p, p)
        floats |= {f"{n}.weight": part.contiguous() for n, part in _parts(of, name, trained).items()}
        if p.partition_dim == 0:
            own = fp4gemm.quantize(p.detach())
            for tensor in (own.codes, own.compact_scales().view(torch.uint8), own.amax):
                for n, part in _parts(of, name, whole(name, p, tensor)).items():
                    copies.setdefault(n, []).append(part.contiguous())
    shapes = {name: (tuple(t.shape), t.dtype) for name, t in floats.items()}
    described = {"model_type": "llama", "num_hidden_layers": LAYERS, "vocab_size": VOCAB}
    plan = Plan.of_shapes(shapes, described, Options(format="fp4gemm", method="round"))
    sent = dict(quantize_named(floats.items(), plan))
    found = {}
    for n, copy in copies.items():
        parts = [sent[f"{n}.weight{suffix}"] for suffix in ("", "_scale", "_amax")]
        found[n] = [t.view(torch.uint8) for t in (*parts, *copy)]
    return found


def of_checkpoints(rank: int) -> dict[Any, Any]:
    with groups(2):
        found = checkpoints(rank)
        found = {("checkpoint", key): value for key, value in found.items()}
        return {**found, "served": served(rank), "exported": exported(rank)}


# ---- examples/megatron_gpt.py


def example(arguments: list[str], **changes: Any) -> dict[str, Any]:
    """The loss of a step of the example, and the layers that added their gradients to main_grad."""
    path = Path(__file__).resolve().parents[2] / "examples" / "megatron_gpt.py"
    spec = importlib.util.spec_from_file_location("megatron_gpt", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sizes = {"layers": 1, "hidden": 64, "ffn": 128, "vocabulary": 128, "sequence": 32, "micro-batch": 2}
    args = module.parsed([*(f"--{name}={size}" for name, size in sizes.items()), *arguments])
    torch.manual_seed(0)
    ddp = module.model_of(module.config_of(args, use_cpu_initialization=True, **changes), args)
    loss = module.gradients(ddp, module.batches(args, 0), 2)
    named = ddp.module.named_parameters()
    added = [name for name, p in named if p.grad_added_to_main_grad and p.main_grad.any()]
    return {"loss": loss, "added": added}


def of_example(rank: int) -> dict[Any, Any]:
    found = {}
    with groups(2):
        for recipe in ("bf16", "nvidia", "per_token"):
            found["example", recipe] = example(["--tensor", "2", "--recipe", recipe])
    with groups(1, 2):
        found["example", "experts"] = example(
            ["--experts", "4", "--expert-parallel", "2"], moe_token_dispatcher_type="allgather"
        )
    return found


def of_layers(rank: int) -> dict[Any, Any]:
    results: dict[Any, Any] = {}
    with groups(2):
        for name in ("te_per_token", "original", "rowwise", "dequantized", "forward alone", "bf16"):
            for sequence in (False, True):
                results["column", name, sequence] = column(rank, RECIPES[name], sequence)
                results["row", name, sequence] = row(rank, RECIPES[name], sequence)
        results["frozen"] = [frozen(sequence) for sequence in (False, True)]
    return results


def of_models(rank: int) -> dict[Any, Any]:
    results: dict[Any, Any] = {}
    for layout in LAYOUTS:
        for name in ("te_per_token", "nvidia", "per_token"):
            results["trained", layout, name] = trained(layout, name)
    for layout in ("tp 1", "tp 2"):
        for name, recipe in (("megatron", None), ("bf16", "bf16")):
            results["biases", layout, name] = trained(layout, recipe, 1, **WITH_BIASES)
    results["biases", "tp 2, sequence", "bf16"] = trained("tp 2, sequence", "bf16", 1, **WITH_BIASES)
    results["trained", "tp 1", "megatron"] = trained("tp 1", None)
    results["trained", "tp 1", "bf16"] = trained("tp 1", "bf16")
    return results


def of_main_grads(rank: int) -> dict[Any, Any]:
    results: dict[Any, Any] = {}
    for layout in LAYOUTS:
        for name, dtype, number in (("float32", torch.float32, 2), ("bfloat16", torch.bfloat16, 1)):
            for is_fused in (False, True):
                found = accumulated(layout, EXACT, dtype, is_fused, number)
                results["accumulated", layout, name, is_fused] = found
    for layout in LAYOUTS:
        found = accumulated(layout, EXACT, torch.float32, True, 2, overlap=True)
        results["accumulated", layout, "overlap"] = found
    return results


def cached(is_attached: bool, is_grouped: bool) -> dict[str, Tensor]:
    """The weights after two steps of two micro-batches, with or without copies that are kept for a step."""
    from fp4gemm.training import cache

    cache._STEPS.are_marked = False
    with groups(1, 2) if is_grouped else groups(2):
        of = moe_config(expert_model_parallel_size=2) if is_grouped else config(2, sequence_parallel=True)
        model = gpt(of, EXACT, grouped_experts=is_grouped, fuse_main_grad=True)
        ddp = data_parallel(of, model)
        masters = [p.detach().float() for p in model.parameters()]
        optimizer = torch.optim.SGD(masters, 0.5)
        if is_attached:
            training.attach()
        for step in range(2):
            ddp.zero_grad_buffer()
            for micro_batch in range(2):
                with contextlib.nullcontext() if micro_batch else ddp.no_sync():
                    loss_of(ddp, 2 * step + micro_batch).backward()
            finish(ddp)
            for master, p in zip(masters, model.parameters(), strict=True):
                master.grad = p.main_grad
            optimizer.step()  # then the parameters are written, as Megatron-Core's optimizers do
            for master, p in zip(masters, model.parameters(), strict=True):
                p.data.copy_(master)
        layers = [m for m in model.modules() if isinstance(m, training.linear.RecipeLayer)]
        if any(bool(m.cache.nbytes) != is_attached for m in layers):
            raise RuntimeError("the copies of a weight were kept without an optimizer, or were not with one")
        cache._STEPS.are_marked = False
        return {name: p.detach().clone() for name, p in model.named_parameters()}


def of_caches(rank: int) -> dict[Any, Any]:
    return {
        ("cached", is_grouped, is_attached): cached(is_attached, is_grouped)
        for is_grouped in (False, True)
        for is_attached in (False, True)
    }


def of_experts(rank: int) -> dict[Any, Any]:
    return {
        ("experts", "sequential"): experts(EXACT),
        ("experts", "grouped"): experts(EXACT, grouped_experts=True),
        ("experts", "fused"): experts(EXACT, grouped_experts=True, fuse_main_grad=True),
        ("experts", "bf16"): experts("bf16", torch.float32, grouped_experts=True),
        ("experts", "megatron"): experts(None, torch.float32),
        ("experts", "sharded, sequential"): experts(EXACT, tensor=2),
        ("experts", "sharded, grouped"): experts(EXACT, tensor=2, grouped_experts=True),
    }


PARTS = (of_layers, of_models, of_main_grads, of_experts, of_checkpoints, of_example, of_caches)


def run(rank: int) -> dict[Any, Any]:
    """Every result that the tests compare."""
    with on_cpu():
        found = [part(rank) for part in PARTS]
    return {key: value for results in found for key, value in results.items()}
