"""WeightCache: a copy is used again only if the weight is provably the same, and keeps its address."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from typing import Any

import fp4gemm
import pytest
import torch
from fp4gemm.training import cache as cache_module
from fp4gemm.training.cache import WeightCache, attach, mark_step


@pytest.fixture(autouse=True)
def steps() -> Iterator[Any]:
    """A process in which no step was marked yet; the hook of all optimizers stays registered."""
    steps = cache_module._STEPS
    before = copy.copy(steps)
    steps.are_marked = False
    yield steps
    steps.count, steps.are_marked = before.count + 100, before.are_marked


@pytest.fixture
def weight() -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.randn(32, 64, generator=torch.Generator().manual_seed(1)))


class Casts:
    """Quantizes a weight and counts how often."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight, self.count = weight, 0

    def __call__(self) -> tuple[torch.Tensor, ...]:
        self.count += 1
        t = fp4gemm.quantize(self.weight.detach())
        return t.codes, t.scales, t.amax


def is_fresh(parts: tuple[torch.Tensor, ...], weight: torch.Tensor) -> bool:
    want = fp4gemm.quantize(weight.detach())
    return torch.equal(parts[0], want.codes) and torch.equal(parts[2], want.amax)


class DataSGD(torch.optim.Optimizer):
    """An optimizer that writes through .data, which leaves the version counter of the parameter alone."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.data.mul_(-1.5)


def test_nothing_is_cached_unless_steps_are_marked(weight: torch.nn.Parameter) -> None:
    cache, casts = WeightCache(), Casts(weight)
    cache.get(weight, casts)
    weight.data.mul_(-2)
    assert is_fresh(cache.get(weight, casts), weight)
    assert casts.count == 2
    assert cache.nbytes == 0


def test_a_copy_is_used_again(weight: torch.nn.Parameter) -> None:
    cache, casts = WeightCache(), Casts(weight)
    mark_step()
    first = cache.get(weight, casts)
    assert cache.get(weight, casts) is first
    assert casts.count == 1
    assert is_fresh(first, weight)
    assert cache.nbytes == sum(part.nbytes for part in first)


def optimizer_step(weight: torch.nn.Parameter) -> None:
    DataSGD([weight]).step()


def closed_step(weight: torch.nn.Parameter) -> None:
    weight.grad = torch.ones_like(weight)
    torch.optim.SGD([weight], 0.5).step()


def in_place(weight: torch.nn.Parameter) -> None:
    with torch.no_grad():
        weight.mul_(-1)


def loaded(weight: torch.nn.Parameter) -> None:
    module = torch.nn.Linear(64, 32, bias=False)
    module.weight = weight
    module.load_state_dict({"weight": -weight.detach() - 1})


def new_data(weight: torch.nn.Parameter) -> None:
    weight.data = weight.detach() * 3 - 1


def written_and_marked(weight: torch.nn.Parameter) -> None:
    weight.data.mul_(-1)
    mark_step()


def preserved_version(weight: torch.nn.Parameter) -> None:
    """What FSDP2 does when it gathers a parameter, followed by the mark of the optimizer's step."""
    with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter((weight,)):
        weight.mul_(-1)
    mark_step()


@pytest.mark.parametrize(
    "change",
    [optimizer_step, closed_step, in_place, loaded, new_data, written_and_marked, preserved_version],
    ids=lambda change: change.__name__,
)
def test_a_change_is_seen_and_addresses_stay(weight: torch.nn.Parameter, change: Any) -> None:
    attach(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], 0.1))
    cache, casts = WeightCache(), Casts(weight)
    first = cache.get(weight, casts)
    codes, addresses = first[0].clone(), [part.data_ptr() for part in first]
    change(weight)
    second = cache.get(weight, casts)
    assert casts.count == 2
    assert is_fresh(second, weight)
    assert not torch.equal(second[0], codes)
    assert [part.data_ptr() for part in second] == addresses


def test_every_optimizer_of_the_process_is_attached(weight: torch.nn.Parameter) -> None:
    attach()
    cache, casts = WeightCache(), Casts(weight)
    cache.get(weight, casts)
    optimizer_step(weight)
    assert is_fresh(cache.get(weight, casts), weight)
    assert cache.get(weight, casts) is cache.get(weight, casts)
    assert casts.count == 2


def test_a_second_optimizer_marks_too(weight: torch.nn.Parameter) -> None:
    cache, casts = WeightCache(), Casts(weight)
    other = DataSGD([weight])
    attach(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], 0.1))
    cache.get(weight, casts)
    other.step()
    assert is_fresh(cache.get(weight, casts), weight)


def test_memory_that_is_used_again_is_not_taken_for_the_same(weight: torch.nn.Parameter) -> None:
    """A storage at the address of one that was freed: only the identity of the storage tells them apart."""
    mark_step()
    cache, casts = WeightCache(), Casts(weight)
    cache.get(weight, casts)
    address, kept = weight.data_ptr(), weight.detach().clone()
    for _ in range(50):
        weight.data = kept.clone()
        weight.data = -kept
        assert is_fresh(cache.get(weight, casts), weight)
        if weight.data_ptr() == address:
            break
    assert casts.count > 1


def test_a_weight_that_is_gone_leaves_nothing(weight: torch.nn.Parameter) -> None:
    mark_step()
    cache = WeightCache()
    temporary = torch.nn.Parameter(weight.detach().clone())
    cache.get(temporary, Casts(weight))
    assert cache.nbytes
    del temporary
    assert cache.nbytes == 0


def test_variants_are_kept_beside_each_other(weight: torch.nn.Parameter) -> None:
    mark_step()
    cache = WeightCache()
    row = cache.get(weight, Casts(weight), "row")
    tensor = cache.get(weight, lambda: (fp4gemm.quantize(weight.detach(), scaling="tensor").amax,), "tensor")
    assert cache.get(weight, Casts(weight), "row") is row
    assert tensor[0].shape == (1,)
    cache.clear()
    assert cache.nbytes == 0


def test_other_shapes_of_parts_replace_the_old_ones(weight: torch.nn.Parameter) -> None:
    cache = WeightCache()
    mark_step()
    cache.get(weight, lambda: (torch.zeros(3),))
    mark_step()
    assert cache.get(weight, lambda: (torch.ones(4), torch.ones(1)))[0].shape == (4,)


def test_copies_of_inference_mode_train_later(weight: torch.nn.Parameter) -> None:
    mark_step()
    cache = WeightCache()
    with torch.inference_mode():
        parts = cache.get(weight, Casts(weight))
    assert not any(part.is_inference() for part in parts)
    with torch.inference_mode():
        inside = torch.randn(32, 64)
        assert cache.get(inside, Casts(inside)) is not cache.get(inside, Casts(inside))


def test_backward_refuses_a_copy_that_was_made_anew(weight: torch.nn.Parameter) -> None:
    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(codes)
            return x * 2

        @staticmethod
        def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None]:
            (codes,) = ctx.saved_tensors
            return dy * codes.sum(), None

    mark_step()
    cache, casts = WeightCache(), Casts(weight)
    x = torch.ones(2, requires_grad=True)
    y = Product.apply(x, cache.get(weight, casts)[0])
    mark_step()
    cache.get(weight, casts)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["deep", "pickle"]
)
def test_a_copy_of_the_cache_is_empty(weight: torch.nn.Parameter, copied: Any) -> None:
    mark_step()
    cache = WeightCache()
    cache.get(weight, Casts(weight))
    assert copied(cache).nbytes == 0


def test_attach_refuses_what_is_no_optimizer() -> None:
    wanted = r"optimizer: got .*, must be a torch.optim.Optimizer or None; .*mark_step"
    with pytest.raises(TypeError, match=wanted):
        attach("adam")  # type: ignore[arg-type]


@pytest.mark.gpu
def test_a_captured_graph_casts_in_every_replay(cuda: torch.device) -> None:
    mark_step()
    weight = torch.nn.Parameter(torch.randn(32, 64, device=cuda))
    cache, casts = WeightCache(), Casts(weight)
    cache.get(weight, casts)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        parts = cache.get(weight, casts)
    for factor in (-1.0, 3.0):
        weight.data.mul_(factor)
        graph.replay()
        assert is_fresh(parts, weight)
