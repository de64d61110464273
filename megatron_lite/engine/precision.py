"""Number formats by name, and the faster one of a machine."""

from __future__ import annotations

import time

import torch
from torch import nn

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}


def faster_dtype(device: torch.device, hidden_size: int, tokens: int) -> str:
    """Return "bf16" or "fp32", the faster one for matmuls of this model's size; always bf16 on CUDA.

    It is measured, because a CPU without bf16 instructions emulates them many times slower than float32.
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
