"""A GPT of Megatron-Core trains in bf16 or in NVFP4, with one amax for each tensor or for each token.

    torchrun --nproc-per-node 1 examples/megatron_gpt.py --recipe bf16
    torchrun --nproc-per-node 1 examples/megatron_gpt.py --recipe nvidia          # per tensor
    torchrun --nproc-per-node 1 examples/megatron_gpt.py --recipe per_token
    torchrun --nproc-per-node 8 examples/megatron_gpt.py --tensor 4               # with sequence parallelism
    torchrun --nproc-per-node 8 examples/megatron_gpt.py --experts 16 --expert-parallel 8

"bf16" builds Megatron-Core's own layers, without sequence parallelism. The text is made up: each sequence
counts upward in steps of its own, so that the loss falls within a few steps. megatron-core and a GPU are
needed; APEX and TransformerEngine are not.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from fp4gemm import training
from fp4gemm.integrations.megatron import convert_spec
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor


def parsed(arguments: list[str] | None = None) -> argparse.Namespace:
    """The arguments of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--recipe", default="per_token", choices=sorted(training.PRESETS))
    parser.add_argument("--tensor", type=int, default=1, help="tensor-parallel ranks")
    parser.add_argument("--experts", type=int, help="of each block; without it blocks are dense")
    parser.add_argument("--expert-parallel", type=int, default=1, help="ranks that divide the experts")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--ffn", type=int, default=5632)
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--sequence", type=int, default=2048, help="tokens of a sequence")
    parser.add_argument("--micro-batch", type=int, default=4, help="sequences of a micro-batch on a rank")
    parser.add_argument("--micro-batches", type=int, default=2, help="of a step")
    parser.add_argument("--steps", type=int, default=20)
    return parser.parse_args(arguments)


def config_of(args: argparse.Namespace, **changes: Any) -> TransformerConfig:
    """Llama's architecture, with experts if there are some."""
    options: dict[str, Any] = {
        "num_layers": args.layers,
        "hidden_size": args.hidden,
        "num_attention_heads": args.hidden // 128 if args.hidden >= 1024 else 4,
        "ffn_hidden_size": args.ffn,
        "tensor_model_parallel_size": args.tensor,
        # Without APEX and TransformerEngine the norms of Megatron-Core refuse it.
        "sequence_parallel": args.tensor > 1 and args.recipe != "bf16",
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
    if args.experts:
        options |= {
            "num_moe_experts": args.experts,
            "moe_router_topk": 2,
            "moe_ffn_hidden_size": args.ffn,
            "moe_token_dispatcher_type": "alltoall",
            "expert_model_parallel_size": args.expert_parallel,
            "expert_tensor_parallel_size": 1,
        }
    return TransformerConfig(**{**options, **changes})


def model_of(config: TransformerConfig, args: argparse.Namespace) -> DistributedDataParallel:
    """The model in Megatron-Core's DistributedDataParallel, whose buffer holds float32 gradients."""
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm")
    if args.recipe != "bf16":
        # The layers add dW to main_grad in their products. config.gradient_accumulation_fusion would ask the
        # same of Megatron-Core's own output layer, which needs APEX for it.
        spec = convert_spec(spec, args.recipe, grouped_experts=True, fuse_main_grad=True)
    model = GPTModel(
        config,
        spec,
        args.vocabulary,
        args.sequence,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    )
    how = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=False)
    return DistributedDataParallel(config, how, model.to(device_of(), config.params_dtype))


def device_of() -> torch.device:
    """The device of this rank."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def batches(args: argparse.Namespace, seed: int) -> Iterator[dict[str, Tensor]]:
    """Micro-batches of sequences that count upward."""
    device, gen = device_of(), torch.Generator().manual_seed(seed)
    shape = (args.micro_batch, args.sequence)
    positions = torch.arange(args.sequence, device=device).expand(shape)
    mask = torch.ones(1, 1, args.sequence, args.sequence, dtype=torch.bool, device=device).triu(1)
    while True:
        first, step = torch.randint(1, 256, (2, args.micro_batch, 1), generator=gen)
        ids = ((first + step * torch.arange(args.sequence + 1)) % min(args.vocabulary, 1024)).to(device)
        yield {
            "input_ids": ids[:, :-1],
            "position_ids": positions,
            "attention_mask": mask,
            "labels": ids[:, 1:],
        }


def gradients(ddp: DistributedDataParallel, data: Iterator[dict[str, Tensor]], number: int) -> Tensor:
    """The mean loss of some micro-batches, whose gradients are added up in main_grad."""
    ddp.zero_grad_buffer()
    total = torch.zeros((), device=device_of())
    for index in range(number):
        with ddp.no_sync() if index + 1 < number else contextlib.nullcontext():
            loss = ddp(**next(data)).float().mean() / number
            loss.backward()
        total += loss.detach()
    finalize_model_grads([ddp])
    return total


def main() -> None:
    """Train, and print the loss and the time of each step."""
    args = parsed()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    parallel_state.initialize_model_parallel(
        args.tensor, expert_model_parallel_size=args.expert_parallel, expert_tensor_parallel_size=1
    )
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    torch.manual_seed(1)
    ddp = model_of(config_of(args), args)
    options = OptimizerConfig(
        optimizer="adam", lr=3e-4, bf16=True, params_dtype=torch.bfloat16, clip_grad=1.0
    )
    optimizer = get_megatron_optimizer(options, [ddp])
    training.attach()  # weights are cast once a step, and not once for each micro-batch
    data = batches(args, seed=parallel_state.get_data_parallel_rank())
    tokens = args.micro_batches * args.micro_batch * args.sequence
    for step in range(args.steps):
        torch.cuda.synchronize()
        start = time.perf_counter()
        loss = gradients(ddp, data, args.micro_batches)
        _, norm, _ = optimizer.step()
        torch.cuda.synchronize()
        ms = 1000 * (time.perf_counter() - start)
        if dist.get_rank() == 0:
            print(
                f"{args.recipe} step {step + 1}: loss {loss.item():.4f}, norm {float(norm):.3f}, "
                f"{ms:.1f} ms, {tokens / ms:.1f} tokens a ms",
                flush=True,
            )
    if dist.get_rank() == 0:
        print(f"{args.recipe}: {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB at most")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
