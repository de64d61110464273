"""Model FLOPs, and the peak FLOP/s that they are measured against.

MFU = tokens/s x training FLOPs a token / (peak FLOP/s of one device x devices), as PaLM defines it (Chowdhery et al.
2022, appendix B): FLOPs that the model needs; what activation checkpointing computes again does not count.
"""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Iterable
from typing import Protocol

import torch


class Layer(Protocol):
    """A layer that knows its cost."""

    def flops_per_token(self, length: int) -> int:
        """Forward FLOPs a token in a sequence of `length` tokens, two a multiply-add."""
        ...


def training_flops_per_token(layers: Iterable[Layer], length: int, predicted_fraction: float = 1.0) -> float:
    """FLOPs a token of one training step at sequence length `length`: the forward pass, and twice it backward.

    The backward pass multiplies once for the gradient of the input and once for the gradient of the weight (or of the
    other operand) for each product of the forward pass. predicted_fraction: as in `forward_flops`.
    """
    return 3 * sum(forward_flops(layers, length, predicted_fraction))


def forward_flops(layers: Iterable[Layer], length: int, predicted_fraction: float = 1.0) -> list[float]:
    """Forward FLOPs a token of every layer.

    Args:
        predicted_fraction: of the tokens at which a token is to be predicted. The last layer, the head, is needed there alone.
    """
    *body, head = (float(layer.flops_per_token(length)) for layer in layers)
    return [*body, head * predicted_fraction]


def peak_flops(device: torch.device, dtype: str) -> float:
    """Peak FLOP/s of one device.

    A GPU in `PEAK_TERAFLOPS` has its data sheet's dense figure; "fp32" there is the TF32 figure when
    `torch.set_float32_matmul_precision` allows TF32. Any other device (a CPU, a GPU that is not in the table or is a
    slice of one) is measured: the best of a few matrix products in half a second. Its MFU is then against what this
    machine's matrix products reach, which is less than its data sheet would say.

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
    """The table's FLOP/s for a name as `torch.cuda.get_device_name` gives it, or None.

    The entry with the most words wins, each of which the name must hold: "H100 PCIe" before "H100". dtype: "bf16",
    "fp16", "tf32" or "fp32".
    """
    words = set(re.split(r"[\s\-]+", device_name.lower()))
    if words & _OTHER_CHIPS:
        return None
    fitting = [key for key in PEAK_TERAFLOPS if set(key.lower().split()) <= words]
    if not fitting:
        return None
    figures = PEAK_TERAFLOPS[max(fitting, key=lambda key: len(key.split()))]
    value = figures.get(dtype)
    return None if value is None else value * 1e12


@functools.cache
def measure_peak_flops(device: torch.device, dtype: str, seconds: float = 0.5) -> float:
    """FLOP/s of the fastest of the square matrix products that fit into `seconds` (at least two); measured once a process.

    Args:
        dtype: "bf16", "fp16" or "fp32".
    """
    size = 8192 if device.type == "cuda" else 1024
    kind = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[dtype]
    # Random, because a GPU multiplies constants faster; of a stream of its own, so that the run's stays where it is.
    stream = torch.Generator(device).manual_seed(0)
    a, b = (torch.rand(size, size, device=device, generator=stream).to(kind) for _ in range(2))
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


# Dense TFLOP/s (no structured sparsity; tensor or matrix cores with float32 accumulation, but for fp32) from the
# vendors' data sheets, which print the sparse figure for most of the newer chips: half of it is given here.
#   V100, T4               NVIDIA data sheets "V100 Tensor Core GPU" (2020), "T4" (2019); no bf16
#   A100, A800, A30        "NVIDIA A100 Tensor Core GPU" (2021), "A30" (2022)
#   A10, A40, RTX A6000    "NVIDIA A10", "A40", "RTX A6000" data sheets (2021)
#   RTX 3090, RTX 4090     NVIDIA Ampere GA102 and Ada GPU architecture whitepapers (float32 accumulation is half rate)
#   RTX 5090               NVIDIA RTX Blackwell GPU architecture whitepaper (2025)
#   L4, L40, L40S, 6000 Ada  NVIDIA data sheets (2023)
#   H100, H800, H200, H20, GH200  "NVIDIA H100 Tensor Core GPU", "H200", "GH200" data sheets; Hopper whitepaper
#   B100, B200, GB200      NVIDIA Blackwell architecture technical brief (2024), HGX and NVL72 tables
#   MI250X                 AMD "Instinct MI250X" data sheet; one device is one of its two dies, hence half
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
# Words that make a name another chip, or a part of one, than the entry that it also holds.
_OTHER_CHIPS = {"laptop", "mobile", "max", "mig", "d", "ti", "super"}
