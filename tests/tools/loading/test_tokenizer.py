"""A run's tokenizer is saved with it, and another tokenizer is refused."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from data.tokenizer import load_tokenizer
from megatron_lite.checkpoint.reader import read_config_yaml
from tools.loading.tokenizer import check_same_tokenizer, read_tokenizer

OLD: dict[str, Any] = {"state": {}}  # a manifest without the tokenizer's hash


def test_saved_tokenizer_needs_no_corpus(trained_run: Path, tmp_path: Path) -> None:
    config = read_config_yaml(trained_run)
    config["data"]["corpus"] = str(tmp_path / "gone")
    tokenizer = read_tokenizer(trained_run, config, OLD)
    assert tokenizer.vocab_size == 400
    assert tokenizer.decode(tokenizer.encode("naïve 🙂")) == "naïve 🙂"


def test_run_without_saved_tokenizer_trains_no_other(trained_run: Path, tmp_path: Path) -> None:
    config = read_config_yaml(trained_run)
    with pytest.raises(FileNotFoundError, match=r"tokenizer is missing: .*Copy it from where the run was made"):
        read_tokenizer(tmp_path, config, OLD)
    saved = read_tokenizer(trained_run, config, OLD)
    config["data"]["tokenizer"]["path"] = saved.path
    assert read_tokenizer(tmp_path, config, OLD).hash == saved.hash
    assert read_tokenizer(tmp_path, config, {"state": {"tokenizer": saved.hash}}).hash == saved.hash


def test_tokenizer_of_another_checkpoint_is_refused(trained_run: Path) -> None:
    other: dict[str, Any] = {"state": {"tokenizer": "0" * 32}}
    with pytest.raises(ValueError, match=r"tokenizer\.model is not the tokenizer that the checkpoint was trained with"):
        read_tokenizer(trained_run, read_config_yaml(trained_run), other)
    saved = read_tokenizer(trained_run, {}, OLD)
    check_same_tokenizer(saved, trained_run, OLD)
    with pytest.raises(ValueError, match=r"with another tokenizer .*Set that tokenizer to resume, or .*resume=never"):
        check_same_tokenizer(saved, trained_run, other)
    manifest = {"state": {"tokenizer": saved.hash}}
    with pytest.raises(
        ValueError, match=r"\(bytes, bytes-257\)\. Set data\.tokenizer\.path=.*tokenizer\.model to resume, or"
    ):
        check_same_tokenizer(load_tokenizer("bytes"), trained_run, manifest)


def test_changed_tokenizer_is_refused(trained_run: Path, tmp_path: Path) -> None:
    shutil.copytree(trained_run / "tokenizer", tmp_path / "tokenizer")
    description = tmp_path / "tokenizer" / "description.json"
    description.write_text(json.dumps({**json.loads(description.read_text()), "hash": "0" * 32}))
    with pytest.raises(ValueError, match=r"description\.json is damaged: .* copy it again, or remove its folder"):
        read_tokenizer(tmp_path, {}, OLD)
    (description.parent / "SHA256SUMS").unlink()  # as earlier versions wrote it
    with pytest.raises(ValueError, match="was changed after training"):
        read_tokenizer(tmp_path, {}, OLD)
    description.write_text(json.dumps({**json.loads(description.read_text()), "file": "../../tokenizer.model"}))
    with pytest.raises(ValueError, match=r"names '\.\./\.\./tokenizer\.model': only names of files inside"):
        read_tokenizer(tmp_path, {}, OLD)
