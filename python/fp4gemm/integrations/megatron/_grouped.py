"""ColumnParallelGroupedLinear and RowParallelGroupedLinear: the experts of Megatron-Core's TEGroupedMLP.

A layer holds the weight of each of its experts as a parameter of its own, as TransformerEngine's layer does,
and multiplies all of them in one grouped product.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import torch
from megatron.core.dist_checkpointing.utils import replace_prefix_for_sharding
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import layers
from megatron.core.transformer.utils import (
    ensure_metadata_has_dp_cp_group,
    make_sharded_tensors_for_checkpoint,
)
from megatron.core.utils import get_pg_rank, get_pg_size
from torch import Tensor

from ... import _checks
from ...training import functional
from ...training.linear import RecipeLayer
from ...training.recipe import Recipe, resolve
from ._config import (
    cache_of,
    check_config,
    check_fusion,
    check_size,
    check_whole,
    is_fused,
    without_fusion,
)

__all__ = ["ColumnParallelGroupedLinear", "RowParallelGroupedLinear"]


class _GroupedLinear(RecipeLayer, torch.nn.Module):
    """What both layers have in common.

    ``partition_dim`` is the dimension of a weight that the ranks divide; Megatron-Bridge reads it and
    ``tensor_model_parallel``.
    """

    tensor_model_parallel = True
    partition_dim: int
    _shares_input = False

    def __init__(
        self,
        num_gemms: int,
        input_size: int,
        output_size: int,
        *,
        config: Any,
        init_method: Any,
        bias: bool,
        skip_bias_add: bool,
        is_expert: bool = True,
        tp_comm_buffer_name: str | None = None,
        pg_collection: Any = None,
        name: str | None = None,
        recipe: Recipe | str = "per_token",
        fuse_main_grad: bool | None = None,
    ) -> None:
        _checks.is_int("num_gemms", num_gemms, 1)
        if not is_expert:
            raise ValueError("is_expert: got False, must be True; the weights are those of experts")
        check_config(config)
        resolved = resolve(recipe)
        super().__init__()
        self.config, self.num_gemms = config, num_gemms
        self.gradient_accumulation_fusion = is_fused(config, fuse_main_grad)
        self.use_bias, self.skip_bias_add = bias, skip_bias_add
        self.pg_collection = (
            ProcessGroupCollection.use_mpu_process_groups() if pg_collection is None else pg_collection
        )
        self._is_sharded = get_pg_size(self.pg_collection.expt_tp) > 1
        for index in range(num_gemms):  # the parameters of Megatron's layer for one expert
            one = self._of_one_expert(
                input_size,
                output_size,
                config=without_fusion(config),
                init_method=init_method,
                bias=bias,
                skip_bias_add=True,
                is_expert=True,
                tp_group=self.pg_collection.expt_tp,
            )
            check_whole(one)
            self.register_parameter(f"weight{index}", one.weight)
            if bias:
                self.register_parameter(f"bias{index}", one.bias)
        self.out_features, self.in_features = self._all("weight")[0].shape
        check_size("input_size", self.in_features, resolved)
        check_size("output_size", self.out_features, resolved)
        self._recipe, self.cache = resolved, cache_of(config)
        self._register_load_state_dict_pre_hook(_drop_extra_states)

    @staticmethod
    def _of_one_expert(input_size: int, output_size: int, **options: Any) -> Any:
        raise NotImplementedError

    def _all(self, kind: str) -> list[Tensor]:
        return [getattr(self, f"{kind}{index}") for index in range(self.num_gemms)]

    def forward(self, x: Tensor, m_splits: list[int] | Tensor) -> tuple[Tensor, list[Tensor] | None]:
        """The products of the tokens x (m, k), sorted by expert, and the biases that are not added.

        Args:
            m_splits: the number of tokens of each expert.
        """
        numbers = m_splits.tolist() if isinstance(m_splits, Tensor) else m_splits
        if len(numbers) != self.num_gemms or sum(numbers) != x.shape[0]:
            raise ValueError(
                f"m_splits: got {len(numbers)} numbers with the sum {sum(numbers)}, must be {self.num_gemms} "
                f"with the sum {x.shape[0]}, the tokens of x"
            )
        if self.gradient_accumulation_fusion:
            check_fusion(self._all("weight")[0])
        ends = torch.tensor(list(accumulate(numbers)), dtype=torch.int32, device=x.device)
        biases = self._all("bias") if self.use_bias else None
        is_added = biases is not None and not self.skip_bias_add
        y = functional.grouped_linear(
            x,
            self._all("weight"),
            ends,
            torch.stack(biases) if biases is not None and is_added else None,
            self._recipe,
            cache=self.cache,
            use_main_grad=self.gradient_accumulation_fusion,
        )
        return y, None if is_added else biases

    def backward_dw(self) -> None:
        """Do nothing: the backward pass has computed dW."""

    def get_extra_state(self) -> None:
        """None: TransformerEngine's layers have such a state, and checkpoints a place for it."""
        return

    def set_extra_state(self, state: Any) -> None:
        """Accept the state that a checkpoint of TransformerEngine's layers has, and read nothing of it."""

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """The shards of each expert, by the keys that Megatron-Core's SequentialMLP has too."""
        metadata = ensure_metadata_has_dp_cp_group(metadata)
        groups, found = self.pg_collection, {}
        num_experts = get_pg_size(groups.ep) * self.num_gemms
        first = get_pg_rank(groups.ep) * self.num_gemms
        divided = {"weight": self.partition_dim} | ({"bias": 0} if self.partition_dim == 0 else {})
        for index in range(self.num_gemms):
            state = {"weight": getattr(self, f"weight{index}"), "_extra_state": None}
            if self.use_bias:
                state["bias"] = getattr(self, f"bias{index}")
            offsets, key = sharded_offsets, f"{first + index}.{prefix}"
            if not metadata.get("singleton_local_shards", False):
                offsets, key = (*offsets, (len(offsets), first + index, num_experts)), prefix
            made = make_sharded_tensors_for_checkpoint(
                state,
                "",
                divided,
                offsets,
                tp_group=groups.expt_tp,
                dp_cp_group=metadata["dp_cp_group"],
            )
            replace_prefix_for_sharding(made, "", key)
            for what, shard in made.items():
                # Replicas are counted among the ranks that have the same experts.
                is_sharded = getattr(shard, "is_data_parallel_fully_shard", False)
                rank = 0 if is_sharded else get_pg_rank(groups.expt_dp)
                shard.replica_id = (*shard.replica_id[:2], rank)
                number = "" if what == "_extra_state" and index == 0 else str(index)
                found[f"{prefix}{what}{number}"] = shard
        return found

    def extra_repr(self) -> str:
        return (
            f"num_gemms={self.num_gemms}, in_features={self.in_features}, "
            f"out_features={self.out_features}, bias={self.use_bias}, {self._recipe_repr()}"
        )


def _drop_extra_states(state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
    """Take the extra states of experts after the first out of a checkpoint, and add one if there is none."""
    state_dict.setdefault(f"{prefix}_extra_state")
    known = f"{prefix}_extra_state"
    for key in [k for k in state_dict if k.startswith(known) and k[len(known) :].isdecimal()]:
        del state_dict[key]


class ColumnParallelGroupedLinear(_GroupedLinear):
    """The first product of the experts of Megatron-Core's TEGroupedMLP, by a recipe.

    Parameters are ``weight0``, ``weight1`` and so on, each (n / R, k) on a rank of R expert-tensor-parallel
    ones, and ``bias0`` and so on, initialised as those of Megatron-Core's ColumnParallelLinear for an expert.
    The tokens of all experts are multiplied in one grouped product. Collectives are those of the token
    dispatcher. With ``gradient_accumulation_fusion`` dW is added to the main_grad of each weight in float32.

    Args:
        num_gemms: the experts of this rank.
        input_size, output_size, config, init_method, bias, skip_bias_add, pg_collection: as for
            TEColumnParallelGroupedLinear. The sizes on each rank are multiples of 32 unless the recipe
            quantizes nothing.
        is_expert: True. tp_comm_buffer_name, name: accepted and not read.
        recipe, fuse_main_grad: as for :class:`ColumnParallelLinear`.

    Raises:
        TypeError, ValueError: naming the argument. NotImplementedError: naming the option of the config that
            the layer does not follow.
    """

    partition_dim = 0

    @staticmethod
    def _of_one_expert(input_size: int, output_size: int, **options: Any) -> Any:
        return layers.ColumnParallelLinear(input_size, output_size, gather_output=False, **options)


class RowParallelGroupedLinear(_GroupedLinear):
    """The second product of the experts of Megatron-Core's TEGroupedMLP, by a recipe.

    A weight is (n, k / R) on each rank, and a bias (n,) is whole; all else is as for
    :class:`ColumnParallelGroupedLinear`.
    """

    partition_dim = 1

    @staticmethod
    def _of_one_expert(input_size: int, output_size: int, **options: Any) -> Any:
        return layers.RowParallelLinear(input_size, output_size, input_is_parallel=True, **options)
