"""The fault campaign with small counts. `python -m tests.faults.campaign --counts large` runs large ones."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import pytest

from tests.faults import campaign, kill_loop, started_command


def test_run_survives_a_pause_of_all_processes_and_names_a_frozen_rank(tmp_path):
    result = campaign.run_kind("frozen_processes", 1, 0, tmp_path)
    assert result["verdict"] == "holds", result
    assert result["counts"]["named"] == 1


def test_run_killed_at_a_random_moment_equals_the_uninterrupted_one(tmp_path):
    counts = kill_loop.run(1, 0, tmp_path, ranks=(1,))
    assert counts == {**counts, "kills": 1, "equal": 1, "different": 0, "orphans": 0, "lost_more_than_an_interval": 0}


def test_a_command_that_has_just_started_is_alive(tmp_path, monkeypatch):
    monkeypatch.setattr(started_command, "_read", lambda *_: b"")  # as right after the start
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    with started_command.StartedCommand(command, tmp_path / "log") as started:
        assert started.processes() == started.wait_for_all(0.01) == [started.agent.pid]
    assert started.has_ended
    assert started.processes() == []


def test_violated_target_is_named_and_sets_the_exit_status(tmp_path, monkeypatch, capsys):
    counts = {"kills": 3, "orphans": 2, "equal": 3}

    def run(count, seed, folder):
        folder.mkdir()
        (folder / "failures.jsonl").write_text('{"case": 2}\n')
        return counts

    monkeypatch.setitem(sys.modules, "tests.faults.stub", SimpleNamespace(run=run))
    monkeypatch.setitem(campaign.KINDS, "stub", campaign.Kind(3, 30, ("orphans",), ("equal",)))
    out = tmp_path / "campaign.json"
    assert campaign.main(["stub", "--out", str(out)]) == 1
    assert "| stub | kills 3, orphans 2, equal 3 | 0       | violated: orphans |" in capsys.readouterr().out
    [result] = json.loads(out.read_text())["results"]
    assert (result["counts"], result["failures"]) == (counts, [{"case": 2}])
    counts |= {"orphans": 0, "equal": 2}
    assert campaign.main(["stub", "--out", str(out)]) == 1
    counts["equal"] = 3
    assert campaign.main(["stub", "--out", str(out)]) == 0
    with pytest.raises(SystemExit, match="2"):
        campaign.main(["flood"])
