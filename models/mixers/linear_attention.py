"""Linear attention (arXiv 2006.16236): a positive feature map in place of the exponential, rows divided by their sum."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from ..config import ModelConfig
from ..init import linear
from ..precision import ROW_SUM_EPS, wide
from ..row_sum import recurrence_with_row_sum


@dataclass(frozen=True)
class LinearAttentionOptions:
    """Settings of the linear attention mixer."""

    bias: bool = field(default=False, metadata={"doc": "Biases in the four projections."})


class LinearAttention(nn.Module):
    """The causal layer of Katharopoulos et al. 2020, Eq. 7, 9-12 and 16-20, with phi(x) = elu(x) + 1.

    S_t = S_{t-1} + phi(k_t) v_t, z_t = z_{t-1} + phi(k_t), o_t = phi(q_t) S_t / (phi(q_t) z_t), y = W_O o, a head.
    """

    Options = LinearAttentionOptions
    state_size: ClassVar[str] = "d^2 / heads + d float32"
    splits_sequence: ClassVar[bool] = True
    tensor_parallel_plan: ClassVar[dict[str, str]] = {
        "q_proj": "column",
        "k_proj": "column",
        "v_proj": "column",
        "out_proj": "row",
    }
    parameter_kinds: ClassVar[dict[str, str]] = {}

    def __init__(self, config: ModelConfig, layer_index: int, options: LinearAttentionOptions) -> None:
        super().__init__()
        size = config.hidden_size
        self.head_dim = size // config.num_heads
        self.q_proj = linear(config, size, size, bias=options.bias)
        self.k_proj = linear(config, size, size, bias=options.bias)
        self.v_proj = linear(config, size, size, bias=options.bias)
        self.out_proj = linear(config, size, size, bias=options.bias, output=True)
        self._size = size

    @staticmethod
    def check(config: ModelConfig, options: LinearAttentionOptions) -> None:
        """Every shape that the model allows is legal."""

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        state: dict[str, Tensor] | None = None,
        return_state: bool = False,
    ) -> Tensor | tuple[Tensor, dict[str, Tensor]]:
        """x: [batch, length, hidden_size] -> the same shape, and the state when asked for.

        The state is "recurrent" [batch, heads, head_dim, head_dim + 1] in float32, S and z side by side; with
        cu_seqlens a row for every segment.
        """
        q, k, v = (proj(x).unflatten(-1, (-1, self.head_dim)) for proj in (self.q_proj, self.k_proj, self.v_proj))
        q, k = ((F.elu(wide(t)) + 1).to(v.dtype) for t in (q, k))
        if mask is not None:
            k = k.masked_fill(~mask[:, :, None, None], 0.0)
        num, den, recurrent = recurrence_with_row_sum(
            q,
            k,
            v,
            wide(q).new_zeros(()).expand(*q.shape[:3], 1),
            initial_state=(state or {}).get("recurrent"),
            cu_seqlens=cu_seqlens,
        )
        y = self.out_proj((num / (den + ROW_SUM_EPS)).flatten(-2).to(v.dtype))
        return (y, {"recurrent": recurrent}) if return_state else y

    def flops_per_token(self, length: int) -> int:
        """Forward FLOPs a token, two a multiply-add: projections, and the recurrence in chunks of 64."""
        head = min(64, length) * (2 * self.head_dim + 1) + 4 * self.head_dim * (self.head_dim + 1)
        return 8 * self._size * self._size + self._size // self.head_dim * head
