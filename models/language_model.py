"""A language model, causal or masked, or an image classifier, as a list of layers and as one module."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from .block import Block
from .config import ModelConfig
from .layers.embedding import Embedding
from .layers.lm_head import Head


@dataclass(frozen=True)
class LayerSpec:
    """Describe one layer before it is built.

    Attributes:
        name: canonical name.
        index: position in the model.
        create: returns the layer with weights from the global random state.
        tied_to: name of the layer whose `weight` it shares; None for none.
    """

    name: str
    index: int
    create: Callable[[], nn.Module]
    tied_to: str | None = None

    def build(self, seed: int | None = None) -> nn.Module:
        """Return the layer, with initial weights that depend on (seed, index) only.

        The weights are drawn on the default device (`with torch.device("cuda")`); CPU and CUDA draw different numbers. The
        global random state does not change. seed None: draw from the global random state instead.
        """
        if seed is None:
            return self.create()
        device = torch.get_default_device()
        digest = hashlib.sha256(f"{seed}/{self.index}".encode()).digest()
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            value = int.from_bytes(digest[:8], "little") >> 1
            torch.default_generator.manual_seed(value)
            if device.type == "cuda":
                with torch.cuda.device(device):
                    torch.cuda.manual_seed(value)
            return self.create()


def layer_specs(config: ModelConfig) -> list[LayerSpec]:
    """Return the layers from input to output: "embedding", "blocks.0", ..., "head"."""
    layers: tuple[type[nn.Module], ...] = Embedding, Block, Head
    if config.image_size is not None:
        from .image_classifier import ClassificationHead, ImageBlock, PatchEmbedding

        layers = PatchEmbedding, ImageBlock, ClassificationHead
    first, block, last = layers
    blocks = [LayerSpec(f"blocks.{i}", i + 1, partial(block, config, i)) for i in range(config.num_layers)]
    tied_to = "embedding" if config.tie_embeddings else None
    return [
        LayerSpec("embedding", 0, partial(first, config)),
        *blocks,
        LayerSpec("head", config.num_layers + 1, partial(last, config), tied_to),
    ]


def example_batch(config: ModelConfig, size: int, length: int) -> dict[str, Tensor]:
    """Return `size` samples of zeros on the default device: tokens (of an image classifier pixels), labels, loss_weight."""
    if config.image_size is not None:
        pixels = torch.zeros(size, 3, config.image_size, config.image_size)
        return {"tokens": pixels, "labels": torch.zeros(size, dtype=torch.int64), "loss_weight": torch.ones(size)}
    tokens = torch.zeros(size, length, dtype=torch.int64)
    return {"tokens": tokens, "labels": tokens, "loss_weight": torch.ones(size, length)}


class LanguageModel(nn.Module):
    """Hold the whole model in one process: `embedding`, `blocks`, `head`."""

    def __init__(self, config: ModelConfig, seed: int | None = None, layers: Sequence[nn.Module] | None = None) -> None:
        """Build the layers from `seed`, or use `layers`, in the order of `layer_specs`."""
        super().__init__()
        self.config = config
        specs = layer_specs(config)
        if layers is None:
            layers = [spec.build(seed) for spec in specs]
        self.embedding, *blocks, self.head = layers
        self.blocks = nn.ModuleList(blocks)
        if specs[-1].tied_to is not None:
            self.head.weight = self.embedding.weight

    def forward(
        self,
        tokens: Tensor,
        labels: Tensor | None = None,
        loss_weight: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        state: list[dict[str, Tensor]] | None = None,
        return_state: bool = False,
    ) -> Tensor | tuple[Tensor, list[dict[str, Tensor]]]:
        """Return logits [batch, length, vocab_size], or with `labels` the float32 scalar sum(loss_weight * nll).

        tokens: [batch, length] int. labels: [batch, length] int, already shifted; -100 is ignored. loss_weight: [batch,
        length] float, None for one everywhere. mask: [batch, length] bool, True for real tokens (left or right padding).
        cu_seqlens: [segments + 1] int, with batch 1. state: the new state of an earlier call with return_state=True, one
        dict per layer, embedding and head included.
        Of an image classifier: tokens are pixels [batch, 3, image_size, image_size], logits [batch, classes], labels and
        loss_weight [batch].
        """
        layer_states = None if state is None else state[:-1]  # the head has none
        x, new_state = self.hidden_states(
            tokens, mask=mask, cu_seqlens=cu_seqlens, state=layer_states, return_state=return_state
        )
        out = self.head(x, labels=labels, loss_weight=loss_weight)
        return (out, [*new_state, {}]) if return_state else out

    def hidden_states(
        self,
        tokens: Tensor,
        *,
        mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        state: list[dict[str, Tensor]] | None = None,
        return_state: bool = False,
    ) -> tuple[Tensor, list[dict[str, Tensor]]]:
        """Return the input of the head, [batch, length, hidden_size], and the new state; an empty one without return_state.

        Arguments as in `forward`. The state has one dict per layer, without the head's. Raises ValueError for a mask of another
        dtype or shape, and for a state of another number of layers.
        """
        if mask is not None and (mask.dtype != torch.bool or mask.shape != tokens.shape):
            raise ValueError(
                f"mask {mask.dtype} {list(mask.shape)}: expected torch.bool {list(tokens.shape)}, True for real tokens"
            )
        layers: list[nn.Module] = [self.embedding, *self.blocks]
        states: Sequence[dict[str, Tensor] | None] = [None] * len(layers) if state is None else state
        if len(states) != len(layers):
            raise ValueError(f"state of {len(states)} layers: the embedding and the blocks are {len(layers)}; give all")
        x, new_states = tokens, []
        for layer, layer_state in zip(layers, states, strict=True):
            x = layer(x, mask=mask, cu_seqlens=cu_seqlens, state=layer_state, return_state=return_state)
            if return_state:
                x, new_state = x
                new_states.append(new_state)
        return x, new_states

    def flops_per_token(self, length: int) -> int:
        """Return forward FLOPs per token at this sequence length, two per multiply-add."""
        layers = [self.embedding, *self.blocks, self.head]
        return sum(layer.flops_per_token(length) for layer in layers)


def count_parameters(config: ModelConfig) -> int:
    """Return the number of parameters, a tied matrix counted once. Allocates no memory for weights."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in LanguageModel(config).parameters())
