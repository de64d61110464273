"""Tensors that `recompute_elementwise` saves and recomputes; gradients are bitwise equal."""

from __future__ import annotations

import gc
import weakref
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron_lite.planning.memory import Allocations
from models.block import Block
from models.config import ModelConfig
from models.recompute import recomputable, recompute_elementwise
from tests.models import mixer_cases


class Counted:
    """Wrap a function so that its result is recomputable, and count its calls."""

    def __init__(self, function: Any) -> None:
        self.function, self.calls = function, 0

    def compute(self, *inputs: Any) -> Any:
        self.calls += 1
        return self.function(*inputs)

    def __call__(self, *inputs: Any) -> Any:
        results = self.compute(*inputs)
        recomputable(results, self.compute, *inputs)
        return results


def leaf(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3)).requires_grad_()


def memory_of(y: Tensor) -> weakref.ref[Any]:
    return weakref.ref(y.untyped_storage())


def test_result_is_not_saved_and_recomputed_once_for_all_uses():
    double = Counted(lambda x: 2 * x)
    x = leaf(4, 6)
    with recompute_elementwise():
        y = double(x)
        memory = memory_of(y)
        total = (y.square() + y.view(6, 4).exp().view(4, 6) * y).sum()
    del y
    assert memory() is None
    total.backward()
    assert double.calls == 2
    again = x.detach().requires_grad_()
    (4 * again.square() + (2 * again).exp() * 2 * again).sum().backward()
    torch.testing.assert_close(x.grad, again.grad)


def test_without_recomputation_or_gradients_everything_is_saved():
    double = Counted(lambda x: 2 * x)
    x = leaf(3)
    y = double(x)
    memory = memory_of(y)
    total = y.square().sum()
    del y
    assert memory() is not None
    total.backward()
    with torch.no_grad(), recompute_elementwise():
        memory = memory_of(double(x))
    assert memory() is None
    assert double.calls == 2


def test_recomputation_from_recomputed_and_multiple_results():
    first, second = Counted(lambda x: x + 1), Counted(lambda x: (x * x, x * 3))
    x = leaf(5)
    with recompute_elementwise():
        square, triple = second(first(x))
        memories = [memory_of(square), memory_of(triple)]
        total = (square[None].square() * triple.sin()).sum()
    del square, triple
    assert [memory() for memory in memories] == [None, None]
    total.backward()
    assert (first.calls, second.calls) == (2, 2)
    shifted = x.detach() + 1
    expected = 4 * shifted**3 * (3 * shifted).sin() + shifted**4 * 3 * (3 * shifted).cos()
    torch.testing.assert_close(x.grad, expected)


def test_recomputed_result_is_freed():
    double = Counted(lambda x: 2 * x)
    x = leaf(1000)
    with Allocations("cpu", [x]) as count:
        with recompute_elementwise():
            y = x
            for _ in range(8):
                y = double(y).square()
        y.sum().backward()
        peak = count.peak
    saved = 8 * 4000  # bytes of the squares; the doubles have as many
    assert peak < saved + 5 * 4000


def test_alias_is_recomputed_as_a_view():
    class Alias(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad

    x = leaf(3)
    with recompute_elementwise():
        y = Counted(torch.sin)(x)
        memory = memory_of(y)
        total = Alias.apply(y).square().sum()
    del y
    assert memory() is None
    total.backward()
    torch.testing.assert_close(x.grad, (2 * x).sin().detach())


def test_view_of_a_larger_storage_is_saved():
    x = leaf(4, 3)
    with recompute_elementwise():
        part = Counted(lambda x: torch.cat([x, x])[1:])(x)
        memory = memory_of(part)
        total = part.square().sum()
    del part
    assert memory() is not None
    total.backward()


def test_result_viewed_as_another_dtype_is_saved():
    """View a complex result as real pairs: its strides differ from those of the recomputed tensor."""
    turn = Counted(lambda x: x * 1j)
    x = torch.view_as_complex(leaf(4, 3, 2).detach()).requires_grad_()
    gradients = []
    for context in (recompute_elementwise(), nullcontext()):
        with context:
            total = torch.view_as_real(turn(x)).square().sum()
        gradients += torch.autograd.grad(total, x)
    assert torch.equal(*gradients)


def test_result_modified_in_place_is_saved():
    sine = Counted(torch.sin)
    x = leaf(5)
    with recompute_elementwise():
        y = sine(x)
        y.mul_(3)
        total = y.square().sum()
    total.backward()
    assert sine.calls == 1
    torch.testing.assert_close(x.grad, 9 * (2 * x).sin().detach())


def test_input_modified_in_place_is_an_error():
    x = leaf(5)
    with recompute_elementwise():
        held = x * 2
        total = Counted(lambda x: x + 1)(held).square().sum()
    held.add_(1)
    with pytest.raises(
        RuntimeError, match=r"\[5\] that the backward pass needs was changed in place .* work on a copy"
    ):
        total.backward()
    with recompute_elementwise():
        held = x * 2
        total = held.square().sum()
    held.detach().add_(1)
    with pytest.raises(RuntimeError, match="changed in place"):
        total.backward()


def test_graph_supports_two_backward_passes_and_frees_its_memory():
    x = leaf(7)
    with recompute_elementwise():
        total = Counted(torch.sin)(x).square().sum()
    (first,) = torch.autograd.grad(total, x, retain_graph=True)
    (second,) = torch.autograd.grad(total, x)
    assert torch.equal(first, second)
    gc.disable()
    try:
        with recompute_elementwise():
            norm = nn.LayerNorm(7)
            y = x.exp()  # saves its result
            memories = [memory_of(y)]
            y = norm(Counted(torch.sin)(y))
            memories.append(memory_of(y))
            total = y.square().sum()
        del y, total
        assert [memory() for memory in memories] == [None, None]
    finally:
        gc.enable()


@pytest.mark.parametrize("case", mixer_cases.CASES, ids=mixer_cases.name_of)
def test_block_gradients_are_bitwise_equal(case):
    name, options = case
    dtype = torch.float32 if options else torch.bfloat16
    shape = {"vocab_size": 8, "num_layers": 3, "hidden_size": 32, "num_heads": 4, "mixers": (name,)}
    other = name in ("attention", "retnet")
    kinds = {"norm": "rmsnorm", "mlp": "gelu" if name == "attention" else "geglu"} if other else {}
    index = 0 if name == "rwkv7" else 1  # a later layer needs the values of the first
    torch.manual_seed(5)
    block = Block(ModelConfig(**shape, **kinds, mixer_options={name: options} if options else {}), index).to(dtype)
    x = mixer_cases.tokens(20, 2, dtype)
    mask = torch.arange(20) < torch.tensor([[20], [13]])

    def gradients(context: AbstractContextManager[None], **masked: Tensor) -> tuple[int, list[Tensor]]:
        start = x.clone().requires_grad_()
        with Allocations("cpu", [start, *block.parameters(), *masked.values()]) as count:
            with context:
                y = block(start, **masked)
            kept = count.now
        return kept, [y, *torch.autograd.grad(y.float().square().sum(), [start, *block.parameters()])]

    for masked in ({}, {"mask": mask}):
        (most, expected), (least, actual) = (
            gradients(nullcontext(), **masked),
            gradients(recompute_elementwise(), **masked),
        )
        assert least < most
        assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


@pytest.mark.parametrize("parallel", [False, True], ids=["", "parallel residual"])
def test_no_linear_of_a_metala_block_saves_its_input(parallel):
    torch.manual_seed(5)
    config = ModelConfig(vocab_size=8, num_layers=3, hidden_size=32, num_heads=4, parallel_residual=parallel)
    block = Block(config, 1)
    made: list[weakref.ref[Any]] = []
    inputs = (block.mixer.q_proj, block.mixer.out_proj, block.mlp.gate_proj, block.mlp.down_proj)
    for linear in inputs:
        linear.register_forward_pre_hook(lambda _, arguments: made.append(memory_of(arguments[0])))
    with recompute_elementwise():
        y = block(leaf(2, 20, 32))
    assert [memory() for memory in made] == [None] * 4
    assert y.requires_grad
