"""The loss of every source between two lines of the log."""

from __future__ import annotations

import math

from megatron_lite.metrics.per_source_loss import PerSourceLoss


def test_sums_accumulate_until_they_are_taken():
    losses = PerSourceLoss(["books", "web", "code"], {})
    losses.add([(6.0, 2.0), (1.0, 1.0), (0.0, 0.0)])
    losses.add([(2.0, 2.0), (math.nan, 5.0), (0.0, 0.0)])  # not finite: left out whole
    losses.add([(4.0, 2.0), (2.0, 2.0), (0.0, 0.0)])
    assert losses.take() == {"loss/books": 2.0, "loss/web": 1.0}  # code had no share
    losses.add([(9.0, 3.0), (0.0, 0.0), (5.0, 1.0)])
    assert losses.take() == {"loss/books": 3.0, "loss/code": 5.0}


def test_sums_between_two_lines_resume_from_a_checkpoint():
    sums = {"books": [6.0, 2.0], "gone": [1.0, 1.0]}  # of another text
    losses = PerSourceLoss(["books", "web"], sums)
    losses.add([(2.0, 2.0), (1.0, 1.0)])
    assert (sums["books"], sums["web"]) == ([8.0, 4.0], [1.0, 1.0])
    assert losses.take() == {"loss/books": 2.0, "loss/web": 1.0}
    assert not sums
