"""The width of the MLP that gives a model as many parameters as another."""

from __future__ import annotations

from dataclasses import replace

from models.config import ModelConfig
from models.language_model import count_parameters


def equal_width(config: ModelConfig, wanted: int, *, multiple: int = 16, tolerance: float = 0.01) -> int:
    """The multiple of `multiple` nearest to `wanted` parameters, those of the embeddings left out.

    Raises ValueError where even that is further from `wanted` than `tolerance` of it.
    """
    tables = (1 if config.tie_embeddings else 2) * config.vocab_size * config.hidden_size
    sizes = [count_parameters(replace(config, intermediate_size=width)) - tables for width in (multiple, 2 * multiple)]
    a_step = sizes[1] - sizes[0]  # the count is linear in the width
    width = multiple * max(1, 1 + round((wanted - sizes[0]) / a_step))
    reached = sizes[0] + (width // multiple - 1) * a_step
    if abs(reached - wanted) > tolerance * wanted:
        raise ValueError(
            f"{'+'.join(config.mixers)} with d = {config.hidden_size}: {wanted:,} parameters without embeddings are wanted; "
            f"the nearest MLP, {width} wide, gives {reached:,}, which is not within {tolerance:.1%}. Lower "
            "equal_parameters.multiple, or give the reference a wider MLP"
        )
    return width
