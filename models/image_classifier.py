"""An image classifier: patch embedding, blocks that read the patches in one or several orders, pooling and class scores.

The frame is ViT's (Dosovitskiy et al. 2021, arXiv 2010.11929) and DeiT's (arXiv 2012.12877). The scans of the patches are those
of LION (arXiv 2502.16249, Figure 9 and Tables 14 and 17). `LanguageModel` holds these layers as `embedding`, `blocks`, `head`.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .block import Block
from .config import ModelConfig
from .layers.norm import Norm
from .layers.projections import init_normal, init_std, linear
from .precision import to_accumulation_dtype


class PatchEmbedding(nn.Module):
    """Project every patch of `patch_size` x `patch_size` pixels to one token, row by row.

    `projection` is a convolution with the patch as kernel and stride: its weight [hidden_size, 3 * patch_size^2] holds the
    flattened kernel. A class token comes last, so that a causal mixer reads all patches before it. `positions` [tokens,
    hidden_size] are added if the model learns them.
    """

    tensor_parallel_plan: ClassVar[dict[str, str]] = {
        "projection": "replicated",
        "class_token": "replicated",
        "positions": "replicated",
    }
    parameter_kinds: ClassVar[dict[str, str]] = {"class_token": "embedding", "positions": "embedding"}

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        assert config.image_size is not None
        self._image_size, self._patch_size = config.image_size, config.patch_size
        size, std = config.hidden_size, init_std(config)
        self.projection = linear(config, 3 * config.patch_size**2, size, bias=True)
        self.class_token = self.positions = None
        if config.pooling == "class_token":
            self.class_token = nn.Parameter(torch.empty(size))
            init_normal(self.class_token, std)
        if config.positions == "learned":
            self.positions = nn.Parameter(torch.empty(config.tokens_per_image, size))
            init_normal(self.positions, std)

    def forward(
        self,
        pixels: Tensor,
        mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        state: dict[str, Tensor] | None = None,
        return_state: bool = False,
    ) -> Tensor | tuple[Tensor, dict[str, Tensor]]:
        """Return the tokens [batch, tokens, hidden_size] of normalized pixels [batch, 3, image_size, image_size].

        The state is empty. Raises ValueError for images of another size.
        """
        size, patch = self._image_size, self._patch_size
        if pixels.dim() != 4 or tuple(pixels.shape[1:]) != (3, size, size):
            raise ValueError(
                f"images {list(pixels.shape)}: this model reads [batch, 3, {size}, {size}]; resize them to model.image_size"
            )
        grid = pixels.unflatten(3, (-1, patch)).unflatten(2, (-1, patch))  # [batch, 3, rows, patch, columns, patch]
        patches = grid.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)
        x = self.projection(patches.to(self.projection.weight.dtype))
        if self.class_token is not None:
            x = torch.cat([x, self.class_token.to(x.dtype).expand(len(x), 1, -1)], 1)
        if self.positions is not None:
            x = x + self.positions
        return (x, {}) if return_state else x

    def flops_per_token(self, length: int) -> int:
        """Return the forward FLOPs per token, two per multiply-add."""
        return 2 * self.projection.weight.numel()


def resized_positions(positions: Tensor, side: int, new_side: int) -> Tensor:
    """Return learned positions [tokens, hidden_size] of side x side patches for a grid of new_side x new_side.

    The interpolation is bicubic, as DeiT's. A class token keeps its position.
    """
    grid, rest = positions[: side**2], positions[side**2 :]
    image = grid.float().T.unflatten(1, (side, side))[None]
    resized = F.interpolate(image, size=(new_side, new_side), mode="bicubic", align_corners=False)
    return torch.cat([resized[0].flatten(1).T.to(positions.dtype), rest]) if side != new_side else positions


class ImageBlock(Block):
    """Compute a block whose mixer reads the patches in the orders of `scans`; the outputs are averaged per patch.

    `model.patch_order` sets whether rows or columns are read, or both ("LION-natural"). `model.direction` sets the direction of
    a causal mixer; both: forward and backward. A bidirectional mixer reads every order once. The class token stays last.
    """

    def __init__(self, config: ModelConfig, layer_index: int) -> None:
        super().__init__(config, layer_index)
        assert config.image_size is not None
        self._side = config.image_size // config.patch_size
        direction = config.direction
        if direction == "alternating":
            direction = "backward" if layer_index % 2 else "forward"
        elif direction == "both" and config.bidirectional_mixers():
            direction = "forward"
        orders = ("rows", "columns") if config.patch_order == "both" else (config.patch_order,)
        directions = ("forward", "backward") if direction == "both" else (direction,)
        self.scans = [(order == "columns", one == "backward") for order in orders for one in directions]

    def run_mixer(self, normed: Tensor, **context: Any) -> Any:
        """Return the mean of the mixer's outputs over all scans, in the order of normed [batch, tokens, hidden_size]."""
        if context.get("return_state"):
            raise ValueError("an image classifier has no state: call it without return_state")
        # All scans in one call, along the batch: one launch of each kernel.
        read = torch.cat([self._reordered(normed, *scan) for scan in self.scans]) if self._reorders else normed
        mixed = self.mixer(read, **context)
        if not self._reorders:
            return mixed
        outputs = mixed.chunk(len(self.scans))
        restored = [self._reordered(y, *scan, back=True) for y, scan in zip(outputs, self.scans, strict=True)]
        return restored[0] if len(restored) == 1 else torch.stack(restored).mean(0)

    def flops_per_token(self, length: int) -> int:
        """Return forward FLOPs per token, with the mixer once per scan."""
        return len(self.scans) * self.mixer.flops_per_token(length) + self.mlp.flops_per_token(length)

    @property
    def _reorders(self) -> bool:
        return self.scans != [(False, False)]

    def _reordered(self, x: Tensor, columns: bool, backward: bool, back: bool = False) -> Tensor:
        """Return tokens [batch, tokens, ...] in the order of a scan; `back` undoes it."""
        count = self._side**2
        patches, rest = x[:, :count], x[:, count:]
        # Transposition and reversal are their own inverses. Undoing applies them in reverse order.
        if back and backward:
            patches = patches.flip(1)
        if columns:
            patches = patches.unflatten(1, (self._side, self._side)).transpose(1, 2).flatten(1, 2)
        if not back and backward:
            patches = patches.flip(1)
        return torch.cat([patches, rest], 1) if rest.shape[1] else patches


class ClassificationHead(nn.Module):
    """Compute logits = pooled(norm(hidden)) weight^T + bias: the mean over all patches, or the class token."""

    tensor_parallel_plan: ClassVar[dict[str, str]] = {"weight": "replicated", "bias": "replicated"}
    parameter_kinds: ClassVar[dict[str, str]] = {}

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.norm = Norm(config)
        self.weight = nn.Parameter(torch.empty(config.vocab_size, config.hidden_size))
        init_normal(self.weight, init_std(config))
        self.bias = nn.Parameter(torch.zeros(config.vocab_size))
        self._mean = config.pooling == "mean"
        self._flops = -(-2 * config.vocab_size * config.hidden_size // config.tokens_per_image)

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
        **statistics: Tensor,
    ) -> Tensor | tuple[Tensor, dict[str, Tensor]]:
        """Return the logits [batch, classes] of hidden [batch, tokens, hidden_size], or with `labels` the loss.

        The loss is the scalar sum(loss_weight * loss of an image) of `classification_loss`. labels: [batch] int. loss_weight:
        [batch], None for one everywhere. num_correct: a scalar to which the weight of the correctly classified images is
        added. statistics: arguments of `classification_loss` and `add_statistics`. The state is empty. Raises ValueError for
        weights of another shape, and on the CPU for a label that is no class.
        """
        hidden = self.norm(hidden)
        pooled = hidden.mean(1) if self._mean else hidden[:, -1]
        out = F.linear(pooled, self.weight, self.bias)
        if labels is not None:
            logits = to_accumulation_dtype(out)
            classes = len(self.weight)
            # On a GPU the host would wait for the labels.
            if labels.device.type == "cpu" and len(wrong := labels[(labels < 0) | (labels >= classes)]):
                raise ValueError(
                    f"label {int(wrong[0])}: allowed are 0 to {classes - 1}, the classes of model.vocab_size"
                )
            weight = torch.ones_like(labels, dtype=logits.dtype) if loss_weight is None else loss_weight
            if weight.shape != labels.shape:
                raise ValueError(f"loss_weight {list(weight.shape)}: expected {list(labels.shape)}, one per image")
            add_statistics(logits.detach(), labels, weight, num_correct, **_named(statistics, "num_top5", "confusion"))
            targets = _named(statistics, "targets", "teacher", "temperature")
            out = (weight * classification_loss(logits, labels, **targets)).sum()
        return (out, {}) if return_state else out

    def flops_per_token(self, length: int) -> int:
        """Return the forward FLOPs per token, two per multiply-add. The projection runs once per image."""
        return self._flops


def classification_loss(
    logits: Tensor,
    labels: Tensor,
    targets: Tensor | None = None,
    teacher: Tensor | None = None,
    temperature: Tensor | None = None,
) -> Tensor:
    """Return the loss of every image, [batch]: -sum(targets log p) + sum(teacher (log teacher - log p_tau)).

    logits: [batch, classes]; p = softmax(logits), p_tau = softmax(logits / temperature). labels: [batch] int, used without
    targets. targets: [batch, classes], the distribution of smoothed labels. teacher: [batch, classes], the teacher's
    distribution times the weight of its loss, which is DeiT's soft distillation. temperature: [batch], None for one everywhere.
    """
    log_p = logits.log_softmax(-1)
    loss = F.nll_loss(log_p, labels, reduction="none") if targets is None else -(targets * log_p).sum(-1)
    if teacher is None:
        return loss
    soft = log_p if temperature is None else (logits / temperature[:, None]).log_softmax(-1)
    share = teacher / teacher.sum(-1, keepdim=True).clamp_min(torch.finfo(teacher.dtype).tiny)
    return loss + (torch.xlogy(teacher, share) - teacher * soft).sum(-1)


def add_statistics(
    logits: Tensor,
    labels: Tensor,
    weight: Tensor,
    num_correct: Tensor | None = None,
    num_top5: Tensor | None = None,
    confusion: Tensor | None = None,
) -> None:
    """Add the weight of correct images to scalars, and of all images to confusion [classes (label), classes (predicted)].

    num_top5: images whose label is among the five highest logits.
    """
    predicted = logits.argmax(-1)
    if num_correct is not None:
        num_correct += ((predicted == labels) * weight).sum()
    if num_top5 is not None:
        highest = logits.topk(min(5, logits.shape[-1])).indices
        num_top5 += ((highest == labels[:, None]).any(-1) * weight).sum()
    if confusion is not None:
        confusion.index_put_((labels, predicted), weight.to(confusion.dtype), accumulate=True)


def _named(values: dict[str, Tensor], *names: str) -> dict[str, Tensor]:
    return {name: values[name] for name in names if name in values}
