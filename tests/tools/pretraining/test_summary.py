"""The closing text of a run: the next command, sizes, durations, and whether the run is complete."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import pytest

from megatron_lite.config.loader import load_config
from models.config import ModelConfig
from tools.pretraining import summary
from tools.pretraining.summary import _duration, is_complete, longer_command
from tools.pretraining.text import compressed_bits_per_byte

BUDGET = "schedule.time_budget_minutes"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([], f"{BUDGET}=null schedule.train_steps=16"),
        ([f"{BUDGET}=2", "schedule.train_steps=8"], f"{BUDGET}=null schedule.train_steps=16"),
        # Without this key, the time budget of the file would allow no more steps.
        ([f"{BUDGET}=null", "schedule.train_steps=8"], f"{BUDGET}=null schedule.train_steps=16"),
    ],
)
def test_continuing_command_names_more_steps_and_no_budget(monkeypatch, given, expected):
    monkeypatch.setattr(sys, "argv", ["train.py", *given])
    config = load_config(["default.yml"], [*given, "model.vocab_size=4096"], model_type=ModelConfig, world_size=1)
    assert longer_command(config, 16) == f"python train.py {expected}"


def test_continuing_command_starts_as_many_processes(monkeypatch):
    given = ["parallel.tensor=2", "batch.global_batch_size=8", f"{BUDGET}=null"]
    monkeypatch.setattr(sys, "argv", ["train.py", *given])
    config = load_config(["default.yml"], [*given, "model.vocab_size=4096"], model_type=ModelConfig, world_size=4)
    rest = f"train.py {given[0]} {given[1]} {BUDGET}=null schedule.train_steps=16"
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert longer_command(config, 16) == f"torchrun --nproc-per-node 4 {rest}"
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")  # two machines: their launcher is not known here
    assert longer_command(config, 16) == f"... {rest}"


def test_a_folder_with_a_space_is_one_word(monkeypatch):
    given = ["run.directory=my runs/a", "model.vocab_size=4096"]
    config = load_config(["default.yml"], given, model_type=ModelConfig, world_size=1)
    assert all(" 'my runs/a' " in line for line in summary._uses(config))


def test_a_run_without_validation_text_names_no_command_that_reads_it():
    given = ["data.validation_fraction=0", "model.vocab_size=4096"]
    config = load_config(["default.yml"], given, model_type=ModelConfig, world_size=1)
    (line,) = summary._uses(config)
    assert "tools.generate" in line


@pytest.mark.parametrize(
    ("resume", "expected"),
    [
        ("never", ["checkpoint.resume=auto"]),
        ("runs/own/checkpoints/step_00000004", ["checkpoint.resume=auto"]),
        ("runs/other", ["checkpoint.resume=runs/other"]),  # where a run without checkpoints starts from
    ],
)
def test_continuing_command_does_not_start_over(monkeypatch, resume, expected):
    given = ["run.directory=runs/own", f"{BUDGET}=null", f"checkpoint.resume={resume}"]
    monkeypatch.setattr(sys, "argv", ["train.py", *given])
    config = load_config(["default.yml"], [*given, "model.vocab_size=4096"], model_type=ModelConfig, world_size=1)
    assert longer_command(config, 16).split() == [
        "python",
        "train.py",
        *given[:2],
        *expected,
        "schedule.train_steps=16",
    ]


def test_compressed_sizes_are_in_bits_per_byte() -> None:
    """Random bytes take eight bits per byte and a little for the format."""
    for bits in compressed_bits_per_byte(random.Random(0).randbytes(50_000)).values():
        assert 8 < bits < 8.05
    assert all(bits < 0.1 for bits in compressed_bits_per_byte(bytes(50_000)).values())


@pytest.mark.parametrize(("seconds", "text"), [(7.6, "0:08"), (59.6, "1:00"), (61, "1:01"), (3661, "1:01:01")])
def test_a_duration_is_in_hours_minutes_and_seconds(seconds: float, text: str) -> None:
    assert _duration(seconds) == text


def test_a_run_is_complete_if_its_summary_is_of_the_checkpoint_and_train_steps_is_reached(tmp_path: Path) -> None:
    def complete(steps: int, seconds: float, train_steps: int = 8) -> bool:
        words = [
            f"run.directory={tmp_path}",
            f"{BUDGET}=null",
            f"schedule.train_steps={train_steps}",
            "model.vocab_size=4096",
        ]
        config = load_config(["default.yml"], words, model_type=ModelConfig, world_size=1)
        return is_complete(config, {"step": steps, "state": {"seconds": seconds}})

    assert not complete(8, 1.5), "there is no summary"
    (tmp_path / "summary.json").write_text(json.dumps({"steps": 8, "training_seconds": 1.5, "validation": {}}))
    assert complete(8, 1.5)
    assert complete(8, 1.5, train_steps=6)
    assert not complete(8, 1.5, train_steps=16)
    assert not complete(8, 2.5), "an earlier run of as many steps"
    assert not complete(6, 1.5, train_steps=6)
