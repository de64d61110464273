"""The two-machine example of docs/guide/launch.md, unchanged, in two network namespaces with a virtual link."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.conftest import ROOT, assert_same_run, environment
from tests.launch.machines import Machine, example, two_machines


@pytest.fixture
def machines() -> Iterator[list[Machine]]:
    with two_machines() as pair:
        yield pair


def test_run_on_two_machines_equals_one_process(machines, arguments, single_process_run, tmp_path):
    processes = [
        subprocess.Popen(
            [*machine.prefix, "bash", "-euc", example()],
            cwd=ROOT,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={
                **environment(),
                "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
                "FIRST": machines[0].address,
                "ADDRESS": machine.address,
                "INTERFACE": machine.interface,
                "GPUS": "1",
                "RUN": " ".join(arguments()).replace("data.tokenizer={type: bytes}", "data.tokenizer.type=bytes"),
            },
        )
        for machine in machines
    ]
    try:
        outputs = [process.communicate(timeout=240)[0] for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    assert [process.returncode for process in processes] == [0, 0], "\n".join(outputs)
    assert_same_run(tmp_path / "run", single_process_run)
    manifest = json.loads((tmp_path / "run" / "checkpoints" / "step_00000008" / "manifest.json").read_text())
    assert manifest["layout"]["world_size"] == 2
