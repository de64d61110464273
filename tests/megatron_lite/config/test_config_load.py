"""Files, includes, merging, overrides and derived values."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import pydantic
import pytest

from megatron_lite.config.files import parse_yaml
from megatron_lite.config.loader import Config, ConfigError, load_config

from .stand_in import REQUIRED, StandIn


@pytest.fixture(autouse=True)
def _one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)


def load(*overrides: str, files: tuple[Path, ...] = (), world_size: int | None = None) -> Config[StandIn]:
    return load_config(files, [*REQUIRED, *overrides], model_type=StandIn, world_size=world_size)


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def test_sections_are_typed_and_frozen() -> None:
    config = load("model.mixers=[metala, attention]")
    assert isinstance(config.model, StandIn)
    assert config.model.mixers == ("metala", "attention")
    assert config.optimizer.betas == (0.9, 0.95)
    with pytest.raises(pydantic.ValidationError, match="frozen"):
        config.run.seed = 3  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.model.vocab_size = 3  # type: ignore[misc]


def test_later_files_win_and_sections_merge(tmp_path: Path) -> None:
    first = write(tmp_path / "a.yml", "optimizer: {lr: 1.0, eps: 0.5}\nmodel:\n  mixers: [metala, attention]\n")
    second = write(tmp_path / "b.yml", "optimizer: {lr: 2.0}\nmodel:\n  mixers: [attention]\n")
    config = load_config([first, second], [*REQUIRED[:4], REQUIRED[5]], model_type=StandIn)
    assert (config.optimizer.lr, config.optimizer.eps) == (2.0, 0.5)
    assert config.model.mixers == ("attention",)  # a list replaces a list


def test_file_overrides_its_includes(tmp_path: Path) -> None:
    write(tmp_path / "parts" / "deep.yml", "run: {seed: 1, name: deep}\nlogging: {interval: 7}\n")
    write(tmp_path / "parts" / "one.yml", "include: deep.yml\nrun: {seed: 2}\n")
    write(tmp_path / "two.yml", "run: {device: cpu}\nlogging: {interval: 8}\n")
    main = write(tmp_path / "main.yml", "run: {device: cuda}\ninclude: [parts/one.yml, two.yml]\n")
    config = load(files=(main,))
    assert (config.run.name, config.run.seed, config.run.device, config.logging.interval) == ("deep", 2, "cuda", 8)


def test_includes_and_files_are_found_in_configs_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    main = write(tmp_path / "main.yml", "include: cluster/cpu.yml\n")
    monkeypatch.chdir(tmp_path)
    assert load(files=(main,)).run.device == "cpu"
    assert load(files=(Path("cluster/cpu.yml"),)).run.device == "cpu"


def test_one_file_may_be_included_twice(tmp_path: Path) -> None:
    write(tmp_path / "shared.yml", "run: {seed: 5}\n")
    write(tmp_path / "left.yml", "include: shared.yml\n")
    write(tmp_path / "right.yml", "include: shared.yml\n")
    main = write(tmp_path / "main.yml", "include: [left.yml, right.yml]\n")
    assert load(files=(main,)).run.seed == 5


def test_empty_file_and_empty_section_change_nothing(tmp_path: Path) -> None:
    empty = write(tmp_path / "empty.yml", "# nothing yet\n")
    section = write(tmp_path / "section.yml", "logging:\n  # interval: 3\n")
    assert load(files=(empty, section)) == load()


def test_yaml_anchors_and_merge_keys(tmp_path: Path) -> None:
    text = "data:\n  tokenizer: &t {type: bytes}\nevaluation: &e\n  batches: 3\n  <<: {interval: 5, batches: 4}\n"
    config = load(files=(write(tmp_path / "a.yml", text),))
    assert (config.data.tokenizer.type, config.evaluation.interval, config.evaluation.batches) == ("bytes", 5, 3)


@pytest.mark.parametrize(
    ("override", "path", "value"),
    [
        ("optimizer.lr=3e-4", "optimizer.lr", 3e-4),
        ("optimizer.lr=1", "optimizer.lr", 1.0),
        ("schedule.train_steps=1e5", "schedule.train_steps", 100_000),
        ("schedule.train_steps=100_000", "schedule.train_steps", 100_000),
        ("run.seed=010", "run.seed", 10),
        ("parallel.compile=true", "parallel.compile", True),
        ("optimizer.betas=[0.8, 9e-1]", "optimizer.betas", (0.8, 0.9)),
        ("data.tokenizer={type: hf, path: x.json}", "data.tokenizer.path", "x.json"),
        ("data.corpus=*.txt", "data.corpus", "*.txt"),
        ("data.corpus=[a.txt, b.txt]", "data.corpus", ("a.txt", "b.txt")),
        ("evaluation.prompt=def ", "evaluation.prompt", "def "),
        ("evaluation.prompt=# note: x = 1", "evaluation.prompt", "# note: x = 1"),
        ("evaluation.prompt='5'", "evaluation.prompt", "5"),
        ("evaluation.prompt=a=b", "evaluation.prompt", "a=b"),
        ("evaluation.prompt=no", "evaluation.prompt", "no"),
        ("evaluation.prompt=2020-01-01", "evaluation.prompt", "2020-01-01"),
        ("model.mixer_options.metala.preset=paper", "model.mixer_options", {"metala": {"preset": "paper"}}),
        ("optimizer.eps=null", "optimizer.eps", 1e-8),
        ("optimizer.eps=", "optimizer.eps", 1e-8),
    ],
)
def test_overrides_are_yaml_values(override: str, path: str, value: Any) -> None:
    loaded: Any = load(override)
    for name in path.split("."):
        loaded = getattr(loaded, name)
    assert loaded == value
    assert type(loaded) is type(value)


def test_overrides_follow_files_in_order(tmp_path: Path) -> None:
    file = write(tmp_path / "a.yml", "run: {seed: 1, name: a}\n")
    config = load("run.seed=2", "run.seed=3", files=(file,))
    assert (config.run.seed, config.run.name) == (3, "a")


def test_null_restores_the_default(tmp_path: Path) -> None:
    file = write(tmp_path / "a.yml", "model: {mixer_options: {metala: {preset: paper}}}\n")
    assert load("model.mixer_options=null", files=(file,)).model.mixer_options == {}
    assert load("model.mixer_options.metala=null", files=(file,)).model.mixer_options == {}
    options = load("model.mixer_options.metala.preset=null", files=(file,)).model.mixer_options
    assert options == {"metala": {"preset": None}}  # each mixer defines the meaning of null
    assert load("data.corpus=null", "data.train=x", "data.tokenizer.type=bytes").data.corpus is None


@pytest.mark.parametrize(
    ("given", "world_size", "expected"),
    [
        ({"micro": 2, "global": 8}, 1, (2, 8, 4)),
        ({"micro": 2, "global": 8}, 4, (2, 8, 1)),
        ({"global": 24, "steps": 3}, 2, (4, 24, 3)),
        ({"micro": 5, "steps": 3}, 4, (5, 60, 3)),
        ({"micro": 2, "global": 12, "steps": 3}, 2, (2, 12, 3)),
    ],
)
def test_two_of_the_batch_sizes_give_the_third(
    given: dict[str, int], world_size: int, expected: tuple[int, int, int]
) -> None:
    names = {"micro": "micro_batch_size", "global": "global_batch_size", "steps": "gradient_accumulation_steps"}
    overrides = [f"batch.{name}={given.get(short, 'null')}" for short, name in names.items()]
    batch = load(*overrides, "batch.sequence_length=10", world_size=world_size).batch
    assert (batch.micro_batch_size, batch.global_batch_size, batch.gradient_accumulation_steps) == expected
    assert batch.data_ranks == world_size
    assert batch.tokens_per_step == 10 * expected[1]


def test_data_ranks_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert load().batch.gradient_accumulation_steps == 1
    monkeypatch.setenv("WORLD_SIZE", "four")
    with pytest.raises(ConfigError, match="WORLD_SIZE is 'four': a whole number >= 1 is expected"):
        load()


def test_folders_follow_from_the_name() -> None:
    config = load("run.name=x")
    assert (config.run.directory, config.checkpoint.directory) == ("runs/x", "runs/x/checkpoints")
    assert config.run.path == Path("runs/x")
    config = load("run.name=x", "run.directory=/scratch/{name}")
    assert (config.run.directory, config.checkpoint.directory) == ("/scratch/x", "/scratch/x/checkpoints")
    assert load("checkpoint.directory=/ckpt/{name}").checkpoint.directory == "/ckpt/default"


def test_steps_of_the_schedule_follow_from_its_length() -> None:
    schedule = load("schedule.warmup_fraction=0.05").schedule
    assert (schedule.warmup_steps, schedule.decay_steps) == (5, 100)
    schedule = load("schedule.warmup_steps=3", "schedule.decay_steps=50").schedule
    assert (schedule.warmup_steps, schedule.decay_steps) == (3, 50)
    assert load().schedule.warmup_steps == 0


def test_importing_the_configuration_is_light() -> None:
    code = (
        "import sys; from megatron_lite.config.loader import load_config; "
        "print([m for m in ('torch', 'deepspeed', 'numpy', 'transformers', 'models', 'data') if m in sys.modules])"
    )
    root = Path(__file__).parents[3]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root, check=True)
    assert done.stdout.strip() == "[]"


def test_empty_sections_of_removed_keys_are_ignored():
    """Ignore `parallel.cublaslt` with its defaults, as dumps of an earlier version hold it."""
    assert load("parallel.cublaslt={device: null, version: null, algorithms: {}}") == load()


def test_change_of_a_parsed_file_does_not_reach_the_next_reader() -> None:
    text = "model: {mixers: [metala]}\n"
    first = parse_yaml(text, "a.yml")
    first.tree["model"]["mixers"].append("lion")
    first.origins.clear()
    second = parse_yaml(text, "a.yml")
    assert second.tree == {"model": {"mixers": ["metala"]}}
    assert second.origin(("model", "mixers")) == "a.yml:1"
