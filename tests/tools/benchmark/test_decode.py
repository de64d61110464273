"""The decoding benchmark: its rows, its times and its ratios."""

from __future__ import annotations

import csv
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tools.benchmark import decode, timing
from tools.benchmark.__main__ import main
from tools.benchmark.decode import Row, ratios


def test_on_a_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shape = ["--config", "configs/model/metala_tiny.yml", "--contexts", "8", "32", "--batch", "2", "--steps", "5"]
    main(["decode", *shape, "--device", "cpu", "--output", str(tmp_path)])
    rows = list(csv.DictReader((tmp_path / "decode.csv").open()))
    assert [(row["method"], row["context"]) for row in rows] == [
        ("eager", "8"),
        ("eager", "32"),
        ("llama", "8"),
        ("llama", "32"),
    ]
    own, peer = rows[:2], rows[2:]
    assert own[0]["state"] == own[1]["state"], "a recurrent state does not grow"
    # Keys and values of 2 layers of 64 channels in float32, for the context without the timed steps.
    assert [float(row["state"]) * 2**30 for row in peer] == [2 * 2 * 64 * 4 * 2 * context for context in (8, 32)]
    for row in rows:
        assert float(row["tokens_per_second"]) == pytest.approx(2 * 1e3 / float(row["milliseconds"]))
    assert "eager / Hugging Face's Llama with its cache at context 32" in capsys.readouterr().out


def test_without_llama(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shape = ["--config", "configs/model/metala_tiny.yml", "--contexts", "8", "--batch", "1", "--steps", "5"]
    assert main(["decode", *shape, "--no-llama", "--device", "cpu", "--output", str(tmp_path)]) == 0
    assert "eager: context 8 / 8: 1.000 of the tokens/s" in capsys.readouterr().out
    assert [row["method"] for row in csv.DictReader((tmp_path / "decode.csv").open())] == ["eager"]


def test_the_index_of_a_gpu_reaches_the_models_and_the_timers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    current, built = [], []

    def build(*words: Any) -> None:
        built.append(words)
        raise RuntimeError("no GPU here")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    monkeypatch.setattr("megatron_lite.engine.precision.faster_dtype", lambda *_: "bf16")
    monkeypatch.setattr(decode, "_project_model", build)
    monkeypatch.setattr("tools.loading.engine.build_engine", build)
    monkeypatch.setattr("megatron_lite.parallel.grid.init_grid", lambda kind, **_: f"{kind}:{os.environ['LOCAL_RANK']}")
    monkeypatch.setenv("LOCAL_RANK", "0")
    options = ["--config", "configs/default.yml", "--device", "cuda:1", "--output", str(tmp_path)]
    for words in (["decode", *options], ["profile", *options, "--shape", "32x2"]):
        with pytest.raises(RuntimeError, match="no GPU here"):
            main(words)
    assert current == 2 * [torch.device("cuda:1")]
    assert (built[0][1], built[1][1]) == (torch.device("cuda:1"), "cuda:1")


def test_ratios() -> None:
    rows = [
        Row("eager", 128, 64, 1.0, 64000.0, 4.0, 0.8),
        Row("eager", 8192, 64, 1.0, 62000.0, 4.0, 0.8),
        Row("llama", 128, 64, 2.0, 32000.0, 5.0, 1.0),
        Row("llama", 8192, 64, 4.0, 15500.0, 110.0, 100.0),
    ]
    printed = "\n".join(ratios(rows))
    assert "eager: context 8192 / 128: 0.969 of the tokens/s, 1.000 of the memory" in printed
    assert "llama: context 8192 / 128: 0.484 of the tokens/s, 22.000 of the memory" in printed
    assert "eager / Hugging Face's Llama with its cache at context 8192: 4.00 x" in printed


def test_a_step_is_the_median_of_fifths(monkeypatch: pytest.MonkeyPatch) -> None:
    now, steps = [0.0], []

    def step(token: torch.Tensor) -> torch.Tensor:
        steps.append(1)
        now[0] += 0.009 if len(steps) > 5 + 4 * 3 else 0.002  # the last fifth is disturbed
        return torch.zeros(len(token), 8)

    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])
    row = decode._row("eager", 8, step, torch.zeros(4, 1, dtype=torch.long), 0, 15)
    assert (row.milliseconds, row.batch, row.memory, len(steps)) == (pytest.approx(2), 4, None, 5 + 15)


def test_the_whole_context_is_read_before_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    model = decode._project_model(
        decode.model_of(Path("configs/model/transformer_tiny.yml")), torch.device("cpu"), torch.float32
    )
    model.register_forward_pre_hook(lambda _, words: read.append(words[0].shape[1]))
    monkeypatch.setattr(decode, "WARM_UP", 1)
    monkeypatch.setattr(decode, "timed", lambda work, cuda: (None, 0.004))
    with torch.inference_mode():
        row = decode._measure_project(model, 1100, 2, 5, graph=False)
    assert read == [512, 512, 76, 1]
    assert (row.tokens_per_second, row.context) == (500, 1100)
    keys_and_values = 2 * 4 * model.config.num_layers * model.config.hidden_size
    assert row.state * 2**30 == pytest.approx(2 * 1100 * keys_and_values, rel=0.01)
