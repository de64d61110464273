"""The training benchmark, with one process per model under test, on a CPU."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megatron_lite.config.files import CONFIGS
from models.config import ModelConfig
from models.mixers import MIXERS
from tests.tools.benchmark.tiny_model import TINY, read
from tests.tools.conftest import refusal
from tools.benchmark import training
from tools.benchmark.__main__ import main
from tools.benchmark.training import _figures
from tools.benchmark.training_models import Settings, Size, _recurrence_flops, build


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Return a run that SIGTERM ended after its first model, and its output."""
    folder = tmp_path_factory.mktemp("interrupted")
    words = ["train", "--output", str(folder), "--subjects", "metalion", "llama", "--steps", "2"]
    # The second shape does not fit into the address space that the process is given.
    words += ["--shapes", "16x2", "16x400000000", "32x1", *TINY]
    limit = "import resource, runpy, sys; resource.setrlimit(resource.RLIMIT_AS, (6 << 30, 6 << 30)); "
    limit += "sys.argv[0] = 'benchmark'; runpy.run_module('tools.benchmark', run_name='__main__')"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}  # every thread reserves address space
    process = subprocess.Popen(
        [sys.executable, "-c", limit, *words], stdout=subprocess.PIPE, text=True, env=environment
    )
    record = folder / "train.jsonl"
    end = time.monotonic() + 240
    while not (record.exists() and record.read_text(encoding="utf-8").count('"row"') >= 3):
        assert process.poll() is None, "ended too early"
        assert time.monotonic() < end
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=240)
    assert process.returncode == 0
    return folder, out


@pytest.fixture
def known_machine(interrupted: tuple[Path, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Read the properties of this machine from the record of the interrupted run, where a process measured them."""
    lines = map(json.loads, (interrupted[0] / "train.jsonl").read_text(encoding="utf-8").splitlines())
    machine = next(line for line in lines if "machine" in line)
    messages = training._messages
    monkeypatch.setattr(
        training, "_messages", lambda task, *rest: messages(task, *rest) if "subject" in task else iter([machine])
    )


def test_rows_before_a_signal_are_reported(interrupted: tuple[Path, str]) -> None:
    folder, out = interrupted
    rows = read(folder / "train.csv")
    assert [(row["method"], row["length"]) for row in rows[:2]] == [("metalion", "16"), ("metalion", "16")]
    assert float(rows[0]["tokens/s"]) == pytest.approx(32 / float(rows[0]["step s"]))
    assert 0 < float(rows[0]["MFU"]) < 1
    assert 0.5 < float(rows[0]["to first step s"]) < 60
    assert float(rows[0]["first loss"]) == pytest.approx(5.545, abs=0.6)  # ln 256
    assert rows[0]["keeps"] == "float32 master weights, float32 moments"
    assert "16 | 2 |" in out


def test_a_shape_that_does_not_fit_is_a_row(interrupted: tuple[Path, str]) -> None:
    folder, out = interrupted
    rows = read(folder / "train.csv")
    assert rows[1]["batch"] == "400000000"
    assert rows[1]["error"] == "out of memory"
    assert rows[1]["tokens/s"] == ""
    assert "| metalion | 16 | 400,000,000 | out of memory | - |" in out
    assert float(rows[2]["tokens/s"]) > 0  # and the next one is measured


@pytest.mark.usefixtures("known_machine")
def test_resumed_run_adds_the_peers(
    interrupted: tuple[Path, str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # as in the interrupted run
    folder, _ = interrupted
    before = [line for line in (folder / "train.jsonl").read_text(encoding="utf-8").splitlines() if '"row"' in line]
    words = ["train", "--output", str(folder), "--steps", "2", "--shapes", "16x2", "--resume", *TINY]
    assert re.search(
        r"--resume: .*train.jsonl was measured with .*num_layers=1.*use the same settings",
        refusal([*words, "model.norm=rmsnorm", "--subjects", "metalion"], capsys),
    )
    record = folder / "train.jsonl"
    content = record.read_bytes()
    record.write_bytes(content.replace(b'{"machine": {"name": "', b'{"machine": {"name": "another, '))
    assert re.search(
        r"--resume: .*another machine or other packages \(another, .* in the file, .* now\)", refusal(words, capsys)
    )
    record.write_bytes(content + b'{"row": {"method": "llam')  # ended in the middle of a line
    main([*words, "--subjects", "metalion", "metalion-bf16", "llama", "gla"])
    lines = [line for line in (folder / "train.jsonl").read_text(encoding="utf-8").splitlines() if '"row"' in line]
    assert lines[: len(before)] == before
    assert [json.loads(line)["row"]["method"] for line in lines[len(before) :]] == ["metalion-bf16", "llama", "gla"]
    timed = [json.loads(line)["row"].get("steps s", [0, 0]) for line in lines]
    assert {len(steps) for steps in timed} == {2}, "the first step and those of the warm-up are not among them"
    rows = {row["method"]: row for row in read(folder / "train.csv")}
    assert (
        rows["gla"]["error"]
        == "not available: flash-linear-attention's kernels need a GPU; leave its models out of --subjects"
    )
    ratio = float(rows["llama"]["metalion / it, tokens/s"])
    assert ratio == pytest.approx(float(rows["metalion"]["tokens/s"]) / float(rows["llama"]["tokens/s"]))
    assert rows["metalion-bf16"]["keeps"] == "bf16 weights, bf16 moments"
    assert rows["llama"]["keeps"] == "float32 weights, float32 moments"
    # 6 FLOPs per parameter and token without the embedding's, and the causal half of attention.
    parameters = int(rows["llama"]["parameters"])
    flops = json.loads(lines[-2])["row"]["flops a token"]
    assert flops == 6 * (parameters - 256 * 32) + 6 * 32 * 16
    assert (folder / "train.png").stat().st_size > 5_000
    out = capsys.readouterr().out
    assert "llama: 0.0 M parameters; stored between steps: float32 weights, float32 moments" in out


@pytest.mark.parametrize("length", [32, 2048])
def test_recurrence_flops_equal_the_projects(length: int) -> None:
    config = ModelConfig(vocab_size=8, num_layers=1, hidden_size=512, num_heads=2, mixers=("retnet",))
    mixer = MIXERS["retnet"](config, 0, config.options_of("retnet"))
    maps = 2 * sum(p.numel() for p in mixer.parameters() if p.ndim == 2)
    assert _recurrence_flops(2, 256, 512)(length) == 3 * (mixer.flops_per_token(length) - maps)


def test_step_of_a_peer_is_clipped_and_clears_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    clipped: list[tuple[list[torch.nn.Parameter], float]] = []
    clip = torch.nn.utils.clip_grad_norm_
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", lambda p, most: (clipped.append((p, most)), clip(p, most)))
    size = Size(vocab_size=64, num_layers=1, hidden_size=32, num_heads=2, mlp_width=64, tied=True)
    settings = Settings(size, "", (), "bf16", "fp32", "logits", 8, 8, 2)
    peer = build("llama", settings, torch.device("cpu"))
    tokens = torch.randint(0, 64, (2, 9), generator=torch.Generator().manual_seed(0))
    losses = [peer.step(tokens) for _ in range(2)]
    assert losses[1] < losses[0] == pytest.approx(math.log(64), abs=0.3)
    ((parameters, most), _) = clipped
    assert peer.parameters == 64 * 32 + (4 * 32 * 32 + 3 * 32 * 64 + 2 * 32) + 32  # the requested size
    assert (sum(p.numel() for p in parameters), most) == (peer.parameters, 1.0)
    assert all(p.grad is None for p in parameters)


def test_columns_are_of_the_median_step() -> None:
    row = {"length": 4, "batch": 2, "flops a token": 10.0, "steps s": [1.0, 2.0, 9.0]}
    found = _figures(row, 80.0)
    assert (found["step s"], found["tokens/s"], found["MFU"], found["spread"]) == (2.0, 4.0, 0.5, 4.0)
    assert _figures(row | {"micro batches": 3}, 80.0)["tokens/s"] == 12.0
    assert _figures({"length": 4, "batch": 2, "error": "out of memory"}, 80.0)["tokens/s"] is None


def test_overrides_change_optimizer_and_accumulation() -> None:
    size = Size(vocab_size=256, num_layers=1, hidden_size=32, num_heads=2, mlp_width=64, tied=False)
    words = (*TINY, "optimizer.name=muon", "batch.gradient_accumulation_steps=2")
    settings = Settings(size, "configs/metala_1.4b.yml", words, "bf16", "fp32", "logits", 8, 8, 2)
    project = build("metalion", settings, torch.device("cpu"))
    assert project.micro_batches == 2
    assert project.keeps == "float32 master weights, float32 moments"
    tokens = torch.randint(0, 256, (2, 9), generator=torch.Generator().manual_seed(0))
    assert project.step(tokens) == pytest.approx(math.log(256), rel=0.3)
    project.close()


@pytest.mark.usefixtures("known_machine")
def test_time_limit_ends_one_model(tmp_path: Path) -> None:
    words = ["train", "--output", str(tmp_path), "--subjects", "metalion", "--steps", "1000000", "--limit", "3"]
    main([*words, "--shapes", "16x2", "8x2", *TINY])
    assert [row["error"] for row in read(tmp_path / "train.csv")] == ["over 3 s", "over 3 s"]


@pytest.mark.usefixtures("known_machine")
def test_cold_first_measures_a_start_with_empty_caches(tmp_path: Path) -> None:
    main(
        [
            "train",
            "--output",
            str(tmp_path),
            "--subjects",
            "metalion",
            "--steps",
            "1",
            "--cold",
            "--shapes",
            "16x2",
            *TINY,
        ]
    )
    (row,) = read(tmp_path / "train.csv")
    assert float(row["the same, empty cache"]) > 0.5
    assert float(row["to first step s"]) > 0.5
    log = (tmp_path / "train.log").read_text(encoding="utf-8")
    assert [word in log for word in ('"first_only": true', '"first_only": false')] == [True, True]


def test_lengths_have_equal_tokens_per_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plans: list[training.Plan] = []
    monkeypatch.setattr(training, "run", lambda _, plan: plans.append(plan))
    common = ["train", "--output", str(tmp_path), "--peak", "2.5", "--lengths", "16", "64"]
    main(common)
    main([*common, "--tokens", "256", "--shapes", "8x3", "64x4", "model.num_layers=1"])
    assert [plan.shapes for plan in plans] == [((16, 4), (64, 1)), ((8, 3), (64, 4), (16, 16))]
    assert (plans[0].peak, plans[1].overrides) == (2.5e12, ("model.num_layers=1",))


def test_errors_name_the_value(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    common = ["train", "--output", str(tmp_path)]
    assert "--subjects mambo: allowed are metalion, metalion-elementwise, metalion-bf16, metalion-fp8, gla" in refusal(
        [*common, "--subjects", "mambo"], capsys
    )
    assert "--lengths 3000: it must divide --tokens 4096" in refusal([*common, "--lengths", "3000", "4096"], capsys)
    assert "--tokens 4096 has no effect without --lengths" in refusal([*common, "--tokens", "4096"], capsys)
    assert "num_heads = 5 does not divide" in refusal([*common, "model.num_heads=5"], capsys)
    assert re.search(
        r"bert_base.yml trains a masked model: use .* masked`",
        refusal([*common, "--config", "configs/bert_base.yml", "--shapes", "512x2"], capsys),
    )
    assert "--shape 2048: allowed is LENGTHxBATCH" in refusal(
        ["profile", "--output", str(tmp_path), "--shape", "2048"], capsys
    )
    assert not list(tmp_path.iterdir())
    record = tmp_path / "train.jsonl"
    record.write_text('{"row":\nhalf a line')
    assert re.search(
        r"--resume: .*train\.jsonl is damaged \(.*\); leave --resume out", refusal([*common, "--resume"], capsys)
    )
    assert record.read_text() == '{"row":\nhalf a line'


@pytest.mark.usefixtures("known_machine")
def test_configuration_is_found_from_any_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tiny.yml").write_text(f"include: [{CONFIGS / 'metala_1.4b.yml'}]")
    monkeypatch.chdir(tmp_path)
    main(
        [
            "train",
            "--config",
            "tiny.yml",
            "--output",
            "out",
            "--subjects",
            "metalion",
            "--steps",
            "1",
            "--shapes",
            "8x2",
            *TINY,
        ]
    )
    (row,) = read(tmp_path / "out" / "train.csv")
    assert (row["method"], row["error"]) == ("metalion", "")


def test_worker_ends_with_its_parent(tmp_path: Path) -> None:
    words = [
        "train",
        "--output",
        str(tmp_path),
        "--subjects",
        "metalion",
        "--steps",
        "1000000",
        "--shapes",
        "16x2",
        *TINY,
    ]
    parent = subprocess.Popen([sys.executable, "-m", "tools.benchmark", *words], stderr=subprocess.DEVNULL)
    end = time.monotonic() + 240
    while not _children(parent.pid) or not (tmp_path / "train.log").exists():
        assert time.monotonic() < end
        time.sleep(0.1)
    time.sleep(1.0)
    (child,) = _children(parent.pid)
    parent.kill()
    parent.wait()
    while Path(f"/proc/{child}").exists() and Path(f"/proc/{child}/cmdline").read_bytes():
        if time.monotonic() > end:
            os.kill(child, signal.SIGKILL)
            pytest.fail("the worker outlives its parent")
        time.sleep(0.1)


def test_interrupt_at_the_start_of_a_worker_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(timer: threading.Timer) -> None:
        assert timer.daemon, "the process would wait for the time limit"
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Timer, "start", interrupted)
    before = _children(os.getpid())
    with (tmp_path / "train.log").open("w", encoding="utf-8") as log, pytest.raises(KeyboardInterrupt):
        next(training._messages({}, {}, log, time.monotonic() + 600))
    assert _children(os.getpid()) == before


def _children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="utf-8").split()]


class _Bar:
    """Keep the lines that are written above a progress bar."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def update(self, _: int = 1) -> None: ...

    def set_postfix_str(self, _: str) -> None: ...

    def write(self, text: str, file: object = None) -> None:
        self.lines.append(text)


def test_killed_worker_names_signal_and_next_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Start a worker that begins a shape and is then ended as the kernel ends it when host memory is short."""
    begun = json.dumps({"begun": {"length": 16, "batch": 2}})
    code = f"import os, signal; print({begun!r}, flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    popen = subprocess.Popen
    monkeypatch.setattr(
        training.subprocess, "Popen", lambda words, **settings: popen([words[0], "-c", code], **settings)
    )
    plan = SimpleNamespace(shapes=((16, 2),), limit=60.0, cold=False)
    task = {"subject": "metalion", "settings": {"precision": "bf16"}}
    bar = _Bar()
    with (tmp_path / "train.log").open("w+", encoding="utf-8") as log:
        (row,) = training._measure_model(task, plan, [], bar, log)  # type: ignore[arg-type]
    assert row["error"] == "ended by SIGKILL, see train.log"
    reason = "killed by SIGKILL: most likely the machine had no free host memory"
    assert bar.lines[0].startswith(f"metalion 16x2: {reason}")
    assert f"\n{reason}" in (tmp_path / "train.log").read_text(encoding="utf-8")
