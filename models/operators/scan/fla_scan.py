"""flash-linear-attention's kernels for the elementwise recurrence: CUDA. Imported only when a tensor lies there."""

from __future__ import annotations

from torch import Tensor

from ..gla.fla import missing_package

# Up to here one kernel that goes token by token is faster, forward and backward, than two that go by chunks of 128.
_RECURRENT_LENGTH = 256


def fla_scan(x: Tensor, log_decay: Tensor) -> Tensor:
    """h_t = exp(log_decay_t) h_{t-1} + x_t from zero; x, log_decay: [batch, length, channels] float32.

    ImportError with the command to run where the package is missing.
    """
    try:
        from fla.ops.hgrn import chunk_hgrn, fused_recurrent_hgrn
    except ImportError as error:
        raise missing_package() from error
    # The kernels' own states are left unused: the one by chunks gives their gradients up.
    scan = fused_recurrent_hgrn if x.shape[1] <= _RECURRENT_LENGTH else chunk_hgrn
    return scan(x.contiguous(), log_decay.contiguous())[0]
