"""The gated norm before the output projection of several mixers: one norm per head without a gain, then a SiLU gate."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from ..backend import is_supported
from ..precision import to_accumulation_dtype


def gated_head_norm(o: Tensor, gate: Tensor, *, norm: str = "layernorm", eps: float = 1e-5) -> Tensor:
    """Return SiLU(gate) * norm(o) in gate's dtype. The output projection after it takes the place of the norm's gain.

    o: [batch, length, heads, head_dim]; gate: [batch, length, heads * head_dim], as the result. norm: "layernorm" or
    "rmsnorm".
    """
    if norm == "layernorm" and is_supported(o) and o.dtype == gate.dtype:
        from ..kernels.metala import epilogue

        # MetaLA's epilogue without self-augmentation reads no q, k and v: o stands for them.
        return epilogue(o, o, o, o, None, gate, eps)
    normed = (F.layer_norm if norm == "layernorm" else F.rms_norm)(to_accumulation_dtype(o), o.shape[-1:], eps=eps)
    return (F.silu(to_accumulation_dtype(gate)) * normed.flatten(-2)).to(gate.dtype)
