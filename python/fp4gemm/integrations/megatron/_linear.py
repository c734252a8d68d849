"""ColumnParallelLinear, RowParallelLinear and LayerNormColumnParallelLinear: dense layers of Megatron-Core.

Each is the layer of Megatron-Core of the same name with another product. All else is inherited: the sharding
of the weight and its initialisation, the tensor-parallel group, the collectives of a row-parallel layer, the
bias that is returned to the caller, and the state for checkpoints.
"""

from __future__ import annotations

from typing import Any

from megatron.core.tensor_parallel import layers
from megatron.core.utils import get_pg_size
from torch import Tensor

from ...training import functional, parallel
from ...training.linear import RecipeLayer
from ...training.parallel import Sharding
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
from ._norm import check_norm, new_parameters, normalized

__all__ = ["ColumnParallelLinear", "LayerNormColumnParallelLinear", "RowParallelLinear"]


class _ParallelLinear(RecipeLayer):
    """What the layers have in common; a base before the class of Megatron-Core."""

    config: Any
    tp_group: Any
    gradient_accumulation_fusion: bool
    _shares_input = False

    def _begin(self, config: Any, recipe: Recipe | str) -> Recipe:
        check_config(config)
        return resolve(recipe)

    def _end(self, config: Any, recipe: Recipe, is_fused: bool, in_features: int, out_features: int) -> None:
        """Set what Megatron's constructor did not: sizes on this rank, the recipe and the cache."""
        check_whole(self)
        check_size("input_size", in_features, recipe)
        check_size("output_size", out_features, recipe)
        self.config = config
        self._is_sharded = get_pg_size(self.tp_group) > 1
        self.gradient_accumulation_fusion = is_fused
        self.in_features, self.out_features = in_features, out_features
        self._recipe, self.cache = recipe, cache_of(config)

    def _forward_impl(
        self,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        gradient_accumulation_fusion: bool,
        allreduce_dgrad: bool,
        sequence_parallel: bool,
        tp_group: Any,
        **deferred: Any,
    ) -> Tensor:
        """The product, which Megatron's forward calls between its collectives.

        Args:
            input: the tokens (s, b, k), of this rank alone with sequence_parallel.
            gradient_accumulation_fusion: whether dW is added to weight.main_grad in float32.
            allreduce_dgrad: whether dx is added up over the ranks, which all have the same input.
            deferred: options of Megatron-Core's products that the config turns on, and that were refused.
        """
        if gradient_accumulation_fusion:
            check_fusion(weight)
        if sequence_parallel:
            return parallel.gathered_linear(
                input,
                weight,
                bias,
                self._recipe,
                self.cache,
                Sharding(tp_group, 0),
                gradient_accumulation_fusion,
            )
        if allreduce_dgrad:
            input = parallel.OnEveryRank.apply(input, Sharding(tp_group, 0))
        return functional.linear(
            input,
            weight,
            bias,
            self._recipe,
            cache=self.cache,
            use_main_grad=gradient_accumulation_fusion,
        )


class ColumnParallelLinear(_ParallelLinear, layers.ColumnParallelLinear):
    """Megatron-Core's ColumnParallelLinear, whose three products follow a recipe.

    Rank r of R has the rows W_r (n / R, k) of W and returns y_r (s, b, n / R). With sequence parallelism it
    has the tokens x_r (s / R, b, k), and their codes, scales and amaxes are gathered, as
    :class:`fp4gemm.training.SequenceColwiseParallel` describes; dx is reduce-scattered in its dtype. Without
    it each rank has all tokens, and dx is added up over the ranks in its dtype.

    With ``gradient_accumulation_fusion`` dW is added to ``weight.main_grad`` in float32, in the
    epilogue of the product; APEX is not needed. Without it dW is rounded to the dtype of the weight, and
    Megatron's DistributedDataParallel adds it.

    Args:
        input_size, output_size, config, options: as for Megatron-Core's class. ``input_size`` and
            ``output_size / R`` are multiples of 32 unless the recipe quantizes nothing.
        recipe: an :class:`fp4gemm.training.Recipe`, or a name of PRESETS.
        fuse_main_grad: whether dW is added to main_grad; None is ``config.gradient_accumulation_fusion``,
            which Megatron-Core's own output layer refuses without APEX.

    Raises:
        TypeError, ValueError: naming the argument. NotImplementedError: naming the option of the config that
            the layer does not follow.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: Any,
        recipe: Recipe | str = "per_token",
        fuse_main_grad: bool | None = None,
        **options: Any,
    ) -> None:
        resolved, fused = self._begin(config, recipe), is_fused(config, fuse_main_grad)
        layers.ColumnParallelLinear.__init__(
            self, input_size, output_size, config=without_fusion(config), **options
        )
        self._end(config, resolved, fused, input_size, self.output_size_per_partition)


class RowParallelLinear(_ParallelLinear, layers.RowParallelLinear):
    """Megatron-Core's RowParallelLinear, whose three products follow a recipe.

    Rank r of R has the columns W_r (n, k / R) of W and the features x_r (s, b, k / R). The ranks' products
    are added up in the dtype of x, or reduce-scattered along the tokens with sequence parallelism; so each
    amax is that of a rank's features. dW is as for :class:`ColumnParallelLinear`.

    Args:
        input_size, output_size, config, options: as for Megatron-Core's class. ``input_size / R`` and
            ``output_size`` are multiples of 32 unless the recipe quantizes nothing.
        recipe, fuse_main_grad: as for :class:`ColumnParallelLinear`.

    Raises:
        The errors of :class:`ColumnParallelLinear`.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: Any,
        recipe: Recipe | str = "per_token",
        fuse_main_grad: bool | None = None,
        **options: Any,
    ) -> None:
        resolved, fused = self._begin(config, recipe), is_fused(config, fuse_main_grad)
        layers.RowParallelLinear.__init__(
            self, input_size, output_size, config=without_fusion(config), **options
        )
        self._end(config, resolved, fused, self.input_size_per_partition, output_size)


class LayerNormColumnParallelLinear(ColumnParallelLinear):
    """A norm and a :class:`ColumnParallelLinear`, with the parameters of TransformerEngine's layer.

    It takes the place of TELayerNormColumnParallelLinear. ``layer_norm_weight`` and, of LayerNorm,
    ``layer_norm_bias`` are those of the norm of ``config.normalization``, which torch computes; its result is
    the input of the product.

    Args:
        input_size, output_size, config, recipe, options: as for :class:`ColumnParallelLinear`.

    Raises:
        The errors of :class:`ColumnParallelLinear`, and NotImplementedError for another norm.
    """

    def __init__(self, input_size: int, output_size: int, *, config: Any, **options: Any) -> None:
        check_norm(config)
        super().__init__(input_size, output_size, config=config, **options)
        weight, bias = new_parameters(config, input_size)
        self.layer_norm_weight = weight
        self.register_parameter("layer_norm_bias", bias)

    def forward(self, input_: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """The product of the normalized input, and the bias that is not added: (output, bias)."""
        eps = self.config.layernorm_epsilon
        x = normalized(self.config, input_, self.layer_norm_weight, self.layer_norm_bias, eps)
        result: tuple[Tensor, Tensor | None] = super().forward(x, *args, **kwargs)
        return result
