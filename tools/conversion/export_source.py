"""Compare the source files of an export with the project's, so that the project's own code can load the weights."""

from __future__ import annotations

import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

from tools.conversion.flatten_source import flat_source


def check_source(folder: Path, mixers: Collection[str], *, images: bool = False) -> None:
    """Raise ValueError if a source file in an export differs from what the exporter writes for these mixers.

    images: the export is an image classifier. No file of the folder is executed. Line ends are ignored, and missing files are
    not compared.
    """
    expected = flat_source(mixers, images=images)
    files = sorted(folder.glob("*.py"))
    differing = [path.name for path in files if path.read_bytes().splitlines() != _lines(expected.get(path.name))]
    if differing:
        names = ", ".join(differing[:4]) + (f" and {len(differing) - 4} more" if len(differing) > 4 else "")
        raise ValueError(
            f"{folder}: {len(differing)} of its {len(files)} source files differ from this version's ({names}). Another "
            "version of the project wrote them, or they were changed. None was executed. Export the run again with this "
            "version, or read the files and allow them with --trust-remote-code of tools.convert_hf import or tools.serve"
        )


def model_class(folder: Path, task: str, *, trust_remote_code: bool) -> Any:
    """Return the class whose `from_pretrained` loads an export for a task ("CausalLM", "MaskedLM", ...).

    trust_remote_code: return transformers' auto class, which executes the folder's source, not the project's class. Raises
    ValueError as `check_source`.
    """
    limit_progress_bars()
    if trust_remote_code:
        import transformers

        return getattr(transformers, f"AutoModelFor{task}")
    from models.hf import modeling_metalion

    config = modeling_metalion.MetalionConfig.from_pretrained(folder)
    check_source(folder, config.mixers, images=config.image_size is not None)
    return getattr(modeling_metalion, f"MetalionFor{task}")


def limit_progress_bars() -> None:
    """Disable transformers' progress bars unless standard error is a terminal. In a file they leave parts of lines."""
    if not sys.stderr.isatty():
        from transformers.utils import logging

        logging.disable_progress_bar()


def _lines(text: str | None) -> list[bytes] | None:
    return None if text is None else text.encode().splitlines()
