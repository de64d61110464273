"""The last layer: final norm, output projection, and the loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..options import ModelShape
from .norm import Norm
from .projections import init_normal, init_std, linear


class Head(nn.Module):
    """Compute logits = norm(hidden) weight^T. A tied head shares `weight` with the embedding: assign it after building.

    With `model.head: mlm` it is BERT's: logits = norm'(GELU(dense(norm(hidden)))) weight^T + bias (Devlin et al. 2019,
    "masked LM" of their released model).
    """

    tensor_parallel_plan: ClassVar[dict[str, str]] = {"weight": "vocab", "bias": "vocab"}
    parameter_kinds: ClassVar[dict[str, str]] = {}

    def __init__(self, config: ModelShape) -> None:
        super().__init__()
        self.norm = Norm(config)
        self.weight = nn.Parameter(torch.empty(config.vocab_size, config.hidden_size))
        init_normal(self.weight, init_std(config))
        masked = config.head == "mlm"
        self.transform = _Transform(config) if masked else None
        self.bias = nn.Parameter(torch.zeros(config.vocab_size)) if masked else None
        # Attributes, so that a trainer that splits the vocabulary can replace them.
        self.project: Callable[[Tensor, Tensor, Tensor | None], Tensor] = F.linear
        self.cross_entropy: Callable[..., Tensor] = cross_entropy
        # Most tokens of a masked model have no label: their logits are not computed.
        self._few_labels = bool(config.bidirectional_mixers())
        self._flops = 2 * config.vocab_size * config.hidden_size + 2 * masked * config.hidden_size**2

    def forward(
        self,
        hidden: Tensor,
        mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        state: dict[str, Tensor] | None = None,
        return_state: bool = False,
        *,
        labels: Tensor | None = None,
        loss_weight: Tensor | None = None,
        num_correct: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, dict[str, Tensor]]:
        """Return the logits [batch, length, vocab_size] of hidden [batch, length, hidden_size], or with `labels` the loss.

        The loss is the float32 scalar sum(loss_weight * nll) over all tokens. labels: [batch, length] int, -100 is
        ignored. loss_weight: [batch, length] float, None for one everywhere. num_correct and errors: as in
        `models.operators.cross_entropy.cross_entropy_sum`. The state is empty.
        """
        hidden = self.norm(hidden)
        if self.transform is not None:
            hidden = self.transform(hidden)
        if labels is None:
            out = self.project(hidden, self.weight, self.bias)
        else:
            few = self._few_labels
            out = self.cross_entropy(
                hidden, self.weight, labels, loss_weight, bias=self.bias, num_correct=num_correct, few_labels=few
            )
        return (out, {}) if return_state else out

    def flops_per_token(self, length: int) -> int:
        """Return the forward FLOPs per token, two per multiply-add."""
        return self._flops


class _Transform(nn.Module):
    """Compute norm(GELU(dense(x))), with the exact (erf) GELU."""

    tensor_parallel_plan: ClassVar[dict[str, str]] = {"dense": "replicated"}
    parameter_kinds: ClassVar[dict[str, str]] = {}

    def __init__(self, config: ModelShape) -> None:
        super().__init__()
        self.dense = linear(config, config.hidden_size, config.hidden_size, bias=True)
        self.norm = Norm(config)

    def forward(self, x: Tensor) -> Tensor:
        """Return the transform of x [..., hidden_size], in the same shape and dtype, under autocast too."""
        return self.norm(F.gelu(self.dense(x))).to(x.dtype)


def cross_entropy(*inputs: Any, **options: Any) -> Tensor:
    """Return `models.operators.cross_entropy.cross_entropy_sum`, imported at the first loss: exports do without it."""
    from ..operators.cross_entropy import cross_entropy_sum

    return cross_entropy_sum(*inputs, **options)
