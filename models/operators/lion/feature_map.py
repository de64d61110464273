"""Feature maps of queries and keys for LION (arXiv 2502.16249) and linear attention (elu, arXiv 2006.16236).

All but silu_paper and relu are positive, so that normalizers are positive:

silu  (SiLU(x) + 1/2) / norm        silu_paper  SiLU(x + 1/2) / norm, as printed        elu  elu(x) + 1
sigmoid, relu, softplus             the elementwise functions, of which only the sigmoid is bounded (Table 6)
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from ...backend import is_supported
from ...precision import to_accumulation_dtype
from ...recompute import recomputable

# Feature maps of length one per head, which kernels compute.
NORMALIZED = ("silu", "silu_paper")
_ELEMENTWISE: dict[str, Callable[[Tensor], Tensor]] = {
    # elu(x) + 1. Below 0 it is exp(x): adding 1 to exp(x) - 1 would lose its digits.
    "elu": lambda x: torch.where(x > 0, x + 1, x.clamp_max(0).exp()),
    "sigmoid": torch.sigmoid,
    "relu": F.relu,
    "softplus": F.softplus,
}


def feature_map(x: Tensor, name: str, dtype: torch.dtype | None = None) -> Tensor:
    """Map x [..., head_dim], in float32 (float64 for float64). Return the same shape, rounded to `dtype` if it is given."""
    form: Callable[..., Tensor] = _plain
    if name in NORMALIZED and is_supported(x):
        from ...kernels.lion.feature_map import normalized_silu

        form, dtype = normalized_silu, dtype or torch.float32
    y = form(x, name, dtype)
    recomputable(y, form, x, name, dtype)
    return y


def _plain(x: Tensor, name: str, dtype: torch.dtype | None) -> Tensor:
    x = to_accumulation_dtype(x)
    if name in _ELEMENTWISE:
        y = _ELEMENTWISE[name](x)
    else:
        y = F.normalize(F.silu(x) + 0.5 if name == "silu" else F.silu(x + 0.5), dim=-1)
    return y if dtype is None else y.to(dtype)
