"""Runs that cut the model or the sequence over two processes do what one process does, and go on in one by themselves."""

from __future__ import annotations

import json

import pytest

import train
from tests.cli.test_data_parallel import assert_close, torchrun

LAYOUTS = {
    "tensor": {"parallel.tensor": 2, "parallel.sequence_parallel": "true"},
    "pipeline": {"parallel.pipeline": 2},
    "context": {"parallel.context": 2},
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_equals_one_process_which_goes_on_from_its_checkpoint(arguments, tmp_path, capsys, name):
    settings = {"optimizer.lr": 1e-4, "evaluation.interval": 4}
    assert train.main(arguments("one", **settings)) == 0
    done = torchrun(arguments("two", **settings, **LAYOUTS[name]))
    assert done.returncode == 0, done.stdout + done.stderr
    assert_close(tmp_path / "two", tmp_path / "one", 8)
    reports = [json.loads((tmp_path / run / "summary.json").read_text())["validation"] for run in ("one", "two")]
    assert reports[0]["loss"] == pytest.approx(reports[1]["loss"], rel=1e-6)
    assert reports[0]["evaluated_tokens"] == reports[1]["evaluated_tokens"]
    capsys.readouterr()
    longer = {**settings, "schedule.train_steps": 12, "schedule.decay_steps": 8}
    for run in ("one", "two"):
        assert train.main(arguments(run, **longer)) == 0
    assert f"written by 2 processes: {name} 2, ZeRO 1, fp32 and read into this layout" in capsys.readouterr().out
    assert_close(tmp_path / "two", tmp_path / "one", 12)


def test_a_layout_for_more_processes_than_there_are_is_refused_before_anything_starts(arguments, tmp_path, capsys):
    assert train.main(arguments(**{"parallel.tensor": 2})) == 2
    assert "start it with torchrun --nproc-per-node 2" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
