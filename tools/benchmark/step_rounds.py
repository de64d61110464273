"""Time training steps of several models in turns, so that a machine that slows down affects all of them.

A step is the trainer's: forward, loss, backward, AdamW.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from .report import machine, plot_lines, table, write_csv
from .timing import timed

WARM_UP = 3


@dataclass(frozen=True)
class Timing:
    """Hold the seconds of one model's timed steps at one shape, the peak GiB (None on a CPU) and the last loss."""

    seconds: list[float]
    gib: float | None
    loss: float


def compare_models(
    output: Path,
    title: str,
    models: Sequence[str],
    shapes: Sequence[dict[str, int]],
    rounds: int,
    measure: Callable[[str, dict[str, int]], Timing],
    speed: Callable[[dict[str, int]], tuple[str, int]],
) -> None:
    """Print the table and write `output`.csv, after each shape, and `output`.png.

    Times are also shown relative to the first model's.

    Args:
        shapes: the columns that describe each shape, with "length" and "batch".
        measure: model, shape -> the times of one round.
        speed: shape -> (unit, units per step), such as ("images", 256).
    """
    rows: list[dict[str, Any]] = []
    first = models[0]
    for shape in shapes:
        timings: dict[str, list[Timing]] = {name: [] for name in models}
        for _ in range(rounds):
            for name in models:
                timings[name].append(measure(name, shape))
        median = {name: statistics.median(s for t in of_model for s in t.seconds) for name, of_model in timings.items()}
        unit, amount = speed(shape)
        for name, of_model in timings.items():
            by_round = [statistics.median(t.seconds) for t in of_model]
            rows.append(
                {
                    "method": name,
                    **shape,
                    "ms per step": 1e3 * median[name],
                    f"time / {first}": median[name] / median[first],
                    "range of rounds": (max(by_round) - min(by_round)) / median[name],
                    f"{unit} / s": amount / median[name],
                    "peak GiB": of_model[0].gib,
                    "loss": of_model[-1].loss,
                }
            )
            print(f"{name} {' x '.join(map(str, shape.values()))}: {1e3 * median[name]:.2f} ms", flush=True)
        write_csv(output.with_suffix(".csv"), rows)
    print(table(rows, title))
    panels = {f"time / {first}": f"step time / {first}", "ms per step": "ms per step"}
    if rows[0]["peak GiB"] is not None:
        panels["peak GiB"] = "peak GiB"
    plot_lines(output.with_suffix(".png"), rows, panels, f"{title}, {machine()}", batches=True)


def time_steps(config: Any, batch: Callable[[torch.Generator], dict[str, torch.Tensor]], steps: int) -> Timing:
    """Return the times of `steps` steps after the warm-up. batch: returns the micro-batch of a step; its time is not counted."""
    from megatron_lite.parallel.grid import init_grid
    from tools.loading.engine import build_engine

    grid = init_grid("auto")
    on_gpu = grid.device.type == "cuda"
    engine = build_engine(config, grid, "bf16" if on_gpu else "fp32")
    generator = torch.Generator().manual_seed(0)
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    times, loss = [], 0.0
    for _ in range(steps + WARM_UP):
        step, seconds = timed(partial(engine.train_step, [batch(generator)], lr=1e-5), cuda=on_gpu)
        loss = step.loss
        times.append(seconds)
    peak = torch.cuda.max_memory_allocated() / 2**30 if on_gpu else None
    engine.close()
    del engine
    gc.collect()
    if on_gpu:
        torch.cuda.empty_cache()
    return Timing(times[WARM_UP:], peak, loss)
