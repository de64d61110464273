"""Parse device names of command lines."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # torch is imported where it is used, so that --help answers at once
    import torch


def device_of(name: str) -> torch.device:
    """Return the device for "auto" (a GPU if there is one), "cpu", "cuda" or "cuda:1".

    Raises ValueError for another name and for a GPU that does not exist.
    """
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "auto":
        return torch.device("cuda" if count else "cpu")
    kind, _, index = name.partition(":")
    if name == "cpu" or (kind == "cuda" and (not index or index.isdecimal()) and int(index or 0) < count):
        return torch.device(name)
    available = ", ".join(["cpu", *(f"cuda:{i}" for i in range(count))])
    raise ValueError(f"the device {name!r} is not here: allowed are auto, {available}")


def use_device(name: str) -> torch.device:
    """Return the device with this name, of CUDA with its index, and make it the current device. Raises as `device_of`."""
    import torch

    device = device_of(name)
    if device.type == "cuda":
        device = torch.device("cuda", device.index or 0)
        torch.cuda.set_device(device)
    return device
