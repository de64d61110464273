"""tools.reshard: killed, on a full disk, and over an existing checkpoint."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

import megatron_lite.checkpoint.storage as writing
from megatron_lite.checkpoint import reader as checkpoint
from tests.tools.conversion.conftest import write_run
from tools.reshard import main


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reshard") / "run"
    write_run(folder, ["data.corpus=stdlib", "data.tokenizer.type=bytes"], ["configs/model/metala_tiny.yml"])
    return folder


def test_killed_before_latest_names_it(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    words = [str(run), str(out), "--tensor", "2"]
    write = writing.write_text

    def killed(path: Path, text: str) -> None:
        if path.name == "latest":
            raise KeyboardInterrupt
        write(path, text)

    with monkeypatch.context() as patched:
        patched.setattr(writing, "write_text", killed)
        assert main(words) == 130
    assert [path.name for path in out.iterdir()] == ["step_00000000"]
    assert main([*words, "--data", "2"]) == 2, "the folder holds a checkpoint of another layout"
    assert not (out / "latest").exists()
    assert main(words) == 0
    assert checkpoint.resolve(out) == out / "step_00000000"
    assert main(words) == 2
    assert "exists: name another output folder" in capsys.readouterr().err


def test_full_disk_is_reported(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))
    try:
        assert main([str(run), str(tmp_path)]) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    printed = capsys.readouterr().err
    assert "weights-00000.safetensors" in printed
    assert "File too large" in printed
    assert "free disk space and run the same command again" in printed
    assert not list(tmp_path.iterdir())


def test_configuration_of_another_version_is_refused_in_words(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = checkpoint.read_config_yaml(checkpoint.resolve(run))
    config["model"]["new_option"] = 1
    monkeypatch.setattr(checkpoint, "read_config_yaml", lambda _: config)
    assert main([str(run), str(tmp_path / "out")]) == 2
    assert "the section model of the configuration" in capsys.readouterr().err
