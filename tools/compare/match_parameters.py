"""Find the MLP width that gives a model as many parameters as another model."""

from __future__ import annotations

from dataclasses import replace

from models.config import ModelConfig
from models.language_model import count_parameters


def embedding_parameters(config: ModelConfig) -> int:
    """Return the number of parameters of embedding and output projection; of an image classifier of patches and classes."""
    if config.image_size is not None:
        return (3 * config.patch_size**2 + config.vocab_size) * config.hidden_size
    return (1 if config.tie_embeddings else 2) * config.vocab_size * config.hidden_size


def equal_width(config: ModelConfig, target: int, *, multiple: int = 16, tolerance: float = 0.01) -> int:
    """Return the MLP width, a multiple of `multiple`, whose parameter count without embeddings is nearest to `target`.

    Raises ValueError if the relative difference from `target` is larger than `tolerance`.
    """
    sizes = [
        count_parameters(replace(config, intermediate_size=width)) - embedding_parameters(config)
        for width in (multiple, 2 * multiple)
    ]
    per_step = sizes[1] - sizes[0]  # the count is linear in the width
    width = multiple * max(1, 1 + round((target - sizes[0]) / per_step))
    reached = sizes[0] + (width // multiple - 1) * per_step
    if abs(reached - target) > tolerance * target:
        remedy = "Lower `multiple`, or change layers or hidden_size"
        if sizes[0] - per_step >= target:
            remedy = "The other layers alone are too large: raise the target, or lower layers or hidden_size"
        raise ValueError(
            f"{'+'.join(config.mixers)} with hidden_size {config.hidden_size}: the target is {target:,} parameters without "
            f"embeddings; the nearest MLP width {width} gives {reached:,}, which is not within {100 * tolerance:g} %. {remedy}"
        )
    return width
