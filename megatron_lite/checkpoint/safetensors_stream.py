"""Write safetensors files one tensor at a time, so that memory holds only one tensor.

Format: eight bytes, little-endian, with the length of the header; the header, a JSON object from a tensor's name to its
dtype, shape and byte range, padded with spaces to a multiple of eight; the tensors' bytes, without gaps.
(https://github.com/huggingface/safetensors, "Format".)
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from megatron_lite.dtypes import torch_name
from megatron_lite.fault_tolerance.finite_check import is_finite

_NAMES = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


def write_tensors(
    path: Path,
    shapes: Mapping[str, tuple[int, ...]],
    tensors: Iterable[tuple[str, Tensor]],
    *,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Write `path` with `tensors` in the order of `shapes`, converted to `dtype`, and flush it to the disk.

    Raises:
        ValueError: a tensor that is not the next one of `shapes`, has another shape, or is not finite as `dtype`.
        OSError: the disk is full; the file is incomplete.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    expected, not_finite = iter(shapes.items()), list[str]()
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, tensor in tensors:
            if (name, tuple(tensor.shape)) != (wanted := next(expected, ("nothing", ()))):
                raise ValueError(f"{path}: got {name} {tuple(tensor.shape)}, expected {wanted[0]} {wanted[1]}")
            flat = tensor.detach().to("cpu", dtype).contiguous().reshape(-1)
            if not is_finite(flat):
                not_finite.append(name)
            file.write(flat.view(torch.uint8).numpy().data)
        if not_finite:
            kind = torch_name(dtype)
            raise ValueError(
                f"not finite as {kind}, and not written: {', '.join(not_finite)}. Use other weights"
                + (", or a dtype with a larger range" if dtype.itemsize < 4 else "")
            )
        if (missing := next(expected, None)) is not None:
            raise ValueError(f"{path}: got no tensor {missing[0]}")
        file.flush()
        os.fsync(file.fileno())
