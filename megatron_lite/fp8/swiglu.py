"""SwiGLU with results in FP8: the input of the down projection, and the gradients of gate and up.

On CUDA a Triton kernel writes FP8 at once (`kernels.py`), with no 16-bit copy between. On a CPU PyTorch computes in float32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_lite.fp8.rowwise import Quantized, empty, write_rows


def swiglu_rows(gate_up: Tensor) -> Quantized:
    """Return SiLU(gate) * up [rows, width] with one scale per row; gate_up: [rows, 2 * width], contiguous."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = empty(gate_up, rows, width)
    if gate_up.is_cuda:
        from megatron_lite.fp8 import kernels

        kernels.swiglu_rows(gate_up, *out)
    elif gate_up.is_cpu:
        gate, up = gate_up.float().chunk(2, 1)
        write_rows(out, gate * torch.sigmoid(gate) * up)
    return out


def swiglu_backward_rows(dy: Tensor, gate_up: Tensor) -> Quantized:
    """Return the gradients of gate and up side by side, [rows, 2 * width], for dy [rows, width], both contiguous."""
    out = empty(gate_up, *gate_up.shape)
    if dy.is_cuda:
        from megatron_lite.fp8 import kernels

        kernels.swiglu_backward_rows(dy, gate_up, *out)
    elif dy.is_cpu:
        gate, up = gate_up.float().chunk(2, 1)
        dy, s = dy.float(), torch.sigmoid(gate)
        write_rows(out, dy * up * s * (1 + gate * (1 - s)), dy * gate * s)
    return out
