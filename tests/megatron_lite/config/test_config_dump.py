"""dump_config loads back to the same configuration; explain_config names the origin of each value."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_lite.config.loader import Config, ConfigError, dump_config, explain_config, load_config

from .stand_in import REQUIRED, StandIn


def load(*overrides: str, file: Path | None = None, world_size: int = 1) -> Config[StandIn]:
    files = [] if file is None else [file]
    required = () if file is not None else REQUIRED
    return load_config(files, [*required, *overrides], model_type=StandIn, world_size=world_size)


TEXT = st.text(st.characters(codec="utf-8"), max_size=30)
VARIED: list[tuple[str, ...]] = [
    (),
    ("run.name=x", "schedule.warmup_fraction=0.07", "optimizer.lr=0.1234567890123456789"),
    ("schedule.warmup_steps=7", "schedule.decay_steps=50", "checkpoint.directory=/elsewhere"),
    ("batch.global_batch_size=null", "batch.gradient_accumulation_steps=3", "run.directory=/scratch/{name}"),
    ("batch.micro_batch_size=null", "batch.gradient_accumulation_steps=1", "batch.global_batch_size=4"),
    ("model.mixers=[metala, other]", "model.mixer_options={metala: {preset: paper, x: [1, 2.5, null]}, other: {}}"),
    ("data.corpus=[a b.txt, 'true', '1e5', '~', '*.txt']", "checkpoint.extra_steps=[1, 5]", "optimizer.eps=1e-30"),
    ("run.name='1e5'", "logging.wandb.entity='null'", "data.text_key=yes", "run.seed=4294967295"),
]  # fmt: skip


@pytest.mark.parametrize("overrides", VARIED)
@pytest.mark.parametrize("world_size", [1, 4])
def test_a_dump_loads_back_to_the_same(tmp_path: Path, overrides: tuple[str, ...], world_size: int) -> None:
    config = load(*overrides, world_size=world_size)
    file = tmp_path / "config.yml"
    file.write_text(dump_config(config), encoding="utf-8")
    again = load(file=file, world_size=world_size)
    assert again == config
    assert dump_config(again) == file.read_text(encoding="utf-8")


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    prompt=TEXT,
    lr=st.floats(min_value=0, exclude_min=True, allow_infinity=False),
    option=st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
)
def test_any_value_survives_a_dump(tmp_path: Path, prompt: str, lr: float, option: Any) -> None:
    config = load()
    config = config.model_copy(
        update={
            "optimizer": config.optimizer.model_copy(update={"lr": lr}),
            "evaluation": config.evaluation.model_copy(update={"prompt": prompt}),
            "model": StandIn(vocab_size=5000, mixer_options={"metala": {"option": option}}),
        }
    )
    file = tmp_path / "config.yml"
    file.write_text(dump_config(config), encoding="utf-8", newline="")
    assert load(file=file) == config


def test_a_dump_is_plain_yaml_for_any_reader() -> None:
    """Tools read the configuration of a checkpoint with the YAML 1.1 rules of yaml.safe_load."""
    config = load("data.text_key=yes", "optimizer.eps=1e-8", "logging.wandb.entity='1e5'")
    tree = yaml.safe_load(dump_config(config))
    assert tree["data"]["text_key"] == "yes"
    assert tree["optimizer"]["eps"] == 1e-8
    assert tree["logging"]["wandb"]["entity"] == "1e5"
    assert tree["model"]["mixers"] == ["metala"]


def test_a_dump_adapts_to_another_number_of_processes_and_another_name(tmp_path: Path) -> None:
    file = tmp_path / "config.yml"
    file.write_text(dump_config(load("run.name=first", world_size=1)), encoding="utf-8")
    config = load("run.name=second", "schedule.train_steps=50", file=file, world_size=2)
    assert config.batch.gradient_accumulation_steps == 2
    assert config.batch.global_batch_size == 8
    assert config.checkpoint.directory == "runs/second/checkpoints"
    assert config.schedule.decay_steps == 50


def test_a_dump_states_every_key() -> None:
    text = dump_config(load())
    for line in (
        "  # directory: runs/default  # follows from run.name",
        "  # decay_steps: 100  # follows from schedule.train_steps",
        "  # gradient_accumulation_steps: 4  # follows from global_batch_size = micro_batch_size x "
        "gradient_accumulation_steps x data ranks, 1 data rank",
        "  lr: 0.0003",
        '  prompt: "def "',
        "    project: metalion",
    ):
        assert f"\n{line}\n" in text


def test_explain_names_the_origin_of_each_value(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("base.yml").write_text("optimizer:\n  eps: 0.5\n  betas: [0.8, 0.9]\nlogging: {interval: 2}\n")
    Path("main.yml").write_text("include: base.yml\n\noptimizer: {eps: 0.25}\nlogging:\n  interval: null\n")
    overrides = [*REQUIRED, "model.mixer_options={metala: {preset: paper}}", "evaluation.prompt=two\nlines"]
    text = explain_config(["main.yml"], overrides, model_type=StandIn, world_size=1)
    for line in (
        "  eps: 0.25  # main.yml:3",
        "  betas: [0.8, 0.9]  # base.yml:3",
        "  lr: 0.0003  # override optimizer.lr=3e-4",
        "  weight_decay: 0.1  # default",
        "  interval: 1  # default",
        "      preset: paper  # override model.mixer_options={metala: {preset: paper}}",
        '  prompt: "two\\nlines"  # override evaluation.prompt=two lines',
        "  # decay_steps: 100  # follows from schedule.train_steps",
    ):
        assert f"\n{line}\n" in text
    Path("explained.yml").write_text(text)
    assert load(file=Path("explained.yml")) == load_config(["main.yml"], overrides, model_type=StandIn, world_size=1)


def test_section_reset_to_null_has_no_origin(tmp_path: Path) -> None:
    file = tmp_path / "a.yml"
    file.write_text("data: {tokenizer: {type: bytes, path: x}}\n")
    text = explain_config([file], [*REQUIRED, "data.tokenizer=null"], model_type=StandIn)
    assert "    type: sentencepiece  # default\n    path: null  # default\n" in text


def test_explain_refuses_what_load_refuses() -> None:
    with pytest.raises(ConfigError, match=r"optimizer\.lr is missing"):
        explain_config([], REQUIRED[:4], model_type=StandIn)
