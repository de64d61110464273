"""`python train.py --dry-run`: its lines, its sample, and what it refuses."""

from __future__ import annotations

import re

import pytest

import train
from tests.cli.conftest import ROOT
from tools.planning import dry_run
from tools.planning.estimate import memory_of, read_config


def test_memory_is_that_of_the_planner(arguments, monkeypatch, capsys):
    words = arguments(**{"model.hidden_size": 256, "model.num_heads": 4})
    words += ["run.device=auto", "precision.dtype=auto"]

    def printed(*more):
        assert train.main([*words, *more, "--dry-run"]) == 0
        out = capsys.readouterr().out
        return out, {part: float(size) for part, size in re.findall(r"^ +([a-z][a-z ]*?) +([\d.]+) GiB", out, re.M)}

    monkeypatch.setattr("tools.planning.dry_run.GIB", 2**20)
    out, memory = printed()
    assert "memory       per process on a GPU, bf16, ZeRO 1 over 1 rank:" in out
    total = memory.pop("sum")
    planned = memory_of(read_config([str(ROOT / "configs/default.yml"), *words], 1), "bf16")
    assert memory == pytest.approx({name: size / 2**20 for name, size in planned.items()}, abs=0.05)
    assert total == pytest.approx(sum(memory.values()), abs=0.05)
    monkeypatch.setenv("WORLD_SIZE", "2")
    out, cut = printed("parallel.tensor=2")
    assert "the fullest process of tensor 2 x pipeline 1 x context 1 on a GPU, bf16, ZeRO 1 over 1 rank:" in out
    assert cut["optimizer"] == pytest.approx(memory["optimizer"] / 2, rel=0.05)
    assert memory["activations"] / 2 < cut["activations"] < memory["activations"]
    out, split = printed("parallel.context=2")
    assert "ZeRO 1 over 2 ranks:" in out
    assert split["optimizer"] == pytest.approx(memory["optimizer"] / 2, rel=0.01)
    out, _ = printed("run.device=cpu", "precision.dtype=fp32")
    assert "per process on a CPU, fp32, ZeRO 1 over 2 ranks:" in out
    hybrid = ["run.device=cpu", "parallel.context=2", "model.num_layers=4", "model.mixers=[metala, attention]"]
    out, _ = printed(*hybrid)
    assert "context 2 on a CPU" in out


def test_projections_in_fp8_are_named(arguments, capsys):
    words = [*arguments(), "precision.fp8.recipe=rowwise", "--dry-run"]
    assert train.main(words) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("fp8  "))
    assert "FP8 (rowwise) in " in line
    assert "mixer.a_proj (not declared for FP8)" in line


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["precision.fp8.recipe=rowwise", "model.hidden_size=40", "model.intermediate_size=88"],
            "precision.fp8.recipe = rowwise: no projection of this model can run in FP8: mixer.q_proj",
        ),
        (
            ["optimizer.name=muon", "optimizer.muon.per_head=true", "model.mixers=[mamba2]"],
            "optimizer.muon.per_head = true: no mixer of this model has projections q_proj",
        ),
    ],
)
def test_models_that_fp8_or_muon_cannot_train_are_refused(arguments, capsys, words, message):
    assert train.main([*arguments(), *words, "--dry-run"]) == 2
    assert message in capsys.readouterr().err


def test_lines_are_printed_before_the_slow_parts(arguments, monkeypatch, capsys):
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(dry_run, "_time_layers", interrupted)
    assert train.main([*arguments(), "--dry-run"]) == 130
    out = capsys.readouterr().out
    for line in ("model  ", "parameters  ", "batch  ", "run  ", "compute  ", "memory  ", "  sum  ", "sample  "):
        assert line in out


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "auto"])
def test_sample_on_a_cpu_is_short_and_has_its_faster_dtype(arguments, monkeypatch, capsys, dtype):
    monkeypatch.setattr(dry_run, "faster_dtype", lambda *_: "fp32")
    words = arguments(**{"run.device": "auto", "precision.dtype": dtype, "batch.sequence_length": 1024})
    assert train.main([*words, "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert f"sample       {dry_run.CPU_TOKENS} tokens forward and backward, fp32 on cpu" in out
    assert f"per process on a GPU, {'bf16' if dtype == 'auto' else dtype}, " in out
    assert out.endswith("start        data and checkpoint are readable\n")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data.corpus": "null", "data.train": "missing/tokens"}, "missing/tokens.idx does not exist"),
        ({"data.corpus": "missing.jsonl"}, "the data path missing.jsonl does not exist"),
        ({"model.vocab_size": 128}, "model.vocab_size = 128 is smaller than the tokenizer's"),
        ({"checkpoint.resume": "missing"}, "missing does not exist"),
    ],
)
def test_refusals_of_a_start_follow_the_costs(arguments, monkeypatch, capsys, changes, message):
    monkeypatch.setattr(dry_run, "_time_layers", lambda *_: None)
    assert train.main([*arguments(**changes), "--dry-run"]) == 2
    printed = capsys.readouterr()
    assert "GiB" in printed.out
    assert message in printed.err


def test_world_size_that_does_not_fit_is_refused(arguments, monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert train.main([*arguments(), "parallel.tensor=2", "--dry-run"]) == 2
    assert "the run must have a multiple of 2, and WORLD_SIZE is 3" in capsys.readouterr().err


def test_only_rank_0_prints(arguments, monkeypatch, capsys):
    monkeypatch.setenv("RANK", "1")
    assert train.main([*arguments(), "--dry-run"]) == 0
    assert capsys.readouterr().out == ""


def test_a_change_of_the_optimizer_is_announced(arguments, monkeypatch, capsys):
    monkeypatch.setattr(dry_run, "_time_layers", lambda *_: None)
    words = arguments(**{"schedule.train_steps": 1, "checkpoint.interval": 1})
    assert train.main(words) == 0
    capsys.readouterr()
    for name, announced in (("muon", True), ("adamw", False)):
        assert train.main([*words, f"optimizer.name={name}", "--dry-run"]) == 0
        line = "optimizer    16 matrices change from AdamW to Muon: weights and first moments (as momentum) are kept"
        assert (line in capsys.readouterr().out) == announced


def test_the_newest_readable_checkpoint_is_checked_like_any_other(arguments, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(dry_run, "_time_layers", lambda *_: None)
    assert train.main(arguments(**{"schedule.train_steps": 1, "checkpoint.interval": 1})) == 0
    words = [*arguments(**{"checkpoint.resume": "newest_readable"}), "--dry-run"]
    assert train.main(words) == 0
    assert train.main([*words, "batch.sequence_length=16"]) == 2
    assert "batch.sequence_length = 16" in capsys.readouterr().err
    (manifest,) = tmp_path.rglob("step_00000001/manifest.json")
    manifest.write_text("{}")
    assert train.main(words) == 2
    assert "is complete; checkpoint.resume=never starts over" in capsys.readouterr().err
