"""A small corpus and a small run, through the command line."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.parity.launch import free_port

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> Path:
    """Return the file of `write_corpus`."""
    return write_corpus(tmp_path_factory.mktemp("corpus"))


def write_corpus(folder: Path) -> Path:
    """Write a hundred short documents of a toy language into `folder`, which is made; return the file."""
    folder.mkdir(parents=True, exist_ok=True)
    path, draw = folder / "toy.jsonl", random.Random(0)
    words = ["state", "decay", "query", "key", "value", "head", "token", "mixer", "layer", "gate"]
    lines = [
        json.dumps({"text": " ".join(draw.choice(words) for _ in range(draw.randint(20, 60))) + "."})
        for _ in range(100)
    ]
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture
def arguments(corpus: Path, tmp_path: Path) -> Callable[..., list[str]]:
    """Return the arguments of a run in the test's folder: bytes, a tiny MetaLA, eight steps."""
    return partial(run_words, corpus, tmp_path)


def run_words(corpus: Path, folder: Path, name: str = "run", **changes: Any) -> list[str]:
    """Return the arguments of a tiny run in `folder/name`."""
    values: dict[str, Any] = {
        "run.directory": folder / name,
        "run.device": "cpu",
        "data.corpus": corpus,
        "data.cache_directory": corpus.parent / "cache",
        "data.tokenizer": "{type: bytes}",
        "data.validation_fraction": 0.03,
        "model.vocab_size": 320,
        "model.num_layers": 2,
        "model.hidden_size": 32,
        "model.num_heads": 2,
        "batch.sequence_length": 32,
        "batch.micro_batch_size": 2,
        "batch.global_batch_size": 4,
        "schedule.train_steps": 8,
        "schedule.time_budget_minutes": "null",
        "precision.dtype": "fp32",
        "optimizer.name": "adamw",
        "checkpoint.interval": 3,
        "checkpoint.keep_last": 0,
        "evaluation.interval": 0,
        "evaluation.sample_tokens": 8,
    }
    values.update(changes)
    return [f"{key}={value}" for key, value in values.items()]


def start(words: list[str]) -> subprocess.Popen[str]:
    """Start `python train.py` in another process."""
    return subprocess.Popen(
        [sys.executable, str(ROOT / "train.py"), *words],
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=environment(),
    )


def environment() -> dict[str, str]:
    """Return the environment of child processes, without variables of this process's launcher."""
    variables = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    return {**variables, "OMP_NUM_THREADS": "1"}


def torchrun(ranks: int, *options: str) -> list[str]:
    """Return the beginning of the command of a run with `ranks` processes."""
    command = ["torch.distributed.run", f"--nproc-per-node={ranks}", f"--master-port={free_port()}"]
    return [sys.executable, "-m", *command, *options]


def output_of(process: subprocess.Popen[str], status: int | None = 0) -> str:
    """Wait for the end of a process and return its output. Require this exit status; None: any but 0."""
    output, _ = process.communicate(timeout=240)
    assert process.returncode == status if status is not None else process.returncode, output
    return output


def wait_for(condition: Callable[[], Any], process: subprocess.Popen[str], seconds: float = 240) -> Any:
    """Poll until the condition holds and return its value. Fail with the output of the process if it ends earlier."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        value = condition()
        if value:
            return value
        if process.poll() is not None:
            value = condition()
            if value:
                return value
            pytest.fail(f"ended with {process.returncode}: {process.communicate()[0]}")
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    pytest.fail(f"nothing happened in {seconds} s: {process.communicate()[0]}")


def train_lines(folder: Path) -> list[dict[str, Any]]:
    """Return the values of every training step that must be equal in two equal runs."""
    keys = ("step", "loss", "gradient_norm", "learning_rate", "tokens")
    return [{key: line[key] for key in keys} for line in metrics_lines(folder, "train")]


def metrics_lines(folder: Path, kind: str | None = None) -> list[dict[str, Any]]:
    """Return the lines of a run's metrics.jsonl; `kind`: of this kind alone."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if kind in (None, line["kind"])]


def assert_same_run(run: Path, other: Path) -> None:
    """Compare losses and gradient norms of every step, in float32 up to the order of summation."""
    lines, others = train_lines(run), train_lines(other)
    assert [line["step"] for line in lines] == [line["step"] for line in others]
    for a, b in zip(lines, others, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-6)
        assert a["gradient_norm"] == pytest.approx(b["gradient_norm"], rel=1e-5)
