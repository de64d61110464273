"""What batches may bring beside tokens: a size that grows, documents that are packed into one row."""

from __future__ import annotations

import itertools

import pytest
import torch

from tests import oracle
from tests.trainer.conftest import LENGTH, VOCAB, batches, model_config

LR = 1e-4


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_batch_that_grows_equals_the_oracle(build, stage):
    config = model_config()
    steps = [batches(1, accumulation=count)[0] for count in (1, 1, 2, 3, 3, 5)]
    expected = oracle.train(config, steps, seed=11, lr=LR, warmup=0, total=10**9)
    engine = build(config, accumulation=5, zero_stage=stage)
    for step, (loss, norm) in zip(steps, expected, strict=True):
        result = engine.train_step(step, lr=LR)
        assert result.loss == pytest.approx(loss, rel=1e-6)
        assert result.gradient_norm == pytest.approx(norm, rel=1e-6)


def test_packed_documents_equal_documents_by_themselves(build):
    """A row of two samples with their documents and the padding of cu_seqlens, against every document as a micro batch."""
    config = model_config()
    generator = torch.Generator().manual_seed(3)
    tokens, labels = torch.randint(0, VOCAB, (2, 1, 2 * LENGTH), generator=generator)
    weight = torch.rand(1, 2 * LENGTH, generator=generator)
    bounds = [0, 5, 6, LENGTH, LENGTH + 1, 2 * LENGTH]
    packed = {
        "tokens": tokens,
        "labels": labels,
        "loss_weight": weight,
        "cu_seqlens": torch.tensor([*bounds, 2 * LENGTH, 2 * LENGTH], dtype=torch.int32),
    }
    alone = [
        {key: packed[key][:, start:end] for key in ("tokens", "labels", "loss_weight")}
        for start, end in itertools.pairwise(bounds)
    ]
    expected = oracle.train(config, [alone] * 3, seed=11, lr=LR, warmup=0, total=10**9)
    engine = build(config, accumulation=1)
    for loss, norm in expected:
        result = engine.train_step([packed], lr=LR)
        assert result.loss == pytest.approx(loss, rel=1e-6)
        assert result.gradient_norm == pytest.approx(norm, rel=1e-6)
