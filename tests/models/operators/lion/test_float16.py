"""Check normalizers per channel of values in float16, where sums are scaled to stay inside its range."""

from __future__ import annotations

import torch

from models.operators.lion.bidirectional_attention import bidirectional_linear_attention


def test_epsilon_of_a_small_normalizer_is_not_scaled() -> None:
    """Use row sums of 1.2e-4, of which an epsilon of 16e-6, unscaled beside scaled sums, would be 13 %."""
    q = torch.full((1, 3, 1, 4), 3.16e-3, dtype=torch.float16)
    v = torch.tensor([1.0, -2.0, 4.0], dtype=torch.float16).view(1, 3, 1, 1).expand(1, 3, 1, 2)
    o = bidirectional_linear_attention(q, q, v, torch.zeros(1, 3, 1, 2), per_value_channel=True)
    row_sum = 12 * q[0, 0, 0, 0].double() ** 2
    torch.testing.assert_close(o.double(), (row_sum / (row_sum + 1e-6)).expand(o.shape), rtol=2e-2, atol=0)
