"""Measure the peak memory of this process."""

from __future__ import annotations

import resource

import torch


def peak_memory_gib(device: torch.device) -> float:
    """Return the peak memory in GiB: allocated by torch on a GPU, resident size of the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # kilobytes on Linux
