"""The end of a parallel region: the all-reduce is in place, and the gradient of gathered logits is local."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F

from megatron_lite.parallel import tensor_parallel
from megatron_lite.parallel.tensor_parallel import TensorGroup


def test_all_reduce_is_in_place(grid) -> None:
    tensor = TensorGroup(dist.group.WORLD, 0, 1)
    weight = torch.randn(3, 4, requires_grad=True)
    x = torch.randn(2, 5, 4)
    partial = F.linear(x, weight)
    address, wanted = partial.data_ptr(), partial.detach().clone()
    y = tensor.leave(partial)
    assert y.data_ptr() == address
    assert torch.equal(y, wanted)
    y.square().sum().backward()
    torch.testing.assert_close(weight.grad, 2 * wanted.flatten(0, 1).t() @ x.flatten(0, 1))
    # A tensor that is not contiguous does not change; the sum is a new tensor.
    transposed = torch.randn(5, 2, 3).transpose(0, 1)
    before = transposed.clone()
    assert torch.equal(tensor.leave(transposed), before)
    assert torch.equal(transposed, before)


def test_logits_gradient_is_that_of_the_local_vocabulary(monkeypatch) -> None:
    """Run process 1 of 2. Process 0 has the negative logits."""
    monkeypatch.setattr(tensor_parallel, "all_gather", lambda x, group, count: torch.stack([-x, x]))
    x = torch.randn(2, 5, 3, requires_grad=True)
    y = tensor_parallel._GatherLast.apply(x, TensorGroup(dist.group.WORLD, 1, 2))
    assert torch.equal(y, torch.cat([-x, x], -1))
    gradient = torch.randn(2, 5, 6)
    y.backward(gradient)
    assert torch.equal(x.grad, gradient[..., 3:])
