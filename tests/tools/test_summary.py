"""What a run says at its end."""

from __future__ import annotations

import sys

import pytest

from megatron_lite.config import load_config
from models.config import ModelConfig
from tools.summary import command

BUDGET = "schedule.time_budget_minutes"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([], f"{BUDGET}=null schedule.train_steps=16"),
        ([f"{BUDGET}=2", "schedule.train_steps=8"], f"{BUDGET}=null schedule.train_steps=16"),
        # Left out, the budget of the file would hold the run to the steps that are done.
        ([f"{BUDGET}=null", "schedule.train_steps=8"], f"{BUDGET}=null schedule.train_steps=16"),
    ],
)
def test_the_command_that_goes_on_names_more_steps_and_no_budget(monkeypatch, given, said):
    monkeypatch.setattr(sys, "argv", ["train.py", *given])
    config = load_config(["default.yml"], [*given, "model.vocab_size=4096"], model_type=ModelConfig, world_size=1)
    assert command(config, 16) == f"python train.py {said}"


@pytest.mark.parametrize(
    ("resume", "said"),
    [
        ("never", ["checkpoint.resume=auto"]),
        ("runs/own/checkpoints/step_00000004", ["checkpoint.resume=auto"]),
        ("runs/other", ["checkpoint.resume=runs/other"]),  # where a run without checkpoints starts from
    ],
)
def test_the_command_that_goes_on_does_not_begin_again(monkeypatch, resume, said):
    given = ["run.directory=runs/own", f"{BUDGET}=null", f"checkpoint.resume={resume}"]
    monkeypatch.setattr(sys, "argv", ["train.py", *given])
    config = load_config(["default.yml"], [*given, "model.vocab_size=4096"], model_type=ModelConfig, world_size=1)
    assert command(config, 16).split() == ["python", "train.py", *given[:2], *said, "schedule.train_steps=16"]
