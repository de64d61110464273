"""Prepared launches use PyTorch's current stream and call the launch hooks of profilers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from models.operators.lion.bidirectional_attention import bidirectional_linear_attention as attend


def inputs(length: int) -> list[Tensor]:
    return [torch.rand(2, length, 2, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3)]


@pytest.mark.parametrize("length", [128, 300])
def test_launch_on_the_current_stream(length: int) -> None:
    """Write the inputs late, on the stream of the call."""
    values = inputs(length)
    expected = attend(*values)
    late = [torch.zeros_like(x) for x in values]
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        for to, x in zip(late, values, strict=True):
            to.copy_(x)
        actual = attend(*late)
    stream.synchronize()
    assert torch.equal(actual, expected)


def test_launch_hooks_are_called() -> None:
    from triton import knobs

    chain = knobs.runtime.launch_enter_hook
    values = inputs(128)
    expected = attend(*values)
    launches = []

    def hook(metadata: object) -> None:
        launches.append(metadata)

    chain.add(hook)
    try:
        assert torch.equal(attend(*values), expected)
    finally:
        chain.remove(hook)
    count = len(launches)
    assert count > 0
    attend(*values)
    assert len(launches) == count


def test_lengths_share_compiled_kernels() -> None:
    """Compile once for all lengths, because every batch of an evaluation may have another length."""
    from models.kernels.lion.chunk import _lion_chunk_forward

    def compiled() -> int:
        return len(_lion_chunk_forward.device_caches[torch.cuda.current_device()][0])

    attend(*inputs(300))
    count = compiled()
    for length in (301, 304, 320):
        attend(*inputs(length))
    assert compiled() == count > 0
