"""The report of a ladder: predicted and trained losses, unstable runs, and what is shown of which size."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from models.config import ModelConfig
from tests.tools.compare.test_plan import EXPERIMENTS
from tools.compare import held_out, ladder_predictions
from tools.compare.__main__ import main, write_results
from tools.compare.ladder_predictions import Prediction, store_predictions, stored_predictions
from tools.compare.ladder_report import markdown, write_ladder
from tools.compare.results import Result, read_results, rows_of, unreadable_note
from tools.compare.rungs import Ladder
from tools.compare.scaling_fit import fit_losses


def law(N: float, D: float) -> float:
    return 1.69 + 406.4 / N**0.34 + 410.7 / D**0.28


def ladder_results(folder: Path, trained: bool = True) -> tuple[Any, list[Any], list[Result]]:
    """Return results of a ladder of two models; the second one is 0.1 above the law and lacks a size."""
    ladder = Ladder(
        parameters={"5m": 5e6, "10m": 1e7, "20m": 2e7, "40m": 4e7},
        tokens_per_parameter={"5m": (10, 20, 40), "10m": (10, 20, 40), "20m": (10, 20), "40m": (10,)},
    )
    planned: Any = SimpleNamespace(ladder=ladder, folder=folder, title="T")
    runs, results = [], []
    for model, more in (("softmax", 0.0), ("metala", 0.1)):
        for rung, (size, ratio) in ladder.rungs().items():
            if model == "metala" and size == "20m":
                continue
            body = int(ladder.parameters[size])
            tokens = round(body * ratio)
            mixer = "attention" if model == "softmax" else model
            config = SimpleNamespace(
                batch=SimpleNamespace(tokens_of=lambda steps: steps),
                schedule=SimpleNamespace(train_steps=tokens),
                model=ModelConfig(vocab_size=384, num_layers=8, hidden_size=256, num_heads=4, mixers=(mixer,)),
            )
            run: Any = SimpleNamespace(
                model=model,
                label=model.title(),
                size=rung,
                seed=1,
                parameters=2 * body,
                body=body,
                config=config,
                causal=True,
            )
            run.folder, run.name = folder / f"{model}-{rung}", f"{model}-{rung}"
            run.folder.mkdir(parents=True, exist_ok=True)
            loss = law(body, tokens) + more
            final = {"loss": loss, "bits_per_byte": loss / 3, "loss/x": loss - 1, "loss/y": loss + 1}
            run.complete = done = trained or size != "40m"
            runs.append(run)
            test = {"loss": loss + 2} if done else None
            results.append(Result(run, [final], final if done else None, tokens, 1.0, test))
    return planned, runs, results


def test_report_compares_predicted_and_trained_losses(tmp_path: Path) -> None:
    planned, runs, results = ladder_results(tmp_path)
    content = {"made_from": "", "training_tokens": 160_000_000, "compressors": {"xz -9": 2.0}}
    (tmp_path / held_out.FILE).write_text(json.dumps(content))
    bins = [{"from": 1, "to": 8, "loss": 5.0}, {"from": 9, "to": 16, "loss": 4.0}]
    (runs[8].folder / held_out.POSITIONS).write_text(json.dumps({"bins": bins}))
    unmeasured: Any = SimpleNamespace(**{**vars(runs[8]), "seed": 0, "folder": tmp_path / "seed0"})
    sections, files = write_ladder(planned, planned.ladder, [unmeasured, *runs], results, rows_of(results))
    document = markdown(sections)
    loss = law(4e7, 4e8)
    predicted = next(line for line in document.splitlines() if "40m-10x" in line and line.startswith("| Softmax"))
    assert f"{loss:.4f} [{loss:.4f}, {loss:.4f}]" in predicted
    assert predicted.rstrip(" |").endswith(("+0.0000", "-0.0000"))
    # Without the largest size the second model has two sizes only.
    assert "No fit of Metala: 6 different points, 2 sizes, 4 token counts" in document
    fit = next(line for line in document.splitlines() if line.startswith("| Softmax |    9 |"))
    assert [cell.strip() for cell in fit.split("|")[3:6]] == ["10.8", "185.2", "1.690 [1.690, 1.690]"]
    assert "Within 0.01 nats: 1 of 1; mean absolute difference 0.0000." in document
    assert "The largest run reads the training text 2.5 times, and the fit takes every token as new" in document
    assert f"{1 - loss / 6:.1%}" in document
    assert "Not measured: `--recall`, and `eval.py` with a run, write scores to the runs' folders." in document
    assert f" {loss + 2:.4f} |" in document
    assert "## Loss by source at 40m-10x" in document
    assert "| 9 to 16  |  4.0000 |" in document
    assert "Loss of one run per model, the first with measured positions. Not measured: Metala." in document
    assert "Not measured: Metala. `--positions` measures runs that have a checkpoint." in document
    page = (tmp_path / "ladder.html").read_text()
    assert "<h2>Prediction of 40m</h2>" in page
    assert "data:image/png;base64," in page
    assert [path.name for path in files] == ["ladder.png", "ladder.html"]


def test_unstable_runs_are_shown_and_left_out_of_choices_predictions_and_fits(tmp_path: Path) -> None:
    planned, runs, results = ladder_results(tmp_path)
    # The first model is unstable at two sizes, and its losses there lie below the law.
    names = {"softmax-20m-20x", "softmax-40m-10x"}
    for result in results:
        if result.run.name in names:
            assert result.final is not None
            result.final["loss"] -= 1.0
    unchanged = [replace(result, gradient_growth=1.9) for result in results]
    unstable = [replace(result, gradient_growth=3.5 if result.run.name in names else 1.9) for result in results]
    stable_page, page = (
        markdown(write_ladder(planned, planned.ladder, runs, of_all, rows_of(of_all))[0])
        for of_all in (unchanged, unstable)
    )
    assert "unstable" not in stable_page
    loss = law(4e7, 4e8)
    line = next(line for line in page.splitlines() if line.startswith("| Softmax (unstable) | 40m-10x"))
    assert [cell.strip() for cell in line.split("|")[3:8:4]] == [f"{loss:.4f} [{loss:.4f}, {loss:.4f}]", "+1.0000"]
    assert "Not counted, since a run was unstable: Softmax." in page
    assert "Within 0.01" not in page
    fit = next(line for line in page.splitlines() if line.startswith("| Softmax |    7 |"))
    assert "1.690 [1.690, 1.690]" in fit
    assert "| lowest loss " in stable_page
    assert "| lowest loss " not in page  # one steady mixer is no choice
    assert f"| Softmax (unstable) | {loss - 1:.4f} |" in page
    assert "the last quarter of the run: Softmax, seed 1: 3.5 times." in page


def test_positions_and_scores_are_of_the_largest_rung_where_they_are_measured(tmp_path: Path) -> None:
    planned, runs, results = ladder_results(tmp_path)
    scores = {"results": {"tasks": {"boolq": {"acc": 0.5}}}, "details": {"tasks": {"boolq": {"acc": {"stderr": 0.1}}}}}
    for run in runs:
        bins = [{"from": 1, "to": 8, "loss": 5.0 if run.model == "softmax" else 4.0}]
        if run.size in ("5m-10x", "10m-10x"):
            (run.folder / held_out.POSITIONS).write_text(json.dumps({"bins": bins}))
            (run.folder / "results.json").write_text(json.dumps(scores))
    document = markdown(write_ladder(planned, planned.ladder, runs, results, rows_of(results))[0])
    titles = [line.removeprefix("## ") for line in document.splitlines() if line.startswith("## ")]
    assert titles[:3] == ["Which mixer for which purpose, at 40m-10x", "Loss at 40m-10x", "Loss by source at 40m-10x"]
    assert titles[3:5] == ["Loss by position at 10m-10x", "Zero-shot scores and recall at 10m-10x"]
    (late,) = (line for line in document.splitlines() if line.startswith("| last positions of a text at 10m-10x"))
    assert [cell.strip() for cell in late.split("|")[2:5]] == ["Metala", "-", "4.0000"]
    assert "| boolq, acc |" in document


def test_complete_runs_whose_metrics_were_cut_are_named(tmp_path: Path) -> None:
    """Take no validation before the last step for the final one."""
    runs: list[Any] = []
    for name, steps in (("whole", [4, 8]), ("cut", [4]), ("gone", [])):
        config = SimpleNamespace(schedule=SimpleNamespace(train_steps=8))
        runs.append(SimpleNamespace(name=name, folder=tmp_path / name, complete=True, config=config))
        runs[-1].folder.mkdir()
        lines = [json.dumps({"kind": "validation", "step": step, "loss": 1.0}) for step in steps]
        if lines:
            (runs[-1].folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    results = read_results(runs)
    assert [result.final is None for result in results] == [False, True]
    assert unreadable_note(runs, results).startswith(
        "Left out, since metrics.jsonl lacks the validation after the last step: cut, gone."
    )
    runs[1].complete = False
    assert unreadable_note(runs[:2], results) == ""


def test_growth_of_the_gradient_norm_is_read_from_the_metrics(tmp_path: Path) -> None:
    run: Any = SimpleNamespace(folder=tmp_path, complete=True)

    def growth(norms: list[float | None]) -> float:
        lines = [
            {"kind": "train", "step": i, "step_seconds": 1.0, "gradient_norm": norm} for i, norm in enumerate(norms)
        ]
        (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        (result,) = read_results([run])
        return result.gradient_growth

    assert growth([9.0, 9.0, 1.0, 2.0, 5.0, 5.0, 6.0, 9.0]) == 5.0
    assert growth([None, 9.0, 9.0, 1.0, 2.0, 5.0, 5.0, 6.0, 9.0]) == 5.0
    assert math.isnan(growth([9.0, 1.0, 2.0]))
    assert math.isnan(growth([0.0] * 8))


def test_report_holds_the_smaller_sizes_alone(tmp_path: Path) -> None:
    planned, _, results = ladder_results(tmp_path)
    small = [result for result in results if result.run.size.startswith("5m")]
    runs = [result.run for result in small]
    document = markdown(write_ladder(planned, planned.ladder, runs, small, rows_of(small))[0])
    assert "## Loss at 5m-40x" in document


def test_largest_size_is_predicted_before_it_is_trained(tmp_path: Path) -> None:
    planned, runs, results = ladder_results(tmp_path, trained=False)
    document = markdown(write_ladder(planned, planned.ladder, runs, results, rows_of(results))[0])
    loss = law(4e7, 4e8)
    line = next(line for line in document.splitlines() if line.startswith("| Softmax") and "40m-10x" in line)
    assert line.split("|")[3].strip().startswith(f"{loss:.4f} [")
    assert [cell.strip() for cell in line.split("|")[4:8]] == [f"{loss:.4f}", f"{loss:.4f}", "-", "-"]
    assert "## Loss at 20m-20x" in document
    assert "Not measured. `--positions` measures runs that have a checkpoint." in document
    assert "20m-20x: 20 M parameters without embeddings, 400 M tokens." in document
    assert "Within 0.01 nats" not in document
    assert "Softmax: not stored, but computed from the smaller runs that are complete now." in document


def test_report_without_a_fit_says_why(tmp_path: Path) -> None:
    planned, runs, results = ladder_results(tmp_path)

    def sections(size: str) -> dict[str, str]:
        some = [result for result in results if result.run.size == size]
        written = write_ladder(planned, planned.ladder, runs, some, rows_of(some))[0]
        assert not any(section.rows for section in written[-3:-1])
        return {section.title: section.note for section in written}

    reason = "No fit of Softmax, Metala: 1 different point, 1 size, 1 token count; E, A, a, B and b are 5 unknowns, so at least 6"
    notes = sections("40m-10x")
    assert notes["Prediction of 40m"] == "No prediction. No smaller run is complete."
    assert notes["Fit of all sizes"].startswith(reason)
    assert notes["Which mixer for which purpose, at 40m-10x"].endswith(
        "No rung has two mixers with several complete seeds, so the noise of a difference is unknown."
    )
    assert sections("5m-10x")["Prediction of 40m"].startswith(f"No prediction. {reason}")
    some = [result for result in results if result.run.model == "softmax" or result.run.size == "5m-10x"]
    fits = write_ladder(planned, planned.ladder, runs, some, rows_of(some))[0][-2]
    assert [row[0] for row in fits.rows] == ["Softmax"]
    assert " No fit of Metala: 1 different point, " in fits.note


def test_picture_names_its_lines_and_filled_marks(tmp_path: Path, monkeypatch) -> None:
    """Fill the marks of the largest size's fewest tokens per parameter. Without a fit there are no lines."""
    planned, runs, results = ladder_results(tmp_path)
    drawn: list[Any] = []

    def keep(figure: Any, out: Path) -> None:
        out.write_bytes(b"")
        drawn.append(figure.axes[0])

    monkeypatch.setattr("tools.reporting.style.save_figure", keep)

    def title(some: list[Result], **changes: Any) -> str:
        ladder = planned.ladder.model_copy(update=changes)
        write_ladder(planned, ladder, runs, some, rows_of(some))
        return drawn[-1].get_title(loc="left")

    assert title(results) == "T (lines and filled marks: 10 tokens per parameter; open marks: other numbers)"
    filled = [line for line in drawn[-1].lines if line.get_marker() and line.get_markerfacecolor() != "none"]
    assert len(filled) == sum(run.size.endswith("-10x") for run in runs)
    ratios = {**planned.ladder.tokens_per_parameter, "40m": (1, 10)}
    rungs = [result for result in results if result.run.size == "5m-10x"]
    assert (
        title(rungs, tokens_per_parameter=ratios)
        == "T (filled marks: 1 token per parameter; open marks: other numbers)"
    )


def test_exponents_that_the_runs_do_not_determine_are_named(tmp_path: Path) -> None:
    """Take losses that do not depend on the tokens."""
    planned, runs, results = ladder_results(tmp_path)

    def note() -> str:
        written = write_ladder(planned, planned.ladder, runs, results, rows_of(results))[0]
        return next(section.note for section in written if section.title == "Fit of all sizes")

    sentence = "Where an interval reaches a bound, the runs do not determine the exponent."
    assert sentence not in note()
    for number, result in enumerate(results):
        assert result.final is not None
        result.final["loss"] = law(result.run.body, 1e30) + 0.01 * (number % 3)
    assert f" Exponents are fitted between 0.01 and 2. {sentence}" in note()


def test_the_own_exponents_of_a_model_give_the_loss_of_its_own_fit(tmp_path: Path) -> None:
    planned, runs, results = ladder_results(tmp_path)
    for number, result in enumerate(results):
        assert result.final is not None
        result.final["loss"] += 0.01 * (number % 3)
    points = ladder_predictions.points_of([r for r in results if not planned.ladder.is_largest(r.run.size)])
    expected = fit_losses(*points["softmax"]).predict(4e7, 4e8)[0]
    predictions, _ = ladder_predictions.predict(planned.ladder, [run for run in runs if run.size == "40m-10x"], results)
    assert predictions["softmax"]["40m-10x"].own == expected


def test_the_mean_of_both_fits_is_the_prediction(tmp_path: Path) -> None:
    planned, runs, results = ladder_results(tmp_path)
    prediction = Prediction(loss=2.0, low=1.9, high=2.2, own=2.1, runs=8, stored="2026-11-28 08:30:28")
    assert prediction.mean == pytest.approx((2.05, 1.95, 2.25))
    stored = {"models": {"softmax": {"40m-10x": asdict(prediction)}}}
    (tmp_path / ladder_predictions.FILE).write_text(json.dumps(stored))
    document = markdown(write_ladder(planned, planned.ladder, runs, results, rows_of(results))[0])
    line = next(line for line in document.splitlines() if line.startswith("| Softmax") and "2.0500" in line)
    cells = [cell.strip() for cell in line.split("|")[3:8]]
    trained = float(cells[3])
    assert cells == ["2.0500 [1.9500, 2.2500]", "2.0000", "2.1000", f"{trained:.4f}", f"{2.05 - trained:+.4f}"]
    assert f"mean absolute difference {abs(2.05 - trained):.4f}." in document


def test_predictions_are_stored_before_the_largest_size_is_complete_and_then_kept(tmp_path: Path, monkeypatch) -> None:
    planned, runs, results = ladder_results(tmp_path, trained=False)
    monkeypatch.setattr(ladder_predictions, "read_results", lambda runs: [r for r in results if r.run in runs])

    def store(*failed: str) -> Any:
        store_predictions(planned, planned.ladder, runs, failed)
        return stored_predictions(planned)

    runs[7].complete = False
    assert not store()
    # A failed run does not delay the predictions. The second model lacks the size of 20 M.
    stored = store(runs[7].name)
    assert list(stored) == ["softmax"]
    prediction = stored["softmax"]["40m-10x"]
    assert prediction.loss == pytest.approx(law(4e7, 4e8), abs=1e-3)
    assert prediction.runs == 8
    # Results that arrive later change no stored prediction, and the trained loss is not predicted afterwards.
    runs[7].complete = runs[8].complete = True
    results[3] = replace(results[3], final={**(results[3].final or {}), "loss": 1.0})
    assert store() == stored
    document = markdown(write_ladder(planned, planned.ladder, runs, results, rows_of(results))[0])
    assert "{:.4f} [{:.4f}, {:.4f}]".format(*prediction.mean) in document
    assert f"Softmax: stored at {prediction.stored} UTC, before a run of 40m was complete." in document
    (tmp_path / ladder_predictions.FILE).write_text('{"models": {"softmax": {"40m-10x": {"loss": 2.0}}}}')
    with pytest.raises(
        ValueError, match=r"predictions\.json holds no prediction at models\.softmax\.40m-10x\.low .*: remove"
    ):
        store()
    (tmp_path / ladder_predictions.FILE).unlink()
    assert not store()
    # Another launch trains other seeds of the same models.
    others = [SimpleNamespace(**{**vars(run), "complete": run is not runs[8]}) for run in runs]
    store_predictions(planned, planned.ladder, others, [], runs)
    assert not stored_predictions(planned)


def test_a_rung_added_to_the_largest_size_gets_its_prediction(tmp_path: Path, monkeypatch) -> None:
    planned, runs, results = ladder_results(tmp_path, trained=False)
    monkeypatch.setattr(ladder_predictions, "read_results", lambda runs: [r for r in results if r.run in runs])
    runs = [run for run in runs if run.model == "softmax"]
    store_predictions(planned, planned.ladder, runs)
    first = stored_predictions(planned)["softmax"]
    ratios = {**planned.ladder.tokens_per_parameter, "40m": (10, 20)}
    planned.ladder = planned.ladder.model_copy(update={"tokens_per_parameter": ratios})
    added = SimpleNamespace(**{**vars(runs[-1]), "size": "40m-20x", "name": "softmax-40m-20x"})
    runs.append(added)
    for stored in (False, True):
        if stored:
            store_predictions(planned, planned.ladder, runs)
        document = markdown(write_ladder(planned, planned.ladder, runs, results, rows_of(results))[0])
        assert sum(line.startswith("| Softmax | 40m-") for line in document.splitlines()) == 2
    assert list(stored_predictions(planned)["softmax"]) == ["40m-20x", "40m-10x"]
    assert stored_predictions(planned)["softmax"]["40m-10x"] == first["40m-10x"]


def test_page_holds_the_launches_and_a_command_for_every_table(tmp_path: Path, monkeypatch, capsys) -> None:
    planned, runs, results = ladder_results(tmp_path)
    planned.reference = None
    monkeypatch.setattr("tools.compare.results.read_results", lambda _: results)
    line = {"date": "2026-01-02", "machine": "1 x GPU", "commit": "abc1234", "workers": 8, "seconds": 300, "busy": 0.9}
    lines = [line, {**line, "seconds": 100, "busy": 0.5}, {**line, "commit": "", "busy": None}]
    (tmp_path / "launches.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    page = tmp_path / "docs" / "ladder.md"
    write_results(planned, runs, Path("ladder.yml"), page)
    assert str(page) in capsys.readouterr().out
    text = page.read_text()
    assert "    python -m tools.compare ladder.yml --positions --recall\n" in text
    write_results(planned, runs, Path("ladder.yml"), page, ["--name", "high", "data.train=[a, b]"])
    assert "    python -m tools.compare ladder.yml --name high 'data.train=[a, b]' --positions" in page.read_text()
    assert text.startswith(
        "# T\n\n1 x GPU; 2026-01-02; commit abc1234; 700 s in 3 launches; kernels ran in 80% of the GPU's"
    )
    titles = [part.splitlines() for part in text.split("## ")[1:]]
    assert titles[0][0] == "Which mixer for which purpose, at 40m-10x"
    commands = {lines[0]: lines[2] for lines in titles}
    assert commands.pop("Learning rates") == "    python -m tools.compare ladder.yml --tune"
    assert set(commands.values()) == {"    python -m tools.compare ladder.yml --positions --recall"}
    assert '<p class="dim">1 x GPU; 2026-01-02; commit abc1234; 700 s in 3' in (tmp_path / "ladder.html").read_text()
    saved = json.loads((tmp_path / "results.json").read_text())
    assert [line["seconds"] for line in saved["launches"]] == [300, 100, 300]
    assert main([str(EXPERIMENTS / "compare_lm.yml"), "--page", "x.md", "--dry-run"]) == 2
    assert "has no section `ladder`, whose results the page shows" in capsys.readouterr().err
