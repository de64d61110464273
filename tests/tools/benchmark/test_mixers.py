"""The benchmarks of mixers, masked models and image classifiers on a CPU; kernels need a CUDA device."""

from __future__ import annotations

import csv
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from models.config import ModelConfig
from tests.tools.conftest import refusal
from tools.benchmark import decode, image_step, kernels, mixers, step_rounds
from tools.benchmark import masked_lm_step as masked
from tools.benchmark import timing as measure
from tools.benchmark.__main__ import main
from tools.benchmark.report import plot_lines


def test_mixers_are_compared_with_attention(
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
        "lion, both directions, decays per key channel",
        "lion, both directions, decays per value channel",
        "lion-d, both directions",
        "lion-lit, both directions",
    ]
    assert [row["method"] for row in rows] == names
    for row in rows:
        # Their order is not checked: on a busy machine either one may take longer.
        assert float(row["forward ms"]) > 0 < float(row["both ms"])
        assert float(row["tokens / s"]) == pytest.approx(16 / float(row["both ms"]) * 1e3)
    assert float(rows[0]["time / attention"]) == 1
    assert (tmp_path / "mixers.png").stat().st_size > 5_000
    assert "| lion, both directions " in capsys.readouterr().out


def test_masked_models_are_compared_with_bert(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    timed: list[int] = []
    timing = step_rounds.Timing
    monkeypatch.setattr(
        step_rounds, "Timing", lambda seconds, *rest: (timed.append(len(seconds)), timing(seconds, *rest))[1]
    )
    tiny = ["model.num_layers=1", "model.hidden_size=32", "model.num_heads=2", "model.intermediate_size=64"]
    tiny += ["model.vocab_size=2048", "model.max_positions=16"]
    common = ["masked", "--output", str(tmp_path), "--size", "base", "--steps", "2", "--rounds", "1"]
    assert "max_positions" in refusal([*common, *tiny, "--shapes", "8x2"], capsys)  # LION-s has none
    main([*common, *tiny[:-1], "--shapes", "16x2"])
    rows = list(csv.DictReader((tmp_path / "masked.csv").open(encoding="utf-8")))
    assert [row["method"] for row in rows] == ["bert", "lion_lit", "lion_d", "lion_s"]
    assert timed == [2] * 4  # without the warm-up
    bert = float(rows[0]["ms per step"])
    for row in rows:
        assert float(row["time / bert"]) == pytest.approx(float(row["ms per step"]) / bert)
        assert float(row["tokens / s"]) == pytest.approx(16 * 2 / float(row["ms per step"]) * 1e3)
        assert float(row["ms per step"]) > 0
        assert 6.5 < float(row["loss"]) < 9  # ln 2048 = 7.6 nats
    assert (tmp_path / "masked.png").stat().st_size > 5_000
    assert "--shapes 128: allowed is LENGTHxBATCH" in refusal(
        ["masked", "--output", str(tmp_path), "--shapes", "128"], capsys
    )


def test_image_classifiers_are_compared_with_vit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny = ["model.num_layers=1", "model.hidden_size=32", "model.num_heads=2", "model.intermediate_size=64"]
    common = ["images", "--output", str(tmp_path), "--steps", "1", "--rounds", "1", "--shapes"]
    main([*common, "32x2", "--subjects", "vit", "lion_s_natural", *tiny])
    rows = list(csv.DictReader((tmp_path / "images.csv").open(encoding="utf-8")))
    assert [(row["method"], row["image size"], row["batch"]) for row in rows] == [
        ("vit", "32", "2"),
        ("lion_s_natural", "32", "2"),
    ]
    for row in rows:
        assert float(row["time / vit"]) == pytest.approx(float(row["ms per step"]) / float(rows[0]["ms per step"]))
        assert float(row["images / s"]) == pytest.approx(2 / float(row["ms per step"]) * 1e3)
        assert 6 < float(row["loss"]) < 8  # ln 1000 = 6.9 nats
    assert (tmp_path / "images.png").stat().st_size > 5_000
    for words, message in (
        (["224"], "--shapes 224: allowed is PIXELSxBATCH"),
        (["32x2", "--subjects", "cnn"], "--subjects cnn: allowed are vit, lion_s,"),
        (["32x2", "--size", "huge"], "--size huge: .* allowed are tiny, small, base"),
        (["40x2"], "model.image_size = 40 is no multiple of model.patch_size = 16"),
    ):
        assert re.search(message, refusal([*common, *words], capsys))


@pytest.mark.parametrize("pixels", [32, 80])
def test_images_per_second_of_the_loader_are_listed_by_threads(pixels: int, capsys: pytest.CaptureFixture[str]) -> None:
    rows = image_step.measure_loader(0.01, pixels, 4, [1, 2])
    assert [row["threads"] for row in rows] == [1, 2]
    assert all(row["images / s"] > 0 for row in rows)
    assert "| threads | images / s |" in capsys.readouterr().out


def test_image_classifier_is_profiled(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny = ["model.num_layers=1", "model.hidden_size=32", "model.num_heads=2", "model.intermediate_size=64"]
    words = ["profile", "--output", str(tmp_path), "--config", "configs/model/lion_s_vit_tiny.yml", "--steps", "1"]
    main([*words, "--shape", "16x2", "model.vocab_size=3", *tiny])
    assert "lion_s_vit_tiny, model.vocab_size=3, " in capsys.readouterr().out
    assert (tmp_path / "profile_parts.csv").is_file()


def test_mixers_are_listed_if_attention_does_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_rows_before_an_interruption_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def until(count: int, result: Any) -> Callable[..., Any]:
        remaining = iter([result] * count)

        def measured(*_: object, **__: object) -> Any:
            if (result := next(remaining, None)) is None:
                raise KeyboardInterrupt
            return result

        return measured

    columns = {"parameters": 1, "forward ms": 1.0, "both ms": 2.0, "tokens / s": 3.0, "memory GiB": None}
    monkeypatch.setattr(masked, "_measure", until(5, step_rounds.Timing([1.0], None, 7.0)))
    monkeypatch.setattr(mixers, "measure_mixer", until(2, columns))
    monkeypatch.setattr(decode, "_measure_project", until(1, decode.Row("eager", 8, 1, 2.0, 3.0, None, 0.1)))
    tiny = ["--hidden", "32", "--heads", "4"]
    model = ["--config", "configs/model/metala_tiny.yml", "--device", "cpu", "--contexts", "8", "16"]
    for words, methods in (
        (["masked", "--shapes", "8x1", "16x1", "--rounds", "1"], ["bert", "lion_lit", "lion_d", "lion_s"]),
        (["mixers", *tiny, "--only", "gla", "hgrn"], ["attention", "gla"]),
        (["decode", *model], ["eager"]),
    ):
        assert main([words[0], "--output", str(tmp_path), *words[1:]]) == 130
        rows = list(csv.DictReader((tmp_path / f"{words[0]}.csv").open(encoding="utf-8")))
        assert [row["method"] for row in rows] == methods


def test_output_path_may_contain_an_equals_sign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[object, ...]] = []
    monkeypatch.setattr(masked, "run", lambda *words: calls.append(words))
    out = tmp_path / "lr=1"
    main(["masked", "--output", str(out), "--shapes", "8x2", "16x1", "model.num_layers=1", "--steps", "2", "a.b=c"])
    assert calls == [(out, "large", [(8, 2), (16, 1)], 2, 3, ["model.num_layers=1", "a.b=c"])]
    assert out.is_dir()


def test_points_of_several_batches_have_no_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import matplotlib.pyplot as plt

    monkeypatch.setattr(plt, "close", lambda _: None)
    shapes = [(128, 128), (2048, 8), (128, 8)]
    rows = [{"method": "bert", "length": length, "batch": batch, "ms": batch} for length, batch in shapes]
    plot_lines(tmp_path / "batches.png", rows, {"ms": "ms"}, "", batches=True)
    (axis,) = plt.gcf().axes
    assert [label.get_text() for label in axis.get_xticklabels()] == ["128\nx 8", "128\nx 128", "2048\nx 8"]
    (line,) = axis.lines
    assert line.get_linestyle() == "None"
    assert {(int(x), int(y)) for x, y in zip(*line.get_data(), strict=True)} == {(1, 128), (2, 8), (0, 8)}
    monkeypatch.undo()
    plt.close("all")


@pytest.mark.parametrize("values", [(1.0, 1.3), (0.2, 0.21), (3.0, 700.0)])
def test_axis_of_times_has_tick_labels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, values) -> None:
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
    assert "--only mambo: allowed are attention, delta_net" in refusal(
        ["mixers", "--output", str(tmp_path), "--only", "mambo"], capsys
    )
    assert "num_heads = 5 does not divide model.hidden_size = 32" in refusal(
        ["mixers", "--output", str(tmp_path), "--hidden", "32", "--heads", "5"], capsys
    )


@pytest.mark.parametrize("command", ["kernels", "choice"])
def test_kernels_need_a_device(tmp_path: Path, command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "no CUDA device is visible" in refusal([command, "--output", str(tmp_path)], capsys)


def test_columns_of_masked_models_follow_from_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    times = {"bert": [[1.0, 2.0, 3.0], [2.0, 2.0, 2.0]], "lion_s": [[4.0, 5.0, 6.0], [8.0, 8.0, 8.0]]}
    left = {name: iter(times.get(name, times["bert"])) for name in masked.MODELS}
    monkeypatch.setattr(masked, "_measure", lambda name, *_: masked.Timing(next(left[name]), 1.5, 7.0))
    masked.run(tmp_path, "base", [(16, 4)], 3, 2, [])
    rows = {row["method"]: row for row in csv.DictReader((tmp_path / "masked.csv").open(encoding="utf-8"))}
    columns = ("ms per step", "time / bert", "range of rounds", "tokens / s", "peak GiB", "loss")
    found = {name: [float(row[column]) for column in columns] for name, row in rows.items()}
    assert found["bert"] == [2000, 1, 0, 32, 1.5, 7]
    assert found["lion_s"] == pytest.approx([7000, 3.5, 3 / 7, 64 / 7, 1.5, 7])


def test_masked_samples_have_targets_at_masked_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mask 30 % of the tokens. Learned positions cover the whole length."""
    seen: list[dict[str, torch.Tensor]] = []

    class Engine:
        def train_step(self, batches: list[dict[str, torch.Tensor]], lr: float) -> SimpleNamespace:
            seen.extend(batches)
            return SimpleNamespace(loss=7.0)

        def close(self) -> None: ...

    built: list[Any] = []
    monkeypatch.setattr("tools.loading.engine.build_engine", lambda config, *_: (built.append(config), Engine())[1])
    timing = masked._measure("bert", "base", 1024, 4, 2, ["model.num_layers=1"])
    assert len(timing.seconds) == 2
    assert built[0].model.max_positions == 1024
    for batch in seen:
        masked_tokens = batch["loss_weight"] == 1
        assert 0.25 < masked_tokens.float().mean() < 0.35
        assert (batch["tokens"][masked_tokens] == 103).all()
        assert (batch["labels"][~masked_tokens] == -100).all()
        assert (batch["labels"][masked_tokens] >= 1000).all()
        assert batch["tokens"][~masked_tokens].min() >= 1000


def test_columns_of_a_mixer_follow_from_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gradients: list[bool] = []

    def timer(step: Callable[[], object], leaves: list[torch.Tensor]) -> float:
        step()
        gradients.append(any(leaf.grad is not None for leaf in leaves))
        return 4.0 if leaves else 1.0

    monkeypatch.setattr(mixers, "host_ms", timer)
    monkeypatch.setattr(mixers, "peak_gib", lambda *_: 2.0)
    config = ModelConfig(vocab_size=8, num_layers=2, hidden_size=32, num_heads=4, mixers=("attention",))
    row = mixers.measure_mixer(config, 16, 3)
    assert gradients == [False, True]
    assert (row["parameters"], row["forward ms"], row["both ms"]) == (4 * 32 * 32, 1, 4)
    assert row["tokens / s"] == 1000 * 3 * 16 / 4
    times = iter([{**row, "both ms": 4.0}, {**row, "both ms": 6.0}])
    monkeypatch.setattr(mixers, "measure_mixer", lambda *_: next(times))
    main(["mixers", "--output", str(tmp_path), "--hidden", "32", "--heads", "4", "--only", "gla"])
    rows = csv.DictReader((tmp_path / "mixers.csv").open(encoding="utf-8"))
    assert [float(row["time / attention"]) for row in rows] == [1, 1.5]


def test_times_are_milliseconds_per_run(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(measure.time, "perf_counter", lambda: now[0])
    for name, value in (("synchronize", None), ("memory_allocated", 2**30), ("max_memory_allocated", 4 * 2**30)):
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    calls: list[int] = []

    def step() -> None:
        calls.append(1)
        now[0] += 0.025

    assert measure.host_ms(step, []) == pytest.approx(25)
    assert len(calls) == 1 + 20
    assert measure.queued_ms(step, []) == pytest.approx(25)
    assert measure.peak_gib(step, []) == 3
    assert [measure._runs(ms, 0.2) for ms in (0.1, 4.0, 1000.0)] == [200, 50, 5]


def test_measured_forms_of_lion_have_equal_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare kernels, formula and two flipped causal calls."""

    def causal(q, k, v, g, scale):
        state = torch.zeros(*q[:, 0].shape, v.shape[-1])
        outputs = []
        for t in range(q.shape[1]):
            state = state * g[:, t, :, None, None].exp() + k[:, t, :, :, None] * v[:, t, :, None]
            outputs.append(scale * (q[:, t, :, :, None] * state).sum(-2))
        return torch.stack(outputs, 1), None

    fla = ModuleType("fla.ops.simple_gla")
    fla.chunk_simple_gla = causal  # type: ignore[attr-defined]
    for name, module in (("fla", ModuleType("fla")), ("fla.ops", ModuleType("fla.ops")), ("fla.ops.simple_gla", fla)):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(kernels, "HEADS", 2)
    monkeypatch.setattr(kernels, "HEAD_DIM", 8)
    monkeypatch.setattr(kernels, "_random", lambda *shape, count=1: [torch.randn(*shape) for _ in range(count)])
    torch.manual_seed(0)
    inputs = kernels._lion_inputs(21, 2)
    monkeypatch.setattr(kernels, "_lion_inputs", lambda *_: tuple(x.detach().clone() for x in inputs))
    found = []
    for build in (kernels.lion, kernels.plain_lion, kernels.flipped_lion):
        step, leaves = build(21, 2)
        step()
        found.append([leaf.grad for leaf in leaves])
    for ours, plain, flipped in zip(*found, strict=True):
        torch.testing.assert_close(plain.transpose(1, 2) if plain.ndim == 4 else plain, ours, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(flipped, ours, rtol=1e-4, atol=1e-5)


def test_errors_are_relative_to_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Return the relative error of the output and of each gradient. Ratios divide a time by the peer's at the same shape."""
    monkeypatch.setattr(kernels, "HEADS", 2)
    monkeypatch.setattr(kernels, "HEAD_DIM", 8)
    monkeypatch.setattr(kernels, "_random", lambda *shape, count=1: [torch.rand(*shape) for _ in range(count)])

    def off(q, k, v, *, decay_logits, form):
        scale = 1.5 if form == "auto" else 1.0
        return decay_logits.weight.sum() * q * k * v * scale + decay_logits.x.sum()

    monkeypatch.setattr(kernels, "bidirectional_linear_attention", off)
    torch.manual_seed(0)
    found = kernels.errors(32, 2)
    assert found.pop("length x batch") == "32 x 2"
    assert found.pop("dx") == pytest.approx(0, abs=0.02)
    assert [*found] == ["output", "dW of the decay logits", "dq", "dk", "dv"]
    assert [found[name] for name in ("dW of the decay logits", "dq", "dk", "dv")] == pytest.approx([0.5] * 4, abs=0.1)
    rows = [
        measure.Measurement("SDPA", 8, 4, 2.0, 2.0, 4.0),
        measure.Measurement("SDPA", 4, 8, 8.0, 8.0, 8.0),
        measure.Measurement("ours", 8, 4, 6.0, 6.0, 6.0),
        measure.Measurement("ours", 4, 8),
    ]
    ratios = [(row["replayed / peer"], row["launched / peer"]) for row in kernels._with_ratios(rows, "SDPA")]
    assert ratios == [(1, 1), (1, 1), (1.5, 3), (None, None)]
