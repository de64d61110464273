"""The metrics file, its lines after a kill and a resume, and the progress display."""

from __future__ import annotations

import io
import json
import math
import os
import pty
import resource
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from megatron_lite.metrics.logger import MetricsLogger, _Progress, read_metrics


def log_steps(directory: Path, first: int, last: int, **arguments: object) -> None:
    logger = MetricsLogger(directory, total_steps=10, initial_step=first - 1, progress_bar=False, **arguments)
    for step in range(first, last + 1):
        logger.log(step, {"loss": 1.0 / step, "tokens": 100 * step})
    logger.close()


def test_lines_are_readable_before_close_and_hold_what_was_logged(tmp_path: Path) -> None:
    logger = MetricsLogger(tmp_path / "run", total_steps=2, progress_bar=False)
    logger.log(1, {"loss": 2.5, "tokens": 64})
    logger.log(1, {"prompt": "def ", "text": "naïve\n✓"}, kind="sample")
    raw = (tmp_path / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    assert len(raw) == 2
    first, second = map(json.loads, raw)
    assert {k: first[k] for k in ("kind", "step", "loss", "tokens")} == {
        "kind": "train",
        "step": 1,
        "loss": 2.5,
        "tokens": 64,
    }
    assert abs(first["time"] - os.stat(tmp_path / "run" / "metrics.jsonl").st_mtime) < 60
    assert (second["kind"], second["text"]) == ("sample", "naïve\n✓")
    assert read_metrics(tmp_path / "run") == [first, second]
    logger.close()
    logger.close()


def test_non_finite_numbers_are_valid_json_and_come_back_as_nan(tmp_path: Path) -> None:
    logger = MetricsLogger(tmp_path, total_steps=2, progress_bar=False)
    logger.log(1, {"loss": math.nan, "gradient_norm": math.inf, "learning_rate": 0.1})
    logger.close()

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not JSON")

    line = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=refuse)
    assert line["loss"] is None
    assert line["gradient_norm"] is None
    back = read_metrics(tmp_path)[0]
    assert math.isnan(back["loss"])
    assert math.isnan(back["gradient_norm"])
    assert back["learning_rate"] == 0.1


def test_resume_removes_later_steps_and_a_cut_last_line(tmp_path: Path) -> None:
    log_steps(tmp_path, 1, 6)
    file = tmp_path / "metrics.jsonl"
    before = file.read_text().splitlines()
    with file.open("a") as out:
        out.write('{"kind": "train", "step": 7, "lo')
    assert [line["step"] for line in read_metrics(file)] == [1, 2, 3, 4, 5, 6]
    log_steps(tmp_path, 5, 7)
    after = file.read_text().splitlines()
    assert after[:4] == before[:4], "lines that stay are untouched"
    assert [json.loads(line)["step"] for line in after] == [1, 2, 3, 4, 5, 6, 7]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["metrics.jsonl"], "no temporary file is left"


@pytest.mark.parametrize(
    ("total", "again", "kept"), [(6, False, False), (10, True, False), (10, False, True)], ids=["end", "again", "on"]
)
def test_evaluation_of_the_resumed_step_stays_unless_it_is_repeated(
    tmp_path: Path, total: int, again: bool, kept: bool
) -> None:
    measured = ("validation", "test", "sample", "evaluation", "evaluation_error")
    with closing(MetricsLogger(tmp_path, total_steps=6, progress_bar=False)) as logger:
        for step in (5, 6):
            for kind in ("train", "checkpoint", "stop", *measured):
                logger.log(step, {}, kind=kind)
    before = (tmp_path / "metrics.jsonl").read_text()
    MetricsLogger(
        tmp_path, total_steps=total, initial_step=6, measures_again=again, keep_previous=again, progress_bar=False
    ).close()
    remaining = [line["kind"] for line in read_metrics(tmp_path) if line["step"] == 6]
    assert remaining == ["train", "checkpoint", "stop", *(measured if kept else ())]
    assert len([line for line in read_metrics(tmp_path) if line["step"] == 5]) == 8
    previous = tmp_path / "metrics.previous.jsonl"
    assert previous.read_text() == before if again else not previous.exists()


def test_resume_keeps_the_file_when_the_rewrite_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log_steps(tmp_path, 1, 6)
    before = (tmp_path / "metrics.jsonl").read_bytes()

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        MetricsLogger(tmp_path, total_steps=10, initial_step=3, progress_bar=False)
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


def test_new_run_renames_the_earlier_file(tmp_path: Path) -> None:
    log_steps(tmp_path, 1, 3)
    log_steps(tmp_path, 1, 2)
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 2]
    assert [line["step"] for line in read_metrics(tmp_path / "metrics.previous.jsonl")] == [1, 2, 3]


def test_damaged_lines_are_skipped_with_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(FileNotFoundError, match=r"metrics\.jsonl: no metrics there"):
        read_metrics(tmp_path)
    (tmp_path / "metrics.jsonl").write_text(
        '{"kind": "train", "step": 1}\n\x00\x00garbage\n{"kind": "train"}\n{"kind": "train", "step": 2}\n'
        '{"kind": "train", "step": 3, "loss": "high"}\n{"kind": "train", "step": 4, "lr": [1, 2]}\n'
    )
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 2]
    file = tmp_path / "metrics.jsonl"
    assert capsys.readouterr().err == f"warning: {file}: 4 damaged lines skipped, the first is line 2\n"
    (tmp_path / "metrics.jsonl").write_text('{"kind": "train", "step": 1}\n[1, 2')
    assert len(read_metrics(tmp_path)) == 1
    assert capsys.readouterr().err == ""


def test_wrong_values_are_refused(tmp_path: Path) -> None:
    logger = MetricsLogger(tmp_path, total_steps=2, progress_bar=False)
    with pytest.raises(ValueError, match="'step' is reserved"):
        logger.log(1, {"step": 3})
    with pytest.raises(TypeError):
        logger.log(1, {"loss": object()})  # type: ignore[dict-item]
    logger.close()
    assert read_metrics(tmp_path) == []


def test_plain_lines_are_sparse_and_show_the_main_values() -> None:
    stream = io.StringIO()
    progress = _Progress(1000, 0, stream)
    for step in range(1, 1001):
        progress.show(step, {"loss": 4.0, "tokens_per_second": 12345.6, "skipped_steps": 0}, "train")
    progress.show(
        1000, {"loss": 3.5, "perplexity": 33.1, "bits_per_byte": 1.75, "evaluated_fraction": 0.0584}, "validation"
    )
    progress.show(1000, {"loss": 3.6, "perplexity": 36.6, "evaluated_fraction": 1.0}, "test")
    progress.close()
    *lines, test = stream.getvalue().splitlines()
    assert test == "step 1000/1000  test  loss 3.6000  perplexity 36.60  (whole set)"
    assert len(lines) == 1 + 25 + 1, "the first step, every 4 %, the validation"
    assert lines[0].startswith("step    1/1000  loss 4.0000  tokens/s 12,346  ETA ")
    assert lines[1].startswith("step   40/1000")
    assert lines[-2] == "step 1000/1000  loss 4.0000  tokens/s 12,346"
    assert lines[-1] == "step 1000/1000  validation  loss 3.5000  perplexity 33.10  bits/byte 1.7500  (5.8% of the set)"


def test_a_slow_run_prints_by_time() -> None:
    stream = io.StringIO()
    progress = _Progress(100_000, 0, stream)
    progress.show(1, {"loss": 4.0}, "train")
    progress.show(2, {"loss": 4.0}, "train")
    assert len(stream.getvalue().splitlines()) == 1
    progress.last_line -= 601
    progress.show(3, {"loss": 4.0, "skipped_steps": 2}, "train")
    assert "loss 4.0000  skipped 2  ETA" in stream.getvalue().splitlines()[1]


def test_a_long_validation_prints_its_share_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    stream = io.StringIO()
    progress = _Progress(1000, 0, stream)
    for _ in range(2):  # validations
        now += 100
        for done in range(1, 9):
            now += 10
            progress.show_share("validation", done / 8)
    assert stream.getvalue().splitlines() == 2 * ["validation 50%", "validation 88%"]


def test_remaining_time_counts_from_the_resumed_step(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    stream = io.StringIO()
    progress = _Progress(1000, 500, stream)
    now += 10
    progress.show(510, {"loss": 4.0}, "train")
    now += 4990
    progress.show(550, {"loss": 4.0}, "train")
    assert [line.split("ETA ")[1] for line in stream.getvalue().splitlines()] == ["08:10", "12:30:00"]


def test_suite_averages_are_shown_if_there_are_any() -> None:
    stream = io.StringIO()
    progress = _Progress(10, 0, stream)
    scores = {"zero_shot/piqa": 61.5, "zero_shot/boolq": 58.0, "tokens": 5, "seconds": 1.0}
    progress.show(4, {**scores, "zero_shot/average": 59.75}, "evaluation")
    progress.show(8, scores, "evaluation")
    assert stream.getvalue().splitlines() == [
        "step  4/10  zero_shot/average 59.75",
        "step  8/10  zero_shot/piqa 61.50  zero_shot/boolq 58.00",
    ]


@pytest.mark.parametrize("size", [(24, 120), (0, 0)], ids=["120 columns", "size unknown"])
def test_on_a_terminal_there_is_one_bar(tmp_path: Path, size: tuple[int, int]) -> None:
    script = (
        "import sys; from pathlib import Path; from megatron_lite.metrics.logger import MetricsLogger\n"
        "logger = MetricsLogger(Path(sys.argv[1]), total_steps=40, initial_step=10)\n"
        "for step in range(11, 41): logger.log(step, {'loss': 2.5, 'tokens_per_second': 5000.0})\n"
        "for _ in range(9): logger.show_share('validation', 0.25)\n"
        "logger.log(40, {'loss': 2.25}, kind='validation')\n"
        "logger.close()\n"
    )
    parent, child = pty.openpty()
    termios.tcsetwinsize(child, size)
    process = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stderr=child)
    os.close(child)
    text = b""
    while True:
        try:
            part = os.read(parent, 4096)
        except OSError:
            break
        if not part:
            break
        text += part
    os.close(parent)
    assert process.wait() == 0
    shown = text.decode().replace("\r", "\n").splitlines()
    bars = [line for line in shown if "%|" in line]
    assert bars[0].startswith("train  25%|")
    assert "40/40" in bars[-1]
    assert "loss 2.5000, tokens/s 5,000" in bars[-1]
    assert sum("40/40" in line and "validation 25%" in line for line in bars) == 1, "at most two updates per second"
    assert sum("validation  loss 2.2500" in line for line in shown) == 1


def test_tensorboard_holds_the_values(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log_steps(tmp_path, 1, 4, tensorboard=True, config={"model": {"hidden_size": 8}})
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, round(e.value, 6)) for e in events.Scalars("train/loss")] == [
        (step, round(1.0 / step, 6)) for step in range(1, 5)
    ]
    assert "config/text_summary" in events.Tags()["tensors"]
    log_steps(tmp_path, 3, 5, tensorboard=True)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [e.step for e in events.Scalars("train/loss")] == [1, 2, 3, 4, 5], "each step once after a resume"


def test_wandb_offline_needs_no_account(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("WANDB_SILENT", "true")
    settings = {"enabled": True, "project": "metalion", "entity": None, "mode": "offline"}
    run = tmp_path / "run"
    log_steps(run, 1, 3, wandb=settings, config={"model": {"hidden_size": 8}})
    identity = (run / "wandb_run_id.txt").read_text()
    log_steps(run, 3, 4, wandb=settings)
    assert (run / "wandb_run_id.txt").read_text() == identity, "a resumed run is the same run"
    folders = list((run / "wandb").glob("offline-run-*"))
    assert folders
    assert any(file.stat().st_size > 0 for folder in folders for file in folder.glob("*.wandb"))


def test_wandb_without_a_key_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")

    def init(**settings: object) -> None:
        assert settings["mode"] == "online"
        raise wandb.errors.UsageError("No API key configured. Use `wandb login` to log in.")

    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setattr(wandb, "init", init)
    (tmp_path / "metrics.jsonl").write_text('{"kind": "train", "step": 1}\n')
    with pytest.raises(
        ValueError, match=r"^logging\.wandb: No API key .* in\. Run wandb .* logging\.wandb\.mode=offline, or .*=false$"
    ):
        MetricsLogger(tmp_path, total_steps=1, wandb={"enabled": True, "mode": "online"}, progress_bar=False)
    assert read_metrics(tmp_path), "the metrics of an earlier run stay"


def test_calls_of_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, tuple[object, ...], dict[str, object]]] = []
    monkeypatch.delenv("WANDB_MODE", raising=False)

    class Run:
        def __getattr__(self, name: str) -> Callable[..., Run]:
            return lambda *words, **more: calls.append((name, words, more)) or self

    monkeypatch.setitem(sys.modules, "wandb", Run())
    settings = {"enabled": True, "project": "metalion", "entity": None}
    for first, last in ((1, 2), (2, 2), (1, 1)):
        log_steps(tmp_path / "name", first, last, wandb=settings)
    inits = [more for name, _, more in calls if name == "init"]
    assert {(i["project"], i["mode"], i["name"], i["resume"]) for i in inits} == {
        ("metalion", "online", "name", "allow")
    }
    assert inits[0]["id"] == inits[1]["id"] != inits[2]["id"], "a run that starts over is another one"
    assert [name for name, *_ in calls[:6]] == ["init", "define_metric", "define_metric", "log", "log", "finish"]
    assert calls[2][1:] == (("*",), {"step_metric": "step"})
    assert calls[4][1] == ({"step": 2, "train/loss": 0.5, "train/tokens": 200},)
    monkeypatch.setenv("WANDB_MODE", "disabled")
    log_steps(tmp_path / "name", 1, 2, wandb={**settings, "mode": "online"})
    assert [more for name, _, more in calls if name == "init"][-1]["mode"] == "disabled", "the environment overrides"


def test_trackers_are_not_imported_when_off(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from megatron_lite.metrics.logger import MetricsLogger\n"
        "logger = MetricsLogger(Path(sys.argv[1]), total_steps=1, wandb={'enabled': False})\n"
        "logger.log(1, {'loss': 1.0}); logger.close()\n"
        "assert not {'wandb', 'torch', 'tensorboard', 'matplotlib'} & set(sys.modules), 'imported for nothing'\n"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=True, stderr=subprocess.DEVNULL)


def test_a_full_disk_names_the_file(tmp_path: Path) -> None:
    metrics = MetricsLogger(tmp_path, total_steps=9, progress_bar=False)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
        metrics.log(0, {"loss": 1.0})
        with pytest.raises(OSError, match=r"File too large: .*metrics\.jsonl"):
            metrics.log(1, {"text": "word " * 20})
        metrics.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [line["step"] for line in read_metrics(tmp_path)] == [0]  # the second was cut
