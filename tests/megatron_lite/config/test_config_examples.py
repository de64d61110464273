"""Files of configs/: whole runs load alone, parts load over the default run, and recipes match the papers."""

from __future__ import annotations

import math
import re
import shlex
from pathlib import Path

import pytest

from megatron_lite.config.files import CONFIGS, read_sources
from megatron_lite.config.loader import Config, ConfigError, dump_config, load_config
from models.config import ModelConfig
from models.language_model import count_parameters
from tools.preprocess_data import _parser

RUNS = sorted(CONFIGS.glob("*.yml"))
MODELS = sorted(CONFIGS.glob("model/*.yml"))
PARTS = sorted(path for folder in ("data", "cluster") for path in CONFIGS.glob(f"{folder}/*.yml"))
LARGE = [path for path in RUNS if not path.stem.startswith("default") and not path.stem.endswith("_sample")]
PAPERS = [path for path in LARGE if re.fullmatch(r"metala_[\d.]+[mb]", path.stem)]


def load(*files: Path, overrides: tuple[str, ...] = (), world_size: int = 1) -> Config[ModelConfig]:
    return load_config(files, overrides, model_type=ModelConfig, world_size=world_size)


def base_of(part: Path) -> Path:
    """Return the run that a part extends: that of its objective."""
    images = read_sources([part]).tree.get("data", {}).get("objective") == "classification"
    return CONFIGS / ("cifar10_lion_s.yml" if images else "default.yml")


def name_of(path: Path) -> str:
    return path.relative_to(CONFIGS).as_posix()


def test_every_file_is_tested() -> None:
    suites = list((CONFIGS / "eval").glob("*.yml"))  # tests/tools/evaluation reads these
    recipes = list((CONFIGS / "finetune").glob("*.yml"))  # tests/tools/masked_lm reads these
    experiments = list(
        (CONFIGS / "experiments").glob("*.yml")
    )  # tests/tools/compare and tests/tools/synthetic read these
    assert sorted(CONFIGS.rglob("*.yml")) == sorted([*RUNS, *MODELS, *PARTS, *suites, *recipes, *experiments])
    assert {path.stem for path in RUNS} >= {"default", "metala_360m", "metala_1.3b", "metala_1.4b", "transformer_410m"}


@pytest.mark.parametrize("path", RUNS, ids=name_of)
def test_whole_runs_load_and_round_trip(path: Path, tmp_path: Path) -> None:
    config = load(path)
    assert config.run.name == path.stem
    dumped = tmp_path / "config.yml"
    dumped.write_text(dump_config(config), encoding="utf-8")
    assert load(dumped) == config


@pytest.mark.parametrize("path", LARGE, ids=name_of)
@pytest.mark.parametrize(("cluster", "ranks"), [("1gpu", 1), ("4gpu", 4), ("4x8gpu", 32)])
def test_large_runs_fit_every_cluster(path: Path, cluster: str, ranks: int) -> None:
    alone = load(path)
    files = [path, CONFIGS / "cluster" / f"{cluster}.yml"]
    if alone.batch.sequence_length > 2048:  # it sets the micro-batch, so it comes last
        files.reverse()
    config = load(*files, world_size=ranks)
    assert config.batch.global_batch_size == alone.batch.global_batch_size
    assert config.batch.data_ranks == ranks


@pytest.mark.parametrize("path", MODELS, ids=name_of)
def test_models_load_over_the_default_run(path: Path) -> None:
    """Load each model file over the default run: it sets every key that differs between models."""
    base, alone = base_of(path), read_sources([path]).tree["model"]
    overrides = ["data.tokenizer.vocab_size=512"] if base.stem == "default" else []
    if base.stem != "default" and "lion" not in alone["mixers"]:
        overrides = ["model.mixer_options.lion=null"]
    config = load(base, path, overrides=tuple(overrides))
    alone = {"vocab_size": config.model.vocab_size, **alone}
    assert config.model == ModelConfig(**{key: value for key, value in alone.items() if value is not None})


@pytest.mark.parametrize("path", PARTS, ids=name_of)
def test_parts_load_over_the_default_run(path: Path) -> None:
    data = read_sources([path]).tree.get("data", {})
    corpus = ("data.corpus=null",) if "train" in data else ()
    mixers = ("model.mixers=[metala_bidirectional]",) if data.get("objective") == "masked" else ()
    # The default's global batch is smaller than the micro-batches that the cluster files are made for.
    base = base_of(path)
    sizes = () if base.stem != "default" else ("batch.global_batch_size=256",)
    config = load(base, path, overrides=(*corpus, *mixers, *sizes))
    assert config.run.name == base.stem


@pytest.mark.parametrize(
    ("name", "lr", "batch_tokens", "tokens", "lowest"),
    [
        ("metala_360m", 3e-4, 0.5e6, 15e9, 3e-5),
        ("metala_1.3b", 2e-4, 2e6, 100e9, 2e-5),
        ("metala_1.4b", 2e-4, 2e6, 100e9, 2e-5),
        ("metala_1.4b_300b", 2e-4, 2e6, 300e9, 2e-5),
        ("kda_360m", 3e-4, 0.5e6, 15e9, 3e-5),
        ("gated_delta_net_360m", 3e-4, 0.5e6, 15e9, 3e-5),
        ("kda_1.4b", 2e-4, 2e6, 100e9, 2e-5),
        ("gated_delta_net_1.4b", 2e-4, 2e6, 100e9, 2e-5),
        ("gated_delta_net_hybrid_1.4b", 2e-4, 2e6, 100e9, 2e-5),
        ("transformer_410m", 3e-4, 2e6, 300e9, 3e-5),
        ("transformer_1.4b", 2e-4, 2e6, 300e9, 2e-5),
    ],
)
def test_recipes_match_the_papers(name: str, lr: float, batch_tokens: float, tokens: float, lowest: float) -> None:
    config = load(CONFIGS / f"{name}.yml")
    assert config.optimizer.lr == lr
    assert config.batch.sequence_length == 2048
    assert math.isclose(config.batch.tokens_per_step, batch_tokens, rel_tol=0.05)
    assert math.isclose(config.batch.tokens_per_step * config.schedule.train_steps, tokens, rel_tol=0.001)
    assert math.isclose(config.optimizer.lr * config.schedule.min_lr_ratio, lowest)
    assert config.schedule.warmup_steps == round(0.01 * config.schedule.train_steps)
    assert (config.optimizer.betas, config.optimizer.eps) == ((0.9, 0.95), 1e-8)
    assert (config.optimizer.weight_decay, config.optimizer.gradient_clipping) == (0.1, 1.0)
    assert (config.model.init_method, config.model.output_init_method) == ("small_init", "wang_init")


@pytest.mark.parametrize(
    ("name", "millions"),
    [
        *(("kda_1.4b", 1465.9), ("gated_delta_net_1.4b", 1462.3), ("gated_delta_net_hybrid_1.4b", 1412.7)),
        *(("kda_360m", 359.6), ("gated_delta_net_360m", 365.9)),
    ],
)
def test_parameters_of_the_delta_rule_models(name: str, millions: float) -> None:
    assert round(count_parameters(load(CONFIGS / f"{name}.yml").model) / 1e6, 1) == millions
    assert f": {millions} M parameters" in (CONFIGS / "model" / f"{name}.yml").read_text(encoding="utf-8")


MASKED = [f"{kind}_{size}" for kind in ("lion_s", "lion_d", "lion_lit", "bert") for size in ("base", "large")]


@pytest.mark.parametrize("name", MASKED)
def test_masked_recipes_match_the_paper(name: str) -> None:
    config = load(CONFIGS / f"{name}.yml")
    optimizer, schedule, large = config.optimizer, config.schedule, name.endswith("large")
    assert (optimizer.lr, optimizer.betas, optimizer.eps) == (2e-4 if large else 8e-4, (0.9, 0.98), 1e-6)
    assert (optimizer.weight_decay, optimizer.gradient_clipping) == (1e-5, 0.0)
    assert (schedule.kind, schedule.train_steps, schedule.warmup_steps, schedule.min_lr_ratio) == (
        "linear", 70000, 4200, 0.2,
    )  # fmt: skip
    assert (config.batch.sequence_length, config.batch.global_batch_size) == (128, 4096)
    assert (config.data.masked.rate, config.data.masked.validation_rate) == (0.30, 0.15)
    positions = "learned" if name.startswith(("bert", "lion_lit")) else "none"
    assert (config.model.positions, config.model.head) == (positions, "mlm")
    assert config.model.bidirectional_mixers() == list(config.model.mixers)
    head = config.model.hidden_size * (config.model.hidden_size + 3) + config.model.vocab_size
    parameters = count_parameters(config.model)
    # The paper counts the large model without its head.
    assert math.isclose(parameters - head * large, 334e6 if large else 110e6, rel_tol=0.01 - 0.005 * large)


@pytest.mark.parametrize("path", PAPERS, ids=name_of)
def test_metala_recipes_mark_stated_and_inferred_values(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    for key in ("sequence_length", "global_batch_size", "lr", "train_steps"):
        assert re.search(rf"^  {key}: .*# stated", text, re.MULTILINE), key
    for key in ("betas", "eps", "weight_decay", "gradient_clipping", "kind", "warmup_fraction", "min_lr_ratio"):
        assert re.search(rf"^  {key}: .*# inferred", text, re.MULTILINE), key


def test_the_default_run_is_small_and_needs_nothing() -> None:
    config = load(CONFIGS / "default.yml")
    assert (config.data.corpus, config.data.tokenizer.path) == ("stdlib", None)
    assert config.data.tokenizer.vocab_size == config.model.vocab_size == 4096
    assert config.batch.sequence_length == 512
    assert config.run.device == "auto"
    assert config.checkpoint.resume == "auto"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.num_heads=5", "model.num_heads = 5 does not divide model.hidden_size = 1024; "),
        ("model.mixers=[metla]", "model.mixers: unknown mixer 'metla'; did you mean metala"),
        ("model.mixer_options.metala.kernel=3", "model.mixer_options.metala.kernel: unknown option; "),
        ("model.mixer_options.metala=3", "model.mixer_options.metala = 3: mapping is allowed"),
        ("model.hiden_size=3", "model.hiden_size is an unknown key; nearest: model.hidden_size"),
    ],
)
def test_errors_of_the_model_name_the_override(override: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(CONFIGS / "metala_360m.yml", overrides=(override,))
    (line,) = caught.value.problems
    assert line.startswith(message)
    assert line.endswith(f"(override {override})")


def test_another_mixer_by_overrides() -> None:
    overrides = ("model.mixers=[attention]", "model.mixer_options.metala=null")
    assert load(CONFIGS / "metala_360m.yml", overrides=overrides).model.mixers == ("attention",)


def test_prepared_data_can_be_exchanged_for_raw_files() -> None:
    for name in ("pile", "c4"):
        text = (CONFIGS / "data" / f"{name}.yml").read_text(encoding="utf-8")
        overrides = next(line for line in text.splitlines() if "data.corpus=" in line).lstrip("# ").replace("'", "")
        config = load(CONFIGS / "metala_360m.yml", CONFIGS / "data" / f"{name}.yml", overrides=tuple(overrides.split()))
        assert config.data.train is None
        assert str(config.data.corpus).startswith(f"corpora/{name}/")


@pytest.mark.parametrize("name", ["pile", "c4", "c4_mlm"])
def test_the_commands_that_make_token_files_make_the_named_ones(name: str) -> None:
    """Check the commands in the comments of data files: arguments and file names are those of the tool."""
    text = (CONFIGS / "data" / f"{name}.yml").read_text(encoding="utf-8")
    model = "metala_bidirectional_tiny" if name.endswith("mlm") else "metala_360m"
    model_file = CONFIGS / ("model" if name.endswith("mlm") else ".") / f"{model}.yml"
    data = load(
        CONFIGS / "default.yml", model_file, CONFIGS / "data" / f"{name}.yml", overrides=("data.corpus=null",)
    ).data
    commands = re.findall(r"^#   python -m tools\.preprocess_data ((?:.*\\\n#)*.*)", text, re.MULTILINE)
    prefixes = []
    for command in commands:
        options = _parser().parse_args(shlex.split(command.replace("\\\n#", " ")))
        assert (options.tokenizer_type, options.vocab_file) == (data.tokenizer.type, data.tokenizer.path)
        prefixes.append(f"{options.output_prefix}_text_document")
    assert prefixes == [data.train, data.validation]


def test_the_page_on_data_makes_the_files_that_the_pile_names() -> None:
    text = (CONFIGS.parent / "docs" / "guide" / "data.md").read_text(encoding="utf-8")
    data = load(
        CONFIGS / "default.yml",
        CONFIGS / "metala_360m.yml",
        CONFIGS / "data" / "pile.yml",
        overrides=("data.corpus=null",),
    ).data
    commands = re.findall(r"^    python -m tools\.preprocess_data ((?:.*\\\n *)*.*)", text, re.MULTILINE)
    read = [_parser().parse_args(shlex.split(command.replace("\\\n", " "))) for command in commands]
    assert [f"{options.output_prefix}_text_document" for options in read] == [data.train, data.validation]
    assert {options.vocab_file for options in read} == {data.tokenizer.path}
