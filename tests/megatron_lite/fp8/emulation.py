"""FP8 rounding in float64 arithmetic, without torch's FP8 types."""

from __future__ import annotations

import torch
from torch import Tensor

# Mantissa bits, exponent of the smallest normal number, largest number.
FORMATS = {torch.float8_e4m3fn: (3, -6, 448.0), torch.float8_e5m2: (2, -14, 57344.0)}


def emulated(x: Tensor, dtype: torch.dtype = torch.float8_e4m3fn) -> Tensor:
    """Return x [rows, columns] rounded to `dtype` with one power of two per row as scale, float64."""
    mantissa, smallest, largest = FORMATS[dtype]
    wide = x.double()
    of_row = wide.abs().amax(1, keepdim=True)
    scale = torch.exp2(torch.ceil(torch.log2(of_row / largest))).where(of_row > 0, 1.0)
    scaled = wide / scale
    exponent = torch.floor(torch.log2(scaled.abs())).clamp(min=smallest)
    unit = torch.exp2(exponent - mantissa)
    return torch.round(scaled / unit) * unit * scale
