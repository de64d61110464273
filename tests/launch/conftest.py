"""Runs of two processes, started by each launcher, beside one run of a single process."""

from __future__ import annotations

from pathlib import Path

import pytest

import train
from tests.cli.conftest import arguments, corpus, run_words

__all__ = ["alone", "arguments", "corpus"]


@pytest.fixture(scope="session")
def alone(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run in one process that every launcher must repeat."""
    folder = tmp_path_factory.mktemp("alone")
    assert train.main(run_words(corpus, folder, "one")) == 0
    return folder / "one"
