"""The first layer: token embedding and learned positions; positions of tokens for the mixers that need them."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..operators.context_parallel import ContextParallelGroup, context_parallel_group, refuse_state, shard_segments
from ..operators.varlen import check_packed
from ..options import ModelShape
from .projections import init_normal, init_std


class Embedding(nn.Module):
    """Look up rows of `weight` [vocab_size, hidden_size] and multiply them by `model.embedding_scale`.

    `model.positions: learned` adds one vector per position. Without it, order is known to the mixers alone.
    """

    tensor_parallel_plan: ClassVar[dict[str, str]] = {"weight": "vocab"}
    parameter_kinds: ClassVar[dict[str, str]] = {"weight": "embedding"}

    def __init__(self, config: ModelShape) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.vocab_size, config.hidden_size))
        init_normal(self.weight, init_std(config))
        self.positions = None if config.max_positions is None else LearnedPositions(config, config.max_positions)
        self.scale = config.embedding_scale
        # An attribute, so that a trainer that splits the vocabulary can replace it.
        self.lookup: Callable[[Tensor, Tensor, Tensor | None], Tensor] = look_up

    def forward(
        self,
        tokens: Tensor,
        mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        state: dict[str, Tensor] | None = None,
        return_state: bool = False,
    ) -> Tensor | tuple[Tensor, dict[str, Tensor]]:
        """Return the vectors of tokens [batch, length] int, [batch, length, hidden_size], and with return_state the state.

        The state is empty, or with learned positions "position" [batch] int, the tokens seen; with cu_seqlens one row per
        segment.
        """
        vectors = None
        new_state: dict[str, Tensor] = {}
        if self.positions is not None:
            vectors, new_state["position"] = self.positions(tokens, mask, cu_seqlens, (state or {}).get("position"))
        if self.scale == 1.0:
            hidden = self.lookup(tokens, self.weight, vectors)
        else:  # the lookup adds the vectors, which are not scaled
            hidden = self.scale * self.lookup(tokens, self.weight, None if vectors is None else vectors / self.scale)
        return (hidden, new_state) if return_state else hidden

    def flops_per_token(self, length: int) -> int:
        """Return 0: a look-up multiplies nothing."""
        return 0


def look_up(tokens: Tensor, weight: Tensor, vectors: Tensor | None) -> Tensor:
    """Return the rows of weight [vocab_size, hidden_size] for tokens [batch, length], plus vectors of the result's shape."""
    rows = F.embedding(tokens, weight)
    return rows if vectors is None else rows + vectors


class LearnedPositions(nn.Module):
    """Hold one vector per position, added to the token's: `weight` [max_positions, hidden_size].

    Devlin et al. 2019 (BERT), section 3; also what LION without a decay needs (arXiv 2502.16249, appendix D).
    """

    # One part of a split vocabulary adds it before the parts are summed: the gradient of the others is zero.
    tensor_parallel_plan: ClassVar[dict[str, str]] = {"weight": "partial_grad"}
    parameter_kinds: ClassVar[dict[str, str]] = {"weight": "embedding"}

    def __init__(self, config: ModelShape, max_positions: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(max_positions, config.hidden_size))
        init_normal(self.weight, init_std(config))

    def forward(
        self, tokens: Tensor, mask: Tensor | None, cu_seqlens: Tensor | None, start: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return vectors [batch, length, hidden_size] for tokens [batch, length], and the next position of each sequence.

        mask, cu_seqlens, start and the second result as in `token_positions`. Raises ValueError for a sequence with more
        tokens than positions, under context parallelism on every rank.
        """
        position, end = token_positions(tokens, mask, cu_seqlens, start)
        # Without packing or a state the shape decides; reading values of a CUDA tensor would synchronise with the device.
        group = context_parallel_group()
        longest = tokens.shape[1] * (1 if group is None else group.count)
        if longest > len(self.weight) or start is not None:
            last = position.amax() if position.numel() else position.new_full((), -1)
            # All ranks take this branch alike: none may skip the collective.
            longest = int(last if group is None else group.gather(last).amax()) + 1
        if longest > len(self.weight):
            raise ValueError(
                f"a sequence of {longest} tokens has more positions than model.max_positions = {len(self.weight)}, which "
                "this model learned; use shorter sequences, or train with more positions"
            )
        return F.embedding(position.clamp_min(0), self.weight), end


def token_positions(
    x: Tensor, mask: Tensor | None, cu_seqlens: Tensor | None, start: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return positions that count real tokens only, so that padding shifts nothing.

    x: [batch, length, ...], read for its shape. mask: [batch, length] bool, True for real tokens. cu_seqlens:
    [segments + 1] with batch 1: every segment counts from its own start. start: [batch or segments] int, the position of
    the first token of each sequence; None for 0.
    Returns the positions [batch, length], -1 before the first real token of a sequence that starts at 0, and the
    position of the next token [batch or segments].

    Under context parallelism x and mask are the local shard of the sequence, cu_seqlens is that of the whole, and start is
    None.
    """
    group = context_parallel_group()
    if group is not None:
        if start is not None:
            refuse_state()
        start, cu_seqlens = _start_of_shard(group, x, mask, cu_seqlens)
    if cu_seqlens is not None:
        check_packed(x, cu_seqlens)
    batch, length = x.shape[:2]
    real = torch.ones(batch, length, dtype=torch.long, device=x.device) if mask is None else mask.long()
    seen = real.cumsum(1)
    if cu_seqlens is None:
        first = torch.zeros(batch, dtype=torch.long, device=x.device) if start is None else start
        return seen - 1 + first[:, None], first + real.sum(1)
    edges = F.pad(seen[0], (1, 0))[cu_seqlens.long()]
    offset = -edges[:-1] if start is None else start - edges[:-1]
    token = torch.arange(length, device=x.device)
    segment = torch.searchsorted(cu_seqlens[1:].to(token), token, right=True)
    return seen - 1 + offset[segment], edges[1:] + offset


def _start_of_shard(
    group: ContextParallelGroup, x: Tensor, mask: Tensor | None, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Return `start` and `cu_seqlens` of `token_positions` for the tokens of the local shard."""
    batch, length = x.shape[:2]
    if cu_seqlens is None:
        if mask is None:
            return torch.full((batch,), group.index * length, device=x.device), None
        return group.gather(mask.sum(1))[: group.index].sum(0), None
    if mask is not None:
        raise ValueError(
            "mask and cu_seqlens were both given under context parallelism: give one of them; leave the padding out"
        )
    segments = shard_segments(cu_seqlens, length, group)
    start = torch.zeros(len(cu_seqlens) - 1, dtype=torch.long, device=x.device)
    return start.index_copy(0, segments.first, segments.age), segments.cu_seqlens
