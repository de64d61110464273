"""Translate a GPT-NeoX configuration to one of this project: `python -m tools.neox_config pythia-410M.yml -o run.yml`."""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from data.atomic_io import write_text
from megatron_lite.config.derived_values import BATCH_KEYS
from megatron_lite.config.files import parse_yaml
from megatron_lite.config.loader import ConfigError, load_config
from tools.cli.arguments import check_not_read, check_writable, command, command_line, positive
from tools.conversion.neox_config import translate
from tools.conversion.neox_translation import Translation

OWN_SECTIONS = ("run", "model", "batch", "schedule", "parallel", "precision")  # GPT-NeoX has no such sections


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line. Write the configuration to stdout or a file, and ignored and assumed keys to stderr."""
    options = _parser().parse_args(arguments)
    paths = [_existing(file) for file in options.files]
    if options.out is not None:
        check_writable(options.out, "--out")
        check_not_read(options.out, "--out", paths)
    files = {str(file): _read(file) for file in paths}
    translation = translate(files, vocab_size=options.vocab_size)
    translation.set("run.name", options.files[0].stem)
    names = ", ".join(file.name for file in options.files)
    text = f"# From GPT-NeoX's {names} by tools/neox_config.\n"
    text += yaml.safe_dump(_ordered(translation.tree), sort_keys=False, default_flow_style=None)
    _check(text, translation)
    if options.out is not None:
        write_text(options.out, text)
    else:
        print(text, end="")
    print(_report(translation), file=sys.stderr)
    return 0


def _existing(file: Path) -> Path:
    """Return the file, or the one with .yml after its name. Raises ConfigError if neither exists."""
    for path in (file, Path(f"{file}.yml")):
        if path.is_file():
            return path
    raise ConfigError([f"{file}: no such file; name GPT-NeoX's .yml files, in the order of their merge"])


def _read(file: Path) -> dict[str, Any]:
    """Return the keys of a file, as the user wrote them. Raises ConfigError."""
    try:
        sources = parse_yaml(file.read_text(encoding="utf-8"), str(file))
    except UnicodeDecodeError as error:
        raise ConfigError([f"{file}: cannot be read: not UTF-8 text; save it as UTF-8"]) from error
    if sources.problems:
        raise ConfigError(sources.problems)
    if sections := [key for key in OWN_SECTIONS if isinstance(sources.tree.get(key), dict)]:
        raise ConfigError(
            [f"{file} has the section {sections[0]}: it is of this project already; give it to train.py as it is"]
        )
    return sources.tree


def _check(text: str, translation: Translation) -> None:
    """Raise ConfigError, in GPT-NeoX's names of keys, if train.py would refuse the configuration."""
    from models.config import ModelConfig

    layout, batch = translation.tree.get("parallel", {}), translation.tree.get("batch", {})
    processes = layout.get("pipeline", 1) * layout.get("tensor", 1)
    micro, total, accumulation = sizes = [batch.get(key) for key in BATCH_KEYS]
    if all(isinstance(size, int) and size > 0 for size in sizes):  # GPT-NeoX starts with the data ranks that they give
        processes *= max(1, total // (micro * accumulation))
    with tempfile.TemporaryDirectory() as folder:
        draft = Path(folder) / "run.yml"
        draft.write_text(text, encoding="utf-8")
        try:
            load_config([draft], [], model_type=ModelConfig, world_size=processes)
        except ConfigError as error:
            origin = re.compile(rf" \({re.escape(str(draft))}:\d+\)$")
            problems = [origin.sub("", problem) for problem in error.problems]
            key = re.compile(r"^[a-z_]+(\.[a-z_]+)+")
            raise ConfigError([key.sub(lambda m: translation.here(m[0]), problem) for problem in problems]) from error


def _report(translation: Translation) -> str:
    lines = ["assumed:", *(f"  {line}" for line in translation.assumed)]
    if translation.important:
        width = max(map(len, translation.important))
        lines += ["ignored, with an effect on the run:"]
        lines += [f"  {key:<{width}}  {reason}" for key, reason in translation.important.items()]
    if translation.harmless:
        lines.append(f"ignored, without an effect: {', '.join(translation.harmless)}")
    return "\n".join(lines)


def _ordered(tree: Mapping[str, Any]) -> dict[str, Any]:
    order = ("run", "model", "data", "batch", "optimizer", "schedule", "parallel", "precision", "checkpoint", "logging")
    return {key: tree[key] for key in (*order, *(k for k in tree if k not in order)) if tree.get(key)}


def _parser() -> argparse.ArgumentParser:
    parser = command_line(
        "python -m tools.neox_config",
        "Translate GPT-NeoX configuration files to one of this project. Keys that change the result are translated or refused.",
        (
            "examples:\n"
            "  python -m tools.neox_config pythia-410M.yml                      to standard output\n"
            "  python -m tools.neox_config configs/125M.yml configs/local_setup.yml -o run.yml   several files, as GPT-NeoX\n"
            "  python train.py run.yml --dry-run                                parameters, memory, FLOPs"
        ),
    )
    parser.add_argument("files", nargs="+", type=Path, help="configuration files of GPT-NeoX")
    parser.add_argument("-o", "--out", type=Path, help="file to write (default: standard output)")
    parser.add_argument(
        "--vocab-size",
        type=positive,
        help="rows of the embedding (default: the tokenizer's entries, padded as in GPT-NeoX)",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
