"""Two data-parallel processes under torchrun do what one process does, and leave checkpoints that one process resumes."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import train
from megatron_lite import checkpoint
from tests.cli.conftest import ROOT, environment, train_lines


def torchrun(words: list[str], processes: int = 2) -> subprocess.CompletedProcess[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={processes}", f"--master-port={port}"]
    return subprocess.run(
        [*command, str(ROOT / "train.py"), *words],
        cwd=ROOT,
        text=True,
        capture_output=True,
        timeout=120,
        env=environment(),
    )


def assert_close(run: Path, other: Path, steps: int) -> None:
    lines, others = train_lines(run), train_lines(other)
    assert [line["step"] for line in lines] == [line["step"] for line in others] == list(range(1, steps + 1))
    for a, b in zip(lines, others, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-6)
        assert a["gradient_norm"] == pytest.approx(b["gradient_norm"], rel=1e-5)


@pytest.mark.parametrize("stage", [1, 3])
def test_two_processes_equal_one_and_their_checkpoint_resumes_in_one(arguments, tmp_path, stage):
    settings = {"optimizer.lr": 1e-4, "parallel.zero_stage": stage}
    assert train.main(arguments("one", **settings)) == 0
    done = torchrun(arguments("two", **settings))
    assert done.returncode == 0, done.stdout + done.stderr
    assert_close(tmp_path / "two", tmp_path / "one", 8)
    reports = [json.loads((tmp_path / name / "summary.json").read_text())["validation"] for name in ("one", "two")]
    assert reports[0]["loss"] == pytest.approx(reports[1]["loss"], rel=1e-6)
    assert reports[0]["evaluated_tokens"] == reports[1]["evaluated_tokens"]
    step = checkpoint.resolve(tmp_path / "two")
    assert checkpoint.read_manifest(step)["layout"]["data"] == 2
    assert sorted(p.name for p in step.glob("weights-*")) == ["weights-00000.safetensors", "weights-00001.safetensors"]
    longer = {**settings, "schedule.train_steps": 12, "schedule.decay_steps": 8}
    for name in ("one", "two"):  # both go on in this one process
        assert train.main(arguments(name, **longer)) == 0
    assert_close(tmp_path / "two", tmp_path / "one", 12)


def test_an_error_on_the_main_process_ends_all(arguments):
    done = torchrun(arguments(**{"data.corpus": "nowhere.jsonl"}))
    assert done.returncode != 0
    assert "nowhere.jsonl" in done.stderr
