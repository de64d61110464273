"""Merge GPT-NeoX configuration files, and hold what their translation gives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from megatron_lite.config.neox_hints import NEOX_KEYS
from tools.conversion.neox_keys import ALIASES, KNOWN


@dataclass
class Translation:
    """Hold the translated configuration and what its user should know.

    Attributes:
        spelling: key with underscores -> key as the user wrote it.
        important: ignored keys that can change the course of a run -> reason.
        harmless: ignored keys without an effect on the result.
        assumed: values that the files do not give, and differences of meaning.
    """

    tree: dict[str, Any] = field(default_factory=dict)
    spelling: Mapping[str, str] = field(default_factory=dict)
    important: dict[str, str] = field(default_factory=dict)
    harmless: list[str] = field(default_factory=list)
    assumed: list[str] = field(default_factory=list)

    def set(self, key: str, value: Any) -> None:
        """Write `section.key`."""
        node = self.tree
        *path, last = key.split(".")
        for name in path:
            node = node.setdefault(name, {})
        node[last] = value

    def name(self, key: str) -> str:
        """Return a key of GPT-NeoX as the user wrote it."""
        return self.spelling.get(key, key)

    def error(self, key: str, value: Any, reason: str) -> ValueError:
        """Return the error for the value of a key of GPT-NeoX."""
        return ValueError(f"{self.name(key)} = {value!r}: {reason}")

    def here(self, key: str) -> str:
        """Return a key of this project behind GPT-NeoX's name for it, "num_layers (here model.num_layers)"."""
        names = [name for name, answer in NEOX_KEYS.items() if key in answer.keys]
        given = [name for name in names if name in self.spelling]
        return f"{self.name([*given, *names][0])} (here {key})" if names else key


def check_complete(neox: Mapping[str, Any], files: Sequence[str]) -> None:
    """Raise ValueError if the files describe no model or no training, as one file of a pair."""
    parts = {
        "model": ("num_layers", "hidden_size", "num_attention_heads", "seq_length"),
        "training": ("train_iters", "optimizer"),
    }
    for part, keys in parts.items():
        if missing := [key for key in keys if key not in neox]:
            raise ValueError(
                f"{', '.join(files)}: {', '.join(missing)} missing; name the file that describes the {part} too, for example "
                "configs/125M.yml configs/local_setup.yml"
            )


def merge_files(files: Mapping[str, Mapping[str, Any]]) -> tuple[Translation, dict[str, Any]]:
    """Return the keys of all files with underscores. A later file overrides an earlier one. Unknown keys are refused."""
    out, neox, unknown = Translation(), {}, []
    spelling: dict[str, str] = {}
    out.spelling = spelling
    for file, values in files.items():
        for original, value in values.items():
            name = str(original).replace("-", "_")
            key = ALIASES.get(name, name)
            if key not in KNOWN:
                near = get_close_matches(name, KNOWN, 1)
                style = near[0].replace("_", "-") if near and "-" in str(original) else "".join(near)
                unknown.append(
                    f"{file}: {original} is no key of GPT-NeoX" + (f"; the nearest is {style}" if near else "")
                )
            if key in neox and neox[key] != value and value is not None:
                out.assumed.append(
                    f"{original} = {value!r} of {file} replaces {neox[key]!r}: GPT-NeoX allows one file to set it"
                )
            if value is not None:
                neox[key], spelling[key] = underscored(value), str(original)
    if unknown:
        raise ValueError("\n".join(unknown))
    return out, neox


def underscored(values: Any) -> Any:
    """Return a value with underscores in the keys of its mappings, which GPT-NeoX also writes with dashes."""
    if isinstance(values, Mapping):
        return {str(key).replace("-", "_"): underscored(value) for key, value in values.items()}
    return values
