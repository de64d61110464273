"""Recognise a YAML file of another program by its keys."""

from __future__ import annotations

from collections.abc import Container

from .files import Sources

# Keys that only the files of one program have together -> the command that reads such a file.
_COMMANDS = {
    ("suite",): "python eval.py --suite {value} --config {file}",
    ("columns",): "python eval.py RUN --suite {file}",
    ("models", "name"): "python -m tools.compare {file}",
    ("tasks", "max_length"): "python -m tools.finetune_glue RUN --recipe {file}",
    ("model", "optimizer"): "python train.py {file}",
}


def other_program(sources: Sources, known: Container[str]) -> list[str]:
    """Return one problem that names the program of the file that was read, or an empty list.

    known: the top-level keys of the program that reads the file.
    """
    for keys, command in _COMMANDS.items():
        unknown = [key for key in keys if key not in known]
        if not unknown or not all(key in sources.tree for key in keys):
            continue
        file, colon, _ = (sources.origin((unknown[0],)) or "").rpartition(":")
        if colon:  # no override
            words = command.format(file=file, value=sources.tree[keys[0]])
            return [f"{file}: the key {unknown[0]} belongs to another program: {words}"]
    return []
