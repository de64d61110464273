"""Count the model FLOPs of a training step, and find the peak FLOP/s of a device for MFU.

MFU = tokens/s x training FLOPs per token / (peak FLOP/s of one device x devices), as in PaLM (Chowdhery et al. 2022,
appendix B). Recomputation by activation checkpointing does not count.
"""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Iterable
from typing import Protocol

import torch

from megatron_lite.dtypes import DTYPES


class Layer(Protocol):
    """A layer that reports its FLOPs."""

    def flops_per_token(self, length: int) -> int:
        """Return the forward FLOPs per token in a sequence of `length` tokens. A multiply-add is two FLOPs."""
        ...


def training_flops_per_token(layers: Iterable[Layer], length: int, predicted_fraction: float = 1.0) -> float:
    """Return the training FLOPs per token at sequence length `length`: three times the forward pass.

    The backward pass has two matmuls per forward matmul, one for the gradient of each operand.
    predicted_fraction: as in `forward_flops`.
    """
    return 3 * sum(forward_flops(layers, length, predicted_fraction))


def forward_flops(layers: Iterable[Layer], length: int, predicted_fraction: float = 1.0) -> list[float]:
    """Return the forward FLOPs per token of every layer.

    Args:
        layers: all layers; the last one is the language model head.
        predicted_fraction: fraction of the positions that have a label. The head runs at these positions only.
    """
    *body, head = (float(layer.flops_per_token(length)) for layer in layers)
    return [*body, head * predicted_fraction]


def peak_flops(device: torch.device, dtype: str) -> float:
    """Return the peak FLOP/s of one device.

    For a GPU in `PEAK_TERAFLOPS` this is the dense figure of the data sheet. "fp32" is the TF32 figure if
    `torch.set_float32_matmul_precision` allows TF32. For any other device (CPU, unlisted GPU, GPU slice) it is measured with
    `measure_peak_flops`. A measured peak is lower than a data sheet figure, so the MFU is higher.

    Args:
        device: "cpu" or "cuda".
        dtype: "bf16", "fp16" or "fp32".
    """
    if device.type == "cuda":
        tf32 = dtype == "fp32" and torch.get_float32_matmul_precision() != "highest"
        listed = listed_peak_flops(torch.cuda.get_device_name(device), "tf32" if tf32 else dtype)
        if listed is not None:
            return listed
    return measure_peak_flops(device, dtype)


def listed_peak_flops(device_name: str, dtype: str) -> float | None:
    """Return the FLOP/s in the table for a name of `torch.cuda.get_device_name`, or None.

    An entry matches if the name holds all its words. The entry with the most words wins: "H100 PCIe" before "H100".
    dtype: "bf16", "fp16", "tf32" or "fp32".
    """
    words = set(re.split(r"[\s\-]+", device_name.lower()))
    if words & _OTHER_CHIPS:
        return None
    matches = [key for key in PEAK_TERAFLOPS if set(key.lower().split()) <= words]
    if not matches:
        return None
    figures = PEAK_TERAFLOPS[max(matches, key=lambda key: len(key.split()))]
    value = figures.get(dtype)
    return None if value is None else value * 1e12


@functools.cache
def measure_peak_flops(device: torch.device, dtype: str, seconds: float = 0.5) -> float:
    """Return the FLOP/s of the fastest of several square matmuls. Measured once per process.

    Args:
        dtype: "bf16", "fp16" or "fp32".
        seconds: duration of the measurement; at least two matmuls run.
    """
    size = 8192 if device.type == "cuda" else 1024
    # Random, because a GPU multiplies constants faster. An own generator leaves the random state of the run unchanged.
    generator = torch.Generator(device).manual_seed(0)
    a, b = (torch.rand(size, size, device=device, generator=generator).to(DTYPES[dtype]) for _ in range(2))
    fastest = float("inf")
    runs, end = 0, time.perf_counter() + seconds
    while runs < 2 or time.perf_counter() < end:
        _synchronize(device)
        start = time.perf_counter()
        torch.mm(a, b)
        _synchronize(device)
        fastest = min(fastest, time.perf_counter() - start)
        runs += 1
    return 2 * size**3 / fastest


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# Dense TFLOP/s from the data sheets of the vendors: tensor or matrix cores with float32 accumulation, except fp32. Data
# sheets give the sparse figure for most newer chips; the table holds half of it.
#   V100, T4               NVIDIA data sheets "V100 Tensor Core GPU" (2020), "T4" (2019); no bf16
#   A100, A800, A30        "NVIDIA A100 Tensor Core GPU" (2021), "A30" (2022)
#   A10, A40, RTX A6000    "NVIDIA A10", "A40", "RTX A6000" data sheets (2021)
#   RTX 3090, RTX 4090     NVIDIA Ampere GA102 and Ada GPU architecture whitepapers (float32 accumulation is half rate)
#   RTX 5090               NVIDIA RTX Blackwell GPU architecture whitepaper (2025)
#   L4, L40, L40S, 6000 Ada  NVIDIA data sheets (2023)
#   H100, H800, H200, H20, GH200  "NVIDIA H100 Tensor Core GPU", "H200", "GH200" data sheets; Hopper whitepaper
#   B100, B200, GB200      NVIDIA Blackwell architecture technical brief (2024), HGX and NVL72 tables
#   MI250X                 AMD "Instinct MI250X" data sheet; one device is one of its two dies, so half
#   MI300X, MI325X, MI355X AMD "Instinct MI300X", "MI325X", "MI355X" data sheets
PEAK_TERAFLOPS: dict[str, dict[str, float]] = {
    "V100": {"fp16": 125.0, "fp32": 15.7},
    "T4": {"fp16": 65.0, "fp32": 8.1},
    "A10": {"bf16": 125.0, "fp16": 125.0, "tf32": 62.5, "fp32": 31.2},
    "A30": {"bf16": 165.0, "fp16": 165.0, "tf32": 82.0, "fp32": 10.3},
    "A40": {"bf16": 149.7, "fp16": 149.7, "tf32": 74.8, "fp32": 37.4},
    "A100": {"bf16": 312.0, "fp16": 312.0, "tf32": 156.0, "fp32": 19.5},
    "A800": {"bf16": 312.0, "fp16": 312.0, "tf32": 156.0, "fp32": 19.5},
    "RTX A6000": {"bf16": 154.8, "fp16": 154.8, "tf32": 77.4, "fp32": 38.7},
    "RTX 3090": {"bf16": 71.0, "fp16": 71.0, "tf32": 35.6, "fp32": 35.6},
    "RTX 4090": {"bf16": 165.2, "fp16": 165.2, "tf32": 82.6, "fp32": 82.6},
    "RTX 5090": {"bf16": 209.5, "fp16": 209.5, "tf32": 104.8, "fp32": 104.8},
    "RTX 6000 Ada": {"bf16": 364.2, "fp16": 364.2, "tf32": 182.1, "fp32": 91.1},
    "L4": {"bf16": 121.0, "fp16": 121.0, "tf32": 60.0, "fp32": 30.3},
    "L40": {"bf16": 181.0, "fp16": 181.0, "tf32": 90.5, "fp32": 90.5},
    "L40S": {"bf16": 362.0, "fp16": 362.0, "tf32": 183.0, "fp32": 91.6},
    "H100": {"bf16": 989.0, "fp16": 989.0, "tf32": 494.5, "fp32": 67.0},
    "H100 PCIe": {"bf16": 756.5, "fp16": 756.5, "tf32": 378.0, "fp32": 51.0},
    "H100 NVL": {"bf16": 835.5, "fp16": 835.5, "tf32": 417.5, "fp32": 60.0},
    "H800": {"bf16": 989.0, "fp16": 989.0, "tf32": 494.5, "fp32": 67.0},
    "H20": {"bf16": 148.0, "fp16": 148.0, "tf32": 74.0, "fp32": 44.0},
    "H200": {"bf16": 989.0, "fp16": 989.0, "tf32": 494.5, "fp32": 67.0},
    "H200 NVL": {"bf16": 835.5, "fp16": 835.5, "tf32": 417.5, "fp32": 60.0},
    "GH200": {"bf16": 989.0, "fp16": 989.0, "tf32": 494.5, "fp32": 67.0},
    "B100": {"bf16": 1750.0, "fp16": 1750.0, "tf32": 900.0, "fp32": 60.0},
    "B200": {"bf16": 2250.0, "fp16": 2250.0, "tf32": 1100.0, "fp32": 80.0},
    "GB200": {"bf16": 2500.0, "fp16": 2500.0, "tf32": 1250.0, "fp32": 90.0},
    "MI250X": {"bf16": 191.5, "fp16": 191.5, "fp32": 47.9},
    "MI300X": {"bf16": 1307.4, "fp16": 1307.4, "tf32": 653.7, "fp32": 163.4},
    "MI325X": {"bf16": 1307.4, "fp16": 1307.4, "tf32": 653.7, "fp32": 163.4},
    "MI355X": {"bf16": 2516.6, "fp16": 2516.6, "fp32": 157.3},
}
# Words in a device name that rule out a match: another chip, or a slice of one.
_OTHER_CHIPS = {"laptop", "mobile", "max", "mig", "d", "ti", "super"}
