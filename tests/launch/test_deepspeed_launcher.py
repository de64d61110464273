"""`deepspeed train.py` starts the same run as torchrun."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.cli.conftest import ROOT, assert_same_run, environment
from tests.parity.launch import free_port


def test_run_by_the_deepspeed_launcher_equals_one_process(arguments, single_process_run, tmp_path):
    launcher = Path(sys.executable).with_name("deepspeed")
    # The launcher looks for its accelerator before train.py selects the CPU.
    done = subprocess.run(
        [launcher, "--num_gpus", "2", "--master_port", str(free_port()), "train.py", *arguments()],
        cwd=ROOT,
        text=True,
        capture_output=True,
        timeout=240,
        env={**environment(), "DS_ACCELERATOR": "cpu"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "--local_rank=1" in done.stdout + done.stderr  # the launcher adds this argument
    assert_same_run(tmp_path / "run", single_process_run)
