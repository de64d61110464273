"""The record of training commands, with the share of the time in which the GPUs ran kernels."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from tools.compare.launches import FILE, launch_note, launches, recorded_launch

# Stands for nvidia-smi: one line per sample until it is stopped.
SAMPLER = """#!/bin/sh
echo "$@" > "$WORDS"
echo 90
echo "[N/A]"
echo 70
touch "$WORDS.ready"
exec sleep 60
"""


def test_launches_hold_the_share_of_the_time_with_kernels(tmp_path: Path, monkeypatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(SAMPLER)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("WORDS", str(tmp_path / "words"))
    folder = tmp_path / "runs"
    assert launches(folder) == []
    with recorded_launch(folder, ["0", "3"], workers=8):
        end = time.monotonic() + 240
        while not (tmp_path / "words.ready").exists() and time.monotonic() < end:
            time.sleep(0.01)
    (line,) = launches(folder)
    assert line["busy"] == 0.8
    assert line["workers"] == 8
    assert line["command"][:3] == ["python", "-m", "tools.compare"]
    assert "--id=0,3" in (tmp_path / "words").read_text()
    assert "kernels ran in 80% of the GPU's time, 8 runs at once per GPU." in launch_note(folder)
    with recorded_launch(folder, ["cpu"], workers=1):
        pass
    assert launches(folder)[1]["busy"] is None
    assert "2 launches; kernels ran in 80%" in launch_note(folder)
    alone, together = (json.dumps({**line, "workers": workers}) for workers in (1, 8))
    (folder / FILE).write_text(f"{alone}\n")
    assert " s in 1 launch; kernels ran in 80% of the GPU's time, 1 run at once per GPU." in launch_note(folder)
    (folder / FILE).write_text(f"{together}\n{alone}\n")
    assert "in 2 launches; kernels ran in 80% of the GPU's time, 1 or 8 runs at once per GPU." in launch_note(folder)


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text('{"date": "2026-01-01"}\n{"date": "20')
    with pytest.raises(ValueError, match=r"launches\.jsonl line 2 is no JSON \(Unterminated .*\): remove the line"):
        launches(tmp_path)


def test_a_launch_that_cannot_be_written_leaves_the_earlier_ones(tmp_path: Path, monkeypatch) -> None:
    with recorded_launch(tmp_path, ["cpu"], workers=1):
        pass
    before = (tmp_path / FILE).read_text()
    monkeypatch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(OSError("the disk is full")))
    with pytest.raises(OSError, match="the disk is full"), recorded_launch(tmp_path, ["cpu"], workers=1):
        pass
    assert (tmp_path / FILE).read_text() == before
