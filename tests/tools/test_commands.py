"""Documented commands have the options that the pages name, and --help answers without heavy imports."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from functools import cache
from importlib import import_module

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from tests.cli.conftest import ROOT, environment
from tools.__main__ import JOBS, main
from tools.cli.arguments import command, refused

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "Makefile", *sorted((ROOT / "docs").rglob("*.md"))]
PAGES += sorted((ROOT / "configs").rglob("*.yml"))
PAGES.remove(ROOT / "docs" / "dev_log.md")  # the log also names removed commands
COMMAND = re.compile(r"(?:python|torchrun[^\n`]*?) (?:-m )?(tools\.[a-z_.]+[a-z]|train\.py|eval\.py)([^\n`#|]*)")
HEAVY = ("torch", "transformers", "datasets", "lm_eval", "matplotlib", "deepspeed", "fla", "triton")


def documented() -> list[tuple[str, str]]:
    """Return (program, its arguments) of every command in the documentation."""
    return sorted({match.groups() for page in PAGES for match in COMMAND.finditer(page.read_text())})


PROGRAMS = sorted({program for program, _ in documented()} | {"train.py", "eval.py"})


@cache
def help_of(program: str, *words: str) -> str:
    """Return the output of `program words --help`, and a last line of the slow packages that it imported."""
    start = (
        f"runpy.run_path({program!r}, run_name='__main__')"
        if program.endswith(".py")
        else f"runpy.run_module({program!r}, run_name='__main__', alter_sys=True)"
    )
    code = (
        f"import runpy, sys\nsys.argv = {[program, *words, '--help']}\n"
        f"try: {start}\n"
        f"finally: print('IMPORTED', [name for name in {HEAVY} if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        text=True,
        capture_output=True,
        timeout=240,
        env={**environment(), "COLUMNS": "80"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("command", [*PROGRAMS, "eval.py table", "eval.py compare", "eval.py --suite mqar"])
def test_help_answers_at_once(command):
    text, _, imported = help_of(*command.split()).rpartition("IMPORTED ")
    assert len(text) > 100
    assert imported.strip() == "[]"
    assert [line for line in text.splitlines() if len(line) > 80] == []


@pytest.mark.parametrize("words", ["convert_hf export", "convert_hf import", "convert_hf verify", "benchmark train"])
def test_help_of_a_subcommand_fits_the_terminal_and_has_an_example(words, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    program, *subcommand = words.split()
    folder = f"tools.{program}"
    module = import_module(f"{folder}.__main__" if (ROOT / "tools" / program).is_dir() else folder)
    with pytest.raises(SystemExit, match="0"):
        module.main([*subcommand, "--help"])
    text = capsys.readouterr().out
    assert f"example:\n  python -m {folder} {words.split()[1]}" in text
    assert max(map(len, text.splitlines())) <= 80


def test_table_of_jobs_holds_every_command_and_the_console_command_lists_it(capsys):
    files = {
        path for path in [ROOT / "train.py", ROOT / "eval.py", *(ROOT / "tools").glob("*.py")] if path.stem[0] != "_"
    }
    programs = {".".join(path.relative_to(ROOT).with_suffix("").parts) for path in files}
    programs |= {f"tools.{path.parent.name}" for path in (ROOT / "tools").glob("*/__main__.py")}
    assert {program for program, _, _ in JOBS.values()} == programs
    assert main(["--help"]) == 0
    listed = capsys.readouterr().out
    for job, (program, first, _) in JOBS.items():
        assert re.search(rf"^  {job} .*\n +=.* {re.escape(' '.join([program, *first]))}", listed, re.MULTILINE)
    assert main(["generat"]) == 2
    assert (
        capsys.readouterr().err
        == "error: generat is not a job: did you mean generate? metalion --help lists the jobs\n"
    )
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["project"]["scripts"] == {"metalion": "tools.__main__:main"}


@pytest.mark.parametrize("job", ["train", "generate", "length", "export"])
def test_job_equals_its_program(job):
    program, first, _ = JOBS[job]
    assert help_of("tools", job) == help_of(program if "." in program else f"{program}.py", *first)


def test_options_of_documented_commands_exist():
    unknown = []
    for program, words in documented():
        known = help_of(program)
        first = re.match(r" ([a-z]+)(?= )", words)  # a subcommand, as in `tools.benchmark train`
        if first and re.search(rf"\b{first[1]}\b", known):
            known += help_of(program, first[1])
        if suite := re.search(r"--suite (\w+)", words):
            known += help_of(program, "--suite", suite[1])
        options = set(re.findall(r"--[a-z][\w-]*", known))
        named = re.findall(r"(?<!\S)--[a-z][\w-]*", words)
        unknown += [f"{program}{words}: {name}" for name in named if name not in options]
    assert not unknown


PIPED = """
import sys
from tools.cli.arguments import command
@command
def main(arguments=None):
    for number in range(100_000):
        print(number, flush=number % 100 == 0)
    return 1
sys.exit(main())
"""


def test_closed_standard_output_is_no_error() -> None:
    words = [sys.executable, "-c", PIPED]
    with subprocess.Popen(
        words, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == "0\n"
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 0


def test_one_rank_per_machine_prints_a_refusal(capsys, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert refused(ValueError("no such key")) == 2
    assert capsys.readouterr().err == "error: no such key\n"
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert refused(ValueError("no such key")) == 2
    assert capsys.readouterr().err == ""
    failure = ProcessFailure(local_rank=1, pid=1, exitcode=2, error_file=str(tmp_path / "error.json"))
    assert "error: no such key" in ChildFailedError("train.py", {1: failure}).format_msg()


def test_interrupt_prints_one_word_and_exits_with_130(capsys) -> None:
    @command
    def main(arguments=None):
        raise KeyboardInterrupt

    assert main() == 130
    assert capsys.readouterr().err == "\ninterrupted\n"
