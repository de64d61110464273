"""The benchmark of mixers on a CPU; that of the kernels says that it needs a CUDA device."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tools.conftest import refusal
from tools.benchmark import decode, masked, measure, mixers
from tools.benchmark.__main__ import main
from tools.benchmark.report import plot_lines


@pytest.mark.skipif(torch.cuda.is_available(), reason="times the CPU")
def test_mixers_are_timed_beside_attention(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "_runs", lambda *_: 5)
    shape = ["--hidden", "32", "--heads", "4", "--length", "16", "--batch", "1", "--only", "lion", "hgrn"]
    main(["mixers", "--output", str(tmp_path), *shape])
    rows = list(csv.DictReader((tmp_path / "mixers.csv").open(encoding="utf-8")))
    names = [
        "attention",
        "hgrn",
        "lion",
        "lion, both directions",
        "lion-d, both directions",
        "lion-lit, both directions",
    ]
    assert [row["method"] for row in rows] == names
    for row in rows:
        # No order of the two: on a busy machine the shorter one may take longer.
        assert float(row["forward ms"]) > 0 < float(row["both ms"])
        assert float(row["tokens / s"]) == pytest.approx(16 / float(row["both ms"]) * 1e3)
    assert float(rows[0]["time / attention"]) == 1
    assert (tmp_path / "mixers.png").stat().st_size > 5_000
    assert "| lion, both directions |" in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="times the CPU")
def test_masked_models_are_timed_beside_bert(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    timed: list[int] = []
    timing = masked.Timing
    monkeypatch.setattr(
        masked, "Timing", lambda seconds, *rest: (timed.append(len(seconds)), timing(seconds, *rest))[1]
    )
    tiny = ["model.num_layers=1", "model.hidden_size=32", "model.num_heads=2", "model.intermediate_size=64"]
    tiny += ["model.vocab_size=2048", "model.max_positions=16"]
    common = ["masked", "--output", str(tmp_path), "--size", "base", "--steps", "2", "--rounds", "1"]
    assert "max_positions" in refusal([*common, *tiny, "--shapes", "8x2"], capsys)  # LION-s has none
    main([*common, *tiny[:-1], "--shapes", "16x2"])
    rows = list(csv.DictReader((tmp_path / "masked.csv").open(encoding="utf-8")))
    assert [row["method"] for row in rows] == ["bert", "lion_lit", "lion_d", "lion_s"]
    assert timed == [2] * 4  # without the warm-up
    bert = float(rows[0]["ms a step"])
    for row in rows:
        assert float(row["time / bert"]) == pytest.approx(float(row["ms a step"]) / bert)
        assert float(row["tokens / s"]) == pytest.approx(16 * 2 / float(row["ms a step"]) * 1e3)
        assert float(row["ms a step"]) > 0
        assert 6.5 < float(row["loss"]) < 9  # ln 2048 = 7.6 nats
    assert (tmp_path / "masked.png").stat().st_size > 5_000
    assert "--shapes 128: LENGTHxBATCH" in refusal(["masked", "--output", str(tmp_path), "--shapes", "128"], capsys)


@pytest.mark.skipif(torch.cuda.is_available(), reason="times the CPU")
def test_mixers_are_listed_where_attention_does_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = {"parameters": 1, "forward ms": None, "both ms": None, "tokens / s": None, "memory GiB": None}
    fits = {**nothing, "both ms": 3.0}
    monkeypatch.setattr(
        mixers, "measure_mixer", lambda config, *_: nothing if config.mixers == ("attention",) else fits
    )
    main(["mixers", "--output", str(tmp_path), "--hidden", "32", "--heads", "4", "--only", "hgrn"])
    rows = list(csv.DictReader((tmp_path / "mixers.csv").open(encoding="utf-8")))
    assert [(row["method"], row["both ms"], row["time / attention"]) for row in rows] == [
        ("attention", "", ""),
        ("hgrn", "3.0", ""),
    ]


@pytest.mark.skipif(torch.cuda.is_available(), reason="times the CPU")
def test_what_was_measured_before_an_interruption_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def until(count: int, result: Any) -> Callable[..., Any]:
        left = iter([result] * count)

        def measured(*_: object, **__: object) -> Any:
            if (found := next(left, None)) is None:
                raise KeyboardInterrupt
            return found

        return measured

    columns = {"parameters": 1, "forward ms": 1.0, "both ms": 2.0, "tokens / s": 3.0, "memory GiB": None}
    monkeypatch.setattr(masked, "_measure", until(5, masked.Timing([1.0], None, 7.0)))
    monkeypatch.setattr(mixers, "measure_mixer", until(2, columns))
    monkeypatch.setattr(decode, "_measure_own", until(1, decode.Row("eager", 8, 1, 2.0, 3.0, None, 0.1)))
    tiny = ["--hidden", "32", "--heads", "4"]
    model = ["--config", "configs/model/metala_tiny.yml", "--device", "cpu", "--contexts", "8", "16"]
    for words, kept in (
        (["masked", "--shapes", "8x1", "16x1", "--rounds", "1"], ["bert", "lion_lit", "lion_d", "lion_s"]),
        (["mixers", *tiny, "--only", "gla", "hgrn"], ["attention", "gla"]),
        (["decode", *model], ["eager"]),
    ):
        assert main([words[0], "--output", str(tmp_path), *words[1:]]) == 130
        rows = list(csv.DictReader((tmp_path / f"{words[0]}.csv").open(encoding="utf-8")))
        assert [row["method"] for row in rows] == kept


def test_paths_may_hold_what_overrides_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[object, ...]] = []
    monkeypatch.setattr(masked, "run", lambda *words: asked.append(words))
    out = tmp_path / "lr=1"
    main(["masked", "--output", str(out), "--shapes", "8x2", "16x1", "model.num_layers=1", "--steps", "2", "a.b=c"])
    assert asked == [(out, "large", [(8, 2), (16, 1)], 2, 3, ["model.num_layers=1", "a.b=c"])]
    assert out.is_dir()


def test_points_of_several_batches_stand_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import matplotlib.pyplot as plt

    monkeypatch.setattr(plt, "close", lambda _: None)
    shapes = [(128, 128), (2048, 8), (128, 8)]
    rows = [{"method": "bert", "length": length, "batch": batch, "ms": batch} for length, batch in shapes]
    plot_lines(tmp_path / "batches.png", rows, {"ms": "ms"}, "", batches=True)
    (axis,) = plt.gcf().axes
    assert [label.get_text() for label in axis.get_xticklabels()] == ["128x8", "128x128", "2048x8"]
    (line,) = axis.lines
    assert line.get_linestyle() == "None"
    assert {(int(x), int(y)) for x, y in zip(*line.get_data(), strict=True)} == {(1, 128), (2, 8), (0, 8)}
    monkeypatch.undo()
    plt.close("all")


@pytest.mark.parametrize("values", [(1.0, 1.3), (0.2, 0.21), (3.0, 700.0)])
def test_the_axis_of_times_has_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, values) -> None:
    import matplotlib.pyplot as plt

    monkeypatch.setattr(plt, "close", lambda _: None)
    rows = [{"method": "bert", "length": 2**i, "batch": 1, "ms": value} for i, value in enumerate(values)]
    plot_lines(tmp_path / "lines.png", rows, {"ms": "ms"}, "")
    (axis,) = plt.gcf().axes
    low, high = axis.get_ylim()
    shown = [float(label.get_text()) for label in axis.get_yticklabels() if low <= label.get_position()[1] <= high]
    assert len(shown) >= 3
    assert shown == pytest.approx([tick for tick in axis.get_yticks() if low <= tick <= high], rel=1e-4)
    monkeypatch.undo()
    plt.close("all")


def test_errors_name_the_value(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "--only mambo: known mixers are attention, gla" in refusal(
        ["mixers", "--output", str(tmp_path), "--only", "mambo"], capsys
    )
    assert "num_heads = 5 does not divide model.hidden_size = 32" in refusal(
        ["mixers", "--output", str(tmp_path), "--hidden", "32", "--heads", "5"], capsys
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is here")
@pytest.mark.parametrize("command", ["kernels", "choice"])
def test_kernels_need_a_device(tmp_path: Path, command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "no CUDA device is visible here" in refusal([command, "--output", str(tmp_path)], capsys)
