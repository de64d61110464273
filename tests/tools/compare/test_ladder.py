"""A ladder: its plan, the check of its text, and the report with predicted and trained losses."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from data.corpus.discovery import source_files
from data.preprocessing.encode import PreprocessingSettings
from data.preprocessing.pipeline import preprocess
from megatron_lite.config.data_schema import DataConfig
from models.config import ModelConfig
from tests.data.inline_pool import Inline
from tests.tools.compare.test_plan import EXPERIMENTS, comparison
from tools.compare import held_out, ladder_predictions
from tools.compare.__main__ import main, write_results
from tools.compare.held_out import check_held_out, compressors_of, training_tokens_of
from tools.compare.ladder_predictions import store_predictions, stored_predictions
from tools.compare.ladder_report import markdown, write_ladder
from tools.compare.results import Result, read_results, rows_of
from tools.compare.rungs import Ladder
from tools.compare.spec import plan_runs, read_comparison

LADDER: dict[str, Any] = {
    "parameters": {"s": 80_000, "m": 300_000},
    "tokens_per_parameter": {"s": [1, 2], "m": [1]},
    "multiple": 2,
}


def laddered(**changes: Any) -> Any:
    """Return a ladder of two sizes and two models."""
    config = {**comparison().config, "schedule": {}}
    return comparison(ladder={**LADDER, **changes}, config=config)


def test_the_ladder_has_equal_parameters_and_tokens(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    planned = read_comparison(EXPERIMENTS / "ladder.yml")
    assert len(planned.models) == 11
    assert [rung for rung, size in planned.rungs().items() if size == "20m"] == ["20m-10x", "20m-20x"]
    assert (planned.seeds_of("5m"), planned.seeds_of("10m")) == ((1, 2, 3), (1,))
    (run,) = plan_runs(planned, models=["kda_hybrid"], sizes=["40m"], overrides=["model.vocab_size=512"])
    assert run.name == "kda_hybrid-40m-10x-seed1"
    assert run.config.model.mixers == ("kda", "kda", "kda", "attention")
    assert run.body == pytest.approx(4e7, rel=0.01)
    steps = run.config.schedule.train_steps
    assert run.config.batch.tokens_of(steps) == pytest.approx(4e8, rel=0.01)
    assert yaml.safe_load(run.text)["schedule"]["train_steps"] == steps
    assert run.config.data.test == "corpora/text_corpus/shift_text_document"


def test_other_steps_are_compared_with_those_of_the_ladder() -> None:
    runs = plan_runs(laddered(), overrides=["checkpoint.extra_steps=[3]", "schedule.warmup_steps=4"])
    assert {run.config.checkpoint.extra_steps for run in runs} == {(3,)}
    assert all(run.config.schedule.decay_steps == run.config.schedule.train_steps for run in runs)
    with pytest.raises(ValueError, match=r"extra_steps holds 1000000: at most schedule\.train_steps = "):
        plan_runs(laddered(), overrides=["checkpoint.extra_steps=[1000000]"])


def test_the_small_ladder_has_the_models_of_the_large_one_and_trains_the_largest_size_last(
    tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    large, small = (read_comparison(EXPERIMENTS / f"{name}.yml") for name in ("ladder", "ladder_small"))
    assert small.models == large.models
    given: dict[str, Any] = {}
    monkeypatch.setattr("tools.compare.launcher.prepare", lambda runs: None)
    monkeypatch.setattr(held_out, "check_held_out", lambda *_: None)

    def run_all(runs: list[Any], **settings: Any) -> SimpleNamespace:
        given.update(settings, names=[run.name for run in runs])
        return SimpleNamespace(stopped="", failed={})

    monkeypatch.setattr("tools.compare.launcher.run_all", run_all)
    words = ["--models", "kda", "--seeds", "1", "--devices", "0", "model.vocab_size=512"]
    assert main([str(EXPERIMENTS / "ladder_small.yml"), *words]) == 1
    assert small.ladder is not None
    rungs = small.ladder.rungs()
    parameters = [small.ladder.parameters[size] for size, _ in rungs.values()]
    assert parameters == sorted(parameters)
    assert given["names"] == [f"kda-{rung}-seed1" for rung in rungs]
    assert given["last"] == {f"kda-{rung}-seed1" for rung, (size, _) in rungs.items() if size == small.ladder.largest}
    measured: list[str] = []
    monkeypatch.setattr(held_out, "measure_positions", lambda runs, _: measured.extend(run.size for run in runs))
    assert main([str(EXPERIMENTS / "ladder_small.yml"), *words, "--sizes", "600k", "--positions"]) == 1
    assert measured == ["600k-40x"]
    given.clear()
    assert main([str(EXPERIMENTS / "ladder_small.yml"), *words, "--check"]) == 0
    assert not given


def test_the_masked_ladder_has_bidirectional_models_of_equal_parameters(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    planned, small = (read_comparison(EXPERIMENTS / f"{name}.yml") for name in ("ladder_masked", "ladder_masked_small"))
    assert small.models == planned.models
    words = ["model.vocab_size=512"]
    runs = plan_runs(planned, models=["softmax", "metala"], sizes=["5m-10x"], seeds=[1], overrides=words)
    assert [run.config.model.mixers for run in runs] == [("attention",), ("metala_bidirectional",)]
    for run in runs:
        assert run.body == pytest.approx(5e6, rel=0.01)
        assert run.config.model.bidirectional_mixers()
        assert run.config.data.objective == "masked"
    for option in ("--positions", "--recall"):
        assert main([str(EXPERIMENTS / "ladder_masked.yml"), "--sizes", "5m-10x", option, "--dry-run", *words]) == 2
        assert f"{option} measures causal language models, " in capsys.readouterr().err


def test_a_complete_run_with_a_checkpoint_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = plan_runs(laddered())[0]
    checkpoints = run.folder / "checkpoints"
    checkpoints.mkdir(parents=True)
    (run.folder / "summary.json").write_text("{}")
    held_out.measure_recall([run], "cpu")  # a folder that was copied without its checkpoints
    held_out.measure_positions([run], "cpu")
    assert not run.measurable
    (checkpoints / "latest").write_text("step_00000001")
    assert run.measurable
    (run.folder / "summary.json").unlink()
    assert not run.measurable


def test_rungs_have_their_own_seeds_and_one_width_per_size() -> None:
    runs = plan_runs(laddered(seeds={"s": [5]}))
    assert sorted(run.name for run in runs if run.model == "metala") == [
        "metala-m-1x-seed1",
        "metala-m-1x-seed2",
        "metala-s-1x-seed5",
        "metala-s-2x-seed5",
    ]
    widths = {(run.model, run.size.split("-")[0]): run.config.model.mlp_width for run in runs}
    assert all(run.config.model.mlp_width == widths[run.model, run.size.split("-")[0]] for run in runs)
    steps = {run.size: run.config.schedule.train_steps for run in runs}
    assert steps["s-2x"] == 2 * steps["s-1x"] == 2 * round(80_000 / 64)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"tolerance": 0.0002},
            r"ladder.parameters.s, metala: .* target is 80,000 .* nearest MLP width \d+ gives .* not within 0\.02 %",
        ),
        (
            {"tokens_per_parameter": {"s": [0.001], "m": [1]}},
            r"ladder rung s-0.001x: 0.001 tokens x 80,000 parameters = 80 tokens; 1 x 64 tokens per step = 64, 20 % away, "
            r"and 1 % is allowed",
        ),
    ],
)
def test_sizes_and_tokens_that_do_not_match_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan_runs(laddered(**changes))


def test_ladders_that_contradict_the_file_are_refused(tmp_path: Path, capsys) -> None:
    with pytest.raises(ValueError, match=r"schedule.train_steps: the ladder sets it"):
        plan_runs(laddered(), overrides=["schedule.train_steps=4"])
    content = {"name": "x", "title": "x", "seeds": [1], "models": {"a": {}}, "sizes": {"s": {}}}
    cases = [
        ({"ladder": LADDER}, "ladder.parameters has the size m, which `sizes` lacks; allowed are s"),
        (
            {"ladder": LADDER, "sizes": {"s": {}, "m": {}}, "equal_parameters": {"reference": "a"}},
            "equal_parameters and ladder both set the MLP widths; remove equal_parameters",
        ),
        ({"ladder": {**LADDER, "seeds": {"l": [1]}}}, "  - ladder.seeds has the size l; allowed are s, m ("),
        (
            {"ladder": {**LADDER, "tokens_per_parameter": {"s": [1]}}},
            "  - ladder.tokens_per_parameter lacks the size m",
        ),
        (
            {"ladder": {**LADDER, "tokens_per_parameter": {"s": [1], "m": []}}},
            "ladder.tokens_per_parameter.m = []: list of 1 or more: number > 0 is allowed",
        ),
        ({"ladder": {**LADDER, "parameters": {"s": 1, "m": 0}}}, "ladder.parameters.m = 0"),
        ({"ladder": {**LADDER, "seeds": {"s": []}}}, "ladder.seeds.s"),
    ]
    for changes, message in cases:
        (tmp_path / "bad.yml").write_text(yaml.safe_dump({**content, **changes}, sort_keys=False))
        assert main([str(tmp_path / "bad.yml"), "--dry-run"]) == 2
        assert message in capsys.readouterr().err


@pytest.fixture
def text(tmp_path, monkeypatch) -> Any:
    """Return a function that writes training and validation text, and the runs of a ladder on it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("data.preprocessing.pipeline._pool", lambda settings, workers: Inline(settings))
    monkeypatch.setattr(Inline, "stop_at", None)

    def write(train: list[str], validation: list[str]) -> Any:
        data = {"corpus": None, "tokenizer": {"type": "bytes"}}
        for name, texts in (("train", train), ("validation", validation)):
            path = tmp_path / f"{name}.jsonl"
            path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
            preprocess(source_files(path), tmp_path / name, PreprocessingSettings("bytes"), progress=False)
            data[name] = str(tmp_path / f"{name}_text_document")
        config = SimpleNamespace(
            data=DataConfig.model_validate(data),
            model=SimpleNamespace(vocab_size=384),
            batch=SimpleNamespace(tokens_of=lambda steps: steps * 64),
            schedule=SimpleNamespace(train_steps=20),
        )
        return [SimpleNamespace(name="metala-s-1x-seed1", config=config, causal=True)]

    return write


def test_held_out_text_that_training_holds_is_refused(text, monkeypatch) -> None:
    planned = laddered()
    ladder = planned.ladder
    runs = text(["a b c " * 100, "shared by both"], ["something else", "shared by both"])
    with pytest.raises(
        ValueError, match=r"shares 1 documents with .*document 1 \(.*'shared by both'\): equals a training"
    ):
        check_held_out(planned, ladder, runs)
    runs = text(["a b c " * 100], ["something else " * 50])
    check_held_out(planned, ladder, runs)
    assert 0 < compressors_of(planned)["xz -9"] < 2
    assert training_tokens_of(planned) == 600
    monkeypatch.setattr(held_out, "shared_documents", lambda *_, **__: pytest.fail("the text has not changed"))
    check_held_out(planned, ladder, runs)
    runs[0].config.schedule.train_steps = 60
    with pytest.raises(
        ValueError, match=r"3,840 tokens / 600 training tokens = 6\.4 passes .*max_passes = 4 is allowed"
    ):
        check_held_out(planned, ladder, runs)


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
    assert "No fit of metala: 6 different points, 2 sizes, 4 token counts" in document
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
    before, document = (
        markdown(write_ladder(planned, planned.ladder, runs, of_all, rows_of(of_all))[0])
        for of_all in (unchanged, unstable)
    )
    assert "unstable" not in before
    loss = law(4e7, 4e8)
    line = next(line for line in document.splitlines() if line.startswith("| Softmax (unstable) | 40m-10x"))
    assert [cell.strip() for cell in line.split("|")[3:7:3]] == [f"{loss:.4f} [{loss:.4f}, {loss:.4f}]", "+1.0000"]
    assert "Not counted, since a run was unstable: Softmax." in document
    assert "Within 0.01" not in document
    fit = next(line for line in document.splitlines() if line.startswith("| Softmax |    7 |"))
    assert "1.690 [1.690, 1.690]" in fit
    assert "| lowest loss " in before
    assert "| lowest loss " not in document  # one steady mixer is no choice
    assert f"| Softmax (unstable) | {loss - 1:.4f} |" in document
    assert "the last quarter of the run: Softmax, seed 1: 3.5 times." in document


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
    assert [cell.strip() for cell in line.split("|")[4:7]] == [f"{loss:.4f}", "-", "-"]
    assert "## Loss at 20m-20x" in document
    assert "Not measured. `--positions` measures runs that have a checkpoint." in document
    assert "20m-20x: 20 M parameters without embeddings, 400 M tokens." in document
    assert "Within 0.01 nats" not in document
    assert "Softmax: not stored." in document


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
    assert f"{prediction.loss:.4f} [{prediction.low:.4f}, {prediction.high:.4f}]" in document
    assert f"Softmax: stored at {prediction.stored} UTC, before a run of 40m was complete." in document
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
    planned.equal_parameters = None
    monkeypatch.setattr("tools.compare.results.read_results", lambda _: results)
    line = {"date": "2026-01-02", "machine": "1 x GPU", "commit": "abc1234", "workers": 8, "seconds": 300, "busy": 0.9}
    lines = [line, {**line, "seconds": 100, "busy": 0.5}, {**line, "commit": "", "busy": None}]
    (tmp_path / "launches.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    page = tmp_path / "docs" / "ladder.md"
    write_results(planned, runs, Path("ladder.yml"), page)
    assert str(page) in capsys.readouterr().out
    text = page.read_text()
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
