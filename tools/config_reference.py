"""Write configs/README.md: every configuration key with its type, default and meaning, from the schema.

python -m tools.config_reference            # write the file
python -m tools.config_reference --check    # exit with status 1 if the file is out of date
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_lite.config.derived_values import DERIVED_KEYS, EQUATION
from megatron_lite.config.describe import REQUIRED, Key, keys_of, leaves
from megatron_lite.config.files import CONFIGS
from megatron_lite.config.schema import Config
from tools.cli.arguments import command, command_line
from tools.reporting.tables import markdown_table

INTRODUCTION = f"""\
# Configuration reference

`python -m tools.config_reference` generates this file from the schema. Do not edit it.

    python train.py                                                     # configs/default.yml
    python train.py configs/metala_360m.yml configs/cluster/1gpu.yml    # merged from left to right
    python train.py configs/metala_360m.yml optimizer.lr=2e-4 run.name=trial data.tokenizer.path=/disk/tokenizer.json
    python train.py configs/metala_360m.yml --print-config              # every value and its origin

- A file may begin with `include: [model/metala_360m.yml, data/pile.yml]`. Its values override those of these files. Names are
  relative to its own folder or to `configs/`.
- Sections are merged key by key. A list replaces the earlier list. `null` restores the default of a key.
- `{EQUATION}`: give two of the three, and the third follows.
  Data ranks are processes / (parallel.tensor x parallel.pipeline x parallel.context).
- Unknown keys are refused with the nearest names, GPT-NeoX keys with their name here.
"""


def config_reference(model_type: type, mixer_options: Mapping[str, type], configs: Path) -> str:
    """Return the reference as Markdown.

    model_type: the dataclass of the section `model`. mixer_options: mixer name -> dataclass of its options.
    configs: the folder whose files are listed.
    """
    parts = [INTRODUCTION, "\n## Files\n\n", _files(configs)]
    rows = list(leaves(Config[model_type]))
    for name, section in keys_of(Config[model_type]).items():
        parts.append(f"\n## {name}\n\n{_plain(section.doc)}\n\n")
        parts.append(_table([(path, key) for path, key in rows if path[0] == name]))
        if name == "model":
            for mixer, options in mixer_options.items():
                above = ("model", "mixer_options", mixer)
                parts.append(f"\n### {'.'.join(above)}\n\n{_plain(options.__doc__)}\n\n")
                parts.append(_table(leaves(options, above)))
    return "".join(parts)


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Write or check configs/README.md. Returns the exit status."""
    parser = command_line("python -m tools.config_reference", "Write configs/README.md from the schema.")
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit with status 1 if the file is out of date"
    )
    check = parser.parse_args(arguments).check
    target = CONFIGS / "README.md"
    text = project_reference()
    if check:
        stale = not target.exists() or target.read_text(encoding="utf-8") != text
        if stale:
            print("configs/README.md is stale: run python -m tools.config_reference", file=sys.stderr)
        return int(stale)
    target.write_text(text, encoding="utf-8")
    print(f"wrote {target}")
    return 0


def project_reference() -> str:
    """Return the reference of this project's model and mixers."""
    from models.config import ModelConfig
    from models.mixers import MIXERS

    return config_reference(ModelConfig, {name: mixer.Options for name, mixer in MIXERS.items()}, CONFIGS)


def _files(configs: Path) -> str:
    rows = []
    for path in sorted(configs.rglob("*.yml"), key=lambda path: (len(path.parts), path)):
        sentence = _first_sentence(path.read_text(encoding="utf-8"))
        rows.append([f"[{path.relative_to(configs)}]({path.relative_to(configs)})", sentence])
    return markdown_table(["file", "what"], rows, text_columns=2) + "\n"


def _first_sentence(text: str) -> str:
    """Return the first sentence of the comment at the beginning of a file."""
    first, *others = text.splitlines()
    sentence = first.removeprefix("#").strip()
    for line in others:
        is_text = line.startswith("# ") and not line.startswith("#  ")  # commands are indented
        if sentence.endswith((".", ":")) or not is_text:
            break
        more, stop, _ = line.removeprefix("# ").partition(". ")
        sentence += f" {more}{stop.strip()}"
        if stop:
            break
    return sentence.removesuffix(":")


def _table(rows: Iterable[tuple[tuple[str, ...], Key]]) -> str:
    cells = [[f"`{'.'.join(path)}`", key.allowed, _default(path, key.default), key.doc] for path, key in rows]
    return markdown_table(["key", "allowed", "default", "meaning"], cells, text_columns=4) + "\n"


def _default(path: tuple[str, ...], default: Any) -> str:
    if default is REQUIRED:
        return "derived" if path in DERIVED_KEYS else "**required**"
    return f"`{_yaml(default)}`"


def _yaml(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, tuple | list):
        return "[" + ", ".join(map(_yaml, value)) + "]"
    if isinstance(value, str) and value != value.strip():
        return f'"{value}"'
    return str(value)


def _plain(doc: str | None) -> str:
    """Return a docstring as one paragraph."""
    return " ".join((doc or "").split())


if __name__ == "__main__":
    sys.exit(main())
