"""Activation checkpointing: keep less of the forward pass, compute it again in the backward pass."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from megatron_lite.config_schema import ParallelConfig


def checkpointed(
    layer: Callable[..., Tensor], index: int, count: int, parallel: ParallelConfig
) -> Callable[..., Tensor]:
    """The layer, or the layer under activation checkpointing (Chen et al. 2016). Only blocks recompute."""
    settings = parallel.activation_checkpointing
    block = index - 1
    if settings.mode == "none" or not 0 < index < count - 1 or block % settings.every:
        return layer
    if settings.mode == "full":
        return lambda x, **context: checkpoint(layer, x, use_reentrant=False, **context)
    # Selective (as torchtitan): matrix products are kept, everything cheap around them is computed again.
    return lambda x, **context: checkpoint(
        layer,
        x,
        use_reentrant=False,
        context_fn=lambda: create_selective_checkpoint_contexts(_keep_products),
        **context,
    )


_PRODUCTS = {
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
}


def _keep_products(_context: object, operator: object, *_args: object, **_kwargs: object) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in _PRODUCTS else CheckpointPolicy.PREFER_RECOMPUTE
