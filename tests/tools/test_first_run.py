"""The tutorial's commands run in their order, on a tiny run that stands for the tutorial's."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import torch

import eval as evaluation
import train
from tools import convert_hf, generate, plot, serve

PAGE = (Path(__file__).parents[2] / "docs" / "guide" / "first_run.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^    python (.*)$", PAGE, re.MULTILINE)
PROGRAMS = {
    "train.py": train.main,
    "eval.py": evaluation.main,
    "-m tools.generate": generate.main,
    "-m tools.plot": plot.main,
    "-m tools.convert_hf": convert_hf.main,
    "-m tools.serve": serve.main,
}


def program_of(command: str) -> tuple[str, list[str]]:
    """Return the program of a command and its arguments."""
    (program,) = [name for name in PROGRAMS if command.startswith(name)]
    return program, shlex.split(command.removeprefix(program))


def test_commands_of_the_tutorial_run_in_order(trained_run: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    root = Path(__file__).parents[2]
    monkeypatch.chdir(tmp_path)
    shutil.copytree(trained_run, tmp_path / "runs" / "first")
    shutil.copy(root / "README.md", tmp_path)
    done = []
    for command in COMMANDS:
        program, arguments = program_of(command)
        done.append(program)
        if program == "train.py":
            assert train.main([*arguments, "--print-config"]) == 0
        elif program == "-m tools.serve":
            assert (tmp_path / arguments[0] / "config.json").is_file()
        else:
            assert PROGRAMS[program](arguments) == 0, command
        capsys.readouterr()
    assert set(done) == set(PROGRAMS)


def test_python_of_the_tutorial_generates(trained_run: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    convert_hf.main(["export", str(trained_run), "runs/first_exported"])
    capsys.readouterr()
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    with torch.no_grad():
        exec(code, {})
    assert "def" in capsys.readouterr().out
