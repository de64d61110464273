"""Every configuration that cannot run is refused with the key, the value, what is allowed and where it was written."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_lite.config.loader import ConfigError, load_config

from .stand_in import StandIn, problems


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(path: Path, text: str | bytes) -> Path:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path.relative_to(Path.cwd())


# Files


def test_missing_file_names_the_nearest(here: Path) -> None:
    write(here / "my_run.yml", "")
    assert problems(file=Path("myrun.yml")) == ["myrun.yml: no such file; nearest: my_run.yml"]
    (line,) = problems(file=Path("configs/metala_360.yml"))
    assert line.startswith("configs/metala_360.yml: no such file; nearest: ")
    assert "metala_360m.yml" in line


def test_missing_include_names_the_file_that_includes_it(here: Path) -> None:
    file = write(here / "a.yml", "include: [nothing_like_it.yml]")
    assert problems(file=file) == [
        "nothing_like_it.yml: no such file (included from a.yml); configs/README.md lists the files of this project"
    ]


def test_include_must_name_files(here: Path) -> None:
    file = write(here / "a.yml", "run: {seed: 1}\ninclude: {a: b}")
    assert problems(file=file) == ["include: a file name or a list of them is allowed (a.yml:2)"]


def test_files_that_include_one_another(here: Path) -> None:
    write(here / "b.yml", "include: a.yml")
    file = write(here / "a.yml", "include: b.yml")
    assert problems(file=file) == ["a.yml: includes itself: a.yml -> b.yml -> a.yml"]


def test_file_without_permission(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(self: Path, encoding: str) -> str:
        raise PermissionError(13, "Permission denied", str(self))

    file = write(here / "a.yml", "run: {seed: 1}")
    monkeypatch.setattr(Path, "read_text", denied)
    assert problems(file=file) == ["a.yml: cannot be read: Permission denied"]


def test_key_without_a_value(here: Path) -> None:
    assert problems(file=Path("optimizer.lr")) == [
        "optimizer.lr: has no value: write optimizer.lr=VALUE, without spaces"
    ]


def test_folder_and_binary_file(here: Path) -> None:
    (here / "folder").mkdir()
    assert problems(file=Path("folder")) == ["folder: is a folder; name a file"]
    write(here / "folder" / "b.yml", "")
    assert problems(file=Path("folder")) == ["folder: is a folder; name a file, such as folder/b.yml"]
    assert problems(file=write(here / "a.yml", b"run: \xff\xfe")) == ["a.yml: cannot be read: not UTF-8 text"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("run:\n  seed: 1\n name: x\n", "a.yml:3: YAML syntax: "),
        ("run:\n\tseed: 1\n", "a.yml:2: YAML syntax: found character '\\t' that cannot start any token"),
        ("run: [1, 2\n", "a.yml:2: YAML syntax: "),
        ("run: {name: *other}\n", "a.yml:1: YAML syntax: found undefined alias 'other'"),
        ("run: &a {name: *a}\n", "a.yml:1: YAML syntax: an alias that holds itself"),
        ("run:\n  name: !!binary aGk=\n", "a.yml:2: YAML syntax: the tag tag:yaml.org,2002:binary is not allowed"),
        ("run:\n  name: !python/object:os.system x\n", "a.yml:2: YAML syntax: could not determine a constructor"),
        ("run:\n  [a]: 3\n", "a.yml:2: YAML syntax: a key must be a name"),
        ("run: {}\n---\nrun: {}\n", "a.yml:2: YAML syntax: but found another document"),
        ("run:\n  name: a\x00b\n", "a.yml:2: YAML syntax: special characters are not allowed"),
        ("- run\n", "a.yml:1: sections (`batch:`) and keys (`micro_batch_size: 8`) are expected"),
        ("run\n", "a.yml:1: sections (`batch:`) and keys (`micro_batch_size: 8`) are expected"),
    ],
)
def test_yaml_errors_name_file_and_line(here: Path, text: str, message: str) -> None:
    (line,) = problems(file=write(here / "a.yml", text))
    assert line.startswith(message)


def test_a_key_written_twice(here: Path) -> None:
    file = write(here / "a.yml", "run:\n  seed: 1\n  name: x\n  seed: 2\n")
    assert problems(file=file) == ["run.seed: written twice (a.yml:2 and a.yml:4)"]


@pytest.mark.parametrize("override", ["optimizer.lr", "=3", "optimizer..lr=3", ".lr=3"])
def test_override_without_key_or_value(override: str) -> None:
    assert problems(override) == [f"override {override!r}: write key.sub=value, for example optimizer.lr=3e-4"]


def test_override_that_is_not_yaml() -> None:
    (line,) = problems("optimizer.betas=[0.9")
    assert line.startswith("override optimizer.betas=[0.9: not a YAML value: ")


# Keys


def test_unknown_key_names_the_nearest_and_its_line(here: Path) -> None:
    file = write(here / "a.yml", "model:\n  hidden_sise: 3\nbatch:\n\n  micro_batchsize: 2\n")
    assert problems(file=file) == [
        "model.hidden_sise is an unknown key; nearest: model.hidden_size (a.yml:2)",
        "batch.micro_batchsize is an unknown key; nearest: batch.micro_batch_size, batch.global_batch_size (a.yml:5)",
    ]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optimiser.lr=1", "optimiser is an unknown key; nearest: optimizer"),
        ("lr=1", "lr is an unknown key; nearest: optimizer.lr"),
        ("model.lr=1", "model.lr is an unknown key; nearest: optimizer.lr"),
        (
            "data.tokenizer.vocabulary_size=1",
            "data.tokenizer.vocabulary_size is an unknown key; nearest: data.tokenizer.vocab_size, model.vocab_size",
        ),
        ("optimizer.params.epss=1", "optimizer.params.epss is an unknown key; nearest: optimizer.eps"),
        (
            "logging.zzz=1",
            "logging.zzz is an unknown key; allowed in logging are interval, loss_by_source, spread_interval, "
            "progress_bar, tensorboard, wandb",
        ),
        (
            "zzz={a: 1}",
            "zzz is an unknown key; "
            "allowed here are run, model, data, classification, batch, optimizer, schedule, parallel, precision, "
            "checkpoint, logging, evaluation",
        ),
    ],
)
def test_unknown_key_of_an_override(override: str, message: str) -> None:
    assert problems(override) == [f"{message} (override {override})"]


def test_section_written_as_a_value(here: Path) -> None:
    file = write(here / "a.yml", "logging: 3\ndata:\n  tokenizer: bytes\n")
    assert problems(file=file) == [
        "logging = 3: this key is a section; set the keys below it, such as logging.interval (a.yml:1)",
        'data.tokenizer = "bytes": this key is a section; set the keys below it, such as data.tokenizer.type (a.yml:3)',
    ]


def test_missing_keys_are_all_named() -> None:
    assert problems(required=()) == [
        "batch needs two of micro_batch_size, global_batch_size, gradient_accumulation_steps: global_batch_size = "
        "micro_batch_size x gradient_accumulation_steps x data ranks (1 from WORLD_SIZE)",
        "model.vocab_size is missing: whole number. Rows of the embedding.",
        "optimizer.lr is missing: number > 0. Peak learning rate.",
        "schedule.train_steps is missing: whole number >= 1. Optimizer steps of the run.",
    ]


# Values


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optimizer.lr=fast", 'optimizer.lr = "fast": number > 0 is allowed'),
        ("optimizer.lr='3e-4'", 'optimizer.lr = "3e-4": number > 0 is allowed; without quotes it is a number'),
        ("optimizer.lr=-1.5", "optimizer.lr = -1.5: number > 0 is allowed"),
        ("optimizer.lr=.inf", "optimizer.lr = Infinity: number > 0 is allowed"),
        ("optimizer.lr=.nan", "optimizer.lr = NaN: number > 0 is allowed"),
        ("optimizer.lr=true", "optimizer.lr = true: number > 0 is allowed"),
        ("optimizer.lr=[1]", "optimizer.lr = [1]: number > 0 is allowed"),
        ("optimizer.lr={a: 1}", 'optimizer.lr = {"a": 1}: number > 0 is allowed'),
        ("schedule.train_steps=1.5", "schedule.train_steps = 1.5: whole number >= 1 is allowed"),
        ("schedule.train_steps=0", "schedule.train_steps = 0: whole number >= 1 is allowed"),
        ("parallel.compile=yes", 'parallel.compile = "yes": true or false is allowed'),
        ("parallel.compile=1", "parallel.compile = 1: true or false is allowed"),
        ("parallel.zero_stage=4", "parallel.zero_stage = 4: one of 0, 1, 2, 3 is allowed"),
        ("run.device=gpu", 'run.device = "gpu": one of auto, cpu, cuda is allowed'),
        ("run.name=5", "run.name = 5: text like [A-Za-z0-9][A-Za-z0-9._+-]* is allowed; in quotes it is text: '5'"),
        ("run.name=a/b", 'run.name = "a/b": text like [A-Za-z0-9][A-Za-z0-9._+-]* is allowed'),
        ("optimizer.betas=[0.9]", "optimizer.betas = [0.9]: list of 2: number >= 0 and < 1 is allowed"),
        ("optimizer.betas=[0.9, 1.0]", "optimizer.betas = [0.9, 1.0]: list of 2: number >= 0 and < 1 is allowed"),
        (
            "optimizer.no_weight_decay=[norms]",
            'optimizer.no_weight_decay = ["norms"]: list of: one of norm, bias, decay, embedding is allowed',
        ),
        # Before the first step nothing is saved.
        ("checkpoint.extra_steps=[0, 1]", "checkpoint.extra_steps = [0, 1]: list of: whole number >= 1 is allowed"),
        ("data.corpus=3", "data.corpus = 3: text, or list of: text, or null is allowed; in quotes it is text: '3'"),
        ("model.norm=batchnorm", 'model.norm = "batchnorm": one of layernorm, rmsnorm is allowed'),
        ("model.hidden_size=64.0", "model.hidden_size = 64.0: whole number is allowed"),
        (
            "model.mixers=metala",
            'model.mixers = "metala": list of: text is allowed; in brackets it is a list: [metala]',
        ),
        ("model.mixers=3", "model.mixers = 3: list of: text is allowed"),
        (
            "model.mixer_options={metala: paper}",
            'model.mixer_options.metala = "paper": mapping is allowed',
        ),
        ("model.intermediate_size=wide", 'model.intermediate_size = "wide": whole number, or null is allowed'),
    ],
)
def test_wrong_value(override: str, message: str) -> None:
    assert problems(override) == [f"{message} (override {override})"]


def test_wrong_value_in_a_file_names_its_line(here: Path) -> None:
    file = write(here / "a.yml", "optimizer:\n  betas:\n    - 0.9\n    - x\n")
    assert problems(file=file) == ['optimizer.betas = [0.9, "x"]: list of 2: number >= 0 and < 1 is allowed (a.yml:2)']


def test_section_set_over_a_value_names_the_override(here: Path) -> None:
    file = write(here / "a.yml", "run:\n  seed: 1\n")
    assert problems("run.seed.x=1", file=file) == [
        'run.seed = {"x": 1}: whole number >= 0 and < 4294967296 is allowed (override run.seed.x=1)'
    ]


def test_error_of_the_model_has_its_origin(here: Path) -> None:
    file = write(here / "a.yml", "model:\n  num_heads: 5\n")
    expected = "model.num_heads = 5 does not divide model.hidden_size; nearest: 2 or 4 (a.yml:2)"
    assert problems(file=file) == [expected]


def test_all_problems_at_once(here: Path) -> None:
    file = write(here / "a.yml", "include: gone.yml\nrun: {seed: x}\nhidden_size: 3\n")
    lines = problems("batch.global_batch_size=9", "model.nrom=rmsnorm", "foo", file=file, ranks=2)
    starts = [
        "gone.yml: no such file",
        "override 'foo'",
        "hidden_size is a GPT-NeoX key",
        "model.nrom is an unknown key",
        "batch.global_batch_size = 9",
        'run.seed = "x"',
    ]
    assert sorted(lines) == sorted(line for start in starts for line in lines if line.startswith(start))
    assert len(lines) == len(starts)


def test_missing_file_does_not_report_its_keys(here: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config([here / "gone.yml"], ["model.nrom=rmsnorm"], model_type=StandIn)
    absent, unknown = caught.value.problems
    assert "gone.yml: no such file" in absent
    assert unknown.startswith("model.nrom is an unknown key")
