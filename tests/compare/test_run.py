"""A small comparison from its file to the table, through real worker processes."""

from __future__ import annotations

import json
import math
import os
import random
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

from data.files import write_whole
from megatron_lite.metrics import read_metrics
from tools.compare.__main__ import _devices, main
from tools.compare.figures import _styles, draw
from tools.compare.plan import Run, plan_runs, read_comparison
from tools.compare.results import Result, Row, markdown, tables
from tools.compare.run import _Slot, run_all

WORDS = ["state", "decay", "query", "key", "value", "head", "token", "mixer", "layer", "gate"]


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A working folder with a comparison of two tiny models, two sizes and two seeds, on documents of two sources."""
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


def test_from_the_file_to_the_table_with_runs_that_fail_on_the_way(place: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(place)
    words = ["tiny.yml", "--devices", "cpu", "--workers", "2"]
    folder = Path("runs/tiny")
    # Folders where a file should be: one run cannot save, the other ends with a traceback. The others go on without them.
    failing = ["metala-small-seed1", "metala-large-seed1"]
    in_the_way = [folder / failing[0] / "checkpoints" / "latest", folder / failing[1] / "loss.png"]
    for path in in_the_way:
        path.mkdir(parents=True)
    assert main(words) == 1
    out, errors = capsys.readouterr()
    assert "2 of 8 runs are not complete:" in out
    for name in failing:
        assert f"{name} failed:" in errors
        assert f"exit status 1; the whole log: runs/tiny/{name}/train.log" in errors
    assert "IsADirectoryError" in errors
    results = json.loads((folder / "results.json").read_text())
    assert {run["run"] for run in results["runs"] if not run["final"]} == set(failing)
    # The same command trains what failed, and nothing that is complete.
    for path in in_the_way:
        path.rmdir()
    first = (folder / "softmax-small-seed2" / "metrics.jsonl").read_text()
    assert main(words) == 0
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


@pytest.mark.parametrize(
    ("words", "workers"), [(["cpu"], 1), (["cpu", "--workers", "2"], 2), (["0"], 3)], ids=["CPU", "asked for", "GPU"]
)
def test_the_workers_of_the_file_are_for_gpus(
    place: Path, tmp_path: Path, monkeypatch, words: list[str], workers: int
) -> None:
    monkeypatch.chdir(place)
    (tmp_path / "many.yml").write_text((place / "tiny.yml").read_text() + "workers: 3\n")
    given: dict[str, Any] = {}

    def run_all(_runs: Any, **settings: Any) -> SimpleNamespace:
        given.update(settings)
        return SimpleNamespace(stopped="", failed={})

    monkeypatch.setattr("tools.compare.run.run_all", run_all)
    assert main([str(tmp_path / "many.yml"), "--name", "many", "--seeds", "1", "--devices", *words]) == 1
    assert given["workers"] == workers
    assert given["devices"] == words[:1]
    assert given["tune_kernels"] is False


def test_devices_are_those_asked_for_or_those_that_are_visible(monkeypatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    assert _devices([1, "cpu"]) == ["1", "cpu"]
    assert _devices([]) == ["4", "6"]
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,-1,6")  # as CUDA reads it, which ends at what is no device
    assert _devices([]) == ["4"]
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert _devices([]) == ["cpu"]
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert _devices(None) == ["0", "1"]
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert _devices(None) == ["cpu"]


def test_a_stopped_comparison_goes_on(place: Path, monkeypatch, capsys) -> None:
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
    steps = 100

    def interrupt() -> None:
        while not (run / "metrics.jsonl").is_file() or len((run / "metrics.jsonl").read_text().splitlines()) < 4:
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    assert main([*words, f"schedule.train_steps={steps}"]) == 1
    captured = capsys.readouterr()
    assert "1 of 1 runs are not complete: metala-small-seed1 at step" in captured.out
    assert "stopped (SIGINT)" in captured.err
    assert "failed" not in captured.err
    stopped = read_metrics(run)[-1]["step"]
    assert 0 < stopped < steps
    assert (run / "checkpoints" / f"step_{stopped:08d}").is_dir()
    # Another number of steps under the same name is refused before anything starts.
    assert main([*words, "schedule.train_steps=8"]) == 2
    assert f"schedule.train_steps: {steps} there, 8 here" in capsys.readouterr().err
    # So it is without training, and where a file that is included has been edited.
    assert main([*words, "schedule.train_steps=8", "--table"]) == 2
    data = (place / "toy.yml").read_text()
    (place / "toy.yml").write_text(data + "optimizer: {weight_decay: 0.3}\n")
    assert main([*words, f"schedule.train_steps={steps}"]) == 2
    assert "optimizer.weight_decay: not given there, 0.3 here" in capsys.readouterr().err
    (place / "toy.yml").write_text(data)
    # The table of what is there trains nothing.
    assert main([*words, f"schedule.train_steps={steps}", "--table"]) == 1
    assert read_metrics(run)[-1]["step"] == stopped
    assert main([*words, f"schedule.train_steps={steps}", "--minutes", "0.0001"]) == 1
    assert "the 0.0001 minutes are over" in capsys.readouterr().err
    assert main([*words, f"schedule.train_steps={steps}"]) == 0
    lines = [line["step"] for line in read_metrics(run) if line["kind"] == "train"]
    assert lines == list(range(1, steps + 1))
    # What was trained further by itself is no part of the comparison any more.
    with (run / "metrics.jsonl").open("a") as metrics:
        metrics.write(json.dumps({"kind": "train", "step": steps + 4}) + "\n")
    assert main([*words, f"schedule.train_steps={steps}", "--table"]) == 2
    assert f"was trained to step {steps + 4}, and the comparison ends at {steps}" in capsys.readouterr().err


def test_a_run_that_diverged_stands_last_and_spoils_no_other(place: Path, monkeypatch, capsys) -> None:
    """Its last steps give no finite loss, too few in a row to end it; the log has every third step."""
    monkeypatch.chdir(place)
    content = yaml.safe_load((place / "tiny.yml").read_text())
    content["models"]["metala"]["config"]["optimizer"] = {"lr": 1e20}
    content["config"]["schedule"]["train_steps"] = 8
    content["config"]["logging"]["interval"] = 3
    (place / "wild.yml").write_text(yaml.safe_dump(content))
    assert main(["wild.yml", "--name", "wild", "--devices", "cpu"]) == 0
    out = capsys.readouterr().out
    for size in ("small", "large"):
        rows = [
            line for line in out.partition(f"### {size}")[2].splitlines() if line.startswith(("| MetaLA", "| softmax"))
        ]
        assert rows[0].startswith("| softmax")
        assert rows[1].startswith("| MetaLA")
        assert " nan " in rows[1]
    assert {file.name for file in Path("runs/wild").glob("*.png")} == {"results.png", "scaling.png", "sources.png"}
    text = Path("runs/wild/results.json").read_text()
    results = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert {run["model"] for run in results["runs"] if run["final"]["loss"] is None} == {"metala"}
    for run in results["runs"]:
        summary = (Path("runs/wild") / run["run"] / "summary.json").read_text()
        told = json.loads(summary, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
        assert told["validation"]["loss"] == run["final"]["loss"]
        assert run["tokens"] == 8 * 2 * 32
        logged = [
            line["step_seconds"] for line in read_metrics(Path("runs/wild") / run["run"]) if "step_seconds" in line
        ]
        assert run["step_seconds"] == pytest.approx(8 * statistics.mean(logged), abs=0.006)


def test_the_figures_show_what_their_words_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """Courses: mean and range of the seeds; scaling: parameters without embeddings; sources: less the reference, largest size."""
    drawn: dict[str, Any] = {}

    def keep(plt: Any, figure: Any, out: Path) -> Path:
        drawn[out.stem] = figure
        return out

    monkeypatch.setattr("tools.compare.figures._save", keep)
    rows, results = [], []
    for size, body in (("small", 100), ("large", 400)):
        for model, loss in (("a", 2.0), ("b", 1.0)):
            ends = {1: loss + 0.1, 2: loss + 0.5}
            values = {"loss": ends, "loss/x": {1: loss, 2: 1.2 * loss}, "loss/y": dict.fromkeys(ends, 3 * loss + body)}
            rows.append(Row(model, model.upper(), size, 1000 + body, body, values))
            for seed, end in ends.items():
                run: Any = SimpleNamespace(model=model, size=size)
                course = [{"tokens": 10, "loss": 9.0 + seed}, {"tokens": 20, "loss": end}]
                results.append(Result(run, course, course[-1], 20, 1.0))
    draw(results, rows, Path(), "T", "a")
    (scaling,) = drawn["scaling"].axes
    found = {container.get_label(): container for container in scaling.containers}
    for label, loss in (("A", 2.3), ("B", 1.3)):
        line, _, (bars,) = found[label]
        assert line.get_xdata().tolist() == [100, 400]
        assert line.get_ydata().tolist() == pytest.approx([loss, loss])
        assert [y for _, y in bars.get_segments()[0]] == pytest.approx([loss - 0.2, loss + 0.2])
    assert scaling.get_xscale() == "log"
    assert [label.get_text() for label in scaling.get_xticklabels()] == ["0.0001 M", "0.0004 M"]
    (sources,) = drawn["sources"].axes
    (container,) = sources.containers
    assert container.get_label() == "B"
    assert container[0].get_xdata().tolist() == pytest.approx([-1.1, -3.0])
    assert [round(x, 6) for x, _ in container[2][0].get_segments()[0]] == [-1.2, -1.0]
    assert sources.get_title(loc="left") == "T, large"
    # In the large size there is nothing to stand beside A yet.
    drawn.clear()
    draw(results, [row for row in rows if (row.model, row.size) != ("b", "large")], Path(), "T", "a")
    assert set(drawn) == {"results", "scaling"}
    # A third model is complete in the large size alone.
    late = Row("c", "C", "large", 1400, 400, {"loss": {1: 4.0}})
    way = [{"tokens": 10, "loss": 9.0}, {"tokens": 20, "loss": 4.0}]
    alone: Any = SimpleNamespace(model="c", size="large")
    draw([*results, Result(alone, way, way[-1], 20, 1.0)], [*rows, late], Path(), "T", "a")
    legend = drawn["results"].axes[3].get_legend()
    assert [text.get_text() for text in legend.get_texts()] == ["B", "A", "C"]
    colors = {line.get_label(): line.get_color() for line in drawn["results"].axes[3].lines}
    assert [line.get_color() for line in legend.get_lines()] == [colors[name] for name in "BAC"]
    assert len(set(colors.values())) == 3
    course = next(line for line in drawn["results"].axes[2].lines if line.get_label() == "A")
    assert course.get_xdata().tolist() == [10, 20]
    assert course.get_ydata().tolist() == pytest.approx([10.5, 2.3])
    seeds = [line for line in drawn["results"].axes[0].lines if line.get_marker() == "o"]
    assert [line.get_xdata().tolist() for line in seeds] == [pytest.approx([1.1, 1.5]), pytest.approx([2.1, 2.5])]


def test_the_ends_and_the_way_there_of_masked_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """Percent of tokens found; the lowest loss on top; the way: at the validations that all complete seeds have."""
    drawn: dict[str, Any] = {}
    monkeypatch.setattr("tools.compare.figures._save", lambda _plt, figure, out: drawn.setdefault(out.stem, figure))
    rows, results = [], []
    for size, more in (("small", 0.0), ("large", 0.2)):
        for model, loss in (("a", 2.0), ("b", 1.0)):
            ends = {1: 0.25 + more, 2: 0.5 + more} if model == "a" else {1: 0.125}
            rows.append(Row(model, model.upper(), size, 1, 1, {"loss": dict.fromkeys(ends, loss), "accuracy": ends}))
            for seed, end in ends.items():
                run: Any = SimpleNamespace(model=model, size=size)
                points = {1: (10, 20, 30), 2: (20, 25, 30)}[seed] if model == "a" else (30,)
                course = [{"tokens": at, "loss": 9.0, "accuracy": end * at / 30} for at in points]
                results.append(Result(run, course, course[-1], 30, 1.0))
            results.append(Result(run, [{"tokens": 20, "accuracy": 0.0}], None, 20, 1.0))
    draw(results, rows, Path(), "T", "a")
    assert set(drawn) == {"results", "scaling"}
    top, way = drawn["results"].axes[0], drawn["results"].axes[2]
    assert [label.get_text() for label in top.get_yticklabels()] == ["B", "A"]
    assert top.get_ylim()[0] > top.get_ylim()[1]
    assert top.get_xlabel() == "masked tokens found, %; circles: seeds"
    assert [line.get_xdata() for line in top.lines if line.get_marker() == "|"] == [[12.5], [37.5]]
    (line,) = way.lines  # of b there is the end alone
    assert line.get_xdata().tolist() == [20, 30]
    assert line.get_ydata().tolist() == pytest.approx([25.0, 37.5])
    (band,) = way.collections
    corners = {(float(x), round(float(y), 6)) for x, y in band.get_paths()[0].vertices}
    assert corners == {(20, 16.666667), (20, 33.333333), (30, 25.0), (30, 50.0)}
    assert way.xaxis.get_major_formatter()(2.5e6) == "2.5 M"


def test_a_masked_model_beside_a_causal_one_is_drawn_by_its_loss(tmp_path: Path) -> None:
    rows = [
        Row("a", "A", "", 1, 1, {"loss": {1: 2.0}, "accuracy": {1: 0.5}}),
        Row("b", "B", "", 1, 1, {"loss": {1: 1.0}}),
    ]
    assert draw([], rows, tmp_path, "T", None) == [tmp_path / "results.png"]


def test_runs_go_out_seed_by_seed_and_the_longest_first(place: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(place)
    runs = [replace(run, folder=tmp_path / run.name) for run in plan_runs(read_comparison(Path("tiny.yml")))]
    served: list[tuple[str, bool]] = []
    trained: list[str] = []

    class Slot:
        def __init__(self, device: str, tune_kernels: bool) -> None:
            self.place = device, tune_kernels

        def train(self, run: Run, _threads: int) -> int:
            trained.append(run.name)
            write_whole(run.folder / "summary.json", "{}")
            return 0

        def close(self) -> None:
            served.append(self.place)

        def kill(self) -> None: ...

    monkeypatch.setattr("tools.compare.run._Slot", Slot)
    assert not run_all(runs, devices=["0"], tune_kernels=True, progress=False).failed
    assert served == [("0", True)]
    models = ["metala-large", "softmax-large", "metala-small", "softmax-small"]
    assert trained == [f"{model}-seed{seed}" for seed in (1, 2) for model in models]
    # As many places as runs are left, on all devices first.
    for run in runs[:3]:
        (run.folder / "summary.json").unlink()
    run_all(runs, devices=["0", "1"], workers=2, progress=False)
    assert sorted(served[1:]) == [("0", False), ("0", False), ("1", False)]
    assert sorted(trained[8:]) == sorted(run.name for run in runs[:3])
    run_all(runs, devices=["0"], progress=False)
    assert len(trained) == 11


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


def test_the_plan_trains_nothing(place: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(place)
    assert main(["tiny.yml", "--name", "planned", "--plan", "schedule.train_steps=50000"]) == 0
    said = capsys.readouterr().out
    assert "Two tiny models: 8 runs in runs/planned\n" in said
    for run in plan_runs(read_comparison(Path("tiny.yml"))):
        cells = [run.label, run.size, f"{run.parameters:,}", f"{run.body:,}", "3.2 M", "1, 2"]
        assert any(all(f" {cell} " in line for cell in cells) for line in said.splitlines()), cells
    assert not Path("runs/planned").exists()


def test_without_validation_text_nothing_is_trained(place: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(place)
    data = {"data": {"corpus": "toy.jsonl", "tokenizer": {"type": "bytes"}, "validation_fraction": 0}}
    Path("all.yml").write_text(yaml.safe_dump(data))
    assert main(["tiny.yml", "--name", "blind", "--data", "all.yml", "--devices", "cpu"]) == 2
    assert "data.validation_fraction above 0" in capsys.readouterr().err
    assert not list(Path("runs/blind").glob("*/train.log"))


def test_the_table_of_one_size_and_one_source() -> None:
    values = {"loss": {1: 2.0, 2: 3.0}, "accuracy": {1: 0.25, 2: 0.75}, "loss/x": {1: 2.0, 2: 3.0}}
    text = tables([Row("a", "A", "", 4321, 1234, values)])
    head, _, line = (row.split("|") for row in text.splitlines()[:3])
    assert dict(zip(map(str.strip, head), map(str.strip, line), strict=True)) == {
        "": "",
        "model": "A",
        "parameters": "4,321",
        "without embeddings": "1,234",
        "seeds": "2",
        "validation loss": "2.5000 ± 0.7071",
        "less A": "-",
        "tokens found, %": "50.00 ± 35.36",
    }
    assert "#" not in text
    assert "by source" not in text


def test_nine_models_are_told_apart(tmp_path: Path) -> None:
    styles = _styles([str(number) for number in range(16)]).values()
    assert len({(style["color"], style["ls"], style["marker"]) for style in styles}) == 16
    assert len({(style["color"], style["ls"]) for style in styles}) == 16
    # Of one alone there is no difference to draw.
    one = Row("a", "A", "", 1, 1, {"loss": {1: 2.0}, "loss/x": {1: 2.0}, "loss/y": {1: 2.0}})
    assert draw([], [one], tmp_path, "T", None) == [tmp_path / "results.png"]


def test_a_bar_in_a_name_is_no_column() -> None:
    head, _, line = markdown(["model", "loss"], [["a|b", "1"]]).splitlines()
    assert line == r"| a\|b  |    1 |"
    assert len(head) == len(line)


def test_differences_are_paired_by_seed() -> None:
    """Over the seeds that both have; one alone has no error."""
    one, other, third = (
        Row(name, name, "", 1, 1, {"loss": values})
        for name, values in (("a", {1: 2.0, 2: 3.0, 3: 5.0}), ("b", {1: 1.0, 4: 0.0, 2: 1.0}), ("c", {3: 4.0}))
    )
    assert one.less(other, "loss") == pytest.approx((1.5, statistics.stdev([1, 2]) / math.sqrt(2)))
    assert other.less(one, "loss")[0] == -1.5
    change, error = one.less(third, "loss")
    assert change == 1.0
    assert math.isnan(error)
    assert all(map(math.isnan, other.less(third, "loss")))
