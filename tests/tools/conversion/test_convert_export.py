"""Check that exports have the trainer's weights, logits and tokens, and are complete or absent."""

from __future__ import annotations

import importlib
import json
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import tools.conversion.export_hf as exporting
from data.indexed import IndexedWriter
from data.tokenizer import ByteTokenizer
from megatron_lite.checkpoint.reader import read_weights
from models.config import ModelConfig
from models.hf import configuration_metalion
from models.hf.configuration_metalion import OLDEST_TRANSFORMERS
from tests.tools.conversion import environments
from tests.tools.conversion.conftest import write_run
from tools.conversion.logit_parity import load_export, real_text
from tools.conversion.model_card import model_card
from tools.convert_hf import main
from tools.evaluation.open_model import checkpoint_hash, locate_model
from tools.evaluation.request import EvaluationRequest


def test_exported_logits_equal_the_trainers(
    trained_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", str(trained_run), str(tmp_path / "out")]) == 0
    captured = capsys.readouterr().out
    difference = float(captured.split("largest difference to the trainer's ")[1].split()[0])
    assert difference <= 1e-5
    assert "same ids on" in captured


def test_exported_weights_equal_the_trainers(trained_run: Path, exported: Path) -> None:
    stored = load_file(exported / "model.safetensors")
    weights = read_weights(trained_run)
    assert stored.keys() == weights.keys()
    assert all(torch.equal(stored[name], weights[name]) for name in weights)


@pytest.mark.parametrize(("dtype", "kind"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_export_in_sixteen_bits_rounds_the_weights(
    dtype: str, kind: torch.dtype, trained_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "out"
    assert main(["export", str(trained_run), str(folder), "--dtype", dtype]) == 0
    captured = capsys.readouterr().out
    assert float(captured.split("difference to the trainer's ")[1].split()[0]) <= 1e-5
    assert 1e-4 < float(captured.split("itself changes logits by up to ")[1].split()[0]) < 1
    weights = read_weights(trained_run)
    assert all(torch.equal(t, weights[name].to(kind)) for name, t in load_file(folder / "model.safetensors").items())
    assert load_export(folder, causal=True).dtype == kind


def test_large_weights_are_sharded(trained_run: Path, exported: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    assert main(["export", str(trained_run), str(folder), "--max-shard-size", "100KB"]) == 0
    files = sorted(folder.glob("model-*-of-*.safetensors"))
    assert len(files) > 3
    assert not (folder / "model.safetensors").exists()
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    whole = load_file(exported / "model.safetensors")
    assert index["weight_map"].keys() == whole.keys()
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in whole.values())
    free_bytes = 0
    for file in files:
        tensors = load_file(file)
        assert sum(t.nbytes for t in tensors.values()) <= 100_000 or len(tensors) == 1
        first = next(t for name, t in whole.items() if name in tensors)
        assert first.nbytes > free_bytes, "the next tensor does not fit into the file"
        free_bytes = 100_000 - sum(t.nbytes for t in tensors.values())
        assert all(torch.equal(t, whole[name]) for name, t in tensors.items())


def test_config_and_generation_config_of_an_export(exported: Path, masked_export: Path) -> None:
    ids = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    config = json.loads((exported / "config.json").read_text())
    assert config.items() >= {**ids, "dtype": "float32", "vocab_size": 512, "num_layers": 2}.items()
    # 400 entries in 512 rows.
    assert json.loads((exported / "generation_config.json").read_text()) == {
        **ids, "suppress_tokens": list(range(400, 512))
    }  # fmt: skip
    assert not (masked_export / "generation_config.json").exists()


def test_tokenizer_larger_than_the_embedding_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["data.corpus=stdlib", "data.tokenizer.type=bytes", "model.vocab_size=128"]
    write_run(tmp_path / "run", words, ["configs/model/metala_tiny.yml"])
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "out")]) == 2
    assert "has 257 entries and the embedding 128 rows" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_text_too_short_for_a_comparison_is_refused(
    trained_run: Path, exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text").write_text("short")
    for words in (["export", str(trained_run)], ["import", str(exported)]):
        assert main([*words, str(tmp_path / "out"), "--text", str(tmp_path / "text")]) == 2
        assert "5 characters are too few to compare logits on" in capsys.readouterr().err
        assert not (tmp_path / "out").exists()


def test_logits_of_a_run_on_token_files_are_compared_on_its_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.txt").write_text("a text of the working folder " * 9)
    config = {"data": {"corpus": None, "train": ["a", "b"], "tokenizer": {"type": "bytes"}}}
    assert real_text(config, ByteTokenizer())[1].endswith("textwrap.py"), "token files on another machine"
    with IndexedWriter(tmp_path / "a", np.dtype("<u2")) as writer:
        writer.add_document(np.frombuffer(b"token " * 50, np.uint8))
    assert real_text(config, ByteTokenizer()) == ("token " * 50, "a")


def test_files_of_the_compared_text_are_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        (tmp_path / f"{name}.txt").write_text(f"text of {name} " * 9)
    config = {"data": {"corpus": ["a.txt", "b.txt"], "tokenizer": {"type": "bytes"}}}
    text, name = real_text(config, ByteTokenizer())
    assert (text, name) == ("text of a " * 9 + "\n" + "text of b " * 9, "a.txt, b.txt")


def test_existing_folder_is_replaced_only_with_overwrite_and_if_an_export(
    trained_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    arguments = ["export", str(trained_run), str(folder)]
    assert main(arguments) == 0, "an empty folder is a valid target"
    previous = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert main(arguments) == 2
    assert "exists: give another folder, or replace it with --overwrite" in capsys.readouterr().err
    assert previous == {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    (folder / "stale.txt").touch()
    assert main([*arguments, "--overwrite"]) == 0
    assert not (folder / "stale.txt").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["out"], "no temporary folder remains"
    run = shutil.copytree(trained_run, folder / "run")
    assert main(["export", str(run), str(folder), "--overwrite"]) == 2
    assert "step_00000030 is inside" in capsys.readouterr().err
    assert run.is_dir()
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "one.jpg").touch()
    for content in (None, "", "[]", "{}"):  # no valid model_type
        if content is not None:
            (tmp_path / "photos" / "config.json").write_text(content)
        assert main(["export", str(trained_run), str(tmp_path / "photos"), "--overwrite"]) == 2
        assert "is not an export of this project" in capsys.readouterr().err
    assert (tmp_path / "photos" / "one.jpg").exists()


def test_difference_over_the_tolerance_exits_with_1_and_keeps_the_export(
    trained_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Change weights while they are written."""
    write = exporting.write_tensors

    def wrong(path: Path, shapes: Any, tensors: Any, **more: Any) -> None:
        write(path, shapes, ((n, t * (1.001 if n.endswith("v_proj.weight") else 1)) for n, t in tensors), **more)

    monkeypatch.setattr(exporting, "write_tensors", wrong)
    assert main(["export", str(trained_run), str(tmp_path / "out")]) == 1
    captured = capsys.readouterr()
    assert float(captured.out.split("difference to the trainer's ")[1].split()[0]) > 1e-4
    assert "over the tolerance of 0.0001" in captured.err
    assert (tmp_path / "out" / "model.safetensors").exists()


def test_full_disk_leaves_no_export(
    trained_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(exporting, "write_tensors", full)
    assert main(["export", str(trained_run), str(tmp_path / "out")]) == 1
    assert "No space left on device" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_disk_that_is_full_at_any_file_leaves_no_export(
    masked_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    for size in (100, 1500, 5000, 20_000, 60_000):  # the first larger file cannot be written
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
        try:
            assert main(["export", str(masked_run), str(tmp_path / "out")]) == 1
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert f"{tmp_path / 'out'}: File too large" in capsys.readouterr().err
        assert not list(tmp_path.iterdir())


def test_missing_or_unfitting_checkpoint_is_refused(
    trained_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", str(tmp_path), str(tmp_path / "out")]) == 2
    assert "is not a checkpoint" in capsys.readouterr().err
    run = tmp_path / "run"
    shutil.copytree(trained_run, run, ignore=shutil.ignore_patterns("SHA256SUMS"))
    config = run / "checkpoints" / "step_00000030" / "config.yml"
    config.write_text(config.read_text().replace("hidden_size: 64", "hidden_size: 32"))
    assert main(["export", str(run), str(tmp_path / "out")]) == 2
    captured = capsys.readouterr().err
    assert "blocks.0.mixer.out_proj.weight is [64, 64], the configuration needs [32, 32]" in captured
    config.write_text(
        config.read_text().replace("hidden_size: 32", "hidden_size: 64").replace("bias: false", "bias: true")
    )
    assert main(["export", str(run), str(tmp_path / "out")]) == 2
    assert "blocks.0.mlp.down_proj.bias is missing" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_model_card_reads_incomplete_metrics(tmp_path: Path) -> None:
    """Metrics may lack the step's line, as with a logging interval, and the last line may be cut."""
    lines = [{"kind": "train", "step": step, "time": 0.0, "tokens": 64 * step} for step in (2, 4)]
    cut = '{"kind": "train", "st'
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + cut)
    model = ModelConfig(vocab_size=32, num_layers=1, hidden_size=32, num_heads=2)
    facts: dict[str, Any] = {"run": tmp_path, "parameters": 1, "dtype": "fp32", "licence": "mit"}
    assert "| tokens | 256 |" in model_card({}, model, checkpoint=tmp_path / "step_00000004", **facts)
    assert "| tokens | unknown |" in model_card({}, model, checkpoint=tmp_path / "step_00000003", **facts)


def test_model_card_of_an_export(trained_run: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(trained_run, run)
    results = {"perplexity": {"pile": {"documents": 3, "perplexity": 12.25}}}
    facts = {
        "checkpoint": "/elsewhere/step_00000030",
        "weights": checkpoint_hash(run / "checkpoints" / "step_00000030"),
    }
    (run / "results.json").write_text(json.dumps({**facts, "results": results}))
    assert main(["export", str(run), str(tmp_path / "out"), "--licence", "mit"]) == 0
    card = (tmp_path / "out" / "README.md").read_text()
    assert card.startswith("---\nlicense: mit\nlibrary_name: transformers\npipeline_tag: text-generation\n")
    for line in (
        "| parameters | 115,680 |",
        "| mixers | metala, attention |",
        "| tokens | 7,680 |",
        "| steps | 30 |",
        "| perplexity | pile | perplexity | 12.25 |",
        "chou2024metala",
        f"torch and transformers {OLDEST_TRANSFORMERS} or newer (below 6) alone",
    ):
        assert line in card, line
    # Scores of another checkpoint are not shown.
    assert main(["export", str(run / "checkpoints" / "step_00000010"), str(tmp_path / "older")]) == 0
    assert "Not evaluated" in (tmp_path / "older" / "README.md").read_text()
    # Nor are those of weights that were trained again to the same step.
    (run / "results.json").write_text(json.dumps({**facts, "weights": "0" * 64, "results": results}))
    assert main(["export", str(run), str(tmp_path / "again")]) == 0
    assert "Not evaluated" in (tmp_path / "again" / "README.md").read_text()


def test_export_needs_memory_for_one_tensor(tmp_path: Path) -> None:
    """While the weights are written, memory grows by less than two layers of a model of twelve."""
    run = tmp_path / "run"
    shape = ["model.num_layers=12", "model.hidden_size=256", "model.intermediate_size=1024", "model.vocab_size=512"]
    write_run(
        run, [*shape, "data.corpus=stdlib", "data.tokenizer.type=bytes"], ["configs/model/metala_tiny.yml"], noise=False
    )
    program = (
        "import sys, threading, time\n"
        "from pathlib import Path\n"
        "import tools.conversion.export_hf as exporting\n"
        "def anonymous():\n"
        "    return int(next(l for l in open('/proc/self/status') if l.startswith('RssAnon')).split()[1]) * 1024\n"
        "exporting.export(sys.argv[1], Path(sys.argv[2]))\n"  # imports and caches
        "start, peak, done = anonymous(), [0], []\n"
        "def watch():\n"
        "    while not done:\n"
        "        peak[0] = max(peak[0], anonymous())\n"
        "        time.sleep(0.0005)\n"
        "thread = threading.Thread(target=watch); thread.start()\n"
        "exporting.export(sys.argv[1], Path(sys.argv[3]))\n"
        "done.append(1); thread.join()\n"
        "print(peak[0] - start)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", program, str(run), str(tmp_path / "a"), str(tmp_path / "b")],
        capture_output=True,
        text=True,
        check=True,
    )
    grown = int(result.stdout.split()[-1])
    layer = 4 * (4 * 256 * 256 + 3 * 256 * 1024)
    assert (tmp_path / "b" / "model.safetensors").stat().st_size > 12 * layer
    assert grown < 2 * layer, f"{grown:,} bytes for layers of {layer:,}"


def test_verify_names_changed_files_of_exports_and_runs(
    trained_run: Path, exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", str(trained_run)]) == 0
    assert capsys.readouterr().out.count(": 4 files match their hashes\n") == 2  # both step folders
    run, folder = tmp_path / "run", tmp_path / "out"
    shutil.copytree(trained_run, run)
    optimizer = run / "checkpoints" / "step_00000010" / "optimizer-00000.safetensors"
    shutil.copytree(exported, folder)
    assert main(["verify", str(folder)]) == 0
    for changed in (optimizer, folder / "model.safetensors"):
        content = bytearray(changed.read_bytes())
        content[-1] ^= 1
        changed.write_bytes(content)
        assert main(["verify", str(run if changed is optimizer else folder)]) == 1
        assert changed.name in capsys.readouterr().err
    with pytest.raises(ValueError, match=r"model\.safetensors is damaged: its SHA-256 .* write it again"):
        locate_model(EvaluationRequest(str(folder), device="cpu"))
    (folder / "README.md").write_text("edited\n")
    (folder / "SHA256SUMS").unlink()
    assert main(["verify", str(folder)]) == 0
    assert f"{folder} has no hashes" in capsys.readouterr().out


def test_run_without_a_tokenizer_is_exported_without_one(
    tmp_path: Path, trained_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Treat the byte tokenizer in the configuration of an import without tokenizer as a placeholder."""
    words = ["data.corpus=stdlib", "data.tokenizer.type=bytes", "model.vocab_size=512"]
    write_run(tmp_path / "run", words, ["configs/model/metala_tiny.yml"])
    shutil.rmtree(tmp_path / "run" / "tokenizer")
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    assert "no tokenizer: the run was imported without one; --tokenizer FILE" in capsys.readouterr().out
    assert not [*tmp_path.glob("out/**/tokenizer*")]
    assert "eos_token_id" not in (tmp_path / "out" / "config.json").read_text()
    given = str(next((trained_run / "tokenizer").glob("*.model")))
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "with"), "--tokenizer", given]) == 0
    assert "AutoTokenizer gives the same ids" in capsys.readouterr().out
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "x"), "--tokenizer", str(tmp_path)]) == 2
    assert (
        "allowed are tokenizer.json, tokenizer.model, vocab.txt and a folder with one of them"
        in capsys.readouterr().err
    )


def test_older_transformers_is_refused_with_the_required_version(monkeypatch: pytest.MonkeyPatch) -> None:
    assert environments.VERSIONS["oldest"] == OLDEST_TRANSFORMERS
    assert f"transformers[torch]>={OLDEST_TRANSFORMERS}," in Path("pyproject.toml").read_text()
    monkeypatch.setattr("importlib.metadata.version", lambda _: "4.57.1")
    needed = rf"transformers>={OLDEST_TRANSFORMERS} is required .* but found transformers==4.57.1"
    with pytest.raises(ImportError, match=needed):
        importlib.reload(configuration_metalion)
