"""Batches of a ramp, packed documents and sources of the text."""

from __future__ import annotations

import itertools

import pytest
import torch

from tests import oracle
from tests.megatron_lite.conftest import LENGTH, VOCAB, batches, model_config

LR = 1e-4


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_batch_ramp_equals_the_oracle(build, stage):
    config = model_config()
    steps = [batches(1, accumulation=count)[0] for count in (1, 1, 2, 3, 3, 5)]
    expected = oracle.train(config, steps, seed=11, lr=LR, warmup=0, total=10**9)
    engine = build(config, accumulation=5, zero_stage=stage)
    for step, (loss, norm) in zip(steps, expected, strict=True):
        result = engine.train_step(step, lr=LR)
        assert result.loss == pytest.approx(loss, rel=1e-6)
        assert result.gradient_norm == pytest.approx(norm, rel=1e-6)


def test_packed_documents_equal_separate_documents(build):
    """Compare a packed row of two samples with each document as a micro-batch."""
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


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_loss_per_source_changes_nothing_else(build, stage, dtype):
    config = model_config()
    steps = batches(3)
    for batch in itertools.chain(*steps):
        batch["loss_weight"][:, ::2] *= 0.5
    plain = [build(config, dtype=dtype, zero_stage=stage).train_step(step, lr=LR) for step in steps[:1]]
    engine = build(config, dtype=dtype, zero_stage=stage)
    generator = torch.Generator().manual_seed(5)
    for number, step in enumerate(steps):
        marked = [{**b, "source": torch.randint(0, 3, b["labels"].shape, generator=generator)} for b in step]
        alone = []
        for source in range(3):
            parts = [{**b, "loss_weight": b["loss_weight"] * (b["source"] == source)} for b in marked]
            alone.append(engine.evaluate(parts)[:2])
        result = engine.train_step(marked, lr=LR, num_sources=4)
        if number == 0:
            assert (result.loss, result.gradient_norm) == (plain[0].loss, plain[0].gradient_norm)
        assert result.by_source[3] == (0.0, 0.0)
        for (nll, weight), (expected, expected_weight) in zip(result.by_source, alone, strict=False):
            assert weight == expected_weight
            assert nll == pytest.approx(expected, rel=1e-6 if dtype == "fp32" else 1e-2)
        assert sum(nll for nll, _ in result.by_source) == pytest.approx(
            result.loss * sum(weight for _, weight in result.by_source), rel=1e-9
        )
