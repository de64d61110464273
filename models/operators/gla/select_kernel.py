"""The arguments of gated linear attention: which kernel computes them, one decision per call, and a check of their shapes.

`select_kernel` decides, and its caller passes the `Selection` on. A decay fits the matmul form if no channel decays below
about exp(-80) over a chunk of 64 tokens. Two factors inside the range of the dtype then replace exp(b_i - b_j). Any other
decay needs the exact form, which is slower.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ...backend import SIXTEEN_BITS, available, is_supported, missing_fla_error, on_cuda, replaceable
from ...precision import accumulation_dtype
from ..context_parallel import context_parallel_group
from ..varlen import check_sequences

Form = Literal["auto", "recurrent", "parallel", "chunked"]

# The longest sequence for which FLA's recurrent kernels are faster than its chunk kernels.
_SHORT = 16
# The longest sequence for which quadratic attention costs less than states between chunks, and its largest head.
_LONGEST_QUADRATIC, _LARGEST_QUADRATIC = 512, 128
# Chunk lengths, the longest first. The last is the chunk of the exact form.
_CHUNKS = (64, 32, 16)
# No factor exceeds exp(80) = 6e34, inside float32, even where a chunk crosses two of the windows of `plan_chunks`.
_LARGEST_DECAY = 40.0


class GLAArguments(NamedTuple):
    """Hold the arguments of `models.operators.gla.gated_linear_attention.gated_linear_attention` that every form reads.

    To change an argument, call the constructor. Under torch.compile of PyTorch 2.11 `_replace` returns an empty tuple.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor
    scale: float = 1.0
    initial_state: Tensor | None = None
    cu_seqlens: Tensor | None = None

    def with_decay(self, log_decay: Tensor) -> GLAArguments:
        """Return these arguments with another decay."""
        return GLAArguments(*self[:3], log_decay, *self[4:])


class Kernel(Enum):
    """Name the kernel of the operator. The value is its `form`, if it can be requested."""

    RECURRENT = "recurrent"  # naive.py, one token after the other
    QUADRATIC = "parallel"  # naive.py, quadratic in length
    CHUNK = "chunked"  # chunk.py: the matmul form or the exact form, by `plan_chunks`
    TRITON = "triton"  # models/kernels/gla
    FLA_CHUNK = "fla chunk"  # flash-linear-attention's chunk_gla or chunk_simple_gla
    FLA_CHUNK_FORWARD = "fla chunk forward"  # their forward pass alone
    FLA_RECURRENT = "fla recurrent"  # fused_recurrent_gla or fused_recurrent_simple_gla


class Decay(Enum):
    """Name the form in which a CUDA kernel receives the log decay."""

    AS_GIVEN = "per channel or per head, as given"
    PER_CHANNEL = "per head, expanded to one per channel"
    FIXED = "one number per head, without a gradient"


@dataclass(frozen=True)
class Selection:
    """Hold the decision for one call."""

    kernel: Kernel
    decay: Decay = Decay.AS_GIVEN


def select_kernel(x: GLAArguments, *, fits_matmul_form: bool, form: Form) -> Selection:
    """Return the kernel for these arguments.

    Raises ValueError for an unknown form, and ImportError where flash-linear-attention is needed and missing.
    """
    if form != "auto":
        if form not in ("recurrent", "parallel", "chunked"):
            raise ValueError(f"form = {form!r}: allowed are auto, recurrent, parallel, chunked")
        return Selection(Kernel(form))
    q, k, v, log_decay = x[:4]
    if not on_cuda(q) or not q.numel() or q.dtype not in SIXTEEN_BITS:
        return Selection(Kernel.RECURRENT if q.shape[1] == 1 and x.cu_seqlens is None else Kernel.CHUNK)
    if fits_matmul_form and supports_triton(q, k, v, log_decay, fits_matmul_form=True):
        return Selection(Kernel.TRITON)
    decay = Decay.AS_GIVEN
    needs_grad = _needs_grad(q, k, v, log_decay, x.initial_state)
    if log_decay.shape[-1] == 1:
        if is_fixed(log_decay):
            decay = Decay.FIXED
        elif needs_grad and fla_refuses_scalar_gradient():
            decay = Decay.PER_CHANNEL
            if supports_triton(q, k, v, log_decay.expand(q.shape), fits_matmul_form=False):
                return Selection(Kernel.TRITON, decay)
    if q.shape[1] <= _SHORT and not needs_grad:
        return Selection(Kernel.FLA_RECURRENT, decay)
    if not needs_grad and x.cu_seqlens is None and decay is not Decay.FIXED:
        return Selection(Kernel.FLA_CHUNK_FORWARD, decay)
    return Selection(Kernel.FLA_CHUNK, decay)


def supports_triton(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, *, fits_matmul_form: bool) -> bool:
    """Return whether `models/kernels/gla` is to compute this: 16 bits, one decay per channel, more tokens than decoding.

    For larger heads flash-linear-attention's kernels were measured to be faster.
    """
    if log_decay.shape[-1] == 1 or q.dtype not in SIXTEEN_BITS or not q.dtype == k.dtype == v.dtype:
        return False
    if q.shape[-1] > (128 if fits_matmul_form else 64) or v.shape[-1] > 128 or not available(q):
        return False
    # The kernels index a row with 32 bits: the gradients of q, a, v and the gate of a MetaLA layer are adjacent.
    if not q.numel() or not 0 < 2 * (q.numel() + v.numel()) < 2**31 * v.shape[0]:
        return False
    return q.shape[1] > _SHORT or _needs_grad(q, k, v, log_decay)


def supports_quadratic(
    q: Tensor, k: Tensor, v: Tensor, initial_state: Tensor | None, cu_seqlens: Tensor | None, return_state: bool
) -> bool:
    """Return whether `models/kernels/quadratic_attention.py` is to compute this: short whole sequences without a state."""
    if return_state or initial_state is not None or cu_seqlens is not None or context_parallel_group() is not None:
        return False
    if not 1 < q.shape[1] <= _LONGEST_QUADRATIC or max(q.shape[-1], v.shape[-1]) > _LARGEST_QUADRATIC:
        return False
    return q.dtype in SIXTEEN_BITS and q.dtype == k.dtype == v.dtype and is_supported(v)


def plan_chunks(log_decay: Tensor) -> tuple[int, bool]:
    """Return the chunk length for `chunk.py`, and whether the decay fits the matmul form there. Reads the decays."""
    largest, smallest = _CHUNKS[0], _CHUNKS[-1]
    if log_decay.shape[-1] == 1 or not log_decay.numel():
        return largest, False
    if log_decay.is_meta:  # has no values
        return largest, True
    with torch.no_grad():
        # Windows start at the first token and ignore segments: a segment's chunk is inside two of them.
        steps = F.pad(log_decay, (0, 0, 0, 0, 0, -log_decay.shape[1] % largest)).unflatten(1, (-1, smallest))
        totals = steps.sum(2)
        fitting = smallest
        for chunk in reversed(_CHUNKS):
            # Written so that nan needs the exact form.
            if not float(totals.unflatten(1, (-1, chunk // smallest)).sum(2).min()) >= -_LARGEST_DECAY:
                return fitting, chunk > smallest
            fitting = chunk
    return largest, True


def bounded_decay(log_decay: Tensor) -> Tensor:
    """Return the log decay in float32 and at least -80, for kernels that subtract cumulative decays.

    1 + exp(-80) = 1 in float32, and a difference of two -inf would be nan.
    """
    return log_decay.float().clamp_min(-80.0)


@replaceable
def fla_refuses_scalar_gradient() -> bool:
    """Return whether flash-linear-attention has no gradient for one decay per head on this machine.

    Triton 3.4 to 3.7.0 compiles that of chunk_simple_gla wrongly on Hopper. Raises ImportError where the package is missing.
    """
    try:
        from fla.utils import IS_NVIDIA_HOPPER, TRITON_ABOVE_3_4_0, TRITON_ABOVE_3_7_1
    except ImportError as error:
        raise missing_fla_error() from error
    return bool(IS_NVIDIA_HOPPER and TRITON_ABOVE_3_4_0 and not TRITON_ABOVE_3_7_1)


def _needs_grad(*inputs: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)


def is_fixed(log_decay: Tensor) -> bool:
    """Return whether one number per head was expanded over batch and length. Known from strides, without reading it."""
    steps = zip(log_decay.shape[:2], log_decay.stride()[:2], strict=True)
    return not log_decay.requires_grad and all(size == 1 or (size and stride == 0) for size, stride in steps)


def check_shapes(x: GLAArguments) -> None:
    """Raise ValueError for arguments whose shapes do not agree."""
    q, k, v, log_decay = x[:4]
    if q.dim() != 4 or k.shape != q.shape or v.shape[:3] != q.shape[:3] or v.dim() != 4:
        raise ValueError(
            f"q {_shape(q)}, k {_shape(k)}, v {_shape(v)}: expected [batch, length, heads, head_dim] with q and k alike "
            "and v equal to them except for its last axis"
        )
    if log_decay.shape[:-1] != q.shape[:-1] or log_decay.shape[-1] not in (1, q.shape[-1]):
        raise ValueError(f"log_decay {_shape(log_decay)}: expected {_shape(q)} or a last axis of 1")
    if x.cu_seqlens is not None or x.initial_state is not None:
        check_sequences(q, x.cu_seqlens, x.initial_state, *q.shape[2:], v.shape[3])


def initial(x: GLAArguments) -> Tensor:
    """Return the initial state [sequences, heads, head_dim_k, head_dim_v] in the accumulation dtype, zeros for None."""
    dtype = accumulation_dtype(x.v)
    if x.initial_state is not None:
        return x.initial_state.to(dtype)
    sequences = x.q.shape[0] if x.cu_seqlens is None else len(x.cu_seqlens) - 1
    return torch.zeros(sequences, *x.q.shape[2:], x.v.shape[-1], dtype=dtype, device=x.v.device)


def _shape(x: Tensor) -> list[int]:
    return list(x.shape)
