"""`deepspeed train.py` starts the same run as torchrun."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.cli.conftest import ROOT, assert_same_run, environment
from tests.parity.launch import free_port


def test_the_deepspeed_launcher_trains(arguments, alone, tmp_path):
    launcher = Path(sys.executable).with_name("deepspeed")
    # It looks for its accelerator before train.py can say that the device is a processor.
    done = subprocess.run(
        [launcher, "--num_gpus", "2", "--master_port", str(free_port()), "train.py", *arguments()],
        cwd=ROOT,
        text=True,
        capture_output=True,
        timeout=120,
        env={**environment(), "DS_ACCELERATOR": "cpu"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "--local_rank=1" in done.stdout + done.stderr  # it adds the word by itself, and train.py takes it
    assert_same_run(tmp_path / "run", alone)
