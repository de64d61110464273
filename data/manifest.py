"""What a pair of token files was made from: ``{prefix}.json`` beside ``{prefix}.bin`` and ``{prefix}.idx``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .atomic_io import read_json, written_aside
from .tokenizer import Tokenizer, load_tokenizer


def manifest_path(prefix: str | Path) -> Path:
    """The manifest of a prefix."""
    return Path(f"{prefix}.json")


def write_manifest(prefix: str | Path, content: dict[str, Any]) -> None:
    """Write ``{prefix}.json``, whole or not at all."""
    with written_aside(manifest_path(prefix)) as file:
        file.write((json.dumps(content, indent=2) + "\n").encode())


def read_manifest(prefix: str | Path) -> dict[str, Any] | None:
    """None where there is no manifest, as beside files that other projects wrote. ValueError for one that was damaged."""
    path = manifest_path(prefix)
    return read_json(path, "copy it again, or remove it and name the tokenizer yourself") if path.is_file() else None


def describe_tokenizer(tokenizer: Tokenizer, folder: Path) -> dict[str, Any]:
    """The manifest's entry; a tokenizer inside ``folder`` is named relative to it, so that the folder can be moved."""
    path = None
    if tokenizer.path is not None:
        full = Path(tokenizer.path).resolve()
        path = str(full.relative_to(folder.resolve()) if full.is_relative_to(folder.resolve()) else full)
    return {
        "type": tokenizer.type,
        "path": path,
        "hash": tokenizer.hash,
        "vocab_size": tokenizer.vocab_size,
        "end_of_document_id": tokenizer.end_of_document_id,
    }


def manifest_tokenizer(prefix: str | Path) -> Tokenizer | None:
    """The tokenizer that the manifest names; None without a manifest. Raises FileNotFoundError when it has moved."""
    manifest = read_manifest(prefix)
    if manifest is None:
        return None
    entry = manifest["tokenizer"]
    path = None if entry["path"] is None else Path(prefix).parent / entry["path"]
    return load_tokenizer(entry["type"], path)


def check_tokenizer(prefix: str | Path, tokenizer: Tokenizer) -> None:
    """Raises ValueError when the token files were written with another tokenizer; files without a manifest pass."""
    manifest = read_manifest(prefix)
    if manifest is None:
        return
    entry = manifest["tokenizer"]
    if not same_tokenizer(entry, tokenizer):
        raise ValueError(
            f"{prefix} was written with another tokenizer: {entry['type']} {entry['path'] or ''} ({entry['vocab_size']}"
            f" entries, end of a document {entry['end_of_document_id']}, hash {entry['hash']}); the one given is"
            f" {tokenizer.type} {tokenizer.path or ''} ({tokenizer.vocab_size} entries, end of a document"
            f" {tokenizer.end_of_document_id}, hash {tokenizer.hash}). Set data.tokenizer to the former, or write the"
            " token files again."
        )


def same_tokenizer(entry: Mapping[str, Any], tokenizer: Tokenizer) -> bool:
    """Whether a manifest's entry is of this tokenizer. The hash is of one file; what ends a document may stand beside it."""
    return (entry["hash"], entry["end_of_document_id"]) == (tokenizer.hash, tokenizer.end_of_document_id)
