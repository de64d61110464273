"""Checks of the arguments of `models.operators.lion.bidirectional_attention.bidirectional_linear_attention`."""

from __future__ import annotations

from functools import lru_cache

import torch

FORMS = ("auto", "parallel", "recurrent", "chunked", "scans", "triton_tile", "triton_chunk", "triton_value_channel")
CONVENTIONS = ("eq17", "shifted")

# Channels of a head that the kernels support.
LARGEST_HEAD = 256
# The same for "triton_value_channel": keys and values. Over ranks, normalizers double the values.
LARGEST_PER_VALUE_CHANNEL = 128, 256


@lru_cache(4096)
def check_projection(q: torch.Size, x: torch.Size, weight: torch.Size, bias: torch.Size | None) -> None:
    """Raise ValueError if the shapes of q and of `ProjectedDecayLogits` do not agree."""
    if x[:-1] != q[:2] or weight != (q[2], x[-1]) or (bias is not None and bias != q[2:3]):
        raise ValueError(
            f"decay_logits x {tuple(x)}, weight {tuple(weight)}, bias {bias and tuple(bias)}: expected [batch, length, size] "
            f"with [batch, length] = {tuple(q[:2])}, [{q[2]}, size] and [{q[2]}] or None"
        )


# Cached, because these checks take as long as the kernels of a short sequence.
@lru_cache(4096)
def check_shapes(
    q: torch.Size,
    k: torch.Size,
    v: torch.Size,
    log_decay: torch.Size | None,
    decay_logits: torch.Size | None,
    mask: torch.Size | None,
    packed: bool,
    mask_convention: str,
    form: str,
    dtype: torch.dtype,
    per_value_channel: bool,
) -> None:
    """Raise ValueError for shapes and options that do not agree."""
    shape = tuple(q[:3])
    if len(q) != 4 or k != q or len(v) != 4 or tuple(v[:3]) != shape:
        raise ValueError(
            f"q {tuple(q)}, k {tuple(k)}, v {tuple(v)}: expected [batch, length, heads, head_dim_k] "
            "twice and [batch, length, heads, head_dim_v]"
        )
    per_head = [shape, (*shape, 1)]
    for name, x, allowed in (
        ("log_decay", log_decay, [(*shape, v[3])] if per_value_channel else [*per_head, (*shape, q[3])]),
        ("decay_logits", decay_logits, [*per_head, shape[2:]]),
    ):
        if x is not None and tuple(x) not in allowed:
            raise ValueError(f"{name} {tuple(x)}: expected {' or '.join(map(str, dict.fromkeys(allowed)))}")
    if mask is not None and tuple(mask) != shape[:2]:
        raise ValueError(f"mask {tuple(mask)}: expected [batch, length] = {shape[:2]}")
    if packed and shape[0] != 1:
        raise ValueError(f"cu_seqlens with batch {shape[0]}: packed segments need batch 1; reshape to [1, tokens, ...]")
    if mask_convention not in CONVENTIONS:
        raise ValueError(f"mask_convention {mask_convention!r}: allowed are {', '.join(CONVENTIONS)}")
    if form not in FORMS:
        raise ValueError(f"form {form!r}: allowed are {', '.join(FORMS)}")
    vector = log_decay is not None and len(log_decay) == 4 and log_decay[-1] > 1
    if form == "scans" and (not (vector or per_value_channel) or mask_convention == "shifted"):
        raise ValueError(
            "form 'scans' supports a per-channel decay and mask_convention 'eq17'; use form='chunked', or form='auto'"
        )
    if form == "triton_value_channel":
        if not per_value_channel or packed or mask_convention == "shifted" or dtype == torch.float64:
            raise ValueError(
                f"form {form!r} supports per_value_channel, mask_convention 'eq17', no cu_seqlens and no float64; "
                "use form='auto'"
            )
        if q[3] > LARGEST_PER_VALUE_CHANNEL[0] or v[3] > LARGEST_PER_VALUE_CHANNEL[1]:
            sizes = "{} channels of keys and {} of values".format(*LARGEST_PER_VALUE_CHANNEL)
            raise ValueError(f"head sizes {q[3]}, {v[3]}: at most {sizes}; use form='scans'")
    elif form.startswith("triton"):
        if vector or mask_convention == "shifted" or dtype == torch.float64:
            raise ValueError(
                f"form {form!r} supports a per-head decay, mask_convention 'eq17' and no float64; use form='chunked'"
            )
        if max(q[3], v[3]) > LARGEST_HEAD:
            raise ValueError(f"head sizes {q[3]}, {v[3]}: at most {LARGEST_HEAD}; use form='chunked'")
