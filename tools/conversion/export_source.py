"""Compare the source files of an export with the project's, so that the project's own code can load the weights."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

from tools.conversion.flatten_source import flat_source


def check_source(folder: Path, mixers: Collection[str]) -> None:
    """Raise ValueError if a source file in an export differs from what the exporter writes for these mixers.

    Nothing of the folder is run. Line ends do not count, and a file that is missing cannot differ.
    """
    own = flat_source(mixers)
    found = sorted(folder.glob("*.py"))
    differs = [path.name for path in found if path.read_bytes().splitlines() != _lines(own.get(path.name))]
    if differs:
        names = ", ".join(differs[:4]) + (f" and {len(differs) - 4} more" if len(differs) > 4 else "")
        raise ValueError(
            f"{folder}: {len(differs)} of its {len(found)} files of source are not this version's ({names}): another "
            "version of the project wrote them, or they were changed, and the model may be another one. None was run. "
            "Export the run again with this version, or look through the files and let them run with --trust-remote-code of "
            "tools.convert_hf import or tools.serve"
        )


def model_class(folder: Path, task: str, *, trust_remote_code: bool) -> Any:
    """Return the class whose `from_pretrained` loads an export for a task ("CausalLM", "MaskedLM", ...).

    It is the project's own, or transformers' auto class, which runs the folder's source, where that is trusted. Raises
    ValueError as `check_source`.
    """
    if trust_remote_code:
        import transformers

        return getattr(transformers, f"AutoModelFor{task}")
    from models.hf import modeling_metalion

    check_source(folder, modeling_metalion.MetalionConfig.from_pretrained(folder).mixers)
    return getattr(modeling_metalion, f"MetalionFor{task}")


def _lines(text: str | None) -> list[bytes] | None:
    return None if text is None else text.encode().splitlines()
