"""Check `python eval.py --suite mqar` from the arguments to the results."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import eval as evaluation
from tests.cli.conftest import wait_for
from tests.tools.synthetic.conftest import one_space
from tools.synthetic.command import synthetic_suite
from tools.synthetic.experiment import load_experiment, plan
from tools.synthetic.results import Results, result_line

ROOT = Path(__file__).parents[3]
QUICK = ["data.train_examples=128", "data.test_examples=64", "epochs=1"]


def test_suite_is_read_from_the_arguments() -> None:
    assert synthetic_suite(["--suite", "mqar", "epochs=3"]) == "mqar"
    assert synthetic_suite(["epochs=3", "--suite=mad"]) == "mad"
    assert synthetic_suite(["runs/a", "--suite", "superglue,commonsense"]) is None
    assert synthetic_suite(["runs/mqar"]) is None
    with pytest.raises(ValueError, match="mqar trains its own models; run it without other suites"):
        synthetic_suite(["--suite", "superglue,mqar"])


def test_help_shows_examples_and_imports_no_torch() -> None:
    words = [sys.executable, "-X", "importtime", "eval.py", "--suite", "mqar", "--help"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
    assert not re.search(r"\| +torch$", done.stderr, re.MULTILINE)  # which takes seconds
    text = done.stdout
    for word in ("--dry-run", "--check", "--report", "results.jsonl", "configs/experiments/mqar.yml", "tasks=[512x80]"):
        assert word in text
    text = subprocess.run(
        [sys.executable, "eval.py", "--help"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert "python eval.py --suite mqar" in text


def test_command_trains_and_writes_a_table(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["--suite", "mqar", *words, *QUICK, "models=[metala,attention]", "lrs=[1e-3,5e-3]"]
    assert evaluation.main([*command, "--dry-run"]) == 0
    listed = capsys.readouterr().out
    assert listed.splitlines()[2].split() == ["8x2", "metala", "32", "2", "0", "2", "2", "4"]
    assert "4 runs, at most 8 steps remain; learning rates 0.001, 0.005" in listed
    assert not (tmp_path / "out").exists()
    assert evaluation.main(command) == 0
    printed = capsys.readouterr().out
    assert "4 runs to do, 8 steps at most; 0 done: " in printed
    lines = [json.loads(text) for text in (tmp_path / "out" / "results.jsonl").read_text().splitlines()]
    assert [(line["model"], line["lr"]) for line in lines] == [
        (model, lr) for model in ("metala", "attention") for lr in (1e-3, 5e-3)
    ]
    assert lines[0]["versions"]["torch"]
    table = one_space((tmp_path / "out" / "results.md").read_text())
    assert "Length 8, 2 pairs" in table
    best = max(line["accuracy"] for line in lines if line["model"] == "metala")
    assert f"| MetaLA | {100 * best:.1f} (" in table
    assert (tmp_path / "out" / "results.png").read_bytes()[:4] == b"\x89PNG"
    assert evaluation.main(command) == 0
    printed = capsys.readouterr()
    assert "0 runs to do" in printed.out
    assert printed.err == ""
    assert evaluation.main([*command, "seeds=[1]", "--minutes", "1e-9"]) == 1
    assert capsys.readouterr().err == "4 runs to do: run the same command again to continue\n"
    assert len((tmp_path / "out" / "results.jsonl").read_text().splitlines()) == 4


@pytest.mark.parametrize("word", ["--dry-run", "--report", "--no-progress"])
def test_model_that_cannot_be_built_is_refused_before_training(
    words: list[str], capsys: pytest.CaptureFixture[str], word: str
) -> None:
    command = ["--suite", "mqar", *words, word]
    assert evaluation.main([*command, "definitions.mine={mixers: [decayed], num_heads: 2}", "models=[mine]"]) == 2
    assert "definitions.mine or network, width 32: model.mixers: unknown mixer 'decayed'" in capsys.readouterr().err
    assert evaluation.main([*command, "network.num_layers=two"]) == 2
    assert "width 32: model.num_layers = 'two': allowed are whole numbers" in capsys.readouterr().err
    assert evaluation.main([*command, "widths=[65]"]) == 2
    assert "definitions.metala or network, width 65: model.num_heads = 2 does not divide" in capsys.readouterr().err


def test_results_of_another_machine_are_reported(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*words, "precision=auto"]
    results = Results(tmp_path / "out" / "results.jsonl")
    with results.writing():
        for run in plan(load_experiment("mqar", words), "bf16"):
            results.add(result_line(run, {"accuracy": 0.5, "best_accuracy": 0.5, "history": [0.5]}, {}))
    assert evaluation.main(["--suite", "mqar", *words, "--report"]) == 0
    output = one_space(capsys.readouterr().out)
    assert "| MetaLA | 50.0 (0.005) |" in output
    assert (tmp_path / "out" / "learning_curves.png").is_file()
    assert "learning_curves.png" in output


def test_check_passes(words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["--suite", "mqar", *words, "batch_size=4", "models=[metala,attention]", "--check"]
    assert evaluation.main(command) == 0
    alone = capsys.readouterr().out.splitlines()
    assert alone[-1] == "2 checked, 0 with a problem"
    assert evaluation.main([*command, "workers=2", "definitions.attention.num_heads=5"]) == 1
    both = capsys.readouterr().out.splitlines()
    assert both[-1] == "2 checked, 1 with a problem"
    assert sum("model.num_heads = 5 does not divide" in line for line in both) == 1
    # The losses are those of one process.
    metala = [next(line for line in lines if "metala" in line).split(" | ")[8] for lines in (alone, both)]
    assert metala[0] == metala[1]
    assert not (tmp_path / "out").exists()


def test_invalid_arguments_are_refused_in_one_line(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert evaluation.main(["--suite", "mqar", *words, "models=[metalla]"]) == 2
    assert capsys.readouterr().err == "error: models: 'metalla' is not in `definitions`; did you mean metala?\n"
    assert evaluation.main(["--suite", "mqar", *words, "definitions.metala.num_heads=5"]) == 2
    assert "model.num_heads = 5 does not divide" in capsys.readouterr().err
    assert evaluation.main(["--suite", "mqar,superglue"]) == 2
    assert evaluation.main(["--suite", "listops"]) == 2
    assert (
        "there is no suite 'listops' (a .yml file of your own is also allowed); allowed are" in capsys.readouterr().err
    )
    assert evaluation.main(["--suite", "mqar", *words, "--report"]) == 1
    assert "has no result of this grid yet: run the same command without --report" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("suite", "words", "message"),
    [
        ("mqar", "tasks=[8x3]", "tasks: 8x3: length 8 with 3 pairs: an even length"),
        ("mqar", "data.fillers=1", "tasks: 8x2: mqar() got an unexpected keyword argument 'fillers'"),
        ("mqar", "data.seed=1", "multiple values for keyword argument 'seed'"),
        ("mqar", "data.test_examples=0", "data.test_examples = 0: whole number >= 1 is allowed"),
        ("mqar", "data.train_examples=null", "data.train_examples = null: whole number >= 1 is allowed"),
        ("mad", "mad.compression.baseline.copied=3", "tasks: compression: compression() got an unexpected"),
        ("lra", "settings.listops.data.vocabulary=32", "tasks: listops: vocabulary = 32: this task needs 16"),
        (
            "lra",
            "settings.listops.data.validation_examples=0.5",
            "settings.listops.data.validation_examples = 0.5: whole number >= 1",
        ),
        (
            "lra",
            "settings.listops.data.test_examples=.inf",
            "settings.listops.data.test_examples = Infinity: whole number >= 1",
        ),
    ],
)
def test_data_that_cannot_be_generated_are_refused_before_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], suite: str, words: str, message: str
) -> None:
    small = "batch_size={8: 64}" if suite == "mqar" else "batch_size=64"
    tasks = {"mqar": "tasks=[8x2]", "mad": "tasks=[compression]", "lra": "tasks=[listops]"}[suite]
    command = ["--suite", suite, tasks, "models=[metala]", small, words, f"output={tmp_path / 'out'}"]
    for flag in ([], ["--dry-run"]):
        assert evaluation.main([*command, *flag]) == 2
        printed = capsys.readouterr()
        assert message in printed.err
        assert printed.out == ""
    assert not (tmp_path / "out").exists()


def test_failed_run_exits_with_1(words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run,) = plan(load_experiment("mqar", words), "fp32")
    checkpoint = tmp_path / "out" / "unfinished" / f"{run.id}.pt"
    checkpoint.parent.mkdir(parents=True)
    checkpoint.write_bytes(b"torn")
    assert evaluation.main(["--suite", "mqar", *words]) == 1
    errors = capsys.readouterr().err
    assert f"failed: 8x2 metala d=32 lr 0.005: ValueError: {checkpoint} cannot be read" in errors
    assert "1 run to do: solve the problem, then run the same command again to continue" in errors
    # The checkpoint of a finished run is removed.
    checkpoint.rename(tmp_path / "checkpoint.pt")
    assert evaluation.main(["--suite", "mqar", *words]) == 0
    (tmp_path / "checkpoint.pt").rename(checkpoint)
    assert evaluation.main(["--suite", "mqar", *words]) == 0
    assert not checkpoint.exists()


def test_interrupted_experiment_resumes(words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rates = "lrs=[1e-3,2e-3]"
    command = [sys.executable, "eval.py", "--suite", "mqar", *words, rates, "target=null", "data.test_examples=20"]
    results = tmp_path / "out" / "results.jsonl"
    # A run takes at least a second, so that the second one is in training when the first has its line.
    command += ["data.train_examples=64", "epochs=200", "evaluate_every=200"]
    # A background job of a shell ignores interrupts, and its children do so, too.
    process = subprocess.Popen(
        command, cwd=ROOT, text=True, stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    for _ in range(4000):
        if results.is_file() and results.read_text().endswith("\n"):
            break
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=240)
    assert process.returncode == 130
    assert errors.splitlines()[-1] == "interrupted: the same command resumes with the unfinished runs"
    first = results.read_text()
    assert first.count("\n") == 1
    assert evaluation.main([*command[2:], "--dry-run"]) == 0
    listed = capsys.readouterr().out
    assert listed.splitlines()[2].split()[3:6] == ["2", "1", "1"]


def workers_of(pid: int) -> list[str]:
    """Return the process ids of the workers of a command."""
    files = Path(f"/proc/{pid}/task").glob("*/children")
    children = [child for file in files for child in file.read_text().split()]
    return [child for child in children if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes()]


def test_interrupt_during_start_prints_one_sentence(words: list[str]) -> None:
    """Ctrl-C reaches all processes while they import."""
    command = [sys.executable, "-u", "eval.py", "--suite", "mqar", *words, "devices=[cpu,cpu]", "seeds=[0,1]"]
    process = subprocess.Popen(
        command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    assert process.stdout is not None
    while "runs to do" not in process.stdout.readline():
        assert process.poll() is None
    wait_for(lambda: len(workers_of(process.pid)) == 2, process)
    states = [Path(f"/proc/{worker}/status").read_text() for worker in workers_of(process.pid)]
    blocked = [int(state.split("SigBlk:")[1].split()[0], 16) for state in states]
    assert all(mask & 1 << (signal.SIGINT - 1) for mask in blocked)
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=240)
    assert process.returncode == 130
    assert errors.split("\n") == ["", "interrupted: the same command resumes with the unfinished runs", ""]
