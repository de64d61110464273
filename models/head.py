"""The last layer: final norm, output projection, and the loss in chunks of tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from .config import ModelConfig
from .init import init_std
from .norm import Norm

IGNORED_LABEL = -100


class Head(nn.Module):
    """logits = norm(hidden) weight^T. A tied head shares `weight` with the embedding: assign it after building."""

    tensor_parallel_plan: ClassVar[dict[str, str]] = {"weight": "vocab"}
    parameter_kinds: ClassVar[dict[str, str]] = {}

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.norm = Norm(config)
        self.weight = nn.Parameter(torch.empty(config.vocab_size, config.hidden_size))
        nn.init.normal_(self.weight, std=init_std(config))
        # Attributes, so that a trainer which cuts the vocabulary can put its own in place.
        self.project: Callable[[Tensor, Tensor], Tensor] = F.linear
        self.cross_entropy: Callable[..., Tensor] = cross_entropy_sum
        self._flops = 2 * config.vocab_size * config.hidden_size

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
    ) -> Tensor | tuple[Tensor, dict[str, Tensor]]:
        """hidden: [batch, length, hidden_size] -> logits [batch, length, vocab_size], or with `labels` the loss.

        The loss is the float32 scalar sum(loss_weight * nll) over all tokens; labels [batch, length] int, -100 counts
        nothing; loss_weight [batch, length] float, None is one everywhere. The state is empty.
        """
        hidden = self.norm(hidden)
        if labels is None:
            out = self.project(hidden, self.weight)
        else:
            out = self.cross_entropy(hidden, self.weight, labels, loss_weight)
        return (out, {}) if return_state else out

    def flops_per_token(self, length: int) -> int:
        """Forward FLOPs a token, two a multiply-add."""
        return self._flops


class VocabularyPart(Protocol):
    """The other parts of a vocabulary whose rows are cut over several processes, in equal parts."""

    @property
    def index(self) -> int:
        """Which part this process holds."""
        ...

    def gather(self, x: Tensor) -> Tensor:
        """[parts, ...]: every process's x, the same on each; no gradient is needed."""
        ...


def cross_entropy_sum(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    loss_weight: Tensor | None = None,
    *,
    chunk: int | None = None,
    vocabulary: VocabularyPart | None = None,
) -> Tensor:
    """sum_t loss_weight_t * (logsumexp(z_t) - z_t[labels_t]) with z = hidden weight^T, without ever holding all of z.

    hidden: [..., d], weight: [vocab, d], labels: [...] int (-100 counts nothing), loss_weight: [...] float or None.
    Logits are formed for `chunk` tokens at a time; the gradients of hidden and weight are computed in the same pass,
    so nothing is computed twice. Returns a float32 scalar (float64 for float64 inputs). The gradient of loss_weight is
    each token's nll (0 where the weight is 0), which tells where a loss comes from. With `vocabulary`, weight is one of
    several parts of the rows; the sum is that over all of them, and the gradient of hidden is this part's share of it,
    to be summed over the parts.
    """
    wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    labels = labels.reshape(-1)
    weights = torch.ones_like(labels, dtype=wide) if loss_weight is None else loss_weight.reshape(-1).to(wide)
    weights = weights.masked_fill(labels == IGNORED_LABEL, 0.0)
    labels = labels.masked_fill(labels == IGNORED_LABEL, 0)
    # A token that counts nothing must not spoil the sum where it is not finite: 0 * inf is nan.
    hidden = hidden.reshape(-1, hidden.shape[-1]).masked_fill((weights == 0)[:, None], 0.0)
    if chunk is None:
        chunk = max(1, _CHUNK_ELEMENTS[hidden.is_cuda] // weight.shape[0])
    return _CrossEntropySum.apply(hidden, weight, labels, weights, chunk, vocabulary)


# Logits held at a time, on a CPU and on CUDA: 16 MiB of float32, which caches hold, and 512 MiB, so that the weight and
# its gradient, read and written once a chunk, cost little beside the products.
_CHUNK_ELEMENTS = (1 << 22, 1 << 27)


class _CrossEntropySum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        weights: Tensor,
        chunk: int,
        vocabulary: VocabularyPart | None,
    ) -> Tensor:
        need_hidden, need_weight, _, need_nll = ctx.needs_input_grad[:4]
        d_hidden = torch.empty_like(hidden) if need_hidden else None
        d_weight = torch.zeros(weight.shape, dtype=weights.dtype, device=weight.device) if need_weight else None
        total = weights.new_zeros(())
        every_nll = torch.empty_like(weights) if need_nll else None
        # The gradients are kept for weights of at most 1 and scaled in the backward pass: one over the tokens of a
        # batch, the usual weight, would leave float16's range before the loss scale is multiplied in.
        unit = weights.abs().amax() if len(weights) else total
        unit = torch.where(unit == 0, 1.0, unit)
        narrow = hidden.new_empty(min(chunk, len(hidden)), len(weight))
        # The same memory where both would be of one type.
        wide = narrow if narrow.dtype == weights.dtype else torch.empty_like(narrow, dtype=weights.dtype)
        for start in range(0, len(hidden), chunk):
            rows = slice(start, start + chunk)
            x, label, token_weight = hidden[rows], labels[rows, None], weights[rows, None]
            logits, p = narrow[: len(x)], wide[: len(x)]
            torch.mm(x, weight.t(), out=logits)
            p.copy_(logits)
            here: Tensor | None = None
            share: Tensor | float = 1.0
            if vocabulary is not None:
                label = label - vocabulary.index * len(weight)
                here = (label >= 0) & (label < len(weight))
                label = label.masked_fill(~here, 0)
            largest = p.amax(-1, keepdim=True)
            chosen = p.gather(-1, label)
            mass = p.sub_(largest).exp_().sum(-1, keepdim=True)
            if vocabulary is not None and here is not None:
                # p and mass are relative to the largest logit of this part: bring them to that of all parts.
                parts = vocabulary.gather(torch.cat([largest, mass, chosen.masked_fill(~here, 0.0)], -1))
                own, largest = largest, parts[..., :1].amax(0)
                mass = (parts[..., 1:2] * (parts[..., :1] - largest).exp()).sum(0)
                chosen = parts[..., 2:].sum(0)
                share = (own - largest).exp()
            nll = mass.log() + largest - chosen
            total += (nll * token_weight).sum()
            if every_nll is not None:
                every_nll[rows] = nll.squeeze(-1).masked_fill(weights[rows] == 0, 0.0)
            if d_hidden is None and d_weight is None:
                continue
            token_weight = token_weight / unit
            p.mul_(token_weight * share / mass)
            p.scatter_add_(-1, label, -token_weight if here is None else -token_weight * here)
            gradient = logits.copy_(p)
            if d_hidden is not None:
                torch.mm(gradient, weight, out=d_hidden[rows])
            if d_weight is not None:
                d_weight += gradient.t() @ x
        ctx.save_for_backward(d_hidden, d_weight, unit, every_nll)
        ctx.weight_dtype = weight.dtype
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        d_hidden, d_weight, unit, every_nll = ctx.saved_tensors
        factor = grad * unit
        if d_hidden is not None:
            d_hidden = (d_hidden.to(unit.dtype) * factor).to(d_hidden.dtype)
        if d_weight is not None:
            d_weight = (d_weight * factor).to(ctx.weight_dtype)
        return d_hidden, d_weight, None, None if every_nll is None else grad * every_nll, None, None
