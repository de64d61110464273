"""Write a data card beside token files: sources, licences, sizes, and the documents that filters removed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ..atomic_io import write_text
from ..corpus.document_sources import allowed_sources, read_sources
from ..indexed import IndexedTokens
from .filters import excluded


def data_card_path(prefix: str | Path) -> Path:
    """Return the path of the data card of a prefix."""
    return Path(f"{prefix}.md")


def write_data_cards(manifests: Mapping[Path, Mapping[str, Any]], licences: Mapping[str, str]) -> list[Path]:
    """Write ``{prefix}.md`` for the manifest of each prefix, and return the paths.

    licences: licence per source name. Raises ValueError for a name that no document has; excluded sources may be named.
    """
    known = {name for manifest in manifests.values() for name in manifest["sources"]}
    removed = {reason for manifest in manifests.values() for reason in manifest["skipped"]}
    if unknown := sorted(name for name in licences.keys() - known if excluded(name) not in removed):
        documents = sum(manifest["documents"] for manifest in manifests.values())
        raise ValueError(
            f"the licences name the source {', '.join(map(repr, unknown))}, which 0 of {documents:,} documents have;"
            f" {allowed_sources(unknown, known)}."
            " Correct the licences and give the same command again; it keeps the token files, which are complete"
        )
    return [_write_data_card(prefix, manifest, licences) for prefix, manifest in manifests.items()]


def _write_data_card(prefix: Path, manifest: Mapping[str, Any], licences: Mapping[str, str]) -> Path:
    file = IndexedTokens(prefix)
    names, ids = read_sources(prefix, len(file))
    documents = np.bincount(ids, minlength=len(names))
    tokens = np.bincount(ids, file.sizes, minlength=len(names)).astype(np.int64)
    sizes = manifest.get("source_bytes") or [manifest["bytes"]]
    rows = sorted(zip(names, documents, tokens, sizes, strict=True), key=lambda row: -row[2])
    path = manifest["tokenizer"]["path"]
    tokenizer = " ".join([manifest["tokenizer"]["type"], *([Path(path).name] if path else [])])
    lines = [
        f"# {prefix.name.removesuffix('_document')}",
        "",
        f"{manifest['documents']:,} documents, {manifest['tokens']:,} tokens, {manifest['bytes']:,} bytes of text,"
        f" {manifest['bytes_per_token']:.3f} bytes per token. Tokenizer: {tokenizer},"
        f" {manifest['tokenizer']['vocab_size']:,} entries, hash {manifest['tokenizer']['hash']}.",
        "",
        "## Sources",
        "",
        "| source | licence | documents | tokens | share of tokens | bytes per token |",
        "|---|---|---:|---:|---:|---:|",
        *(
            f"| {_cell(name)} | {_cell(licences.get(name, 'not given'))} | {count:,} | {length:,} |"
            f" {length / manifest['tokens']:.1%} | {size / max(1, length):.3f} |"
            for name, count, length, size in rows
        ),
        "",
        "## Removed documents",
        "",
        *_removed_documents(manifest["skipped"]),
        "",
        "## Settings",
        "",
        "| setting | value |",
        "|---|---|",
        *(f"| {name} | {_cell(value)} |" for name, value in manifest.get("settings", {}).items()),
        f"| input files | {manifest['files']:,} |",
    ]
    card = data_card_path(prefix)
    write_text(card, "\n".join(lines) + "\n")
    return card


def _removed_documents(counts: Mapping[str, int]) -> list[str]:
    """Return the lines of the section on removed documents. counts: documents per reason."""
    if not counts:
        return ["No document was removed."]
    return [
        "Counts cover all outputs of the job that wrote this file. A document counts under the first reason.",
        "",
        "| reason | documents |",
        "|---|---:|",
        *(f"| {_cell(reason)} | {count:,} |" for reason, count in counts.items()),
    ]


def _cell(value: Any) -> str:
    """Return a value as text that stays in one cell of a Markdown table."""
    return " ".join(str(value).split()).replace("|", "\\|")
