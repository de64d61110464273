"""The plan of a ladder: sizes, tokens, order of the runs, and files that are damaged."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from data.atomic_io import write_text
from tests.tools.compare.test_plan import EXPERIMENTS, comparison
from tools.compare import held_out
from tools.compare.__main__ import main
from tools.compare.held_out import compressors_of, training_tokens_of
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
    with pytest.raises(
        ValueError, match=r"--sizes 1b is not in the comparison; allowed are 5m, 10m, 20m, 40m, 5m-10x, "
    ):
        plan_runs(planned, sizes=["1b"])
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
    with pytest.raises(
        ValueError, match=r"extra_steps holds 1000000: at most schedule\.train_steps = .*metala, size s-1x\)"
    ):
        plan_runs(laddered(), overrides=["checkpoint.extra_steps=[1000000]"])


def test_the_small_ladder_has_the_models_of_the_large_one_and_trains_the_largest_size_last(
    tmp_path: Path, monkeypatch, capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    large, small = (read_comparison(EXPERIMENTS / f"{name}.yml") for name in ("ladder", "ladder_small"))
    assert small.models == large.models
    given: dict[str, Any] = {}
    monkeypatch.setattr("tools.compare.launcher.check_text", lambda runs: [])
    monkeypatch.setattr(held_out, "check_held_out", lambda *_: None)

    def run_all(runs: list[Any], **settings: Any) -> SimpleNamespace:
        given.update(settings, names=[run.name for run in runs])
        return SimpleNamespace(stopped="", failed={})

    monkeypatch.setattr("tools.compare.launcher.run_all", run_all)
    words = ["--models", "kda", "--seeds", "1", "--devices", "cpu", "model.vocab_size=512"]
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

    def refused(*_: Any) -> None:
        raise ValueError("no such text")

    monkeypatch.setattr(held_out, "measure_positions", refused)
    Path("runs/ladder_small/results.md").unlink()
    assert main([str(EXPERIMENTS / "ladder_small.yml"), *words, "--sizes", "600k", "--positions"]) == 2
    assert Path("runs/ladder_small/results.md").is_file()  # the results of the training are written
    given.clear()
    words[1] = "metala"  # a model of ladder.tuning
    for more in ([], ["--tune"]):
        assert main([str(EXPERIMENTS / "ladder_small.yml"), *words, "--check", *more]) == 0
        assert "copy runs/ladder_small and the text there" in capsys.readouterr().out
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


def test_positions_are_measured_at_the_largest_size_in_any_order_of_the_file(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    planned = comparison(sizes={"l": {"model": {"hidden_size": 128}}, "s": {}})
    (tmp_path / "two.yml").write_text(yaml.safe_dump(json.loads(planned.model_dump_json())))
    for run in plan_runs(planned):
        write_text(run.file, run.text)
        write_text(run.folder / "summary.json", "{}")
    measured: list[str] = []
    monkeypatch.setattr(held_out, "measure_positions", lambda runs, _: measured.extend(run.name for run in runs))
    assert main(["two.yml", "--positions", "--report", "--seeds", "1", "--devices", "cpu"]) == 0
    assert measured == ["metala-l-seed1", "retnet-l-seed1"]


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
    assert list(laddered(tokens_per_parameter={"s": [4, 1, 2], "m": [1]}).rungs()) == ["s-1x", "s-2x", "s-4x", "m-1x"]
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
            r"ladder rung s-0.001x: 0.001 tokens per parameter x 80,000 parameters = 80 tokens; 1 x 64 tokens per step = 64, "
            r"20 % away, "
            r"and 1 % is allowed. .* give 0.0008 in place of 0.001 in ladder.tokens_per_parameter.s",
        ),
    ],
)
def test_sizes_and_tokens_that_do_not_match_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan_runs(laddered(**changes))


def test_the_plan_says_that_too_few_rungs_predict_nothing(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    content = yaml.safe_load((EXPERIMENTS / "ladder_cpu.yml").read_text())
    for ratios, note in (
        ([1, 2, 4], ""),
        ([1, 2], ""),
        (
            [1],
            "No prediction of 400k is possible: 3 different points, 3 sizes, 3 token counts; E, A, a, B and b are 5 unknowns",
        ),
    ):
        content["ladder"]["tokens_per_parameter"] = {"50k": ratios, "100k": ratios, "200k": ratios[:2], "400k": [1]}
        Path("ladder.yml").write_text(yaml.safe_dump(content))
        assert main(["ladder.yml", "--dry-run"]) == 0
        output = capsys.readouterr().out
        assert note in output
        assert ("No prediction" in output) == bool(note)
        assert main(["ladder.yml", "--dry-run", "--sizes", "400k"]) == 0
        assert "No prediction" not in capsys.readouterr().out


def test_ladders_that_contradict_the_file_are_refused(tmp_path: Path, capsys) -> None:
    with pytest.raises(ValueError, match=r"schedule.train_steps: the ladder sets it"):
        plan_runs(laddered(), overrides=["schedule.train_steps=4"])
    content = {"name": "x", "title": "x", "seeds": [1], "models": {"a": {}}, "sizes": {"s": {}}}
    tuning = {"sizes": ["s"], "models": ["a"], "factors": [1, 2]}
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
        (
            {"ladder": {**LADDER, "seeds": {"s": [-1]}}},
            "ladder.seeds.s = [-1]: list of 1 or more: whole number >= 0 and < 4294967296 is allowed",
        ),
        ({"seeds": [-1]}, "seeds = [-1]: list of 1 or more: whole number >= 0 and"),
        ({"models": {}}, "models = {}: mapping of 1 or more to: section of label, files, config is allowed"),
        (
            {"ladder": {**LADDER, "tokens_per_parameter": {"s": [1, float("inf")], "m": [1]}}},
            "ladder.tokens_per_parameter.s = [1, Infinity]: list of 1 or more: number > 0 is allowed",
        ),
        (
            {"ladder": {**LADDER, "tokens_per_parameter": {"s": [1, 1.0000001], "m": [1]}}},
            "1 is there twice; the numbers name the runs, so they must differ in six digits",
        ),
        (
            {"ladder": {**LADDER, "tuning": {**tuning, "factors": [2, 0.5, 2]}}},
            "factors = [2, 0.5, 2]: 2 is there twice",
        ),
        (
            {"ladder": {**LADDER, "tuning": {**tuning, "factors": [0, 1]}}},
            "factors = [0, 1]: list of 2 or more: number > 0",
        ),
        (
            {"ladder": {**LADDER, "tuning": {**tuning, "models": ["gla"]}}, "sizes": {"s": {}, "m": {}}},
            "bad.yml: ladder.tuning.models has gla; allowed are a",
        ),
    ]
    for changes, message in cases:
        (tmp_path / "bad.yml").write_text(yaml.safe_dump({**content, **changes}, sort_keys=False))
        assert main([str(tmp_path / "bad.yml"), "--dry-run"]) == 2
        assert message in capsys.readouterr().err


def test_a_file_in_place_of_the_folder_is_refused(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    write_text(Path("runs/ladder_cpu"), "")
    for options in ([], ["--tune"], ["--dry-run"]):
        assert main([str(EXPERIMENTS / "ladder_cpu.yml"), *options]) == 2
        assert "error: runs/ladder_cpu is a file, but the comparison needs a folder" in capsys.readouterr().err
    assert [path.name for path in Path("runs").iterdir()] == ["ladder_cpu"]


def test_damaged_files_name_the_option_that_writes_them(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    planned = laddered()
    run = plan_runs(planned)[0]
    for path in (planned.folder / held_out.FILE, run.folder / held_out.POSITIONS, run.folder / "results.json"):
        write_text(path, '{"made_from": "x", ')
    write_text(run.folder / "summary.json", "{}")
    write_text(run.folder / "checkpoints" / "latest", "step_00000001")
    for read in (compressors_of, training_tokens_of):
        with pytest.raises(ValueError, match=r"held_out\.json is no JSON .*: remove it; --check writes it again"):
            read(planned)
    with pytest.raises(ValueError, match=r"positions\.json is no JSON .*: remove it; --positions writes it again"):
        held_out.positions_of(run)
    write_text(planned.folder / held_out.FILE, '{"compressors": [2.0]}')
    write_text(run.folder / held_out.POSITIONS, '{"bins": [{"from": 1}]}')
    with pytest.raises(
        ValueError, match=r"held_out\.json: compressors = \[2\.0\]; .*: remove it; --check writes it again"
    ):
        compressors_of(planned)
    with pytest.raises(ValueError, match=r"positions\.json: a list of bins .*: remove it; --positions writes it again"):
        held_out.positions_of(run)
    with pytest.raises(
        ValueError, match=r"results\.json is no JSON .*: remove it; eval\.py and --recall write it again"
    ):
        held_out.measure_recall([run], "cpu")
