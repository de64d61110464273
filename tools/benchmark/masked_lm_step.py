"""Measure training steps of LION's masked models and of BERT with softmax attention (PyTorch's SDPA), in one run.

A step is the trainer's: forward, loss and accuracy of masked tokens, backward, AdamW. 30 % of the tokens are masked, without
padding. The models of a shape take turns for several rounds, so that a machine that slows down affects all of them.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megatron_lite.config.loader import ConfigError, load_config
from models.config import ModelConfig

from .report import machine, plot_lines, table, write_csv
from .timing import timed

CONFIGS = Path(__file__).parents[2] / "configs"
MODELS = ("bert", "lion_lit", "lion_d", "lion_s")
MASK, FIRST_WORD = 103, 1000  # BERT's vocabulary: the id of [MASK] and of the first word


@dataclass(frozen=True)
class Timing:
    """Hold the seconds of one model's timed steps at one shape, the peak GiB (None on a CPU) and the last loss."""

    seconds: list[float]
    gib: float | None
    loss: float


def run(
    output: Path, size: str, shapes: Sequence[tuple[int, int]], steps: int, rounds: int, overrides: Sequence[str]
) -> None:
    """Print the table and write masked.csv, after each shape, and masked.png.

    shapes: (length, batch). Raises ValueError for an unknown size.
    """
    rows: list[dict[str, Any]] = []
    for length, batch in shapes:
        timings: dict[str, list[Timing]] = {name: [] for name in MODELS}
        for _ in range(rounds):
            for name in MODELS:
                timings[name].append(_measure(name, size, length, batch, steps, overrides))
        median = {name: statistics.median(s for t in of_model for s in t.seconds) for name, of_model in timings.items()}
        for name, of_model in timings.items():
            by_round = [statistics.median(t.seconds) for t in of_model]
            rows.append(
                {
                    "method": name,
                    "length": length,
                    "batch": batch,
                    "ms per step": 1e3 * median[name],
                    "time / bert": median[name] / median["bert"],
                    "range of rounds": (max(by_round) - min(by_round)) / median[name],
                    "tokens / s": length * batch / median[name],
                    "peak GiB": of_model[0].gib,
                    "loss": of_model[-1].loss,
                }
            )
            print(f"{name} {length} x {batch}: {1e3 * median[name]:.2f} ms", flush=True)
        write_csv(output / "masked.csv", rows)
    title = f"Masked models, {size}, training step"
    print(table(rows, title))
    panels = {"time / bert": "step time / BERT's", "ms per step": "ms per step"}
    if rows[0]["peak GiB"] is not None:
        panels["peak GiB"] = "peak GiB"
    plot_lines(output / "masked.png", rows, panels, f"{title}, {machine()}", batches=True)


def _measure(name: str, size: str, length: int, batch: int, steps: int, overrides: Sequence[str]) -> Timing:
    from megatron_lite.parallel.grid import init_grid
    from tools.loading.engine import build_engine

    file = CONFIGS / f"{name}_{size}.yml"
    if not file.is_file():
        raise ValueError(f"--size {size}: {file} does not exist; allowed are base, large")
    settings = [
        f"batch.sequence_length={length}",
        f"batch.micro_batch_size={batch}",
        f"batch.global_batch_size={batch}",
        *overrides,
    ]
    try:
        positions = load_config([file], overrides, model_type=ModelConfig, world_size=1).model.max_positions
        if positions is not None and positions < length:
            settings.append(f"model.max_positions={length}")
        config = load_config([file], settings, model_type=ModelConfig, world_size=1)
    except ConfigError as error:
        raise ValueError(str(error)) from error
    if config.model.vocab_size <= FIRST_WORD:
        raise ValueError(f"model.vocab_size = {config.model.vocab_size}: allowed are values >= {FIRST_WORD + 1}")
    grid = init_grid("auto")
    on_gpu = grid.device.type == "cuda"
    engine = build_engine(config, grid, "bf16" if on_gpu else "fp32")
    generator = torch.Generator().manual_seed(0)
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    times, loss = [], 0.0
    for _ in range(steps + 3):
        tokens = torch.randint(FIRST_WORD, config.model.vocab_size, (batch, length), generator=generator)
        predicted = torch.rand(batch, length, generator=generator) < 0.30
        sample = {"tokens": tokens.masked_fill(predicted, MASK), "labels": tokens.masked_fill(~predicted, -100)}
        batch_of_step = [{**sample, "loss_weight": predicted.float()}]
        step, seconds = timed(partial(engine.train_step, batch_of_step, lr=1e-5), cuda=on_gpu)
        loss = step.loss
        times.append(seconds)
    peak = torch.cuda.max_memory_allocated() / 2**30 if on_gpu else None
    engine.close()
    del engine
    gc.collect()
    if on_gpu:
        torch.cuda.empty_cache()
    return Timing(times[3:], peak, loss)
