"""One run of a single process, which the runs of every launcher must equal."""

from __future__ import annotations

from pathlib import Path

import pytest

import train
from tests.cli.conftest import arguments, corpus, run_words

__all__ = ["arguments", "corpus", "single_process_run"]


@pytest.fixture(scope="session")
def single_process_run(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the run of one process."""
    folder = tmp_path_factory.mktemp("single_process_run")
    assert train.main(run_words(corpus, folder, "one")) == 0
    return folder / "one"
