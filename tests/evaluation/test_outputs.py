"""Where results go: refused before the work where they cannot, added to what an earlier evaluation left."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import eval as command
from tools.evaluation.outputs import check_output

MODEL = "tools.load_model.read_weights"


@pytest.fixture
def nothing_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """No weights are read, so that a refusal is an early one."""

    def read(*_: object) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr(MODEL, read)


KINDS = {
    "suites": ({"metalion": {}, "results": {}}, ["--tasks", "copa"]),
    "needle": ({"cells": [], "model": {}}, ["--suite", "needle"]),
    "texts": ({"checkpoint": "", "results": {}}, ["--by-position"]),
}


@pytest.mark.parametrize("there", [*KINDS, "other"])
def test_results_of_another_kind_stay(there, trained_run: Path, tmp_path: Path, nothing_is_done, capsys) -> None:
    out = tmp_path / "r.json"
    out.write_text(json.dumps(KINDS[there][0] if there in KINDS else {"private": "notes"}))
    before = out.read_text()
    for kind, (_, words) in KINDS.items():
        if kind != there:
            assert command.main([str(trained_run), "--device", "cpu", *words, "--out", str(out)]) == 2
            assert "name another file with --out, or remove it" in capsys.readouterr().err
    if there in KINDS:
        with pytest.raises(ValueError, match="holds results of"):
            check_output(out)  # as `compare --out`
    assert out.read_text() == before


@pytest.mark.parametrize(
    "words",
    [
        ["--suite", "needle,superglue"],
        ["--suite", "superglue", "--data", "a.txt"],
        ["--suite", "needle", "--by-position"],
    ],
)
def test_one_file_for_several_kinds_is_refused(
    words, trained_run: Path, tmp_path: Path, nothing_is_done, capsys
) -> None:
    assert command.main([str(trained_run), *words, "--out", str(tmp_path / "r.json")]) == 2
    assert "have a results file each: ask for one of them at a time, or leave --out away" in capsys.readouterr().err


@pytest.mark.parametrize("words", [words for _, words in KINDS.values()])
def test_where_nothing_can_be_written(
    words, trained_run: Path, tmp_path: Path, nothing_is_done, monkeypatch, capsys
) -> None:
    (tmp_path / "file").write_text("")

    def said(out: Path) -> str:
        assert command.main([str(trained_run), "--device", "cpu", *words, "--out", str(out)]) == 2
        return capsys.readouterr().err

    assert "file is no folder: name another file with --out" in said(tmp_path / "file" / "r.json")
    assert "is a folder: name another file with --out, for example" in said(tmp_path)
    if words != ["--by-position"]:
        assert f"name {tmp_path / 'r.json'} with --out" in said(tmp_path / "r.md")
    monkeypatch.setattr("os.access", lambda *_: False)  # a user who may not; root may always
    assert f"nothing may be made in {tmp_path}: name another file with --out" in said(tmp_path / "new" / "r.json")
    assert command.main([str(trained_run), "--device", "cpu", *words]) == 2
    assert f"nothing may be made in {trained_run}" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_comparisons_and_tables_look_first(tmp_path: Path, capsys) -> None:
    (tmp_path / "file").write_text("")
    for word in ("compare", "table"):
        assert command.main([word, "nowhere.json", "nowhere.json", "--out", str(tmp_path / "file" / "x.md")]) == 2
        assert "file is no folder: name another file with --out" in capsys.readouterr().err
