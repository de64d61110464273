"""Build the classifier of a run: the project's blocks between an embedding and the mean over the tokens."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.config import ModelConfig
from models.language_model import LayerSpec, layer_specs
from models.layers.embedding import Embedding
from models.layers.norm import Norm
from models.layers.projections import linear
from models.mixers.lion import Lion
from models.operators.cross_entropy import IGNORED_LABEL

from .experiment import Run
from .network import WithDropout, look_up_filler, model_config, sines


class Classifier(WithDropout):
    """Classify a whole sequence: a norm, the mean over the tokens of the last block's output, and a projection.

    With `pairs` each row holds two texts side by side; the classifier reads both means, their difference and elementwise product.
    `positions` is ignored. The largest token id is padding. With `images` no token is padding, and the ids are grey pixels,
    which are projected as numbers. With `positions: sinusoidal` fixed sines and cosines are added to the embeddings. With
    `norm: batchnorm` all norms are BatchNorm.
    """

    def __init__(self, run: Run, classes: int, *, pairs: bool = False, images: bool = False) -> None:
        config = model_config(run)
        super().__init__(run)
        specs = layer_specs(config)[:-1]
        if images:
            specs[0] = LayerSpec("pixels", 0, partial(PixelEmbedding, config))
        self.embedding, *blocks = (spec.build(run.seed) for spec in specs)
        if not images:
            self.embedding.lookup = look_up_filler
        self.blocks = nn.ModuleList(blocks)
        self.norm: nn.Module = Norm(config)
        if run.network.get("norm") == "batchnorm":
            for block in blocks:
                block.norm1, block.norm2 = BatchNorm(config), BatchNorm(config)
            self.norm = BatchNorm(config)
        self.pairs, self.images = pairs, images
        inputs = (4 if pairs else 1) * config.hidden_size
        self.output = LayerSpec("classifier", len(specs), partial(linear, config, inputs, classes)).build(run.seed)
        self.pad = config.vocab_size - 1
        sinusoidal = run.network.get("positions") == "sinusoidal"
        vectors = sines(run.length, config.hidden_size) if sinusoidal else None
        self.register_buffer("positions", vectors, persistent=False)
        if run.network.get("first_weights") == "pytorch":
            _init_as_pytorch(self, run.seed)

    def loss(self, tokens: Tensor, positions: Tensor | None, labels: Tensor) -> Tensor:
        """Return the mean cross entropy over the labels [batch, 1] that are not IGNORED_LABEL."""
        logits = self.logits(tokens, positions, training=True)
        return F.cross_entropy(logits[:, 0], labels[:, 0], ignore_index=IGNORED_LABEL)

    def logits(self, tokens: Tensor, positions: Tensor | None, *, training: bool = False) -> Tensor:
        """Return logits [batch, 1, classes] in float32 for tokens [batch, length].

        training: use dropout, and the statistics of the batch in BatchNorm.
        """
        self._dropout_active = training
        self.train(training)  # BatchNorm reads it
        if self.pairs:
            tokens = tokens.view(2 * tokens.shape[0], -1)
        real, x = None if self.images else tokens != self.pad, self.embedding(tokens)
        if self.positions is not None:
            x = x + self.positions[: tokens.shape[1]]
        x = self._dropout(x, self.embedding_dropout)
        x = self._through(self.blocks, x, real)
        x = self.norm(x).float()
        # Rows of padding only fill the last batch. Their labels are ignored.
        if real is None:
            mean = x.mean(1)
        else:
            mean = x.masked_fill(~real.unsqueeze(-1), 0.0).sum(1) / real.sum(1, keepdim=True).clamp_min(1)
        if self.pairs:
            first, second = mean.view(-1, 2, mean.shape[-1]).unbind(1)
            mean = torch.cat([first, second, first - second, first * second], -1)
        return F.linear(mean, self.output.weight.float()).unsqueeze(1)


class BatchNorm(nn.Module):
    """Normalize each channel over a batch and all its tokens, padding too (Ioffe and Szegedy 2015), as code for Long Range Arena.

    In evaluation `mean` and `variance` are used, moving averages in float32 over the training batches.
    """

    mean: Tensor
    variance: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        size = config.hidden_size
        self.eps = config.norm_eps
        self.weight, self.bias = nn.Parameter(torch.ones(size)), nn.Parameter(torch.zeros(size))
        self.register_buffer("mean", torch.zeros(size))
        self.register_buffer("variance", torch.ones(size))

    def forward(
        self, x: Tensor, delta: Tensor | None = None, return_sum: bool = False
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Return the norm of h = x + delta, and h with return_sum, as `models.layers.norm.Norm`."""
        h = x if delta is None else x + delta
        affine = self.weight.float(), self.bias.float()
        rows = F.batch_norm(h.flatten(0, -2), self.mean, self.variance, *affine, self.training, eps=self.eps)
        y = rows.view_as(h)
        return (y, h) if return_sum else y

    def _apply(self, fn: Callable[..., Tensor], recurse: bool = True) -> BatchNorm:
        super()._apply(fn, recurse)
        self.mean, self.variance = self.mean.float(), self.variance.float()  # also in a network of 16 bits
        return self


class PixelEmbedding(Embedding):
    """Project grey pixels p, 0 to 255, to w (p - 127.5) / 64 + b, as code for Long Range Arena (S4, S5); `weight` holds w and b.

    The initial weights are those of PyTorch's linear layer of one input.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(replace(config, vocab_size=2))
        nn.init.uniform_(self.weight, -1, 1)
        self.lookup = _project


def _project(pixels: Tensor, weight: Tensor, vectors: Tensor | None) -> Tensor:
    """Return [batch, length, size] for pixels [batch, length]. Computed in float32: bf16 has 8 bits."""
    w, b = weight.float()
    x = torch.addcmul(b, ((pixels.float() - 127.5) / 64).unsqueeze(-1), w).to(weight.dtype)
    return x if vectors is None else x + vectors


@torch.no_grad()
def _init_as_pytorch(network: Classifier, seed: int) -> None:
    """Initialize as nn.Embedding and nn.Linear do: N(0, 1), and uniform up to 1 / sqrt(inputs).

    Layers of LION whose initial weights `init_std` and `value_init` define are not changed.
    """
    generator = torch.Generator().manual_seed(seed)
    initialized = {layer for block in network.blocks for layer in _layers_with_own_weights(block.mixer)}
    if not network.images:
        nn.init.normal_(network.embedding.weight, generator=generator)
    for module in network.modules():
        if isinstance(module, nn.Linear) and module not in initialized:
            nn.init.kaiming_uniform_(module.weight, a=math.sqrt(5), generator=generator)


def _layers_with_own_weights(mixer: nn.Module) -> list[nn.Module]:
    if not isinstance(mixer, Lion):
        return []
    layers = [mixer.q_proj, mixer.k_proj] if mixer.options.init_std is not None else []
    return [*layers, mixer.v_proj] if mixer.options.value_init == "zero_order_hold" else layers
