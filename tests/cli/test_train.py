"""`python train.py`: complete runs, time budgets, dry runs and refused input."""

from __future__ import annotations

import json
import math
import re
import shlex
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch
import yaml

import train
from data.indexed import IndexedTokens
from data.loader import ReadAhead
from data.manifest import read_manifest, write_manifest
from data.tokenizer import load_tokenizer
from megatron_lite.checkpoint import reader as checkpoint
from megatron_lite.config.loader import load_config
from megatron_lite.metrics.logger import MetricsLogger, read_metrics
from megatron_lite.parallel.grid import init_grid
from megatron_lite.trainer import Trainer
from models.config import ModelConfig
from tests.cli.conftest import ROOT, metrics_lines
from tools import generate
from tools.loading.model import load_model
from tools.pretraining import prepare
from tools.reporting.run_curves import plot_loss


def test_complete_run_writes_report_metrics_plot_and_checkpoint(arguments, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("tools.reporting.run_curves.plot_loss", plot_loss)
    assert train.main(arguments(**{"evaluation.interval": 4, "evaluation.batches": 2})) == 0
    out = capsys.readouterr().out
    folder = tmp_path / "run"
    for words in ("validation loss", "perplexity", "gzip -9", "xz -9", "this model", "sample:", "def ", "next:"):
        assert words in out
    assert "python -m tools.generate" in out
    assert "python eval.py" in out
    assert "schedule.train_steps=16" in out
    report = json.loads((folder / "summary.json").read_text())
    assert report["validation"]["bits_per_byte"] < 8
    assert report["steps"] == 8
    assert report["tokens"] == 8 * 4 * 32
    assert report["tokens_per_second"] == pytest.approx(report["tokens"] / report["training_seconds"])
    assert f"({report['tokens_per_second']:,.0f} tokens/s)" in out
    assert (folder / "loss.png").read_bytes()[:4] == b"\x89PNG"
    lines = metrics_lines(folder)
    assert [line["step"] for line in lines if line["kind"] == "train"] == list(range(1, 9))
    validations = [line for line in lines if line["kind"] == "validation"]
    assert [line["step"] for line in validations] == [4, 8]
    assert 0 < validations[0]["evaluated_fraction"] < validations[1]["evaluated_fraction"] == 1
    part = f"{validations[0]['evaluated_fraction']:.1%}"
    assert f"validations during the run read {part} of this set, so their losses differ" in out
    expected = {
        "loss",
        "perplexity",
        "learning_rate",
        "gradient_norm",
        "tokens",
        "tokens_per_second",
        "mfu",
        "memory_gib",
    }
    assert expected | {"skipped_steps", "data_seconds", "step_seconds"} <= set(lines[0])
    # A byte model of ten words learns quickly.
    assert lines[-2]["loss"] < lines[0]["loss"] - 0.3
    stored = yaml.safe_load((folder / "checkpoints" / "step_00000008" / "config.yml").read_text())
    assert stored["model"]["hidden_size"] == 32
    manifest = checkpoint.read_manifest(folder / "checkpoints" / "step_00000008")
    assert manifest["versions"]["torch"] == metadata.version("torch")
    assert manifest["state"]["consumed_samples"] == 32
    assert manifest["tensors"]["blocks.0.mixer.q_proj.weight"]["partition"] == "column"

    words = arguments()
    monkeypatch.setattr("sys.argv", ["train.py", *words])
    assert train.main(words) == 0
    again = capsys.readouterr().out
    assert "is complete: 8 steps" in again
    longer = [word for word in words if not word.startswith("schedule.train_steps=")] + ["schedule.train_steps=16"]
    assert f"  python train.py {shlex.join(longer)}   # train twice as long\n" in again
    assert f"  python train.py {shlex.join([*words, 'checkpoint.resume=never'])}   # train again" in again
    other = [word for word in words if not word.startswith("run.directory=")] + [f"run.directory={folder}-2"]
    assert f"  python train.py {shlex.join(other)}   # another run" in again, "the name does not change this folder"
    shutil.copytree(folder, folder.with_name("moved"))
    shutil.move(folder.with_name("moved") / "checkpoints", folder.with_name("elsewhere"))
    moved = [f"run.directory={folder.with_name('moved')}", f"checkpoint.directory={folder.with_name('elsewhere')}"]
    monkeypatch.setattr("sys.argv", ["train.py", *(moved_words := [*other[:-1], *moved])])
    assert train.main(moved_words) == 0
    both = shlex.join([*other[:-1], *(f"{word}-2" for word in moved)])
    assert f"  python train.py {both}   # another run" in capsys.readouterr().out
    assert "  it was trained with evaluation.interval = 4, not 0; evaluation.batches = 2, not 8\n" in again
    monkeypatch.setattr("tools.planning.dry_run._time_layers", lambda *_: None)
    # Of the complete run, and of a longer one.
    for more in ([], ["schedule.train_steps=9"], ["schedule.train_steps=9", "--dry-run"]):
        assert train.main([*arguments(**{"model.hidden_size": 64}), *more]) == 2
        error = capsys.readouterr().err
        assert "another architecture" in error
        assert "embedding.weight: (320, 32) in the checkpoint, (320, 64) in the model" in error


def test_run_shorter_than_the_logging_interval_completes(arguments, tmp_path, capsys):
    assert train.main(arguments(**{"logging.interval": 100, "schedule.train_steps": 2})) == 0
    assert "loss plot    none: no step was logged (logging.interval = 100)" in capsys.readouterr().out
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["steps"] == 2


def test_run_killed_after_its_last_step_completes_at_the_next_start(arguments, tmp_path, capsys):
    def killed(*_: object) -> None:
        raise KeyError("killed")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "_evaluate_suites", killed)  # after the validation
        with pytest.raises(KeyError, match="killed"):
            train.main(arguments())
    folder = tmp_path / "run"
    assert checkpoint.resolve(folder).name == "step_00000008"
    assert not (folder / "summary.json").exists()
    assert train.main(arguments()) == 0
    out = capsys.readouterr().out
    assert "validation loss" in out
    assert "checkpoint   " + str(folder / "checkpoints" / "step_00000008") in out
    assert json.loads((folder / "summary.json").read_text())["steps"] == 8
    lines = metrics_lines(folder)
    assert [line["kind"] for line in lines if line["step"] == 8] == ["train", "checkpoint", "validation", "sample"]
    assert train.main(arguments()) == 0
    again = capsys.readouterr().out
    assert "is complete: 8 steps" in again
    assert "it was trained with" not in again


def test_bits_per_byte_covers_the_whole_validation_text(arguments, tmp_path):
    train.main(arguments())
    folder = tmp_path / "run"
    loaded = load_model(folder)
    (text,) = Path(yaml_value(folder, "data", "cache_directory")).glob("corpus-*/validation.txt")
    report = json.loads((folder / "summary.json").read_text())["validation"]
    tokenizer = load_tokenizer("bytes")
    tokens = IndexedTokens(text.parent / "validation_text_document")
    stream = [tokenizer.end_of_document_id, *(int(t) for i in range(len(tokens)) for t in tokens[i])]
    nll = 0.0
    with torch.no_grad():
        for begin in range(0, len(stream) - 1, 32):
            piece = torch.tensor([stream[begin : begin + 33]])
            nll += loaded.model(piece[:, :-1], piece[:, 1:], torch.ones(1, piece.shape[1] - 1)).item()
    size = text.stat().st_size
    assert report["bits_per_byte"] == pytest.approx(nll / math.log(2) / size, rel=1e-5)
    assert report["evaluated_tokens"] == len(stream) - 1


def yaml_value(folder: Path, *keys: str):
    value = checkpoint.read_config_yaml(folder)
    for key in keys:
        value = value[key]
    return value


def test_non_finite_steps_stop_the_run_with_a_dump(arguments, tmp_path, capsys):
    words = arguments(**{"optimizer.lr": 1e30, "optimizer.gradient_clipping": 0.0, "run.max_skipped_steps": 3})
    assert train.main([*words, "schedule.train_steps=50"]) == 1
    error = capsys.readouterr().err
    assert "3 consecutive steps were skipped" in error
    (dump,) = (tmp_path / "run").glob("skipped_step_*.json")
    assert dump.name in error
    history = json.loads(dump.read_text())
    assert [entry["skipped"] for entry in history[-3:]] == [True] * 3
    assert history[-1]["last_sample"] == history[-1]["step"] * 4 - 1


def test_time_budget_lowers_the_steps_and_a_resume_keeps_their_number(arguments, tmp_path, capsys):
    words = arguments(
        **{"schedule.train_steps": 1_000_000, "schedule.time_budget_minutes": 0.005, "checkpoint.interval": 0}
    )
    assert train.main(words) == 0
    steps = yaml_value(tmp_path / "run", "schedule", "train_steps")
    assert 1 <= steps < 10_000
    assert train.main(words) == 0  # complete: not measured again
    assert yaml_value(tmp_path / "run", "schedule", "train_steps") == steps
    manifest = checkpoint.read_manifest(checkpoint.resolve(tmp_path / "run"))
    assert manifest["state"]["tokenizer"] == "bytes-257"
    other = ["data.tokenizer={type: sentencepiece, vocab_size: 300}", "schedule.time_budget_minutes=null"]
    other.append(f"data.cache_directory={tmp_path}/cache")
    assert train.main([*words, *other, f"schedule.train_steps={steps + 1}"]) == 2, "the ids would mean other text"
    assert "was trained with another tokenizer" in capsys.readouterr().err
    longer = [*words, f"run.directory={tmp_path / 'other'}", f"checkpoint.resume={tmp_path / 'run'}"]
    with pytest.MonkeyPatch.context() as patch:  # a new run that starts from the weights of this one
        patch.setattr(prepare, "_steps_in_budget", lambda config, engine, steps, grid: steps.close() or 3)
        assert train.main(longer) == 0
    assert yaml_value(tmp_path / "other", "schedule", "train_steps") == 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"data.corpus": "nowhere.jsonl"}, "nowhere.jsonl"),
        ({"data.text_key": "content"}, "content"),
        ({"model.vocab_size": 128}, "model.vocab_size = 128"),
        ({"model.num_heads": 5}, "does not divide"),
        ({"batch.global_batch_size": 5}, "global"),
        ({"run.device": "cuda"}, "no CUDA device"),
        ({"checkpoint.resume": "nowhere"}, "nowhere does not exist"),
        ({"run.directory": "LICENSE"}, "run.directory = LICENSE: File exists (LICENSE); name a folder"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_bad_input_is_refused_before_training(arguments, tmp_path, capsys, change, message):
    assert train.main(arguments(**change)) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_empty_and_truncated_token_files_are_named(arguments, tmp_path, capsys, corpus):
    train.main(arguments(**{"data.cache_directory": tmp_path / "cache"}))
    (prefix,) = (tmp_path / "cache").glob("corpus-*/train_text_document.bin")
    for suffix in (".bin", ".idx"):
        content = prefix.with_suffix(suffix).read_bytes()
        (tmp_path / f"cut{suffix}").write_bytes(content[:-7] if suffix == ".bin" else content)
    words = [word for word in arguments("other") if not word.startswith("data.corpus=")]
    words += ["data.corpus=null", f"data.train={tmp_path / 'cut'}"]
    assert train.main(words) == 2
    error = capsys.readouterr().err
    assert "cut.bin" in error
    assert "7" in error
    (tmp_path / "cut.idx").write_bytes(b"")
    assert train.main(words) == 2
    assert "cut.idx" in capsys.readouterr().err
    # A file without a checksum whose tokens are not the model's is refused where they are read.
    (tmp_path / "cut.idx").write_bytes(prefix.with_suffix(".idx").read_bytes())
    (tmp_path / "cut.bin").write_bytes(b"\xff" * prefix.stat().st_size)
    assert train.main(words) == 1
    error = capsys.readouterr().err
    assert "cut.bin is damaged at byte " in error
    assert "it holds token 65,535; ids below 320 are allowed" in error


def test_help_does_not_import_torch():
    code = (
        "import sys, train\n"
        "try: train.main(['--help'])\n"
        "except SystemExit: pass\n"
        "print('torch' in sys.modules, 'deepspeed' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, text=True, capture_output=True, check=True)
    assert done.stdout.endswith("False False\n")
    assert "torchrun" in done.stdout


def test_sample_text_ends_at_the_last_learned_position(arguments, tmp_path, capsys):
    """Check `model.max_positions` in training and in tools.generate."""
    model = {"model.mixers": "[attention]", "model.positions": "learned", "model.max_positions": 32}
    assert train.main(arguments(**model, **{"evaluation.sample_tokens": 64, "schedule.train_steps": 2})) == 0
    (sample,) = [line for line in read_metrics(tmp_path / "run") if line["kind"] == "sample"]
    assert 0 < len(sample["text"]) <= 29  # bytes, after a prompt of four
    capsys.readouterr()
    assert generate.main([str(tmp_path / "run"), "--prompt", "def ", "--max-tokens", "30"]) == 2
    output = capsys.readouterr()
    assert "--max-tokens 30: after a prompt of 4 tokens at most 29 is allowed (model.max_positions = 32)" in output.err
    assert not output.out
    assert generate.main([str(tmp_path / "run"), "--prompt", "def ", "--max-tokens", "29"]) == 0


def test_time_budget_counts_the_samples_of_a_batch_ramp(arguments):
    class Engine:
        def measure_step_seconds(self, _batch):
            return 1.0

    budget = {"schedule.train_steps": 1000, "schedule.time_budget_minutes": 1.5}
    ramp = {"batch.global_batch_size": 8, "batch.ramp": "{start: 2, increment: 2, samples: 60}"}
    for changes, expected in ((budget, 90), (budget | ramp, 10 + 5 + 4 + 14)):  # 20, 20 and 24 samples, then steps of 8
        config = load_config(["configs/default.yml"], arguments(**changes), model_type=ModelConfig, world_size=1)
        assert prepare._steps_in_budget(config, Engine(), ReadAhead(iter([[]])), init_grid("cpu")) == expected
        assert expected == 90 or config.batch.samples_of(expected) <= 180 < config.batch.samples_of(expected + 1)


def test_token_count_of_a_batch_ramp(arguments, tmp_path, capsys):
    ramp = {"batch.global_batch_size": 8, "batch.micro_batch_size": 2, "schedule.train_steps": 12}
    words = arguments(**ramp, **{"batch.ramp": "{start: 2, increment: 2, samples: 60}"})
    assert train.main([*words, "--dry-run"]) == 0
    assert re.search(r"12 steps, 896 +tokens", capsys.readouterr().out)  # ten steps of 2 samples of 32, two of 4
    assert train.main(words) == 0
    assert "12 steps of up to 256 tokens = 896, from" in capsys.readouterr().out
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["tokens"] == 28 * 32


def test_print_config_and_dry_run_write_nothing(arguments, tmp_path, capsys):
    assert train.main([*arguments(), "--print-config"]) == 0
    assert "hidden_size: 32" in capsys.readouterr().out
    assert train.main([*arguments(), "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "parameters   " in out
    assert "workspace" in out
    assert not (tmp_path / "run").exists()


def test_token_files_of_another_tokenizer_are_refused(arguments, tmp_path, capsys, corpus):
    train.main(arguments(**{"data.cache_directory": tmp_path / "cache"}))
    (prefix,) = (tmp_path / "cache").glob("corpus-*/train_text_document.bin")
    for suffix in (".bin", ".idx"):
        (tmp_path / f"moved{suffix}").write_bytes(prefix.with_suffix(suffix).read_bytes())
    content = read_manifest(prefix.with_suffix(""))
    content["tokenizer"]["hash"] = "0" * 16
    write_manifest(tmp_path / "moved", content)
    words = [word for word in arguments("other") if not word.startswith("data.corpus=")]
    assert train.main([*words, "data.corpus=null", f"data.train={tmp_path / 'moved'}"]) == 2
    assert "was written with another tokenizer" in capsys.readouterr().err


def test_error_in_the_loop_keeps_its_traceback(arguments, monkeypatch):
    """Exit with status 1, because the SLURM script does not requeue after status 2."""

    def broken(self: Trainer, steps: object) -> None:
        raise ValueError("a shape that does not fit")

    monkeypatch.setattr(Trainer, "_step", broken)
    with pytest.raises(ValueError, match="a shape that does not fit"):
        train.main(arguments())


def test_interrupt_before_the_first_step_prints_one_sentence(arguments, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(Trainer, "fit", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    assert train.main(arguments()) == 130
    assert capsys.readouterr().err.endswith(
        "\ninterrupted: the same command resumes from the newest checkpoint, or starts if there is none\n"
    )


@pytest.mark.parametrize("objective", ["causal", "masked"])
def test_complete_validation_reports_its_progress(arguments, monkeypatch, objective):
    calls = []
    monkeypatch.setattr(MetricsLogger, "show_share", lambda _, what, share: calls.append((what, share)))
    masked = {"data.objective": "masked", "model.mixers": "[metala_bidirectional]"}
    # The limited validation during the run reports no progress.
    settings = {"schedule.train_steps": 2, "evaluation.interval": 1, "evaluation.batches": 1}
    assert train.main(arguments(**settings, **(masked if objective == "masked" else {}))) == 0
    shares = [share for what, share in calls if what == "validation"]
    assert len(shares) == len(calls) > 3
    assert shares == sorted(shares)
    assert shares[-1] == pytest.approx(1)
