"""Measure training steps of LION's masked models and of BERT with softmax attention (PyTorch's SDPA), in one run.

30 % of the tokens are masked, without padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from .step_rounds import Timing, compare_models, time_steps
from .training_models import step_config

CONFIGS = Path(__file__).parents[2] / "configs"
MODELS = ("bert", "lion_lit", "lion_d", "lion_s")
MASK, FIRST_WORD = 103, 1000  # BERT's vocabulary: the id of [MASK] and of the first word


def run(
    output: Path, size: str, shapes: Sequence[tuple[int, int]], steps: int, rounds: int, overrides: Sequence[str]
) -> None:
    """Print the table and write masked.csv, after each shape, and masked.png.

    shapes: (length, batch). Raises ValueError for an unknown size.
    """
    compare_models(
        output / "masked",
        f"Masked models, {size}, training step",
        MODELS,
        [{"length": length, "batch": batch} for length, batch in shapes],
        rounds,
        lambda name, shape: _measure(name, size, shape["length"], shape["batch"], steps, overrides),
        lambda shape: ("tokens", shape["length"] * shape["batch"]),
    )


def _measure(name: str, size: str, length: int, batch: int, steps: int, overrides: Sequence[str]) -> Timing:
    file = CONFIGS / f"{name}_{size}.yml"
    if not file.is_file():
        raise ValueError(f"--size {size}: {file} does not exist; allowed are base, large")
    settings = [f"batch.sequence_length={length}", *overrides]
    positions = step_config(file, overrides, batch).model.max_positions
    if positions is not None and positions < length:
        settings.append(f"model.max_positions={length}")
    config = step_config(file, settings, batch)
    if config.model.vocab_size <= FIRST_WORD:
        raise ValueError(f"model.vocab_size = {config.model.vocab_size}: allowed are values >= {FIRST_WORD + 1}")

    def micro_batch(generator: torch.Generator) -> dict[str, Tensor]:
        tokens = torch.randint(FIRST_WORD, config.model.vocab_size, (batch, length), generator=generator)
        predicted = torch.rand(batch, length, generator=generator) < 0.30
        sample = {"tokens": tokens.masked_fill(predicted, MASK), "labels": tokens.masked_fill(~predicted, -100)}
        return {**sample, "loss_weight": predicted.float()}

    return time_steps(config, micro_batch, steps)
