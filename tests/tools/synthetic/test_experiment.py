"""Experiments: the papers' grids, ids of runs, and refused values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_lite.config.files import ConfigError
from tools.synthetic.batches import generate, to_device
from tools.synthetic.experiment import Run, load_experiment, plan, sweeps
from tools.synthetic.network import Network, model_config


def test_mqar_is_the_paper_s_grid() -> None:
    runs = plan(load_experiment("mqar"), "bf16")
    assert {run.task: (run.length, run.data["pairs"], run.batch_size) for run in runs} == {
        "64x4": (64, 4, 512),
        "128x8": (128, 8, 256),
        "256x16": (256, 16, 128),
        "512x64": (512, 64, 64),
        "512x80": (512, 80, 64),
    }
    assert {(run.epochs, run.weight_decay, run.min_lr, run.target) for run in runs} == {(64, 0.1, 0.0, 0.99)}
    assert {(r.data["train_examples"], r.data["test_examples"], r.data["vocabulary"]) for r in runs} == {
        (100_000, 3_000, 8192)
    }
    assert {(run.model, run.width) for run in runs if run.task == "512x80"} == {("metala", 64), ("metala", 128)}

    def rates(task: str, model: str) -> list[float]:
        return [run.lr for run in runs if (run.task, run.model, run.width) == (task, model, 64)]

    assert rates("512x64", "gla") == pytest.approx(np.logspace(-4, -2, 4), rel=1e-4)
    assert rates("256x16", "metala") == pytest.approx(np.logspace(-4, -2, 4), rel=1e-4)
    both = np.sort(np.concatenate([np.logspace(-4, -2, 4), np.logspace(-5, -3, 4)]))
    assert rates("512x64", "metala") == pytest.approx(both, rel=1e-4)
    assert rates("512x80", "metala") == pytest.approx(both, rel=1e-4)
    for run in runs:
        config = model_config(run)
        assert (config.num_layers, config.hidden_size) == (2, run.width)
        assert (config.max_positions == run.length) == (run.model == "attention")
        options = run.network.get("mixer_options", {}).get(config.mixers[0], {})
        if config.mixers[0] in ("metala", "gla"):
            assert (config.num_heads, options["expand_k"]) == (2, 1.0)
            assert options.get("conv_kernel", 2) == 2


def test_mad_is_the_paper_s_grid() -> None:
    runs = plan(load_experiment("mad", ["models=[metala]"]), "bf16")
    assert len(runs) == 396
    settings = Counter(sweep[0].task.partition("/")[0] for sweep in sweeps(runs))
    assert settings == {
        "in_context_recall": 11,
        "fuzzy_recall": 11,
        "noisy_recall": 14,
        "memorization": 6,
        "compression": 11,
        "selective_copying": 13,
    }
    sweep = [(run.lr, run.weight_decay) for run in runs[:6]]
    assert sorted(sweep) == [(lr, decay) for lr in (1e-4, 5e-4, 1e-3) for decay in (0.0, 0.1)]
    assert {(run.width, run.epochs, run.batch_size, run.schedule) for run in runs} == {(128, 200, 128, "constant")}
    by_name = {run.task: run for run in runs}
    assert by_name["noisy_recall/noise=0.8"].data == {
        **by_name["noisy_recall"].data,
        "noise": 0.8,
    }
    assert by_name["fuzzy_recall/length=1024"].length == 1024
    assert by_name["memorization"].data["train_examples"] == 256
    assert by_name["selective_copying/copied=96"].data["copied"] == 96
    config = model_config(runs[0])
    assert (config.num_layers, config.mlp, config.norm, config.positions) == (2, "swiglu", "rmsnorm", "none")


@pytest.mark.parametrize("suite", ["mqar", "mad"])
def test_every_defined_model_trains(suite: str) -> None:
    """Check that one step's gradient reaches every parameter, in each kind of task."""
    experiment = load_experiment(suite)
    models = f"models=[{','.join(experiment.definitions)}]"
    more = ["data.vocabulary=64", "batch_size=4"] if suite == "mqar" else ["tasks=[in_context_recall/baseline]"]
    tasks = ["tasks=[32x8]"] if suite == "mqar" else []
    every = plan(load_experiment(suite, [models, "widths=[32]", "lrs=[1e-3]", *more, *tasks]), "fp32")
    if suite == "mad":
        every += plan(load_experiment("mad", ["models=[metala]", "widths=[32]", "lrs=[1e-3]"]), "fp32")
        every = [run for run in every if run.length <= 256 and run.weight_decay == 0]
        every = list({(run.model, run.task.partition("/")[0]): run for run in every}.values())
    for run in every:
        run = replace(run, data={**run.data, "train_examples": 4, "test_examples": 2})
        data = to_device(generate(run)[0], torch.device("cpu"))
        network = Network(run)
        loss = network.loss(*data.batch(torch.arange(4)))
        loss.backward()
        assert 0.5 < loss.item() / np.log(run.data["vocabulary"]) < 2, run.name
        for name, parameter in network.named_parameters():
            assert parameter.grad is not None, (run.name, name)
            assert parameter.grad.isfinite().all(), (run.name, name)


def test_run_id_depends_on_each_setting(runs: Callable[..., list[Run]]) -> None:
    (run,) = runs()
    assert run.id == runs("workers=3", "graph=false", "output=elsewhere")[0].id
    changed = {
        "data": {**run.data, "power": 0.5},
        "network": {**run.network, "num_layers": 3},
        "target": None,
        "epoch_steps": 8,
    }
    others = []
    for field in fields(run):
        value = getattr(run, field.name)
        if field.name not in changed:
            changed[field.name] = f"{value}x" if isinstance(value, str) else value + 1
        others.append(replace(run, **{field.name: changed[field.name]}))
    assert len({run.id, *(other.id for other in others)}) == 1 + len(others)
    same = [other for other in others if other.sweep == run.sweep]
    assert {(other.lr, other.weight_decay) for other in same} == {(run.lr + 1, 0.1), (run.lr, 1.1)}


def test_sweep_groups_learning_rates_and_weight_decays(runs: Callable[..., list[Run]]) -> None:
    every = runs("lrs=[1e-3,1e-2]", "weight_decays=[0,0.1]", "seeds=[0,1]", "widths=[16,32]")
    grouped = sweeps(every)
    assert [len(sweep) for sweep in grouped] == [4] * 4
    assert {(run.width, run.seed) for sweep in grouped for run in sweep[:1]} == {(16, 0), (16, 1), (32, 0), (32, 1)}


def test_duplicate_settings_are_one_run(runs: Callable[..., list[Run]]) -> None:
    assert len(runs("models=[metala,metala]", "tasks=[8x2,8x2]", "seeds=[0,0]", "weight_decays=[0,0]")) == 1
    tasks = "tasks=[compression/baseline,compression,compression/vocabulary=32]"
    names = [sweep[0].task for sweep in sweeps(plan(load_experiment("mad", [tasks, "models=[gla]"]), "fp32"))]
    assert (len(names), len(set(names))) == (11, 11)


def test_steps_are_whole_batches(runs: Callable[..., list[Run]]) -> None:
    assert runs("data.train_examples=100", "batch_size=64", "epochs=3")[0].steps == 3
    assert runs("data.train_examples=10", "batch_size=64", "epochs=3")[0].steps == 3


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["models=[metalla]"], r"models: 'metalla' is not in `definitions`; did you mean metala"),
        (["tasks=[64-4]"], r"tasks: '64-4': allowed is LENGTHxPAIRS"),
        (
            ["tasks=[100x4]", "batch_size={64: 512}"],
            r"batch_size = .* has no value for length 100: add batch_size\.100=N",
        ),
        (["tasks=[512x80]", "models=[gla]"], r"no run remains of .*'512x80': \{'models': \('metala',\)"),
        (["epoch=3"], r"epoch is an unknown key; did you mean epochs"),
        (["batch_size=0"], r"batch_size = 0: whole number >= 1, or mapping to: whole number >= 1 is allowed"),
        (["batch_size={64: 0}"], r"whole number >= 1 is allowed"),
        (["seeds=[-1]"], r"seeds = \[-1\]: list of: whole number >= 0 is allowed"),
        (["lrs=[-1]"], r"lrs = \[-1\]: list of 1 or more: number >= 0 is allowed"),
        (["lrs=[]"], r"lrs = \[\]: list of 1 or more: number >= 0 is allowed"),
        (["epochs=many"], r'epochs = "many": whole number >= 1 is allowed'),
    ],
)
def test_invalid_values_are_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan(load_experiment("mqar", overrides), "fp32")


def test_invalid_mad_tasks_and_models_are_refused(runs: Callable[..., list[Run]]) -> None:
    with pytest.raises(ValueError, match="'compresion' is unknown; did you mean compression"):
        plan(load_experiment("mad", ["tasks=[compresion]"]), "fp32")
    with pytest.raises(ValueError, match="did you mean memorization/vocabulary=512"):
        plan(load_experiment("mad", ["tasks=[memorization/vocabulary=511]"]), "fp32")
    with pytest.raises(ConfigError, match="no such file"):
        load_experiment("mqar", path=Path("missing.yml"))
    with pytest.raises(
        ValueError, match=r"definitions\.metala or network: layers is an unknown key; did you mean num_layers"
    ):
        model_config(runs("network.layers=3")[0])
    with pytest.raises(
        ValueError, match="dropout is an unknown key; did you mean tie_dropout or residual_dropout or embedding_dropout"
    ):
        model_config(runs("network.dropout=0.1")[0])
    with pytest.raises(ValueError, match="hidden_size is an unknown key"):  # `widths` sets it
        model_config(runs("network.hidden_size=64")[0])
    with pytest.raises(ValueError, match="head_dim = 0: allowed are whole numbers >= 1"):
        model_config(runs("definitions.metala.head_dim=0")[0])
    with pytest.raises(ValueError, match=r"model\.num_heads = 5 does not divide"):
        model_config(runs("definitions.metala.num_heads=5")[0])
