"""Number formats by name."""

from __future__ import annotations

import torch

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}


def torch_name(dtype: torch.dtype) -> str:
    """Return PyTorch's own name of a format, such as "float32"."""
    return str(dtype).removeprefix("torch.")
