"""Read and write the manifest ``{prefix}.json`` of a token file: its tokenizer, settings, inputs and checksums."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .checksum import DamagedDataError, read_json_with_seal, write_sealed
from .tokenizer import Tokenizer, load_tokenizer

_REMEDY = (
    "copy it again, write the token files again (python -m tools.preprocess_data ... --overwrite), or remove it and set"
    " data.tokenizer"
)
_TOKENIZER_KEYS = {"type", "path", "hash", "vocab_size", "end_of_document_id"}


def manifest_path(prefix: str | Path) -> Path:
    """Return the path of the manifest of a prefix."""
    return Path(f"{prefix}.json")


def write_manifest(prefix: str | Path, content: dict[str, Any]) -> None:
    """Write ``{prefix}.json`` with a checksum of its own, atomically."""
    write_sealed(manifest_path(prefix), content)


def read_manifest(prefix: str | Path) -> dict[str, Any] | None:
    """Return the manifest of a prefix; None if there is none, as for token files of other projects.

    Raises DamagedDataError if the manifest was changed. Manifests of earlier versions have no checksums.
    """
    path = manifest_path(prefix)
    if not path.is_file():
        return None
    content, has_seal = read_json_with_seal(path, _REMEDY)
    if not has_seal and "checksums" in content:
        raise DamagedDataError(f"{path} has checksums of the token files, but not its own: {_REMEDY}")
    return content


def describe_tokenizer(tokenizer: Tokenizer, folder: Path) -> dict[str, Any]:
    """Return the manifest's entry of a tokenizer. A path inside ``folder`` is stored relative to it, so the folder can move."""
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
    """Return the tokenizer that the manifest names; None without a manifest. Raises FileNotFoundError if its file is missing."""
    manifest = read_manifest(prefix)
    if manifest is None:
        return None
    entry = tokenizer_entry(manifest_path(prefix), manifest)
    path = None if entry["path"] is None else Path(prefix).parent / entry["path"]
    return load_tokenizer(entry["type"], path)


def check_tokenizer(prefix: str | Path, tokenizer: Tokenizer) -> None:
    """Raise ValueError if the token files were written with another tokenizer. Files without a manifest pass."""
    manifest = read_manifest(prefix)
    if manifest is None:
        return
    entry = tokenizer_entry(manifest_path(prefix), manifest)
    if not same_tokenizer(entry, tokenizer):
        raise ValueError(
            f"{prefix} was written with another tokenizer: {entry['type']} {entry['path'] or ''} ({entry['vocab_size']}"
            f" entries, end of a document {entry['end_of_document_id']}, hash {entry['hash']}); the configured one is"
            f" {tokenizer.type} {tokenizer.path or ''} ({tokenizer.vocab_size} entries, end of a document"
            f" {tokenizer.end_of_document_id}, hash {tokenizer.hash}). Set data.tokenizer to the tokenizer of the"
            " token files, or write them again."
        )


def tokenizer_entry(path: Path, manifest: Mapping[str, Any], remedy: str = _REMEDY) -> dict[str, Any]:
    """Return the tokenizer's entry of the manifest at ``path``. Raises DamagedDataError if a key of it is missing."""
    entry = manifest.get("tokenizer")
    if not isinstance(entry, dict) or not entry.keys() >= _TOKENIZER_KEYS:
        keys = ", ".join(sorted(_TOKENIZER_KEYS))
        raise DamagedDataError(f"{path} does not describe a tokenizer by {keys}: {remedy}")
    return entry


def same_tokenizer(entry: Mapping[str, Any], tokenizer: Tokenizer) -> bool:
    """Return whether a manifest's entry describes this tokenizer.

    The end-of-document id is compared too: the hash covers one file, and another file may name that token.
    """
    return (entry.get("hash"), entry.get("end_of_document_id")) == (tokenizer.hash, tokenizer.end_of_document_id)
