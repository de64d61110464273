"""Small experiments: seconds on one core."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tools.synthetic.experiment import Experiment, Run, load_experiment, plan

# 8 tokens, 2 pairs, 16 ids, d = 32: MetaLA knows it after about a hundred steps.
SMALL = (
    "tasks=[8x2]",
    "models=[metala]",
    "widths=[32]",
    "lrs=[5e-3]",
    "batch_size=64",
    "data.train_examples=2560",
    "data.test_examples=200",
    "data.vocabulary=16",
    "network.init_method=small_init",
    "network.embedding_dropout=0",
    "devices=[cpu]",
    "precision=fp32",
)


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    """Overrides of a small MQAR experiment in this test's folder."""
    return [*SMALL, f"output={tmp_path / 'out'}"]


@pytest.fixture
def small(words: list[str]) -> Callable[..., Experiment]:
    """Return the small experiment with more overrides."""
    return lambda *more: load_experiment("mqar", [*words, *more])


@pytest.fixture
def runs(small: Callable[..., Experiment]) -> Callable[..., list[Run]]:
    """Return the runs of the small experiment with more overrides."""
    return lambda *more: plan(small(*more), "fp32")


def one_space(table: str) -> str:
    """Return a table without the spaces that align its columns."""
    return re.sub(" +", " ", table)
