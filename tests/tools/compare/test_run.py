"""A small comparison from its file to the table, through real worker processes."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import statistics
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from data.atomic_io import write_text
from megatron_lite.metrics.logger import read_metrics
from tools.compare import worker
from tools.compare.__main__ import _devices, main
from tools.compare.launcher import _Slot, run_all
from tools.compare.spec import Run, plan_runs, read_comparison

WORDS = ["state", "decay", "query", "key", "value", "head", "token", "mixer", "layer", "gate"]


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """Make a working folder with a comparison of two tiny models, two sizes and two seeds, on documents of two sources."""
    folder = tmp_path_factory.mktemp("compare")
    draw = random.Random(0)
    lines = [
        json.dumps({"text": " ".join(draw.choices(WORDS, k=30)), "meta": {"pile_set_name": "AB"[i % 2]}})
        for i in range(120)
    ]
    (folder / "toy.jsonl").write_text("\n".join(lines) + "\n")
    content = {
        "name": "tiny",
        "title": "Two tiny models",
        "data": "toy.yml",
        "seeds": [1, 2],
        "sizes": {"small": {}, "large": {"model": {"hidden_size": 48, "num_heads": 2}}},
        "models": {
            "metala": {"label": "MetaLA", "config": {"model": {"mixers": ["metala"]}}},
            "softmax": {"config": {"model": {"mixers": ["attention"]}}},
        },
        "equal_parameters": {"reference": "metala", "tolerance": 0.05, "multiple": 4},
        "config": {
            "model": {"num_layers": 1, "hidden_size": 32, "num_heads": 2},
            "batch": {"sequence_length": 32, "micro_batch_size": 2, "global_batch_size": 2},
            "optimizer": {"lr": 1e-2},
            "schedule": {"train_steps": 12},
            "precision": {"dtype": "fp32"},
            "evaluation": {"interval": 4, "batches": 4, "sample_tokens": 0},
            "logging": {"loss_by_source": True},
        },
    }
    (folder / "tiny.yml").write_text(yaml.safe_dump(content))
    data = {"corpus": "toy.jsonl", "tokenizer": {"type": "bytes"}, "validation_fraction": 0.2}
    (folder / "toy.yml").write_text(yaml.safe_dump({"data": data}))
    return folder


def test_comparison_continues_after_failed_runs(place: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(place)
    words = ["tiny.yml", "--devices", "cpu", "--workers", "2"]
    folder = Path("runs/tiny")
    # Folders in place of files: one run cannot save, another ends with a traceback. The other runs continue.
    failing = ["metala-small-seed1", "metala-large-seed1"]
    in_the_way = [folder / failing[0] / "checkpoints" / "latest", folder / failing[1] / "loss.png"]
    for path in in_the_way:
        path.mkdir(parents=True)
    assert main(words) == 1
    out, errors = capsys.readouterr()
    assert "2 of 8 runs not complete:" in out
    for name in failing:
        assert f"{name} failed:" in errors
        assert f"exit status 1; the whole log: runs/tiny/{name}/train.log" in errors
    assert "IsADirectoryError" in errors
    results = json.loads((folder / "results.json").read_text())
    assert {run["run"] for run in results["runs"] if not run["final"]} == set(failing)
    # The same command trains the failed runs, and no complete run.
    for path in in_the_way:
        path.rmdir()
    first = (folder / "softmax-small-seed2" / "metrics.jsonl").read_text()
    assert main([*words, "--workers", "1"]) == 0
    assert (folder / "softmax-small-seed2" / "metrics.jsonl").read_text() == first
    out = capsys.readouterr().out
    for name in ("results.md", "results.json", "results.png", "scaling.png", "sources.png"):
        assert (folder / name).stat().st_size > 500, name
    results = json.loads((folder / "results.json").read_text())
    assert len(results["runs"]) == 8
    for run in results["runs"]:
        # The numbers are those of the run's own metrics, read over the whole text at the end.
        last = [line for line in read_metrics(folder / run["run"]) if line["kind"] == "validation"][-1]
        assert run["final"]["loss"] == last["loss"] > 0
        assert run["parameters"] == run["body_parameters"] + 384 * (32 if run["size"] == "small" else 48) > 0
        assert run["tokens"] == 12 * 2 * 32
    losses = [r["final"]["loss"] for r in results["runs"] if (r["model"], r["size"]) == ("metala", "large")]
    assert f"{statistics.mean(losses):.4f} ± {statistics.stdev(losses):.4f}" in out
    pairs = {(r["model"], r["seed"]): r["final"]["loss"] for r in results["runs"] if r["size"] == "large"}
    change = statistics.mean(pairs["softmax", seed] - pairs["metala", seed] for seed in (1, 2))
    assert f"{change:+.4f} ± " in out
    assert "Loss by source:" in out
    # One worker trained several runs; each has a log of its own.
    log = (folder / "metala-large-seed1" / "train.log").read_text()
    assert "step 12/12" in log
    assert "python train.py" in log
    # A complete run whose metrics were cut is named, and has no loss of an earlier step.
    (folder / "softmax-small-seed2" / "metrics.jsonl").write_text(first[: first.rindex('{"kind": "validation"')])
    assert main([*words, "--report"]) == 0
    assert "lacks the validation after the last step: softmax-small-seed2. Copy the file" in capsys.readouterr().out
    (folder / "softmax-small-seed2" / "metrics.jsonl").write_text(first)


@pytest.mark.parametrize(
    ("words", "workers"), [(["cpu"], 1), (["cpu", "--workers", "2"], 2), (["0"], 3)], ids=["CPU", "two workers", "GPU"]
)
def test_the_workers_of_the_file_are_for_gpus(
    place: Path, tmp_path: Path, monkeypatch, words: list[str], workers: int
) -> None:
    monkeypatch.chdir(place)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    (tmp_path / "many.yml").write_text((place / "tiny.yml").read_text() + "workers: 3\n")
    given: dict[str, Any] = {}

    def run_all(_runs: Any, **settings: Any) -> SimpleNamespace:
        given.update(settings)
        return SimpleNamespace(stopped="", failed={})

    monkeypatch.setattr("tools.compare.launcher.run_all", run_all)
    assert main([str(tmp_path / "many.yml"), "--name", "many", "--seeds", "1", "--devices", *words]) == 1
    assert given["workers"] == workers
    assert given["devices"] == words[:1]
    assert given["tune_kernels"] is False


def test_devices_are_the_given_or_the_visible_ones(monkeypatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    assert _devices([6, "cpu"]) == ["6", "cpu"]
    assert _devices(["GPU-8f2a0c"]) == ["GPU-8f2a0c"]
    with pytest.raises(ValueError, match=r"--devices 1: allowed are 4, 6, cpu; leave it out for all GPUs"):
        _devices([1])
    assert _devices([]) == ["4", "6"]
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,-1,6")  # CUDA ignores the names from the first invalid one on
    assert _devices([]) == ["4"]
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert _devices([]) == ["cpu"]
    with pytest.raises(ValueError, match=r"--devices cuda9: allowed are cpu"):
        _devices(["cuda9"])
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert _devices(None) == ["0", "1"]
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert _devices(None) == ["cpu"]


def test_stopped_comparison_resumes(place: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(place)
    words = [
        "tiny.yml",
        "--name",
        "cut",
        "--devices",
        "cpu",
        "--sizes",
        "small",
        "--seeds",
        "1",
        "--models",
        "metala",
        "evaluation.interval=0",
    ]
    run = Path("runs/cut/metala-small-seed1")
    steps = 400

    def interrupt() -> None:
        while not (run / "metrics.jsonl").is_file() or len((run / "metrics.jsonl").read_text().splitlines()) < 4:
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    assert main([*words, f"schedule.train_steps={steps}"]) == 1
    captured = capsys.readouterr()
    assert "1 of 1 run not complete: metala-small-seed1 at step" in captured.out
    assert "stopped (SIGINT)" in captured.err
    assert "failed" not in captured.err
    stopped = read_metrics(run)[-1]["step"]
    assert 0 < stopped < steps
    assert (run / "checkpoints" / f"step_{stopped:08d}").is_dir()
    # Another number of steps under the same name is refused before anything starts.
    assert main([*words, "schedule.train_steps=8"]) == 2
    assert f"schedule.train_steps: {steps} in the file, 8 now" in capsys.readouterr().err
    # It is refused without training too, and after an included file was edited.
    assert main([*words, "schedule.train_steps=8", "--report"]) == 2
    data = (place / "toy.yml").read_text()
    (place / "toy.yml").write_text(data + "optimizer: {weight_decay: 0.3}\n")
    assert main([*words, f"schedule.train_steps={steps}"]) == 2
    assert "optimizer.weight_decay: not given in the file, 0.3 now" in capsys.readouterr().err
    (place / "toy.yml").write_text(data)
    # --report trains nothing.
    assert main([*words, f"schedule.train_steps={steps}", "--report"]) == 1
    assert "no run is complete yet: run the same command without --report" in capsys.readouterr().err
    assert read_metrics(run)[-1]["step"] == stopped
    assert main([*words, f"schedule.train_steps={steps}", "--minutes", "0.0001"]) == 1
    assert "the time limit, --minutes 0.0001" in capsys.readouterr().err
    assert main([*words, f"schedule.train_steps={steps}"]) == 0
    lines = [line["step"] for line in read_metrics(run) if line["kind"] == "train"]
    assert lines == list(range(1, steps + 1))
    # A run that was trained further outside of the comparison is refused.
    with (run / "metrics.jsonl").open("a") as metrics:
        metrics.write(json.dumps({"kind": "train", "step": steps + 4}) + "\n")
    assert main([*words, f"schedule.train_steps={steps}", "--report"]) == 2
    assert f"was trained to step {steps + 4}, but the comparison ends at {steps}" in capsys.readouterr().err


def test_other_runs_with_another_recipe_are_refused(place: Path, monkeypatch, capsys) -> None:
    """Refuse results with runs that are not selected and were trained with an override."""
    monkeypatch.chdir(place)
    planned = read_comparison(Path("tiny.yml")).model_copy(update={"name": "mixed"})
    (run, *_) = plan_runs(planned, models=["metala"], overrides=["optimizer.lr=0.5"])
    write_text(run.file, run.text)
    write_text(run.folder / "summary.json", "{}")
    assert main(["tiny.yml", "--name", "mixed", "--models", "softmax", "--report"]) == 2
    message = capsys.readouterr().err
    assert f"{run.folder} was started with other values (optimizer.lr: 0.5 in the file" in message
    assert "--tune" not in message
    # The file of --tune may have set the rate.
    write_text(run.folder.parent / "learning_rates.json", "{}")
    assert main(["tiny.yml", "--name", "mixed", "--models", "softmax", "--report"]) == 2
    source = "0.01 now). runs/mixed/learning_rates.json sets the rates since --tune. Give the comparison another --name"
    assert source in capsys.readouterr().err
    assert main(["tiny.yml", "--name", "mixed", "--report", "optimizer.lr=0.5", "optimizer.weight_decay=0.3"]) == 2
    assert "--tune" not in capsys.readouterr().err


def test_diverged_run_fails_alone(place: Path, monkeypatch, capsys) -> None:
    """End a run whose losses are not finite (learning rate 1e20) with an error and without a summary."""
    monkeypatch.chdir(place)
    content = yaml.safe_load((place / "tiny.yml").read_text())
    content["models"]["metala"]["config"]["optimizer"] = {"lr": 1e20}
    content["config"]["schedule"]["train_steps"] = 8
    (place / "wild.yml").write_text(yaml.safe_dump(content))
    assert main(["wild.yml", "--name", "wild", "--devices", "cpu", "--sizes", "small"]) == 1
    output = capsys.readouterr()
    assert "metala-small" in output.err + output.out
    complete = {path.parent.name for path in Path("runs/wild").glob("*/summary.json")}
    assert complete
    assert all(name.startswith("softmax") for name in complete)


def test_runs_are_sorted_by_seed_and_longest_first(place: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(place)
    runs = [replace(run, folder=tmp_path / run.name) for run in plan_runs(read_comparison(Path("tiny.yml")))]
    served: list[tuple[str, bool]] = []
    trained: list[str] = []

    class Slot:
        def __init__(self, device: str, tune_kernels: bool) -> None:
            self.place = device, tune_kernels

        def train(self, run: Run, _threads: int) -> int:
            trained.append(run.name)
            write_text(run.folder / "summary.json", "{}")
            return 0

        def close(self) -> None:
            served.append(self.place)

        def kill(self) -> None: ...

    monkeypatch.setattr("tools.compare.launcher._Slot", Slot)
    assert not run_all(runs, devices=["0"], tune_kernels=True, progress=False).failed
    assert served == [("0", True)]
    models = ["metala-large", "softmax-large", "metala-small", "softmax-small"]
    assert trained == [f"{model}-seed{seed}" for seed in (1, 2) for model in models]
    # One slot per remaining run, on all devices first.
    for run in runs[:3]:
        (run.folder / "summary.json").unlink()
    run_all(runs, devices=["0", "1"], workers=2, progress=False)
    assert sorted(served[1:]) == [("0", False), ("0", False), ("1", False)]
    assert sorted(trained[8:]) == sorted(run.name for run in runs[:3])
    run_all(runs, devices=["0"], progress=False)
    assert len(trained) == 11


def test_the_last_runs_start_when_all_others_have_ended(place: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(place)
    runs = [replace(run, folder=tmp_path / run.name) for run in plan_runs(read_comparison(Path("tiny.yml")))][:4]
    last, failing = runs[0].name, runs[2].name
    ended: list[str] = []

    class Slot:
        def __init__(self, *_: Any) -> None: ...

        def train(self, run: Run, _threads: int) -> int:
            if run.name == last:
                assert len(ended) == 3
            else:
                time.sleep(0.3)  # longer than the other slots need to ask for the next run
            ended.append(run.name)
            if run.name == failing:
                raise OSError("no memory")
            write_text(run.folder / "summary.json", "{}")
            return 0

        def close(self) -> None: ...

        def kill(self) -> None: ...

    monkeypatch.setattr("tools.compare.launcher._Slot", Slot)
    failed = run_all(runs, devices=["0"], workers=4, last=[last], progress=False).failed
    assert failed == {failing: "the worker failed: no memory"}
    assert ended[3:] == [last]


def test_a_worker_has_its_device_and_its_share_of_the_cores(monkeypatch) -> None:
    started: list[Any] = []
    monkeypatch.setattr("subprocess.Popen", lambda words, **more: started.append((words, more["env"])))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    _Slot("3", tune_kernels=False)._start(5)
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    _Slot("cpu", tune_kernels=True)._start(5)
    (untuned, gpu), (tuned, cpu) = started
    assert untuned == [*tuned, "--untuned"]
    assert (gpu["CUDA_VISIBLE_DEVICES"], gpu["OMP_NUM_THREADS"]) == ("3", "5")
    assert (cpu["CUDA_VISIBLE_DEVICES"], cpu["OMP_NUM_THREADS"]) == ("", "2")


def test_a_worker_stops_its_run_when_the_launcher_is_gone(tmp_path: Path, monkeypatch) -> None:
    """Close the worker's input, as a killed launcher does: SIGTERM then makes the run save and end."""
    read, write = os.pipe()
    stopped = threading.Event()

    def run(files: list[Path]) -> int:
        previous = signal.signal(signal.SIGTERM, lambda *_: stopped.set())
        os.close(write)
        received = stopped.wait(30)
        signal.signal(signal.SIGTERM, previous)
        return 0 if received else 1

    monkeypatch.setattr("tools.pretraining.run.run", run)
    monkeypatch.setattr("sys.argv", ["worker"])
    outputs = [os.dup(number) for number in (1, 2)]
    statuses, unread = os.pipe()
    os.close(statuses)
    monkeypatch.setattr("sys.stdout", SimpleNamespace(fileno=lambda: unread, flush=lambda: None))
    os.write(write, f"{tmp_path / 'run.yml'}\n".encode())
    with os.fdopen(read) as lines:
        monkeypatch.setattr("sys.stdin", lines)
        try:
            assert worker.main() == 0
        finally:
            for number, saved in zip((1, 2), outputs, strict=True):
                os.dup2(saved, number)
                os.close(saved)
            os.close(unread)
    assert stopped.is_set()


def test_the_plan_trains_nothing(place: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(place)
    assert main(["tiny.yml", "--name", "planned", "--dry-run", "schedule.train_steps=50000"]) == 0
    output = capsys.readouterr().out
    assert "Two tiny models: 8 runs in runs/planned\n" in output
    for run in plan_runs(read_comparison(Path("tiny.yml"))):
        cells = [run.label, run.size, f"{run.parameters:,}", f"{run.body:,}", "3,200,000", "1, 2"]
        assert any(set(cells) <= set(re.split(" {2,}", line)) for line in output.splitlines()), cells
    assert not Path("runs/planned").exists()
    monkeypatch.setattr("tools.reporting.tables.terminal_width", lambda: 60)
    assert main(["tiny.yml", "--dry-run"]) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 60


def test_without_validation_text_nothing_is_trained(place: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(place)
    data = {"data": {"corpus": "toy.jsonl", "tokenizer": {"type": "bytes"}, "validation_fraction": 0}}
    Path("all.yml").write_text(yaml.safe_dump(data))
    assert main(["tiny.yml", "--name", "blind", "--data", "all.yml", "--devices", "cpu"]) == 2
    assert "data.validation_fraction > 0" in capsys.readouterr().err
    assert not list(Path("runs/blind").glob("*/train.log"))
