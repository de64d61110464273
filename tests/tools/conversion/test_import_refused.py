"""Check that damaged, incomplete and unknown imports are refused by name, and that nothing is half-written."""

from __future__ import annotations

import json
import pickle
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.tools.conversion.test_import import error_of, tiny_llama
from tools.conversion.import_hf import import_folder
from tools.convert_hf import main


def without_hashes(exported: Path, folder: Path) -> None:
    """Copy an export without its hashes, as earlier versions wrote it."""
    shutil.copytree(exported, folder, ignore=shutil.ignore_patterns("SHA256SUMS"))


def broken(exported: Path, folder: Path, **config: Any) -> dict[str, torch.Tensor]:
    without_hashes(exported, folder)
    values = json.loads((folder / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps(values))
    return load_file(folder / "model.safetensors")


def test_missing_unknown_and_wrong_tensors_are_named(
    exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "folder"
    tensors = broken(exported, folder)
    tensors["blocks.0.mixer.query_proj.weight"] = tensors.pop("blocks.0.mixer.q_proj.weight")
    save_file(tensors, folder / "model.safetensors")
    error = error_of(["import", str(folder), str(tmp_path / "run")], capsys)
    assert "blocks.0.mixer.q_proj.weight is missing (nearest: blocks.0.mixer.query_proj.weight)" in error
    assert "blocks.0.mixer.query_proj.weight is unknown (nearest: blocks.0.mixer.q_proj.weight)" in error
    tensors["blocks.0.mixer.q_proj.weight"] = tensors.pop("blocks.0.mixer.query_proj.weight")[:, :5].contiguous()
    save_file(tensors, folder / "model.safetensors")
    error = error_of(["import", str(folder), str(tmp_path / "run")], capsys)
    assert "blocks.0.mixer.q_proj.weight [32, 5]" in error
    assert "config.json needs [32, 64]" in error
    assert not (tmp_path / "run").exists(), "nothing is half-written"


def test_folder_without_a_known_config_json_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    error = error_of(["import", str(tmp_path / "nowhere"), str(tmp_path / "run")], capsys)
    assert "is no Hugging Face folder: config.json is missing (there is no such folder)" in error
    (tmp_path / "config.json").write_text("{")
    assert "is no JSON" in error_of(["import", str(tmp_path), str(tmp_path / "run")], capsys)
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    error = error_of(["import", str(tmp_path), str(tmp_path / "run")], capsys)
    assert "model_type 'bert' cannot be imported; allowed are metalion, metala, gpt_neox" in error


def test_pickles_are_not_opened(exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "folder"
    broken(exported, folder)
    (folder / "model.safetensors").unlink()

    class Trap:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path.touch, (tmp_path / "opened",))

    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Trap()))
    error = error_of(["import", str(folder), str(tmp_path / "run")], capsys)
    assert "pickles (pytorch_model.bin), which execute code when they are read; they are not opened" in error
    assert not (tmp_path / "opened").exists()


def test_changed_source_of_an_export_is_executed_only_with_the_flag(
    exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, executed = tmp_path / "folder", tmp_path / "executed"
    shutil.copytree(exported, folder)
    source = folder / "modeling_metalion.py"
    text = source.read_text()
    (folder / "SHA256SUMS").unlink()  # an attacker would change the hashes too
    source.write_bytes(text.replace("\n", "\r\n").encode())  # line ends of a checkout by git
    assert main(["import", str(folder), str(tmp_path / "run")]) == 0
    assert "largest difference to the original's 0.00e+00" in capsys.readouterr().out
    source.write_text(f"{text}\nopen({str(executed)!r}, 'w').close()\n")
    (folder / "more.py").write_text("")
    error = error_of(["import", str(folder), str(tmp_path / "run2")], capsys)
    assert "source files differ from this version's (modeling_metalion.py, more.py)" in error
    assert "allow them with --trust-remote-code" in error
    assert not executed.exists()
    assert not (tmp_path / "run2").exists()
    assert main(["import", str(folder), str(tmp_path / "run2"), "--trust-remote-code"]) == 0
    assert executed.exists()


def test_tokenizer_larger_than_the_embedding_is_refused(
    exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "folder"
    tensors = broken(exported, folder, vocab_size=300)
    tensors["embedding.weight"] = tensors["embedding.weight"][:300].contiguous()
    save_file(tensors, folder / "model.safetensors")
    error = error_of(["import", str(folder), str(tmp_path / "run")], capsys)
    assert "has 400 entries and the embedding 300 rows" in error


def test_settings_without_counterpart_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "folder"
    tiny_llama(
        rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0},
    ).save_pretrained(folder)
    assert "rope_type = 'linear' has no counterpart here" in error_of(
        ["import", str(folder), str(tmp_path / "run")], capsys
    )
    golden = Path(__file__).parent / "golden" / "gla"
    tensors = broken(golden, tmp_path / "gla", use_short_conv=True)
    assert tensors
    error = error_of(["import", str(tmp_path / "gla"), str(tmp_path / "run")], capsys)
    assert "use_short_conv = True has no counterpart here; allowed are False" in error


@pytest.mark.parametrize(
    ("file", "content", "says"),
    [
        ("training/config.yml", "run: {name: [", "config.yml is no YAML"),
        ("training/config.yml", "", "config.yml is no configuration, or a part of one"),
        ("training/config.yml", "run: {name: x}\n", "config.yml is no configuration, or a part of one"),
        ("training/config.yml", "data: {}\ncheckpoint:\n", "config.yml is no configuration, or a part of one"),
        ("training/config.yml", "data: {corpus: stdlib}\n", "training/config.yml: The configuration has"),
        ("training/tokenizer/description.json", "{", "description.json is no JSON"),
        ("training/tokenizer/description.json", "{}", "description.json has no key 'type'"),
        (
            "training/tokenizer/description.json",
            '{"type": "bytes", "file": null, "hash": "of another"}',
            "was changed after training",
        ),
        ("config.json", '{"model_type": "metalion"}', "config.json has no key 'vocab_size'"),
    ],
)
def test_damaged_file_of_an_export_is_named(
    exported: Path, file: str, content: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "folder"
    without_hashes(exported, folder)
    (folder / file).write_text(content)
    assert says in error_of(["import", str(folder), str(tmp_path / "run")], capsys)
    for sums in exported.rglob("SHA256SUMS"):
        shutil.copyfile(sums, folder / sums.relative_to(exported))
    error = error_of(["import", str(folder), str(tmp_path / "run")], capsys)
    assert f"{folder / file} is damaged: its SHA-256 is not the one in {folder / 'SHA256SUMS'}; copy it again" in error
    assert not (tmp_path / "run").exists()


def test_weight_that_makes_the_logits_not_finite_is_named_with_its_file(
    exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "folder"
    tensors = broken(exported, folder)
    tensors["head.norm.weight"][0] = 3e38
    save_file(tensors, folder / "model.safetensors")
    assert main(["import", str(folder), str(tmp_path / "run")]) == 1
    error = capsys.readouterr().err
    assert (
        f"The largest weight is 3.0e+38 of head.norm.weight in {folder / 'model.safetensors'}; if the file is" in error
    )


def test_run_folder_with_an_invalid_name_is_refused(
    exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for run in ("my run (2)", str(tmp_path / "my run (2)"), "../my run (2)"):
        error = error_of(["import", str(exported), run], capsys).strip()
        assert error.endswith(
            f'run.name = "my run (2)": text like [A-Za-z0-9][A-Za-z0-9._+-]* is allowed ({run}/config.yml)'
        )
    assert not [*tmp_path.iterdir()]


def no_space(*_: object, **__: object) -> Path:
    raise OSError(28, "No space left on device")


def test_existing_run_is_replaced_only_with_overwrite_and_if_untrained(
    exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    assert main(["import", str(exported), str(run)]) == 0
    assert "exists: give another run folder" in error_of(["import", str(exported), str(run)], capsys)
    (run / "old").touch()
    previous = sorted(path.relative_to(run) for path in run.rglob("*"))
    with monkeypatch.context() as patched:
        patched.setattr("tools.conversion.import_hf.write_weights", no_space)
        with pytest.raises(OSError, match="No space"):
            import_folder(exported, run, overwrite=True)
    assert sorted(path.relative_to(run) for path in run.rglob("*")) == previous
    assert main(["import", str(exported), str(run), "--overwrite"]) == 0
    assert not (run / "old").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    shutil.copytree(exported, run / "folder")
    error = error_of(["import", str(run / "folder"), str(run), "--overwrite"], capsys)
    assert "is inside" in error
    assert (run / "folder").is_dir()
    later = run / "checkpoints" / "step_00000100"  # a trained run with its metrics in another folder
    later.mkdir()
    assert "holds a trained run" in error_of(["import", str(exported), str(run), "--overwrite"], capsys)
    later.rmdir()
    (run / "metrics.jsonl").touch()
    assert "holds a trained run" in error_of(["import", str(exported), str(run), "--overwrite"], capsys)


@pytest.mark.parametrize("kind", ["gla", "retnet"])
def test_number_of_heads_that_does_not_fit_the_norm_is_refused(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    golden = Path(__file__).parent / "golden" / kind
    heads = json.loads((golden / "config.json").read_text())["num_heads"]
    broken(golden, tmp_path / kind, num_heads=2 * heads)
    error = error_of(["import", str(tmp_path / kind), str(tmp_path / "run")], capsys)
    assert "model.layers.0.attn.g_norm_swish_gate.weight has" in error
    assert "correct num_heads" in error
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("change", [{"id2label": 3}, {"hidden_size": 2**40}])
def test_value_that_no_model_can_have_is_refused_before_a_run_is_written(
    exported: Path, change: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken(exported, tmp_path / "folder", **change)
    error = error_of(["import", str(tmp_path / "folder"), str(tmp_path / "run")], capsys)
    assert "config.json has a value that is not allowed (" in error
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("model", ["metalion", "llama"])
@pytest.mark.parametrize(
    ("key", "value", "allowed"),
    [
        ("dtype", "banana", "a floating-point type of torch, such as float32, or null is allowed"),
        ("dtype", 5, "a floating-point type"),
        ("torch_dtype", ["float32"], "a floating-point type"),
        ("eos_token_id", -5, r"token ids from 0 to vocab_size - 1 = \d+, or null, are allowed"),
        ("eos_token_id", [0, 10**6], "token ids from 0"),
        ("bos_token_id", 1.5, "token ids from 0"),
    ],
)
def test_dtype_and_special_ids_that_no_model_can_have_are_named(
    exported: Path, model: str, key: str, value: Any, allowed: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if model == "llama":
        tiny_llama().save_pretrained(tmp_path / "llama")
    broken(exported if model == "metalion" else tmp_path / "llama", tmp_path / "folder", **{key: value})
    error = error_of(["import", str(tmp_path / "folder"), str(tmp_path / "run")], capsys)
    assert re.search(rf"config\.json: {key} = {re.escape(json.dumps(value))}: {allowed}", error)
    assert not (tmp_path / "run").exists()
