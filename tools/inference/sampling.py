"""Sample the next token from logits with temperature, top-k and top-p."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

# Smaller divisors overflow float32. With this one the most likely token already has probability 1.
LEAST_TEMPERATURE = 1e-30


def next_tokens(
    logits: Tensor,
    generators: Sequence[torch.Generator],
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
) -> Tensor:
    """Sample one token per row.

    Args:
        logits: [batch, vocab_size].
        generators: one per row, on the CPU, so that a row's token does not depend on the other rows.
        temperature: divides the logits; 0 selects the most likely token.
        top_k: sample from the k most likely tokens; 0 for all.
        top_p: sample from the most likely tokens that together reach this probability (Holtzman et al. 2020).

    Returns:
        [batch] int64, on the logits' device.
    """
    if temperature == 0:
        return logits.argmax(-1)
    likely = keep_likely(logits.float() / max(temperature, LEAST_TEMPERATURE), top_k=top_k, top_p=top_p)
    probabilities = likely.softmax(-1).cpu()
    drawn = [torch.multinomial(row, 1, generator=g) for row, g in zip(probabilities, generators, strict=True)]
    return torch.cat(drawn).to(logits.device)


def keep_likely(logits: Tensor, *, top_k: int = 0, top_p: float = 1.0) -> Tensor:
    """Return logits [..., vocab_size] in which excluded tokens are -inf. The most likely token is never excluded.

    Top-k is applied first, then top-p on the remaining distribution. Of equally likely tokens smaller ids are preferred.
    """
    if top_k <= 0 and top_p >= 1:
        return logits
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    keep = torch.ones_like(ordered, dtype=torch.bool)
    if top_k > 0:
        keep[..., top_k:] = False
    if top_p < 1:
        probabilities = ordered.masked_fill(~keep, -torch.inf).softmax(-1)
        preceding = probabilities.cumsum(-1) - probabilities
        keep &= preceding < top_p
    return logits.masked_fill(~keep.scatter(-1, order, keep), -torch.inf)


def check_sampling(temperature: float, top_k: int, top_p: float) -> None:
    """Raise ValueError naming the value and what is allowed."""
    if not temperature >= 0:  # NaN is not
        raise ValueError(f"temperature = {temperature}: 0 (the most likely token) or more is allowed")
    if top_k < 0:
        raise ValueError(f"top_k = {top_k}: 0 (all tokens) or more is allowed")
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p = {top_p}: above 0 and at most 1 (all tokens) is allowed")
