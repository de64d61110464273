"""Damage files of run folders and exports at random, and count the outcomes of the commands that read them.

Each case copies a small run or an export, damages one file and starts commands in this process: `tools.generate` and
`train.py` on a run, `tools.convert_hf import` on an export. The results are compared with those of an undamaged copy. Half of
the copies have no `SHA256SUMS`, as in earlier versions.
`run` returns these counts:

- cases: damaged files;
- refused: the message names the damaged file;
- harmless: the result is the same as without the damage;
- accepted: no checksum: another result, from a folder of an earlier version;
- silently accepted: another result, although a checksum exists;
- file not named: the message does not name the file;
- traceback: any other exception.

The last three must be 0. `failures.jsonl` of the folder describes their cases.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import random
import shutil
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import train
from tests.cli.conftest import run_words, write_corpus
from tests.faults.outcomes import FAILURES, HARMLESS, REFUSED, SILENT, TRACEBACK, UNHASHED, UNNAMED, record_failure
from tools import convert_hf, generate


@dataclass(frozen=True)
class CommandResult:
    """Hold the exit status of a command (None after an exception), its output and a digest of its result."""

    status: int | None
    output: str
    digest: str = ""


@dataclass(frozen=True)
class Target:
    """Hold a folder to damage, the commands that read it, and their results for an undamaged copy."""

    name: str
    original: Path
    copy: Path
    commands: tuple[Callable[[], CommandResult], ...]
    expected: tuple[CommandResult, ...]
    has_hashes: bool = True


def run(count: int, seed: int, folder: Path) -> dict[str, int]:
    """Damage `count` files in a new `folder` and return the counts. The same seed damages the same bytes."""
    draw = random.Random(seed)
    targets = _targets(folder)
    counts = {"cases": count} | dict.fromkeys((REFUSED, HARMLESS, UNHASHED, *FAILURES), 0)
    for number in range(count):
        target = targets[number % len(targets)]
        _copy(target)
        file = choose(target.copy, draw)
        change = damage(file, draw)
        category = ""
        for command, expected in zip(target.commands, target.expected, strict=True):
            result = command()
            category = judge(result, expected, file)
            if category == SILENT and not target.has_hashes:
                category = UNHASHED
            if category in FAILURES:
                name = f"{target.name}/{file.relative_to(target.copy)}"
                record_failure(folder, case=number, outcome=category, file=name, damage=change, output=result.output)
            if category != HARMLESS:
                break
        counts[category] += 1
    return counts


def choose(folder: Path, draw: random.Random) -> Path:
    """Return a random file below `folder`. Every suffix is equally likely; otherwise most cases would be source files."""
    files: dict[str, list[Path]] = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            files.setdefault(path.suffix, []).append(path)
    return draw.choice(files[draw.choice(sorted(files))])


def damage(file: Path, draw: random.Random) -> str:
    """Change, cut or remove a file; return a description of the damage."""
    content = bytearray(file.read_bytes())
    kind = draw.choice(["byte", "bytes", "zeros", "cut", "missing"] if content else ["missing"])
    if kind == "missing":
        file.unlink()
        return "removed"
    place = draw.randrange(len(content))
    if kind == "cut":
        file.write_bytes(content[:place])
        return f"cut to {place} bytes"
    length = 1 if kind == "byte" else min(draw.choice([2, 16, 512]), len(content) - place)
    original = bytes(content[place : place + length])
    while content[place : place + length] == original:
        content[place : place + length] = bytes(length) if kind == "zeros" and any(original) else draw.randbytes(length)
    file.write_bytes(content)
    return f"{length} bytes from {place} on: {original[:16]!r} became {bytes(content[place : place + length][:16])!r}"


def judge(result: CommandResult, expected: CommandResult, file: Path) -> str:
    """Return the outcome of a command after damage to `file`."""
    if result.status is None:
        return TRACEBACK
    if result.status != expected.status:
        return REFUSED if file.name in result.output else UNNAMED
    return HARMLESS if result.digest == expected.digest else SILENT


def _targets(folder: Path) -> list[Target]:
    corpus = write_corpus(folder)
    copy, imported = folder / "case" / "run", folder / "case" / "imported"
    settings = {"evaluation.sample_tokens": 0, "logging.progress_bar": "false", "schedule.decay_steps": 8}
    words = run_words(corpus, copy.parent, "run", **settings)
    export = folder / "case" / "export"
    _run_command(lambda: train.main([*words, "schedule.train_steps=6"]))
    exported = _run_command(lambda: convert_hf.main(["export", str(copy), str(export), "--text", str(corpus)]))
    assert exported.status == 0, exported.output

    def trained() -> CommandResult:
        result = _run_command(lambda: train.main([*words, "schedule.train_steps=7"]))
        manifest = copy / "checkpoints" / "step_00000007" / "manifest.json"
        return CommandResult(result.status, result.output, _digest_of_manifest(manifest) if result.status == 0 else "")

    def generated() -> CommandResult:
        return _run_command(lambda: generate.main([str(copy), "--prompt", "state", "--greedy", "--max-tokens", "8"]))

    def imports() -> CommandResult:
        shutil.rmtree(imported, ignore_errors=True)
        result = _run_command(lambda: convert_hf.main(["import", str(export), str(imported)]))
        if result.status != 0:
            return result
        step = imported / "checkpoints" / "step_00000000"
        rest = [step / "config.yml", *sorted((imported / "tokenizer").iterdir())]
        content = b"".join(path.read_bytes() for path in rest)
        digest = _digest_of_manifest(step / "manifest.json") + hashlib.sha256(content).hexdigest()
        return CommandResult(result.status, result.output, digest)

    targets = []
    for name, place, commands in (("run", copy, (generated, trained)), ("export", export, (imports,))):
        original = folder / f"original-{name}"
        shutil.copytree(place, original)
        target = Target(name, original, place, commands, ())
        expected = []
        for command in commands:
            _copy(target)
            expected.append(command())
            assert expected[-1].status == 0, expected[-1].output
        earlier = folder / f"earlier-{name}"
        shutil.copytree(original, earlier, ignore=shutil.ignore_patterns("SHA256SUMS"))
        targets.append(Target(name, original, place, commands, tuple(expected)))
        targets.append(Target(f"earlier {name}", earlier, place, commands, tuple(expected), has_hashes=False))
    return targets


def _copy(target: Target) -> None:
    shutil.rmtree(target.copy, ignore_errors=True)
    shutil.copytree(target.original, target.copy)


def _digest_of_manifest(file: Path) -> str:
    """Return a digest of weights, optimizer state and the position in the data."""
    manifest = json.loads(file.read_text())
    state = {key: manifest["state"].get(key) for key in ("step", "consumed_samples", "consumed_tokens")}
    files = {name: entry["sha256"] for name, entry in manifest["files"].items()}
    return hashlib.sha256(json.dumps([state, files], sort_keys=True).encode()).hexdigest()


def _run_command(command: Callable[[], int]) -> CommandResult:
    """Run a command line in this process. Its standard output serves as the digest of a command that writes no file."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            status: int | None = command()
        except KeyboardInterrupt:
            raise
        except BaseException:  # a panic of a Rust library is no Exception
            return CommandResult(None, err.getvalue() + traceback.format_exc())
    return CommandResult(status, out.getvalue() + err.getvalue(), out.getvalue())
