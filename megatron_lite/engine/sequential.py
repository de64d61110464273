"""Layers applied in order. One process holds all of them in `Sequential`; a pipeline stage holds consecutive ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor, nn

Batch = Mapping[str, Tensor]


class Sequential(nn.Module):
    """Apply the layers in order; `forward` returns the summed loss of a batch.

    Args:
        layers: the first takes tokens, the last takes hidden states, labels and loss weights.
        calls: the layers as they are called in a training step, from `parallelize`.
    """

    def __init__(self, layers: Sequence[nn.Module], calls: Sequence[Callable[..., Tensor]]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self._calls = list(calls)

    def forward(self, batch: Batch) -> Tensor:
        """Return sum(loss_weight * nll), a float32 scalar.

        Args:
            batch: tokens, labels [batch, length] int64; loss_weight [batch, length] float32; optionally `mask` [batch, length],
                `cu_seqlens` [segments + 1], and the scalar `num_correct`, to which the weight of the correctly predicted tokens
                is added. An image classifier has pixels as tokens, and labels and weights [batch].
        """
        hidden = chain(self._calls[:-1])(batch["tokens"], **block_inputs(batch))
        return self._calls[-1](hidden, **head_inputs(batch))


def chain(calls: Sequence[Callable[..., Tensor]]) -> Callable[..., Tensor]:
    """Return consecutive layers as one call."""

    def call(hidden: Tensor, **context: Tensor) -> Tensor:
        for layer in calls:
            hidden = layer(hidden, **context)
        return hidden

    return call


def block_inputs(batch: Batch) -> dict[str, Tensor]:
    """Return the inputs of every layer but the last, besides tokens or hidden states."""
    return {key: batch[key] for key in ("mask", "cu_seqlens") if key in batch}


def head_inputs(batch: Batch) -> dict[str, Tensor]:
    """Return the inputs of the last layer besides hidden states."""
    return {key: batch[key] for key in _HEAD_INPUTS if key in batch}


_HEAD_INPUTS = (
    *("labels", "loss_weight", "num_correct"),
    *("targets", "teacher", "temperature", "num_top5", "confusion"),  # of an image classifier
)
