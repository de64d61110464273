"""The number formats of a machine, the faster one, and which layers multiply in FP8."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence

import torch
from torch import nn

from megatron_lite.config.fp8_schema import Fp8Config
from megatron_lite.dtypes import DTYPES
from megatron_lite.fp8.rowwise import ALIGNMENT
from megatron_lite.parallel.fp8_projections import select_projections


def faster_dtype(device: torch.device, hidden_size: int, tokens: int) -> str:
    """Return "bf16" or "fp32", the faster one for matmuls of this model's size; always bf16 on CUDA.

    It is measured, because a CPU without bf16 instructions emulates them many times slower than float32.
    tokens: of a micro-batch.
    """
    if device.type == "cuda":
        return "bf16"
    seconds = {}
    for name in ("fp32", "bf16"):
        x = torch.randn(min(tokens, 4096), hidden_size, dtype=DTYPES[name])
        w = torch.randn(4 * hidden_size, hidden_size, dtype=DTYPES[name])
        runs = []
        for _ in range(6):
            start = time.perf_counter()
            nn.functional.linear(x, w)
            runs.append(time.perf_counter() - start)
        seconds[name] = sorted(runs)[1]
    # bf16 also pays for conversions around the float32 gates: it must win clearly.
    return "bf16" if seconds["bf16"] < 0.7 * seconds["fp32"] else "fp32"


def check_dtype(dtype: str, device: torch.device) -> None:
    """Raise ValueError for fp16 on a CPU."""
    if dtype == "fp16" and device.type == "cpu":
        raise ValueError("precision.dtype = fp16 does not train on a CPU: bf16 and fp32 are allowed")


def is_fp8_layer(fp8: Fp8Config, index: int, count: int) -> bool:
    """Return whether layer `index` of `count` multiplies in FP8. The first layer is the embedding, the last the head."""
    return 0 < index < count - 1 and fp8.covers(index - 1, count - 2)


def fp8_summary(fp8: Fp8Config, layers: Sequence[nn.Module], ranks: int, dtype: str) -> str:
    """Return one line that names the projections in FP8 and those of the blocks that are not; empty without FP8.

    layers: all layers at full width. ranks: of a tensor-parallel group.

    Raises ValueError if no projection runs in FP8.
    """
    if fp8.recipe == "none":
        return ""
    selected: dict[str, None] = {}
    excluded: dict[str, dict[str, list[int]]] = {}  # reason -> name -> blocks
    having: Counter[str] = Counter()  # name -> number of blocks with this projection
    covered = [index for index in range(len(layers)) if is_fp8_layer(fp8, index, len(layers))]
    for index in covered:
        names, reasons = select_projections(layers[index], ranks)
        selected |= dict.fromkeys(names)
        having.update([*names, *reasons])
        for name, reason in reasons.items():
            excluded.setdefault(reason, {}).setdefault(name, []).append(index - 1)

    def listed(name: str, blocks: list[int]) -> str:
        of = f" of block{'s' if len(blocks) > 1 else ''} {', '.join(map(str, blocks))}"
        return name if len(blocks) == having[name] else name + of

    exclusions = "; ".join(
        f"{', '.join(listed(*entry) for entry in names.items())} ({reason})" for reason, names in excluded.items()
    )
    if not selected:
        raise ValueError(
            f"precision.fp8.recipe = {fp8.recipe}: no projection of this model can run in FP8: {exclusions}. "
            f"Choose widths per rank that are multiples of {ALIGNMENT}, or set precision.fp8.recipe=none"
        )
    line = f"FP8 ({fp8.recipe}) in {len(covered)} of {len(layers) - 2} blocks: {', '.join(selected)}"
    return f"{line}; in {dtype}: {exclusions}" if exclusions else line
