"""The results file, groups of runs over processes, failures, and the time limit."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tools.synthetic.batches import prepare
from tools.synthetic.experiment import Run, sweeps
from tools.synthetic.model_run import ModelRun
from tools.synthetic.results import Line, Results, result_line
from tools.synthetic.run_checkpoint import CheckpointStore, Evaluation, GroupState
from tools.synthetic.training import train_together
from tools.synthetic.workers import Group, _worker_processes, groups_of, train_groups, without_interrupts

Runs = Callable[..., list[Run]]
QUICK = ("data.train_examples=128", "data.test_examples=64", "epochs=1")


def line(run: Run, accuracy: float = 0.5, best: float = 0.0) -> Line:
    return result_line(run, {"accuracy": accuracy, "best_accuracy": best or accuracy, "history": [accuracy]}, {})


def test_incomplete_last_line_is_removed(runs: Runs, tmp_path: Path) -> None:
    first, second, third = runs("lrs=[1e-3,2e-3,3e-3]")
    path = tmp_path / "deep" / "results.jsonl"
    results = Results(path)
    with results.writing():
        results.add(line(first))
        results.add(line(second))
    whole = path.read_bytes()
    # The incomplete line is longer than the line that replaces it.
    path.write_bytes(whole[:-20] + b" " * 5000)
    again = Results(path)
    assert list(again.lines) == [first.id]
    with again.writing():
        again.add(line(third))
    assert [json.loads(text)["id"] for text in path.read_text().splitlines()] == [first.id, third.id]
    assert list(Results(path).lines) == [first.id, third.id]


def test_lines_of_other_processes_are_kept(runs: Runs, tmp_path: Path) -> None:
    """Append a line while the file is written, as `cat a/results.jsonl >> b/results.jsonl` does, and move the file away."""
    first, second, third = runs("lrs=[1e-3,2e-3,3e-3]")
    path = tmp_path / "results.jsonl"
    results = Results(path)
    with results.writing():
        results.add(line(first))
        with path.open("a") as file:
            file.write(json.dumps(line(second)) + "\n")
        results.add(line(third))
        assert list(Results(path).lines) == [first.id, second.id, third.id]
        path.rename(tmp_path / "aside.jsonl")
        results.add(line(second))
    assert list(Results(path).lines) == [second.id]


@pytest.mark.parametrize(("text", "shown"), [(b"[]", r"\[\]"), (b"\xff{", "\ufffd{")])
def test_invalid_line_is_named(tmp_path: Path, text: bytes, shown: str) -> None:
    path = tmp_path / "results.jsonl"
    path.write_bytes(b'{"id": "a"}\n' + text + b"\n")
    with pytest.raises(ValueError, match=rf"results\.jsonl:2 is not a result of a run: '{shown}'"):
        Results(path)


def test_second_command_is_refused_by_the_lock(runs: Runs, tmp_path: Path) -> None:
    first, second = runs("lrs=[1e-3,2e-3]")
    one, other = (Results(tmp_path / "results.jsonl") for _ in range(2))
    with one.writing():
        with pytest.raises(ValueError, match=r"results\.jsonl is locked by another command"), other.writing():
            pass
        one.add(line(first))
    with other.writing():
        assert list(other.lines) == [first.id]
        other.add(line(second))
    assert list(Results(one.path).lines) == [first.id, second.id]


def test_pending_runs_of_a_sweep(runs: Runs, tmp_path: Path) -> None:
    """Count a sweep with a run at the target as finished; list the missing runs of the others."""
    grouped = sweeps(runs("lrs=[1e-3,2e-3,3e-3]", "widths=[16,32]"))
    results = Results(tmp_path / "results.jsonl")
    assert [len(group.runs) for group in groups_of(grouped, results, None)] == [3, 3]
    assert [len(group.runs) for group in groups_of(grouped, results, 2)] == [2, 1, 2, 1]
    # Groups are in the order of the table's rows, and split until every worker has one.
    assert [group.runs[0].width for group in groups_of(grouped, results, None)] == [16, 32]
    shared = groups_of(grouped, results, None, 4)
    assert [(group.runs[0].width, len(group.runs)) for group in shared] == [(16, 3), (32, 1), (32, 1), (32, 1)]
    assert {run.id for group in shared for run in group.runs} == {run.id for sweep in grouped for run in sweep}
    assert [len(group.runs) for group in groups_of(grouped, results, None, 99)] == [1] * 6
    results.add(line(grouped[0][1], 0.98))
    results.add(line(grouped[1][2], 0.5, best=0.99))  # reached before the scored evaluation
    (group,) = groups_of(grouped, results, None)
    assert group.runs == (grouped[0][0], grouped[0][2])
    assert group.sweep == tuple(grouped[0])
    assert results.reached(grouped[1])
    assert not results.reached(replace(run, target=None) for run in grouped[1])


def test_groups_are_sorted_by_rows_of_the_table(runs: Runs, tmp_path: Path) -> None:
    more = "more_lrs={tasks: [8x2], models: [gla], lrs: [1e-3]}"
    grouped = sweeps(
        runs("tasks=[12x2,8x2]", "models=[metala,gla]", "widths=[32,16]", "batch_size={8: 64, 12: 64}", more)
    )
    order = [group.runs[0] for group in groups_of(grouped, Results(tmp_path / "results.jsonl"), None)]
    rows = [(run.width, run.task) for run in order]
    assert rows[::2] == rows[1::2] == [(32, "12x2"), (32, "8x2"), (16, "12x2"), (16, "8x2")]
    assert [run.model for run in order] == ["metala", "gla", "gla", "metala"] * 2


def train(groups: list[Group], results: Results, devices: list[str]) -> tuple[list[str], int]:
    reported = [0]
    results.path.parent.mkdir(exist_ok=True)

    def progress(steps: int, text: str) -> None:
        reported[0] += steps

    return train_groups(groups, results, devices, progress=progress), reported[0]


def test_finished_runs_are_skipped_and_progress_adds_up(runs: Runs, tmp_path: Path) -> None:
    """Count the steps of runs that are no longer needed, too."""
    grouped = sweeps(runs(*QUICK, "data.train_examples=640", "lrs=[5e-3,1e-2]", "target=0.01"))
    results = Results(tmp_path / "results.jsonl")
    groups = groups_of(grouped, results, 1)
    assert train(groups, results, ["cpu"]) == ([], sum(group.steps for group in groups))
    assert list(results.lines) == [grouped[0][0].id]
    assert groups_of(grouped, Results(results.path), 1) == []


def test_several_processes_give_the_results_of_one(runs: Runs, tmp_path: Path) -> None:
    grouped = sweeps(runs(*QUICK, "widths=[16,32]", "models=[metala,attention]"))
    result = []
    for name, devices in (("one", ["cpu"]), ("two", ["cpu", "cpu"])):
        results = Results(tmp_path / name / "results.jsonl")
        groups = groups_of(grouped, results, None)
        assert train(groups, results, devices) == ([], sum(group.steps for group in groups))
        keys = ("accuracy", "history", "loss", "steps", "parameters", "data", "network")
        result.append({i: [line[key] for key in keys] for i, line in results.lines.items()})
    assert len(result[0]) == 4
    assert result[0] == result[1]


def test_target_ends_the_sweep_in_all_processes(runs: Runs, tmp_path: Path) -> None:
    """Stop a long run when another reaches the target after one epoch. No checkpoint remains."""
    slow, quick = runs("lrs=[5e-3,1e-9]", "epochs=1000", "target=0.9")
    results = Results(tmp_path / "results.jsonl")
    for run in (slow, quick):
        state = GroupState(1, 2.0, [[Evaluation(0.1, 2.0, 0.1)]], [ModelRun(run, torch.device("cpu")).state()])
        CheckpointStore(tmp_path / "unfinished", [run]).save(state)
    (tmp_path / "unfinished" / "another.pt").touch()
    groups = groups_of([[slow, quick]], results, None, 2)
    assert len(groups) == 2
    assert train(groups, results, ["cpu", "cpu"]) == ([], quick.steps + slow.steps)
    assert list(results.lines) == [quick.id]
    assert results.lines[quick.id]["stopped"] == "90 % was reached"
    assert results.lines[quick.id]["history"][0] == 0.1
    assert [path.name for path in (tmp_path / "unfinished").iterdir()] == ["another.pt"]


class _EndsTheProcess(dict[str, Any]):
    """End the worker that unpickles it, as the kernel does when memory is short."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os._exit, (9,)


def test_a_failed_group_is_reported_and_the_others_continue(runs: Runs, tmp_path: Path) -> None:
    good, also_good = runs(*QUICK, "widths=[16,32]")
    bad = replace(good, data={**good.data, "pairs": 3})
    results = Results(tmp_path / "results.jsonl")
    failed, _ = train([Group((run,), (run,)) for run in (bad, good)], results, ["cpu"])
    assert failed == [
        "8x2 metala d=16 lr 0.005: ValueError: length 8 with 3 pairs: an even length of at least 4 x pairs = 12 is required "
        "(data/synthetic/mqar.py:27)"
    ]
    assert list(results.lines) == [good.id]
    deadly = replace(good, network={**good.network, "mlp": _EndsTheProcess()})
    failed, _ = train([Group((run,), (run,)) for run in (deadly, also_good)], results, ["cpu", "cpu"])
    assert failed == ["8x2 metala d=16 lr 0.005: its worker process: exit status 9"]
    assert list(results.lines) == [good.id, also_good.id]


def test_time_limit_stops_training(runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that every process saves at the end of an epoch, and that the run resumes there."""
    long = runs("epochs=100000", "target=null", "widths=[16,32]")
    results = Results(tmp_path / "results.jsonl")
    groups = [Group((run,), (run,)) for run in long]
    begin = time.monotonic()
    assert train_groups(groups, results, ["cpu"], seconds=0) == []
    assert time.monotonic() - begin < 150
    assert not (tmp_path / "unfinished").exists()
    monkeypatch.setattr("tools.synthetic.workers._GRACE", 600.0)
    states: list[str] = []
    assert train_groups(groups, results, ["cpu", "cpu"], seconds=2, saved=states.append) == []
    for width in (16, 32):
        (text,) = [text for text in states if f"d={width}:" in text]
        assert re.fullmatch(
            r".*: saved after epoch \d+ of 100000; accuracy [\d.]+ %, highest [\d.]+ % after epoch \d+", text
        )
    saved = list((tmp_path / "unfinished").iterdir())
    assert {path.stem for path in saved} == {run.id for run in long}
    for path in saved:
        path.unlink()
    reported: list[str] = []
    for _ in range(2):
        begin = time.monotonic()
        assert (
            train_groups(groups, results, ["cpu"], seconds=0.5, progress=lambda steps, text: reported.append(text))
            == []
        )
        assert time.monotonic() - begin < 150
    assert not results.lines
    assert [path.name for path in (tmp_path / "unfinished").iterdir()] == [f"{long[0].id}.pt"]
    (resumed,) = [text for text in reported if "resumes" in text]
    assert resumed == f"8x2 metala d=16 resumes after epoch {reported.index(resumed)}"
    # A run that is past its last epoch is complete, also after the time limit.
    (short,) = runs(*QUICK)
    result = train_together([short], prepare(short, torch.device("cpu")), torch.device("cpu"), end=0.0)
    assert result[0]["epochs"] == 1


def test_every_run_has_the_examples_of_its_task_and_seed(runs: Runs, tmp_path: Path) -> None:
    cpu = torch.device("cpu")
    every = runs(*QUICK, "seeds=[0,1]", "tasks=[8x2,12x2]", "batch_size={8: 64, 12: 64}")
    results = Results(tmp_path / "results.jsonl")
    assert train_groups([Group((run,), (run,)) for run in every], results, ["cpu"]) == []
    for run in every:
        (alone,) = train_together([run], prepare(run, cpu), cpu)
        assert results.lines[run.id]["loss"] == alone["loss"]


def test_finished_run_has_no_checkpoint(runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tools.synthetic.run_checkpoint.SECONDS_BETWEEN", 0.0)
    monkeypatch.setattr("tools.synthetic.run_checkpoint._MIN_TRAINING_PER_WRITING", 0.0)
    (run,) = runs("data.train_examples=128", "data.test_examples=64", "epochs=3", "target=null")
    seen: list[list[Path]] = []
    results = Results(tmp_path / "results.jsonl")

    def look(steps: int, text: str) -> None:
        seen.append([*tmp_path.glob("unfinished/*")])

    assert train_groups([Group((run,), (run,))], results, ["cpu"], progress=look) == []
    assert [path.name for path in seen[-2]] == [f"{run.id}.pt"]
    assert [*tmp_path.glob("unfinished/*")] == []


def test_missing_device_gives_no_result(runs: Runs, tmp_path: Path) -> None:
    (run,) = runs(*QUICK)
    results = Results(tmp_path / "results.jsonl")
    failed, _ = train([Group((run,), (run,))], results, ["cuda:98", "cuda:99"])
    assert failed == ["8x2 metala d=32 lr 0.005: ValueError: the device 'cuda:98' is not here: allowed are auto, cpu"]
    assert not results.lines


def test_workers_exit_without_a_signal(runs: Runs, tmp_path: Path) -> None:
    """Check that a worker releases its semaphores: a process that a signal ends does not, and the parent reports them."""
    (run,) = runs(*QUICK)
    with _worker_processes(["cuda:99"], False, tmp_path, math.inf) as workers:
        ((connection, process),) = workers.items()
        connection.send(Group((run,), (run,)))
        assert connection.recv()[0] == "failed"
    assert process.exitcode in (0, 128 + signal.SIGTERM)


def test_interrupt_while_processes_start_comes_afterwards_and_not_to_them() -> None:
    program = "import signal; print(signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, []))"
    outputs = []

    def interrupted_start() -> None:
        with without_interrupts():
            os.kill(os.getpid(), signal.SIGINT)
            outputs.append(subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout)

    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # a process of pytest-xdist ignores the signal
    try:
        with pytest.raises(KeyboardInterrupt):
            interrupted_start()
    finally:
        signal.signal(signal.SIGINT, handler)
    assert outputs == ["True\n"]
