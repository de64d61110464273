"""Runs of two processes, started by each launcher, beside one run of a single process."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

import train
from tests.cli.conftest import arguments, corpus, run_words, train_lines

__all__ = ["alone", "arguments", "assert_same_run", "corpus", "free_port"]


@pytest.fixture(scope="session")
def alone(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run in one process that every launcher must repeat."""
    folder = tmp_path_factory.mktemp("alone")
    assert train.main(run_words(corpus, folder, "one")) == 0
    return folder / "one"


def assert_same_run(run: Path, other: Path) -> None:
    """Losses and gradient norms of every step, in float32 up to the order of the sums."""
    lines, others = train_lines(run), train_lines(other)
    assert [line["step"] for line in lines] == [line["step"] for line in others]
    for a, b in zip(lines, others, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-6)
        assert a["gradient_norm"] == pytest.approx(b["gradient_norm"], rel=1e-5)


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
