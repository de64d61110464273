"""Activation checkpointing: keep less of the forward pass, compute it again in the backward pass."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from megatron_lite.config.schema import ParallelConfig


def checkpointed(
    layer: Callable[..., Tensor],
    index: int,
    count: int,
    parallel: ParallelConfig,
    recompute: Callable[[], AbstractContextManager[None]] | None = None,
) -> Callable[..., Tensor]:
    """The layer, or the layer under activation checkpointing (Chen et al. 2016). Only blocks recompute.

    recompute: the layers' own context in which they do not keep what is cheap to make again, for mode "elementwise"; without
    it ValueError.
    """
    mode = mode_of(index, count, parallel)
    if mode == "none":
        return layer
    if mode == "elementwise":
        if recompute is None:
            raise ValueError("parallel.activation_checkpointing.mode = elementwise needs `recompute` of the layers")

        def call(*inputs: Tensor, **context: Tensor) -> Any:
            with recompute():
                return layer(*inputs, **context)

        return call
    if mode == "full":
        return lambda x, **context: checkpoint(layer, x, use_reentrant=False, **context)
    # Selective (as torchtitan): matrix products are kept, everything cheap around them is computed again.
    return lambda x, **context: checkpoint(
        layer,
        x,
        use_reentrant=False,
        context_fn=_keep_products,
        **context,
    )


def mode_of(index: int, count: int, parallel: ParallelConfig) -> str:
    """The mode of layer `index` of `count`: "none" for the first and the last, the embedding and the head."""
    settings = parallel.activation_checkpointing
    if not 0 < index < count - 1:
        return "none"
    return settings.others if (index - 1) % settings.every else settings.mode


_PRODUCTS = [
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
]


class _ProductsAlone(TorchDispatchMode):
    """Shows one of torch's two modes of selective checkpointing the products and nothing else.

    They compare every operation of the second forward pass with the first one's. ZeRO 3 gathers and frees weights in both, and
    not the same ones: what is there depends on what ran before.
    """

    def __init__(self, mode: TorchDispatchMode) -> None:
        super().__init__()
        self._mode = mode

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _PRODUCTS:
            return self._mode.__torch_dispatch__(func, types, args, kwargs)
        return func(*args, **(kwargs or {}))


def _keep_products() -> tuple[TorchDispatchMode, TorchDispatchMode]:
    first, second = create_selective_checkpoint_contexts(_PRODUCTS)
    return _ProductsAlone(first), _ProductsAlone(second)
