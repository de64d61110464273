"""Errors and long waits of functions that one process calls for all, and flags of any process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.megatron_lite.parallel.collectives_worker import ERRORS
from tests.parity.launch import launch


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out: Path = tmp_path_factory.mktemp("collectives") / "results.json"
    launch("tests.megatron_lite.parallel.collectives_worker", 2, str(out), timeout=120)
    return json.loads(out.read_text())


@pytest.mark.parametrize("name", ERRORS)
@pytest.mark.parametrize("function", ["on_main", "on_all"])
def test_every_rank_raises_the_error_of_one_rank(results, function, name):
    """Raise the text of any error on every rank, also of errors that cannot be sent. Their kind decides the exit status."""
    error, failed = ERRORS[name], 0 if function == "on_main" else 1
    for rank, (kind, text, is_refusal) in enumerate(results[f"{function} {name}"]):
        assert text.endswith(str(error)), text
        assert is_refusal == isinstance(error, OSError | ValueError)
        if rank == failed:
            assert kind == name


def test_flag_of_one_rank_is_seen_by_all(results):
    assert results["any_rank"] == [[True, True, False, True]] * 2


def test_ranks_wait_for_the_preparation_of_data_longer_than_for_other_collectives(results):
    assert results["slow"] == [7, 7]
