"""Activation checkpointing: store fewer activations and recompute them in the backward pass."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from megatron_lite.config.schema import ParallelConfig

Recompute = Callable[[], AbstractContextManager[None]]


def checkpointed(layer: Callable[..., Tensor], mode: str, recompute: Recompute) -> Callable[..., Tensor]:
    """Return the call of a layer under activation checkpointing (Chen et al. 2016).

    Args:
        mode: "none", "elementwise", "selective" or "full", from `mode_of`.
        recompute: a context in which layers do not store elementwise results, for "elementwise".
    """
    if mode == "none":
        return layer
    if mode == "elementwise":

        def call(*inputs: Tensor, **context: Tensor) -> Any:
            with recompute():
                return layer(*inputs, **context)

        return call
    if mode == "full":
        return lambda x, **context: checkpoint(layer, x, use_reentrant=False, **context)
    # Selective (as torchtitan): results of matmuls are stored, everything else is recomputed.
    return lambda x, **context: checkpoint(layer, x, use_reentrant=False, context_fn=_store_matmuls, **context)


def mode_of(index: int, count: int, parallel: ParallelConfig) -> str:
    """Return the mode of layer `index` of `count`; "none" for the embedding and the head, the first and the last layer."""
    settings = parallel.activation_checkpointing
    if not 0 < index < count - 1:
        return "none"
    return settings.others if (index - 1) % settings.every else settings.mode


@cache
def _matmuls() -> list[Any]:
    """Return the operators whose results are stored."""
    # This import registers torch_attn._varlen_attn. It also loads torch's compiler, which would slow down every start.
    import_module("torch.nn.attention.varlen")
    return [
        torch.ops.aten.mm.default,
        torch.ops.aten.addmm.default,
        torch.ops.aten._scaled_mm.default,
        torch.ops.aten._scaled_dot_product_flash_attention.default,
        torch.ops.aten._scaled_dot_product_efficient_attention.default,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
        torch.ops.torch_attn._varlen_attn.default,
    ]


class _MatmulsOnly(TorchDispatchMode):
    """Pass only matmuls to one of torch's two modes of selective checkpointing.

    These modes compare the operations of the second forward pass with those of the first. Without this class they would see those
    of ZeRO 3, which gathers and frees different weights in the two passes.
    """

    def __init__(self, mode: TorchDispatchMode) -> None:
        super().__init__()
        self._mode = mode

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _matmuls():
            return self._mode.__torch_dispatch__(func, types, args, kwargs)
        return func(*args, **(kwargs or {}))


def _store_matmuls() -> tuple[TorchDispatchMode, TorchDispatchMode]:
    first, second = create_selective_checkpoint_contexts(_matmuls())
    return _MatmulsOnly(first), _MatmulsOnly(second)
