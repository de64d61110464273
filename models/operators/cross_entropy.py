"""The cross entropy of a language model's head, in chunks of tokens, with its gradients formed in the same pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..backend import cpu_kernel, is_supported, on_cuda
from ..precision import accumulation_dtype, to_accumulation_dtype

IGNORED_LABEL = -100


class VocabularyPart(Protocol):
    """Describe one part of a vocabulary whose rows are split evenly over several ranks."""

    @property
    def index(self) -> int:
        """Return the number of this process's part."""

    @property
    def count(self) -> int:
        """Return the number of parts."""

    def gather(self, x: Tensor) -> Tensor:
        """Return [parts, ...], the x of every process, equal on each. No gradient is needed."""


def cross_entropy_sum(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    loss_weight: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    num_correct: Tensor | None = None,
    few_labels: bool = False,
    chunk: int | None = None,
    vocabulary: VocabularyPart | None = None,
) -> Tensor:
    """Return sum_t loss_weight_t * (logsumexp(z_t) - z_t[labels_t]) with z = hidden weight^T + bias.

    Only the logits of `chunk` tokens exist at a time. The gradients of hidden and weight are computed in the same pass,
    so nothing is computed twice.

    hidden: [..., d]; weight: [vocab, d]; bias: [vocab] or None.
    labels: [...] int, -100 is ignored. loss_weight: [...] float, None for one everywhere.
    num_correct: a float scalar; sum_t loss_weight_t * (argmax(z_t) == labels_t) is added to it in place. Of equal logits
        the first is the prediction.
    few_labels: first drop tokens of weight zero, which synchronises with the device.
    vocabulary: weight and bias are one of several equal parts of the rows. The result is that of all parts. The gradient
        of hidden is this part's share; the caller sums the shares.

    Returns a float32 scalar (float64 for float64 inputs). The gradient of loss_weight is the nll of each token, 0 where
    the weight is 0.
    Raises ValueError for labels without one entry per row of hidden, and for a loss_weight of another shape. On a CPU also for
    a label that is neither -100 nor a row of weight; on CUDA labels are not checked, because reading them would synchronise.
    """
    accumulation = accumulation_dtype(hidden)
    if labels.shape != hidden.shape[:-1]:
        raise ValueError(
            f"labels {list(labels.shape)}: expected {list(hidden.shape[:-1])}, one per row of hidden {list(hidden.shape)}"
        )
    if loss_weight is not None and loss_weight.shape != labels.shape:
        raise ValueError(f"loss_weight {list(loss_weight.shape)}: expected {list(labels.shape)}, one per label")
    # The kernels read int64 labels unchecked.
    labels = labels.reshape(-1).long()
    weights = (
        torch.ones_like(labels, dtype=accumulation) if loss_weight is None else loss_weight.reshape(-1).to(accumulation)
    )
    weights = weights.masked_fill(labels == IGNORED_LABEL, 0.0)
    labels = labels.masked_fill(labels == IGNORED_LABEL, 0)
    if labels.device.type == "cpu" and not torch.compiler.is_compiling():
        _check_labels(labels, len(weight) * (1 if vocabulary is None else vocabulary.count))
    hidden = hidden.reshape(-1, hidden.shape[-1])
    if few_labels and not weights.is_meta:  # the meta device has no values to count
        counted = weights.detach().nonzero().squeeze(-1)
        hidden, labels, weights = hidden[counted], labels[counted], weights[counted]
    if chunk is None:
        chunk = max(1, _CHUNK_ELEMENTS[on_cuda(hidden)] // weight.shape[0])
        parts = max(1, -(-len(hidden) // chunk))
        chunk = max(1, -(-len(hidden) // parts))
    return _CrossEntropySum.apply(hidden, weight, bias, labels, weights, num_correct, chunk, vocabulary)


def _check_labels(labels: Tensor, vocab: int) -> None:
    if not len(labels):
        return
    for label in (int(x) for x in labels.aminmax()):
        if not 0 <= label < vocab:
            raise ValueError(
                f"label {label}: allowed are 0 to {vocab - 1}, the tokens of the vocabulary, and {IGNORED_LABEL} for no label; "
                "compare the tokenizer's size with model.vocab_size"
            )


# Logits per chunk. CPU: 16 MiB of float32, which fit in the cache. CUDA: 512 MiB of 16 bits. Larger chunks read and write the
# weight and its gradient less often.
_CHUNK_ELEMENTS = (1 << 22, 1 << 28)


class _Kernels(NamedTuple):
    """Hold the functions that compute with a chunk of logits [rows, vocab].

    row_statistics, gradient_in_place, add_matmul, scaled: as those of `models.kernels.cross_entropy`.
    """

    row_statistics: Callable[..., tuple[Tensor, Tensor | None, Tensor, Tensor]]
    gradient_in_place: Callable[..., None]
    add_matmul: Callable[..., None]
    scaled: Callable[..., Tensor]


def _select_kernels(hidden: Tensor, weight: Tensor) -> _Kernels:
    """Return the functions that run. This is the only place that decides."""
    if is_supported(hidden):
        from ..kernels.cross_entropy import add_matmul, gradient_in_place, row_statistics, scaled

        return _Kernels(row_statistics, gradient_in_place, add_matmul, scaled)
    native = cpu_kernel("cross_entropy")
    if native is not None and native.supports_cross_entropy(hidden, weight):
        return _Kernels(native.row_statistics, native.gradient_in_place, _add_matmul, _scaled)
    return _Kernels(_row_statistics, _gradient_in_place, _add_matmul, _scaled)


class _CrossEntropySum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        weights: Tensor,
        num_correct: Tensor | None,
        chunk: int,
        vocabulary: VocabularyPart | None,
    ) -> Tensor:
        need_hidden, need_weight, need_bias, _, need_nll = ctx.needs_input_grad[:5]
        d_hidden = torch.empty_like(hidden) if need_hidden else None
        d_weight = torch.zeros(weight.shape, dtype=weights.dtype, device=weight.device) if need_weight else None
        d_bias = weights.new_zeros(len(weight)) if need_bias else None
        total = weights.new_zeros(())
        every_nll = torch.empty_like(weights) if need_nll else None
        # Gradients are saved for weights of at most 1 and scaled in the backward pass. The usual weight, 1 / tokens of a
        # batch, would underflow float16 before the loss scale is applied.
        unit = weights.abs().amax() if len(weights) else total
        unit = torch.where(unit == 0, 1.0, unit)
        kernels = _select_kernels(hidden, weight)
        # The kernels read consecutive addresses.
        bias = None if bias is None else bias.contiguous()
        buffer = hidden.new_empty(min(chunk, len(hidden)), len(weight))
        for start in range(0, len(hidden), chunk):
            rows = slice(start, start + chunk)
            token_weight = weights[rows]
            # A token of weight 0 must not reach the sum when it is not finite: 0 * inf is nan.
            x = hidden[rows].masked_fill(token_weight[:, None] == 0, 0.0)
            logits = buffer[: len(x)]
            torch.mm(x, weight.t(), out=logits)
            label = labels[rows] if vocabulary is None else _local_labels(labels[rows], vocabulary, len(weight))
            log_sum, chosen, correct = _over_vocabulary(
                vocabulary, label, *kernels.row_statistics(logits, bias, label.clamp_min(0), num_correct is not None)
            )
            nll = log_sum - chosen
            total += (nll * token_weight).sum()
            if num_correct is not None and correct is not None:
                num_correct += (token_weight * correct).sum()
            if every_nll is not None:
                every_nll[rows] = nll.masked_fill(token_weight == 0, 0.0)
            if d_hidden is None and d_weight is None and d_bias is None:
                continue
            kernels.gradient_in_place(logits, bias, label, log_sum, token_weight / unit)
            if d_bias is not None:
                d_bias += logits.sum(0, dtype=d_bias.dtype)
            if d_hidden is not None:
                torch.mm(logits, weight, out=d_hidden[rows])
            if d_weight is not None:
                kernels.add_matmul(d_weight, logits.t(), x)
        ctx.save_for_backward(d_hidden, d_weight, d_bias, unit, every_nll)
        ctx.weight_dtype, ctx.scaled = weight.dtype, kernels.scaled
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        d_hidden, d_weight, d_bias, unit, every_nll = ctx.saved_tensors
        factor = grad * unit
        if d_hidden is not None:
            d_hidden = ctx.scaled(d_hidden, factor, d_hidden.dtype)
        if d_weight is not None:
            d_weight = ctx.scaled(d_weight, factor, ctx.weight_dtype)
        if d_bias is not None:
            d_bias = (d_bias * factor).to(ctx.weight_dtype)
        return d_hidden, d_weight, d_bias, None, None if every_nll is None else grad * every_nll, *[None] * 3


def _local_labels(label: Tensor, vocabulary: VocabularyPart, rows: int) -> Tensor:
    """Return the labels as rows of this part of the vocabulary, -1 for labels of other parts."""
    local = label - vocabulary.index * rows
    return local.masked_fill((local < 0) | (local >= rows), -1)


def _over_vocabulary(
    vocabulary: VocabularyPart | None, label: Tensor, largest: Tensor, best: Tensor | None, mass: Tensor, chosen: Tensor
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return logsumexp(z), z[label] and whether the prediction is the label (None without `best`), for each row of logits z.

    label: row of this part, -1 for a label of another part. The others: `row_statistics` of this part. All are [rows].
    """
    correct = None if best is None else best == label
    if vocabulary is not None:
        columns = [largest, mass, chosen.masked_fill(label < 0, 0.0)]
        if correct is not None:
            columns.append(correct.to(mass.dtype))
        parts = vocabulary.gather(torch.stack(columns, -1))
        largest, winner = parts[..., 0].max(0)
        mass = (parts[..., 1] * (parts[..., 0] - largest).exp()).sum(0)
        chosen = parts[..., 2].sum(0)
        if correct is not None:
            correct = parts[..., 3].gather(0, winner[None])[0] > 0
    return mass.log() + largest, chosen, correct


def _row_statistics(
    logits: Tensor, bias: Tensor | None, label: Tensor, first: bool
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """Compute `models.kernels.cross_entropy.row_statistics` in PyTorch."""
    z = _with_bias(logits, bias)
    best = None
    if first:
        largest, best = z.max(-1)
    else:
        largest = z.amax(-1)
    mass = (z - largest[:, None]).exp_().sum(-1)
    return largest, best, mass, z.gather(-1, label[:, None]).squeeze(-1)


def _gradient_in_place(logits: Tensor, bias: Tensor | None, label: Tensor, log_sum: Tensor, weight: Tensor) -> None:
    """Compute `models.kernels.cross_entropy.gradient_in_place` in PyTorch."""
    p = (_with_bias(logits, bias) - log_sum[:, None]).exp_()
    p.scatter_add_(-1, label.clamp_min(0)[:, None], -(label >= 0).to(p.dtype)[:, None])
    logits.copy_(p.mul_(weight[:, None]))


def _with_bias(logits: Tensor, bias: Tensor | None) -> Tensor:
    z = to_accumulation_dtype(logits)
    return z if bias is None else z + bias


def _add_matmul(total: Tensor, x: Tensor, y: Tensor) -> None:
    total += x @ y


def _scaled(x: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    return (x.to(factor.dtype) * factor).to(dtype)
