"""Select the samples of a data rank in a step, as a pure function of the samples consumed before.

A step takes the next ``global_batch_size`` samples. They are split into global micro-batches of micro_batch_size x
data_size, and a rank takes a contiguous slice of each (GPT-NeoX's order). There is no iterator state, and gradient
accumulation only groups the same samples differently.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def step_samples(
    consumed_samples: int, *, global_batch_size: int, micro_batch_size: int, data_rank: int, data_size: int
) -> NDArray[np.int64]:
    """Return the sample numbers of one rank in the step after ``consumed_samples``.

    Returns int64 [micro-batches, micro_batch_size]. Raises as `check_batch_sizes`.
    """
    check_batch_sizes(global_batch_size, micro_batch_size, data_rank, data_size)
    numbers = np.arange(consumed_samples, consumed_samples + global_batch_size, dtype=np.int64)
    return numbers.reshape(-1, data_size, micro_batch_size)[:, data_rank]


def check_batch_sizes(global_batch_size: int, micro_batch_size: int, data_rank: int, data_size: int) -> None:
    """Raise ValueError unless global_batch_size is a multiple of micro_batch_size x data_size, all are 1 or more, and
    data_rank is in [0, data_size)."""
    if min(global_batch_size, micro_batch_size, data_size) < 1:
        raise ValueError(
            f"global_batch_size {global_batch_size}, micro_batch_size {micro_batch_size} and data_size {data_size} must"
            " be 1 or more"
        )
    if not 0 <= data_rank < data_size:
        raise ValueError(f"data_rank {data_rank} must be in [0, {data_size})")
    if global_batch_size % (micro_batch_size * data_size):
        raise ValueError(
            f"global_batch_size {global_batch_size} is not a multiple of micro_batch_size {micro_batch_size} x"
            f" {data_size} data ranks = {micro_batch_size * data_size}"
        )
