"""Token embedding: the first layer."""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .config import ModelConfig
from .init import init_std


class Embedding(nn.Module):
    """Rows of `weight` [vocab_size, hidden_size]; no positions (the mixers know order)."""

    tensor_parallel_plan: ClassVar[dict[str, str]] = {"weight": "vocab"}
    parameter_kinds: ClassVar[dict[str, str]] = {"weight": "embedding"}

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.vocab_size, config.hidden_size))
        nn.init.normal_(self.weight, std=init_std(config))

    def forward(
        self,
        tokens: Tensor,
        mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        state: dict[str, Tensor] | None = None,
        return_state: bool = False,
    ) -> Tensor | tuple[Tensor, dict[str, Tensor]]:
        """tokens: [batch, length] int -> [batch, length, hidden_size]; the state is empty."""
        hidden = F.embedding(tokens, self.weight)
        return (hidden, {}) if return_state else hidden

    def flops_per_token(self, length: int) -> int:
        """A look-up multiplies nothing."""
        return 0
