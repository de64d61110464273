"""Translate a GPT-NeoX configuration to one of this project: `python -m tools.neox_config pythia-410M.yml -o run.yml`."""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from data.atomic_io import write_text
from megatron_lite.config.files import parse_yaml
from megatron_lite.config.loader import ConfigError, load_config
from tools.cli.arguments import command_line, positive
from tools.conversion.neox_config import Translation, translate, underscored

OWN_SECTIONS = ("run", "model", "batch", "schedule", "parallel", "precision")  # GPT-NeoX has no such sections


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line. Write the configuration to stdout or a file, and ignored and assumed keys to stderr."""
    options = _parser().parse_args(arguments)
    import yaml

    from models.config import ModelConfig

    try:
        neox: dict[str, Any] = {}
        for file in options.files:
            if not file.is_file():
                raise ConfigError([f"{file}: no such file; name GPT-NeoX's .yml files, in the order of their merge"])
            sources = parse_yaml(file.read_text(encoding="utf-8"), str(file))
            if sources.problems:
                raise ConfigError(sources.problems)
            if sections := [key for key in OWN_SECTIONS if isinstance(sources.tree.get(key), dict)]:
                raise ConfigError(
                    [f"{file} has the section {sections[0]}: it is of this project already, run it as it is"]
                )
            neox |= underscored(sources.tree)
        translation = translate(neox, vocab_size=options.vocab_size)
        translation.set("run.name", options.files[-1].stem)
        text = f"# From GPT-NeoX's {', '.join(file.name for file in options.files)} by tools/neox_config.\n"
        text += yaml.safe_dump(_ordered(translation.tree), sort_keys=False, default_flow_style=None)
        with tempfile.TemporaryDirectory() as folder:
            draft = Path(folder) / options.files[-1].with_suffix(".yml").name
            draft.write_text(text, encoding="utf-8")
            layout = translation.tree.get("parallel", {})
            processes = layout.get("pipeline", 1) * layout.get("tensor", 1) * options.data_ranks
            try:
                load_config([draft], [], model_type=ModelConfig, world_size=processes)
            except ConfigError as error:  # without line numbers of the temporary file
                origin = re.compile(rf" \({re.escape(str(draft))}:\d+\)$")
                raise ConfigError(origin.sub("", problem) for problem in error.problems) from error
        if options.out is not None:
            write_text(options.out, text)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if options.out is None:
        print(text, end="")
    print(_report(translation), file=sys.stderr)
    return 0


def _report(translation: Translation) -> str:
    lines = ["assumed:", *(f"  {line}" for line in translation.assumed)]
    if translation.ignored:
        width = max(map(len, translation.ignored))
        lines += ["ignored:", *(f"  {key:<{width}}  {why}" for key, why in sorted(translation.ignored.items()))]
    return "\n".join(lines)


def _ordered(tree: Mapping[str, Any]) -> dict[str, Any]:
    order = ("run", "model", "data", "batch", "optimizer", "schedule", "parallel", "precision", "checkpoint", "logging")
    return {key: tree[key] for key in (*order, *(k for k in tree if k not in order)) if tree.get(key)}


def _parser() -> argparse.ArgumentParser:
    parser = command_line(
        "python -m tools.neox_config",
        "Translate GPT-NeoX configuration files to one of this project, and list the ignored keys with reasons.",
        (
            "examples:\n"
            "  python -m tools.neox_config pythia-410M.yml                      to standard output\n"
            "  python -m tools.neox_config 410M.yml local_setup.yml -o run.yml  later files override earlier ones\n"
            "  python train.py run.yml --dry-run                                parameters, memory, FLOPs"
        ),
    )
    parser.add_argument("files", nargs="+", type=Path, help="configuration files of GPT-NeoX")
    parser.add_argument("-o", "--out", type=Path, help="file to write (default: standard output)")
    parser.add_argument(
        "--vocab-size",
        type=positive,
        default=50304,
        help="rows of the embedding (50304: GPT-NeoX-20B's tokenizer, padded)",
    )
    parser.add_argument(
        "--data-ranks",
        type=positive,
        default=1,
        help="number of data ranks for which the batch size is checked (default 1)",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
