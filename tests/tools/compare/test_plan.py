"""A comparison's file, the runs that it makes, and models of equal size."""

from __future__ import annotations

import argparse
import re
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from megatron_lite.config.loader import ConfigError, load_config
from models.config import ModelConfig
from models.language_model import LanguageModel, count_parameters
from tools.compare.__main__ import main, shown_runs
from tools.compare.match_parameters import equal_width
from tools.compare.results import plan_table
from tools.compare.spec import Comparison, Run, differing_keys, plan_runs, read_comparison

ROOT = Path(__file__).parents[3]
EXPERIMENTS = ROOT / "configs" / "experiments"
TINY = {"num_layers": 2, "hidden_size": 64, "num_heads": 2, "vocab_size": 320}
CONFIG = {
    "model": TINY,
    "data": {"corpus": "stdlib", "tokenizer": {"type": "bytes"}},
    "batch": {"sequence_length": 32, "micro_batch_size": 2, "global_batch_size": 2},
    "optimizer": {"lr": 1e-3},
    "schedule": {"train_steps": 4},
}


def comparison(**changes) -> Comparison:
    values = {
        "name": "tiny",
        "title": "Tiny",
        "seeds": [1, 2],
        "config": CONFIG,
        "sizes": {"s": {}, "m": {"model": {"hidden_size": 128}}},
        "models": {
            "metala": {"config": {"model": {"mixers": ["metala"]}}},
            "retnet": {"label": "RetNet", "config": {"model": {"mixers": ["retnet"]}}},
        },
    }
    return Comparison.model_validate(values | changes)


def test_plan_has_each_model_size_and_seed_once() -> None:
    runs = plan_runs(comparison(), overrides=["optimizer.lr=2e-3"])
    assert len(runs) == 8
    assert len({run.folder for run in runs}) == 8
    # All runs of a seed come before the next seed.
    assert [(run.model, run.size) for run in runs[:4]] == [
        ("metala", "s"),
        ("retnet", "s"),
        ("metala", "m"),
        ("retnet", "m"),
    ]
    assert [run.seed for run in runs] == [1] * 4 + [2] * 4
    assert [run.label for run in runs[:2]] == ["metala", "RetNet"]
    run = next(run for run in runs if run.folder.name == "retnet-m-seed2")
    assert run.config.model.mixers == ("retnet",)
    assert run.config.model.hidden_size == 128
    assert run.config.optimizer.lr == 2e-3
    assert run.parameters == count_parameters(run.config.model)
    assert run.body == run.parameters - 320 * 128
    untied = next(run for run in plan_runs(comparison(), overrides=["model.tie_embeddings=false"]) if run.size == "m")
    assert untied.body == untied.parameters - 2 * 320 * 128
    assert [run.name for run in plan_runs(comparison(), models=["metala"], sizes=["m"], seeds=[7])] == [
        "metala-m-seed7"
    ]


def test_plan_table_counts_the_tokens_of_smshown_runs() -> None:
    table = plan_table(plan_runs(comparison(), models=["metala"], sizes=["s"]), plain=True)
    assert table.splitlines()[-1].split()[-3:] == ["256", "1,", "2"]  # 4 steps of 2 rows of 32 tokens


def test_duplicate_seed_is_one_run() -> None:
    assert [run.seed for run in plan_runs(comparison(sizes={"": {}}), models=["metala"], seeds=[3, 3, 5])] == [3, 5]
    assert len(plan_runs(comparison(seeds=[1, 1]))) == 4


def test_two_runs_of_one_name_are_refused() -> None:
    """Refuse two runs that would train in the same folder."""
    models = {name: {"config": {"model": {"mixers": [name[:3]]}}} for name in ("gla", "gla-m")}
    sizes: dict[str, dict] = {"": {}, "m": {}}
    with pytest.raises(
        ValueError, match=r"models.gla in size m and models.gla-m in size \(none\) would both use the folder"
    ):
        plan_runs(comparison(models=models, sizes=sizes))
    assert len(plan_runs(comparison(models=models, sizes=sizes), sizes=["m"])) == 4


def test_order_of_overrides(tmp_path: Path) -> None:
    for name, lr in (("file", 1e-1), ("data", 2e-1), ("own", 3e-1)):
        (tmp_path / f"{name}.yml").write_text(f"optimizer: {{lr: {lr}}}\n")
    base = {key: value for key, value in CONFIG.items() if key != "optimizer"}
    model = {"config": {"model": {"mixers": ["metala"]}}}
    laid = {"files": [str(tmp_path / "file.yml")], "config": base, "sizes": {"": {}}, "models": {"m": model}}

    def lr(**more) -> float:
        return plan_runs(comparison(**laid | more))[0].config.optimizer.lr

    rate = [{"optimizer": {"lr": value}} for value in (4e-1, 5e-1, 6e-1)]
    assert lr() == 1e-1
    more = {"data": str(tmp_path / "data.yml")}
    assert lr(**more) == 2e-1
    more["models"] = {"m": {**model, "files": [str(tmp_path / "own.yml")]}}
    assert lr(**more) == 3e-1
    more["config"] = base | rate[0]
    assert lr(**more) == 4e-1
    more["sizes"] = {"": rate[1]}
    assert lr(**more) == 5e-1
    more["models"] = {"m": {"config": model["config"] | rate[2]}}
    assert lr(**more) == 6e-1


def test_run_file_gives_the_planned_configuration(tmp_path: Path) -> None:
    """Read the planned configuration from the file of `python train.py run.yml`."""
    run = plan_runs(comparison(), models=["retnet"], sizes=["m"], seeds=[2])[0]
    file = tmp_path / "run.yml"
    file.write_text(run.text)
    config = load_config([file], model_type=ModelConfig, world_size=1)
    assert config.model == run.config.model
    assert config.schedule == run.config.schedule
    assert (config.run.name, config.run.seed) == ("retnet-m-seed2", 2)
    assert config.run.path == run.folder


@pytest.mark.parametrize("mixer", ["gla", "retnet", "mamba2", "lion", "attention", "hgrn2"])
def test_width_is_the_nearest_multiple(mixer: str) -> None:
    config = ModelConfig(**TINY, mixers=(mixer,))
    wanted = count_parameters(ModelConfig(**TINY, intermediate_size=416)) - 320 * 64
    width = equal_width(config, wanted, multiple=8, tolerance=0.1)

    def distance(width: int) -> int:
        return abs(count_parameters(replace(config, intermediate_size=width)) - 320 * 64 - wanted)

    # The count is linear in the width, so the nearest width is nearer than its neighbours.
    assert width % 8 == 0
    assert distance(width) <= min(distance(width - 8), distance(width + 8))


def test_width_excludes_untied_embeddings() -> None:
    tied = ModelConfig(**TINY, mixers=("retnet",))
    body = count_parameters(tied) - 320 * 64
    assert equal_width(replace(tied, tie_embeddings=False), body) == equal_width(tied, body) == tied.mlp_width
    with pytest.raises(
        ValueError, match=r"the nearest MLP width 16 gives .* other layers alone are too large: raise the"
    ):
        equal_width(tied, 1)
    without_mlp = 2 * count_parameters(replace(tied, intermediate_size=16)) - count_parameters(
        replace(tied, intermediate_size=32)
    )
    with pytest.raises(ValueError, match=r"the nearest MLP width 16 gives .* %\. Lower `multiple`, or change layers"):
        equal_width(tied, without_mlp - 320 * 64 + 100, tolerance=0.001)


def test_equal_parameters_of_every_model_and_size() -> None:
    equal = {"reference": "metala", "tolerance": 0.02, "multiple": 8}
    runs = plan_runs(comparison(equal_parameters=equal))
    for size in ("s", "m"):
        bodies = {run.model: run.body for run in runs if run.size == size}
        assert abs(bodies["retnet"] / bodies["metala"] - 1) < 0.02
    widths = {run.model: run.config.model.mlp_width for run in runs if run.size == "s"}
    assert widths["retnet"] < widths["metala"]
    retnet = next(run for run in runs if run.model == "retnet")
    assert yaml.safe_load(retnet.text)["model"]["intermediate_size"] == retnet.config.model.intermediate_size
    odd = plan_runs(comparison(equal_parameters=equal), sizes=["s"], overrides=["model.intermediate_size=100"])
    assert next(run for run in odd if run.model == "metala").config.model.mlp_width == 100
    # The reference sets the width also if it is not trained itself.
    alone = plan_runs(comparison(equal_parameters=equal), models=["retnet"], sizes=["s"])
    assert alone[0].body == retnet.body
    with pytest.raises(
        ValueError, match=r"equal_parameters, retnet in size s with the reference metala: .*not within 0\.1 %"
    ):
        plan_runs(comparison(equal_parameters={**equal, "tolerance": 0.001, "multiple": 128}))


def test_invalid_comparisons_are_refused(tmp_path: Path, capsys) -> None:
    with pytest.raises(ValueError, match="--models gla is not in the comparison; allowed are metala, retnet"):
        plan_runs(comparison(), models=["gla"])
    with pytest.raises(ConfigError, match=r"optimizer.lrr"):
        plan_runs(comparison(), overrides=["optimizer.lrr=1"])
    with pytest.raises(ConfigError, match=r"optimizer.lr"):
        plan_runs(comparison(), overrides=["optimizer.lr=[1"])
    # The file sets the rate of one size: no message may quote the whole section `optimizer` as an override.
    with pytest.raises(ConfigError) as caught:
        plan_runs(comparison(sizes={"s": {}, "m": {"optimizer": {"lr": -1}}}))
    assert caught.value.problems == ("optimizer.lr = -1: number > 0 is allowed (model metala, size m)",)
    with pytest.raises(ConfigError, match=r"optimizer.lr = -1: number > 0 is allowed \(model metala\)$"):
        plan_runs(comparison(sizes={"": {"optimizer": {"lr": -1}}}))
    file = tmp_path / "bad.yml"
    file.write_text("name: x\ntitle: x\nseeds: [1]\nmodels: {a: {}}\nequal_parameters: {reference: b}\n")
    with pytest.raises(ValueError, match=r"equal_parameters.reference = b is not a model of this file; allowed are a"):
        read_comparison(file)
    file.write_text("name: x\ntitle: x\nseeds: [1]\nmodels: {a: {colour: red}}\n")
    with pytest.raises(
        ValueError, match=r"models.a.colour is an unknown key; allowed are config, files, label .*bad.yml:4"
    ):
        read_comparison(file)
    assert main([str(file)]) == 2
    assert "models.a.colour" in capsys.readouterr().err
    file.write_text("name: x\ntitle: x\nseeds: [1]\nmodels: {a/b: {}}\n")
    with pytest.raises(ValueError, match="a/b"):
        read_comparison(file)
    file.write_text("name: x\ntitle: x\nseeds: [1]\nmodels: {a: {}}\n")
    assert main([str(file), "--name", "../x", "--dry-run"]) == 2
    assert "--name ../x: letters, digits" in capsys.readouterr().err
    assert main([str(tmp_path / "none.yml")]) == 2
    assert "none.yml does not exist: give a comparison's YAML file" in capsys.readouterr().err
    file.write_text("title: x\nseeds: [1]\nmodels: {a: {}}\n")
    assert main([str(file)]) == 2
    assert re.search(r"name is missing in .*bad.yml: text like", capsys.readouterr().err)


def test_differing_keys_are_named(tmp_path: Path) -> None:
    """Compare included files too. The order of keys is no difference."""

    def run(**config: object) -> Run:
        return replace(plan_runs(comparison(**config))[0], folder=tmp_path)

    (tmp_path / "rate.yml").write_text("optimizer: {lr: 0.25}\n")
    old = run()
    old.file.write_text("include: rate.yml\n" + old.text.replace("lr: 0.001", "eps: 1.0e-06"))
    assert set(differing_keys(old)) == {
        "optimizer.lr: 0.25 in the file, 0.001 now",
        "optimizer.eps: 1e-06 in the file, not given now",
    }
    old.file.write_text(old.text)
    assert not differing_keys(run(config=dict(reversed(CONFIG.items()))))


def test_a_missing_key_names_the_model_and_the_size() -> None:
    config = {key: value for key, value in CONFIG.items() if key != "optimizer"}
    sizes = {"s": {"optimizer": {"lr": 1e-3}}, "m": {}}
    with pytest.raises(ConfigError, match=r"optimizer\.lr is missing: .* \(model metala, size m\)"):
        plan_runs(comparison(config=config, sizes=sizes))


def test_a_folder_is_no_comparison(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r" is a folder: give a comparison's YAML file"):
        read_comparison(tmp_path)


def test_the_masked_comparison(tmp_path: Path, monkeypatch) -> None:
    """Plan four encoders of BERT's shape that differ only in their mixers, with parameters equal to 1 %."""
    monkeypatch.chdir(tmp_path)
    runs = plan_runs(read_comparison(EXPERIMENTS / "compare_masked.yml"))
    assert len(runs) == 12
    assert {run.config.model.mixers for run in runs} == {("attention",), ("lion",)}
    variants = {run.config.model.mixer_options["lion"]["variant"] for run in runs if run.model != "softmax"}
    assert variants == {"lit", "d", "s"}
    for run in runs:
        assert run.config.model.bidirectional_mixers()
        assert abs(run.body / runs[0].body - 1) < 0.01
        assert (run.config.model.num_layers, run.config.model.hidden_size) == (12, 768)
        assert run.config.data.objective == "masked"
        assert run.config.optimizer == runs[0].config.optimizer
        assert run.config.schedule == runs[0].config.schedule
        assert run.config.batch == runs[0].config.batch


def test_the_language_model_comparison(tmp_path: Path, monkeypatch) -> None:
    """Plan all models in three sizes that differ only in their mixers, with parameters without embeddings equal to 1 %."""
    monkeypatch.chdir(tmp_path)
    runs = plan_runs(read_comparison(EXPERIMENTS / "compare_lm.yml"), seeds=[1], overrides=["model.vocab_size=4096"])
    assert {run.config.model.mixers for run in runs} == {
        (name,)
        for name in (
            "metala",
            "gla",
            "retnet",
            "mamba2",
            "lion",
            "attention",
            "delta_net",
            "gated_delta_net",
            "kda",
            "gdn2",
        )
    }
    assert len(runs) == 3 * 14
    for size in ("small", "medium", "large"):
        here = {run.model: run for run in runs if run.size == size}
        for run in here.values():
            assert not run.config.model.bidirectional_mixers()
            assert abs(run.body / here["metala"].body - 1) < 0.01
            assert run.config.model.num_layers == here["metala"].config.model.num_layers
            assert run.config.optimizer == here["metala"].config.optimizer
            assert run.config.schedule == here["metala"].config.schedule
    bodies = [run.body for run in runs if run.model == "metala"]
    assert bodies[1] > 2 * bodies[0]
    assert bodies[2] > 2 * bodies[1]


def test_help_needs_no_torch(monkeypatch, capsys) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "compare_masked.yml" in capsys.readouterr().out


def test_comparison_of_image_classifiers_has_every_direction_and_no_text() -> None:
    runs = plan_runs(read_comparison(EXPERIMENTS / "compare_images.yml"), seeds=[1])
    models = {run.model: run.config.model for run in runs}
    assert {model.direction for model in models.values()} == {"forward", "backward", "alternating", "both"}
    assert models["lion_s_natural"].patch_order == "both"
    assert all(run.config.data.objective == "classification" for run in runs)
    alone = LanguageModel(models["lion_s"])
    matrices = alone.embedding.projection.weight.numel() + alone.head.weight.numel()
    body = next(run.body for run in runs if run.model == "lion_s")
    assert body == sum(parameter.numel() for parameter in alone.parameters()) - matrices
    # The projection of a decay per channel is larger.
    parameters = [run.parameters for run in runs if run.model != "lion_s_vector"]
    assert max(parameters) < 1.02 * min(parameters)


def test_results_show_shown_runs_unless_overrides_change_some() -> None:
    planned = comparison()
    options = argparse.Namespace(override=[], data=None, tune=False, models=["metala"], sizes=[], seeds=[99])
    selected = plan_runs(planned, models=["metala"], seeds=[99])
    names = [run.name for run in shown_runs(planned, selected, options)]
    assert names == [run.name for run in (*plan_runs(planned), *selected)]
    options.override = ["optimizer.weight_decay=0.3"]
    assert shown_runs(planned, selected, options) == selected
    # Rates are chosen from all runs.
    options.tune = True
    assert len(shown_runs(planned, selected, options)) == len(names)
