"""The last layer: final norm, output projection, and the loss (and right predictions) in chunks of tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ..backend import takes
from ..config import ModelConfig
from ..kernels.cpu.cross_entropy import cross_entropy_takes
from .init import init_std, linear
from .norm import Norm

IGNORED_LABEL = -100


class Head(nn.Module):
    """logits = norm(hidden) weight^T. A tied head shares `weight` with the embedding: assign it after building.

    With `model.head: mlm` it is BERT's: logits = norm'(GELU(dense(norm(hidden)))) weight^T + bias (Devlin et al. 2019,
    "masked LM" of their released model).
    """

    tensor_parallel_plan: ClassVar[dict[str, str]] = {"weight": "vocab", "bias": "vocab"}
    parameter_kinds: ClassVar[dict[str, str]] = {}

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.norm = Norm(config)
        self.weight = nn.Parameter(torch.empty(config.vocab_size, config.hidden_size))
        nn.init.normal_(self.weight, std=init_std(config))
        masked = config.head == "mlm"
        self.transform = _Transform(config) if masked else None
        self.bias = nn.Parameter(torch.zeros(config.vocab_size)) if masked else None
        # Attributes, so that a trainer which cuts the vocabulary can put its own in place.
        self.project: Callable[[Tensor, Tensor, Tensor | None], Tensor] = F.linear
        self.cross_entropy: Callable[..., Tensor] = cross_entropy_sum
        # Of a masked model most tokens have no label, and their logits are not worth computing.
        self._few_labels = bool(config.two_sided_mixers())
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
        right: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, dict[str, Tensor]]:
        """hidden: [batch, length, hidden_size] -> logits [batch, length, vocab_size], or with `labels` the loss.

        The loss is the float32 scalar sum(loss_weight * nll) over all tokens; labels [batch, length] int, -100 counts
        nothing; loss_weight [batch, length] float, None is one everywhere. right and errors: as in `cross_entropy_sum`. The
        state is empty.
        """
        hidden = self.norm(hidden)
        if self.transform is not None:
            hidden = self.transform(hidden)
        if labels is None:
            out = self.project(hidden, self.weight, self.bias)
        else:
            few = self._few_labels
            out = self.cross_entropy(
                hidden, self.weight, labels, loss_weight, bias=self.bias, right=right, few_labels=few
            )
        return (out, {}) if return_state else out

    def flops_per_token(self, length: int) -> int:
        """Forward FLOPs a token, two a multiply-add."""
        return self._flops


class _Transform(nn.Module):
    """norm(GELU(dense(x))), with the exact (erf) GELU."""

    tensor_parallel_plan: ClassVar[dict[str, str]] = {"dense": "replicated"}
    parameter_kinds: ClassVar[dict[str, str]] = {}

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.dense = linear(config, config.hidden_size, config.hidden_size, bias=True)
        self.norm = Norm(config)

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., hidden_size] -> the same shape."""
        return self.norm(F.gelu(self.dense(x)))


class VocabularyPart(Protocol):
    """The other parts of a vocabulary whose rows are cut over several processes, in equal parts."""

    @property
    def index(self) -> int:
        """Which part this process holds."""
        ...

    @property
    def count(self) -> int:
        """Number of parts."""
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
    bias: Tensor | None = None,
    right: Tensor | None = None,
    few_labels: bool = False,
    chunk: int | None = None,
    vocabulary: VocabularyPart | None = None,
) -> Tensor:
    """sum_t loss_weight_t * (logsumexp(z_t) - z_t[labels_t]), z = hidden weight^T + bias, without ever holding all of z.

    hidden: [..., d], weight: [vocab, d], labels: [...] int (-100 counts nothing), loss_weight: [...] float or None;
    bias: [vocab] or None.
    right: a float scalar to which sum_t loss_weight_t * (argmax(z_t) == labels_t) is added in place; of equal logits the
    first is the prediction. few_labels: leave tokens that count nothing out before anything is computed, which waits for
    the device to count them.
    Logits are formed for `chunk` tokens at a time; the gradients of hidden and weight are computed in the same pass,
    so nothing is computed twice. Returns a float32 scalar (float64 for float64 inputs). The gradient of loss_weight is
    each token's nll (0 where the weight is 0), which tells where a loss comes from. With `vocabulary`, weight is one of
    several parts of the rows; the sum is that over all of them, and the gradient of hidden is this part's share of it,
    to be summed over the parts; bias is that of the part.
    Raises ValueError for labels of another shape than hidden's rows, and on a CPU for a label that is neither -100 nor a row
    of weight, of all parts together; elsewhere it is for the caller to see to: reading the values of a CUDA tensor would wait
    for the device.
    """
    wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    if labels.shape != hidden.shape[:-1]:
        raise ValueError(f"labels {list(labels.shape)}: one for every row of hidden {list(hidden.shape)} is needed")
    # The kernels read int64 and trust every label.
    labels = labels.reshape(-1).long()
    weights = torch.ones_like(labels, dtype=wide) if loss_weight is None else loss_weight.reshape(-1).to(wide)
    weights = weights.masked_fill(labels == IGNORED_LABEL, 0.0)
    labels = labels.masked_fill(labels == IGNORED_LABEL, 0)
    if labels.device.type == "cpu" and not torch.compiler.is_compiling():
        _check_labels(labels, len(weight) * (1 if vocabulary is None else vocabulary.count))
    hidden = hidden.reshape(-1, hidden.shape[-1])
    if few_labels and not weights.is_meta:  # which has none to count
        kept = weights.detach().nonzero().squeeze(-1)
        hidden, labels, weights = hidden[kept], labels[kept], weights[kept]
    if chunk is None:
        chunk = max(1, _CHUNK_ELEMENTS[hidden.is_cuda] // weight.shape[0])
        parts = max(1, -(-len(hidden) // chunk))
        chunk = max(1, -(-len(hidden) // parts))
    return _CrossEntropySum.apply(hidden, weight, bias, labels, weights, right, chunk, vocabulary)


def _check_labels(labels: Tensor, vocab: int) -> None:
    if not len(labels):
        return
    for label in (int(x) for x in labels.aminmax()):
        if not 0 <= label < vocab:
            raise ValueError(
                f"label {label}: allowed are 0 to {vocab - 1}, the tokens of the vocabulary, and {IGNORED_LABEL} where there is "
                "none; compare the tokenizer's size with model.vocab_size"
            )


# Logits held at a time, on a CPU and on CUDA: 16 MiB of float32, which caches hold, and 512 MiB of 16 bits, so that the
# weight and its gradient, read and written once a chunk, cost little beside the products.
_CHUNK_ELEMENTS = (1 << 22, 1 << 28)


class _CrossEntropySum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        weights: Tensor,
        right: Tensor | None,
        chunk: int,
        vocabulary: VocabularyPart | None,
    ) -> Tensor:
        need_hidden, need_weight, need_bias, _, need_nll = ctx.needs_input_grad[:5]
        d_hidden = torch.empty_like(hidden) if need_hidden else None
        d_weight = torch.zeros(weight.shape, dtype=weights.dtype, device=weight.device) if need_weight else None
        d_bias = weights.new_zeros(len(weight)) if need_bias else None
        total = weights.new_zeros(())
        every_nll = torch.empty_like(weights) if need_nll else None
        # The gradients are kept for weights of at most 1 and scaled in the backward pass: one over the tokens of a
        # batch, the usual weight, would leave float16's range before the loss scale is multiplied in.
        unit = weights.abs().amax() if len(weights) else total
        unit = torch.where(unit == 0, 1.0, unit)
        narrow = hidden.new_empty(min(chunk, len(hidden)), len(weight))
        kernels = True
        if takes(hidden):
            from ..kernels.cross_entropy import add_product, gradient_in_place, row_statistics
        elif cross_entropy_takes(hidden, weight):
            from ..kernels.cpu.cross_entropy import add_product, gradient_in_place, row_statistics
        else:
            kernels = False
        # They read every place after the one before.
        bias = bias.contiguous() if kernels and bias is not None else bias
        # The same memory where both would be of one type; the kernels need no other.
        shared = kernels or narrow.dtype == weights.dtype
        wide = narrow if shared else torch.empty_like(narrow, dtype=weights.dtype)
        for start in range(0, len(hidden), chunk):
            rows = slice(start, start + chunk)
            label, token_weight = labels[rows, None], weights[rows, None]
            # A token that counts nothing must not spoil the sum where it is not finite: 0 * inf is nan.
            x = hidden[rows].masked_fill(token_weight == 0, 0.0)
            logits, p = narrow[: len(x)], wide[: len(x)]
            torch.mm(x, weight.t(), out=logits)
            here: Tensor | None = None
            if vocabulary is not None:
                label = label - vocabulary.index * len(weight)
                here = (label >= 0) & (label < len(weight))
                label = label.masked_fill(~here, 0)
            best: Tensor | None = None
            if kernels:
                highest, first, *others = row_statistics(logits, bias, label.squeeze(-1), right is not None)
                largest, mass, chosen = (y[:, None] for y in (highest, *others))
                best = None if first is None else first[:, None]
            else:
                p.copy_(logits)
                if bias is not None:
                    p += bias
                if right is None:
                    largest = p.amax(-1, keepdim=True)
                else:
                    largest, best = p.max(-1, keepdim=True)
                chosen = p.gather(-1, label)
                mass = p.sub_(largest).exp_().sum(-1, keepdim=True)
            found: Tensor | None = None
            if right is not None and best is not None:
                found = best == label if here is None else (best == label) & here
            own = largest
            if vocabulary is not None and here is not None:
                # largest and mass are this part's: bring them to what they are over all parts.
                columns = [largest, mass, chosen.masked_fill(~here, 0.0)]
                parts = vocabulary.gather(torch.cat(columns if found is None else [*columns, found.to(mass.dtype)], -1))
                largest, winner = parts[..., :1].max(0)
                mass = (parts[..., 1:2] * (parts[..., :1] - largest).exp()).sum(0)
                chosen = parts[..., 2:3].sum(0)
                if found is not None:
                    found = parts[..., 3:].gather(0, winner[None])[0] > 0
            log_sum = mass.log() + largest
            nll = log_sum - chosen
            total += (nll * token_weight).sum()
            if right is not None and found is not None:
                right += (token_weight * found).sum()
            if every_nll is not None:
                every_nll[rows] = nll.squeeze(-1).masked_fill(weights[rows] == 0, 0.0)
            if d_hidden is None and d_weight is None and d_bias is None:
                continue
            token_weight = token_weight / unit
            if kernels:
                place = label if here is None else label.masked_fill(~here, -1)
                gradient_in_place(logits, bias, *(y.squeeze(-1) for y in (place, log_sum, token_weight)))
            else:
                p.mul_(token_weight * (own - largest).exp() / mass)
                p.scatter_add_(-1, label, -token_weight if here is None else -token_weight * here)
                logits.copy_(p)
            if d_bias is not None:
                d_bias += p.sum(0, dtype=d_bias.dtype)
            if d_hidden is not None:
                torch.mm(logits, weight, out=d_hidden[rows])
            if d_weight is not None:
                if kernels:
                    add_product(d_weight, logits.t(), x)
                else:
                    d_weight += logits.t() @ x
        ctx.save_for_backward(d_hidden, d_weight, d_bias, unit, every_nll)
        ctx.weight_dtype = weight.dtype
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        d_hidden, d_weight, d_bias, unit, every_nll = ctx.saved_tensors
        factor = grad * unit
        scale: Callable[..., Tensor] = _scaled
        if takes(factor):
            from ..kernels.cross_entropy import scaled as scale
        if d_hidden is not None:
            d_hidden = scale(d_hidden, factor, d_hidden.dtype)
        if d_weight is not None:
            d_weight = scale(d_weight, factor, ctx.weight_dtype)
        if d_bias is not None:
            d_bias = (d_bias * factor).to(ctx.weight_dtype)
        return d_hidden, d_weight, d_bias, None, None if every_nll is None else grad * every_nll, *[None] * 3


def _scaled(x: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    return (x.to(factor.dtype) * factor).to(dtype)
