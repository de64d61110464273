"""From logits to the next token: temperature, top-k, top-p. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

# Divided by less, logits leave float32's range; already here the likeliest token alone has any probability.
LEAST_TEMPERATURE = 1e-30


def next_tokens(
    logits: Tensor,
    generators: Sequence[torch.Generator],
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
) -> Tensor:
    """Draws one token a row.

    Args:
        logits: [batch, vocab_size].
        generators: one a row, on the CPU, so that what is drawn for one row does not depend on the others.
        temperature: divides the logits; 0 takes the most likely token.
        top_k: only the k most likely tokens; 0 for all.
        top_p: only the most likely tokens that together reach this probability (Holtzman et al. 2020).

    Returns:
        [batch] int64, on the logits' device.
    """
    if temperature == 0:
        return logits.argmax(-1)
    kept = keep_likely(logits.float() / max(temperature, LEAST_TEMPERATURE), top_k=top_k, top_p=top_p)
    probabilities = kept.softmax(-1).cpu()
    drawn = [torch.multinomial(row, 1, generator=own) for row, own in zip(probabilities, generators, strict=True)]
    return torch.cat(drawn).to(logits.device)


def keep_likely(logits: Tensor, *, top_k: int = 0, top_p: float = 1.0) -> Tensor:
    """Sets the logits of the tokens that may not be drawn to -inf; the most likely token always stays.

    Top-k comes first; top-p then counts in the distribution that top-k left. Of equally likely tokens at the border
    those of smaller ids stay.

    logits: [..., vocab_size] -> the same shape.
    """
    if top_k <= 0 and top_p >= 1:
        return logits
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    keep = torch.ones_like(ordered, dtype=torch.bool)
    if top_k > 0:
        keep[..., top_k:] = False
    if top_p < 1:
        probabilities = ordered.masked_fill(~keep, -torch.inf).softmax(-1)
        before = probabilities.cumsum(-1) - probabilities
        keep &= before < top_p
    return logits.masked_fill(~keep.scatter(-1, order, keep), -torch.inf)


def check_sampling(temperature: float, top_k: int, top_p: float) -> None:
    """Raises ValueError, naming the value and what is allowed."""
    if not temperature >= 0:  # NaN is not
        raise ValueError(f"temperature = {temperature}: 0 (the most likely token) or more is allowed")
    if top_k < 0:
        raise ValueError(f"top_k = {top_k}: 0 (all tokens) or more is allowed")
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p = {top_p}: above 0 and at most 1 (all tokens) is allowed")
