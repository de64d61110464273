"""Power cuts and damaged files with small counts. `python -m tests.faults.campaign` runs large ones."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from data.atomic_io import atomic_write
from tests.faults import fuzz_checkpoints, fuzz_data, power_cut
from tests.faults.outcomes import FAILURES


def test_same_command_completes_after_a_power_cut(tmp_path: Path) -> None:
    counts = power_cut.run(6, 0, tmp_path / "cuts")
    assert counts == {"cuts": 6, "restarted": 6, "by hand": 0, "other result": 0}


def test_damaged_data_are_never_silently_accepted(tmp_path: Path) -> None:
    counts = fuzz_data.run(60, 0, tmp_path / "fuzz")
    assert [counts[name] for name in ("cases", *FAILURES)] == [60, 0, 0, 0]
    assert counts["refused"] > 20
    assert counts["harmless"] > 5


def test_damaged_checkpoints_and_exports_are_never_silently_accepted(tmp_path: Path) -> None:
    counts = fuzz_checkpoints.run(4, 1, tmp_path)
    assert [counts[name] for name in ("cases", *FAILURES)] == [4, 0, 0, 0]


@pytest.mark.parametrize("synced", [True, False])
def test_synced_content_survives_a_simulated_power_cut(tmp_path: Path, synced: bool) -> None:
    root = tmp_path / "root"
    root.mkdir()
    recording = power_cut.Recording(root)
    with recording.recorded():
        if synced:
            with atomic_write(root / "x") as file:
                file.write(b"content")
        else:
            (root / "temporary").write_bytes(b"content")
            os.replace(root / "temporary", root / "x")
    contents = set()
    for seed in range(30):
        recording.write_image(len(recording.operations) - 1, random.Random(seed))
        assert synced <= (root / "x").exists()
        contents |= {path.read_bytes() for path in root.iterdir()}
    assert contents == {b"content"} if synced else b"" in contents
