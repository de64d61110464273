"""Elementwise activation recomputation of blocks with kernels: gradients are bitwise equal."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_lite.parallel.fused_projections import fuse_projections
from models import backend as kernels
from models.block import Block
from models.config import ModelConfig
from models.recompute import recompute_elementwise

# Norms and SwiGLU; convolution, gate and epilogue; the feature maps of queries and keys in one launch.
AGAIN = {"metala": 3 + 3, "lion": 3 + 1}
# MetaLA's core as one step also keeps the states between chunks.
CORE = 1


@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm"])
@pytest.mark.parametrize("mixer", [*AGAIN, "metala as one step"])
def test_a_block(device: str, monkeypatch: pytest.MonkeyPatch, mixer: str, norm: str) -> None:
    from models.kernels import metala as metala_core
    from models.kernels.launch import Launch

    shape = {"vocab_size": 8, "num_layers": 1, "hidden_size": 32, "num_heads": 2, "norm": norm}
    core, mixer = mixer not in AGAIN, mixer.split()[0]
    options: dict[str, Any] = {"lion": {"causal": False}} if mixer == "lion" else {}
    torch.manual_seed(5)
    block = Block(ModelConfig(**shape, mixers=(mixer,), mixer_options=options), 0).to(device)
    fuse_projections(block, None)
    taken = []
    if core and device == "cuda":
        block = block.bfloat16()
    elif core:
        monkeypatch.setattr("models.operators.metala.supports_triton", lambda *_, **__: True)
        monkeypatch.setattr("models.kernels.gla.gla._DTYPES", (torch.float32,))
    inner = metala_core.metala_core
    monkeypatch.setattr(metala_core, "metala_core", lambda *of, **options: taken.append(1) or inner(*of, **options))
    x = torch.randn(2, 40, 32, generator=torch.Generator().manual_seed(1)).to(block.norm1.weight)
    launches = 0

    def counted(self: Launch, *pointers: Tensor | None) -> None:
        nonlocal launches
        launches += 1
        call(self, *pointers)

    call = Launch.__call__
    monkeypatch.setattr(Launch, "__call__", counted)
    # Let CPU tensors use the kernels, which run in the interpreter.
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda _: True))
    monkeypatch.setattr(kernels, "_installed", lambda: True)

    def gradients(context: AbstractContextManager[None]) -> tuple[int, list[Tensor]]:
        before = launches
        leaf = x.clone().requires_grad_()
        with context:
            y = block(leaf)
        results = [y.detach(), *torch.autograd.grad(y.square().sum(), [leaf, *block.parameters()])]
        return launches - before, results

    (once, expected), (again, actual) = gradients(nullcontext()), gradients(recompute_elementwise())
    assert again == once + AGAIN[mixer] + CORE * core
    assert len(taken) == 2 * core
    assert all(torch.equal(a, b) for a, b in zip(expected, actual, strict=True))
