"""Measure every mixer and softmax attention at one model shape: forward, backward, tokens per second, memory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from tqdm import tqdm

from data.progress import ProgressBar
from models.config import ModelConfig
from models.mixers import MIXERS

from ..loading.triton_autotune import tune_side_by_side, without_tuning
from .report import machine, plot_bars, table, write_csv
from .timing import Step, host_ms, launched_ms, peak_gib

# Mixer options, besides the defaults, that select another operator or kernel.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "lion, both directions": ("lion", {"causal": False}),
    "lion, both directions, decays per key channel": ("lion", {"causal": False, "decay_per": "channel"}),
    "lion, both directions, decays per value channel": ("lion", {"causal": False, "decay_per": "value_channel"}),
    "lion-d, both directions": ("lion", {"variant": "d", "causal": False}),
    "lion-lit, both directions": ("lion", {"variant": "lit", "causal": False}),
}
PEER = "attention"


def run(
    output: Path,
    hidden: int,
    heads: int,
    length: int,
    batch: int,
    *,
    only: Sequence[str] | None = None,
    tuned: bool = True,
) -> None:
    """Print the table and write mixers.csv, after each mixer, and mixers.png.

    Raises ValueError for an unknown mixer or an impossible shape.
    """
    if tuned:
        tune_side_by_side()
    else:
        without_tuning()
    cases: dict[str, tuple[str, dict[str, Any]]] = {
        name: (name, {}) for name in [PEER, *(name for name in MIXERS if name != PEER)]
    } | VARIANTS
    if only is not None:
        if unknown := [name for name in only if name not in MIXERS]:
            raise ValueError(f"--only {' '.join(unknown)}: allowed are {', '.join(MIXERS)}")
        cases = {name: case for name, case in cases.items() if case[0] in (PEER, *only)}
    rows: list[dict[str, Any]] = []
    for method, (name, options) in (bar := ProgressBar(cases.items(), unit="mixer")):
        bar.set_postfix_str(method)
        try:
            config = ModelConfig(
                vocab_size=8,
                num_layers=2,
                hidden_size=hidden,
                num_heads=heads,
                mixers=(name,),
                mixer_options={name: options},
            )
        except ValueError as error:
            if name == PEER:
                raise
            tqdm.write(f"{method}: skipped, {error}")
            continue
        row = {"method": method, **measure_mixer(config, length, batch)}
        rows.append(row)
        row["time / attention"] = row["both ms"] and rows[0]["both ms"] and row["both ms"] / rows[0]["both ms"]
        write_csv(output / "mixers.csv", rows)
    dtype = "bf16" if torch.cuda.is_available() else "fp32"
    title = f"one mixer, d = {hidden}, {heads} heads, {length} x {batch} tokens, {dtype}{'' if tuned else ', FLA not tuned'}"
    print(table(rows, title))
    columns = {"both ms": "milliseconds, forward and backward"}
    if torch.cuda.is_available():
        columns["memory GiB"] = "GiB beyond input and parameters"
    plot_bars(output / "mixers.png", rows, columns, f"{title}, {machine()}")
    print(f"\n{output / 'mixers.csv'} and mixers.png written")


def measure_mixer(config: ModelConfig, length: int, batch: int) -> dict[str, Any]:
    """Return parameters, milliseconds forward and forward with backward, tokens per second and peak GiB.

    A value is None if the mixer runs out of memory.
    """
    cuda = torch.cuda.is_available()
    device, dtype = ("cuda", torch.bfloat16) if cuda else ("cpu", torch.float32)
    torch.manual_seed(0)
    with torch.device(device):
        name = config.mixers[0]
        mixer: nn.Module = MIXERS[name](config, 0, config.options_of(name)).to(dtype)
        x, dy = (torch.randn(batch, length, config.hidden_size, dtype=dtype) for _ in range(2))
    x.requires_grad_()
    leaves = [x, *mixer.parameters()]
    timer = launched_ms if cuda else host_ms

    def forward() -> None:
        with torch.no_grad():
            mixer(x)

    def both() -> None:
        mixer(x).backward(dy)

    row: dict[str, Any] = {"parameters": sum(p.numel() for p in mixer.parameters()), "forward ms": None}
    row |= {"both ms": None, "tokens / s": None, "memory GiB": None}
    try:
        row["forward ms"] = _time(timer, forward, [])
        row["both ms"] = milliseconds = _time(timer, both, leaves)
        row["tokens / s"] = 1e3 * batch * length / milliseconds
        row["memory GiB"] = peak_gib(both, leaves) if cuda else None
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
    return row


def _time(timer: Any, step: Step, leaves: list[torch.Tensor]) -> float:
    # Kernels are compiled and autotuned at their first call.
    step()
    return timer(step, leaves)
