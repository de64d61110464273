"""What a pair of token files was made from: ``{prefix}.json`` beside ``{prefix}.bin`` and ``{prefix}.idx``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .checksum import DamagedDataError, read_json_with_seal, write_sealed
from .tokenizer import Tokenizer, load_tokenizer

_REMEDY = (
    "copy it again, write the token files again (python -m tools.preprocess_data ... --overwrite), or remove it and name"
    " the tokenizer yourself"
)
_TOKENIZER_KEYS = {"type", "path", "hash", "vocab_size", "end_of_document_id"}


def manifest_path(prefix: str | Path) -> Path:
    """The manifest of a prefix."""
    return Path(f"{prefix}.json")


def write_manifest(prefix: str | Path, content: dict[str, Any]) -> None:
    """Write ``{prefix}.json`` with a checksum of its own, whole or not at all."""
    write_sealed(manifest_path(prefix), content)


def read_manifest(prefix: str | Path) -> dict[str, Any] | None:
    """None where there is no manifest, as beside files that other projects wrote. DamagedDataError for one that was damaged.

    A manifest of an earlier version has no checksums, neither of the token files nor of itself.
    """
    path = manifest_path(prefix)
    if not path.is_file():
        return None
    content, has_seal = read_json_with_seal(path, _REMEDY)
    if not has_seal and "checksums" in content:
        raise DamagedDataError(f"{path} has lost its own checksum: {_REMEDY}")
    return content


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
    entry = _tokenizer_entry(prefix, manifest)
    path = None if entry["path"] is None else Path(prefix).parent / entry["path"]
    return load_tokenizer(entry["type"], path)


def check_tokenizer(prefix: str | Path, tokenizer: Tokenizer) -> None:
    """Raises ValueError when the token files were written with another tokenizer; files without a manifest pass."""
    manifest = read_manifest(prefix)
    if manifest is None:
        return
    entry = _tokenizer_entry(prefix, manifest)
    if not same_tokenizer(entry, tokenizer):
        raise ValueError(
            f"{prefix} was written with another tokenizer: {entry['type']} {entry['path'] or ''} ({entry['vocab_size']}"
            f" entries, end of a document {entry['end_of_document_id']}, hash {entry['hash']}); the one given is"
            f" {tokenizer.type} {tokenizer.path or ''} ({tokenizer.vocab_size} entries, end of a document"
            f" {tokenizer.end_of_document_id}, hash {tokenizer.hash}). Set data.tokenizer to the former, or write the"
            " token files again."
        )


def _tokenizer_entry(prefix: str | Path, manifest: dict[str, Any]) -> dict[str, Any]:
    entry = manifest.get("tokenizer")
    if not isinstance(entry, dict) or not entry.keys() >= _TOKENIZER_KEYS:
        keys = ", ".join(sorted(_TOKENIZER_KEYS))
        raise DamagedDataError(f"{manifest_path(prefix)} does not describe a tokenizer by {keys}: {_REMEDY}")
    return entry


def same_tokenizer(entry: Mapping[str, Any], tokenizer: Tokenizer) -> bool:
    """Whether a manifest's entry is of this tokenizer. The hash is of one file; what ends a document may stand beside it."""
    return (entry.get("hash"), entry.get("end_of_document_id")) == (tokenizer.hash, tokenizer.end_of_document_id)
