"""Layers one after another on one process, and what the last of them is told; a pipeline's stages go the same way."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor, nn

Batch = Mapping[str, Tensor]


class Sequential(nn.Module):
    """The layers one after another; `forward` is the summed loss of a batch.

    The first layer takes tokens, the last one hidden states, labels and loss weights.
    """

    def __init__(self, layers: Sequence[nn.Module], calls: Sequence[Callable[..., Tensor]]) -> None:
        """calls: the layers as they are called, under activation checkpointing."""
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self._calls = list(calls)

    def forward(self, batch: Batch) -> Tensor:
        """sum(loss_weight * nll), a float32 scalar. `batch`: tokens, labels [batch, length] int64, loss_weight float32
        of the same shape, and optionally `mask` [batch, length], `cu_seqlens` [segments + 1] and `num_correct`, a scalar to
        which the weight of the correctly predicted tokens is added."""
        context = {key: batch[key] for key in ("mask", "cu_seqlens") if key in batch}
        hidden = one_after_another(self._calls[:-1])(batch["tokens"], **context)
        return self._calls[-1](hidden, **asked_for(batch))


def one_after_another(calls: Sequence[Callable[..., Tensor]]) -> Callable[..., Tensor]:
    """Consecutive layers as one call."""

    def call(hidden: Tensor, **context: Tensor) -> Tensor:
        for layer in calls:
            hidden = layer(hidden, **context)
        return hidden

    return call


def asked_for(batch: Batch) -> dict[str, Tensor]:
    """What the last layer is told besides hidden states."""
    return {key: batch[key] for key in ("labels", "loss_weight", "num_correct") if key in batch}
