"""Token embedding: the first layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..options import ModelShape
from .init import init_std
from .positions import LearnedPositions


class Embedding(nn.Module):
    """Rows of `weight` [vocab_size, hidden_size], and with `model.positions: learned` a vector a position added to them.

    Without, the mixers alone know order.
    """

    tensor_parallel_plan: ClassVar[dict[str, str]] = {"weight": "vocab"}
    parameter_kinds: ClassVar[dict[str, str]] = {"weight": "embedding"}

    def __init__(self, config: ModelShape) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.vocab_size, config.hidden_size))
        nn.init.normal_(self.weight, std=init_std(config))
        self.positions = None if config.max_positions is None else LearnedPositions(config, config.max_positions)
        # An attribute, so that a trainer which cuts the vocabulary can put its own in place.
        self.lookup: Callable[[Tensor, Tensor, Tensor | None], Tensor] = look_up

    def forward(
        self,
        tokens: Tensor,
        mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        state: dict[str, Tensor] | None = None,
        return_state: bool = False,
    ) -> Tensor | tuple[Tensor, dict[str, Tensor]]:
        """tokens: [batch, length] int -> [batch, length, hidden_size], and the state when asked for.

        The state is empty, or with learned positions "position" [batch] int, the tokens seen; with cu_seqlens a row for
        every segment.
        """
        vectors = None
        new_state: dict[str, Tensor] = {}
        if self.positions is not None:
            vectors, new_state["position"] = self.positions(tokens, mask, cu_seqlens, (state or {}).get("position"))
        hidden = self.lookup(tokens, self.weight, vectors)
        return (hidden, new_state) if return_state else hidden

    def flops_per_token(self, length: int) -> int:
        """A look-up multiplies nothing."""
        return 0


def look_up(tokens: Tensor, weight: Tensor, vectors: Tensor | None) -> Tensor:
    """The rows of weight [vocab_size, hidden_size] for tokens [batch, length], plus vectors of the result's shape."""
    rows = F.embedding(tokens, weight)
    return rows if vectors is None else rows + vectors
