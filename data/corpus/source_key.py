"""Check that the records name their source, before a whole corpus is read."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from .discovery import SourceFile, shown_files
from .readers import SOURCE_KEY, Block, Document, open_parquet, open_saved, parse_block, read_blocks


def check_source_key(source_key: str, text_keys: Sequence[str], files: Sequence[SourceFile]) -> None:
    """Raise ValueError if no document in the first block (about 1 MiB of text) of any file names its source.

    The default key may be absent. Files whose first block holds no document are left to the errors of the job itself.
    text_keys: keys of the text. Raises ValueError as `parse_block` does.
    """
    if source_key == SOURCE_KEY:
        return
    keys: list[str] | None = None
    for file in files:
        if file.format in ("text", "python"):
            keys = keys or []
            continue
        for block, text_key in itertools.product(itertools.islice(read_blocks([file]), 1), text_keys):
            documents = parse_block(block, text_key, source_key).documents
            if any(document.source is not None for document in documents):
                return
            if documents:
                keys = [*(keys or []), *_keys(block, documents[0])]
    if keys is not None:
        known = f"their keys are {', '.join(dict.fromkeys(keys))}" if keys else "plain text has no keys"
        raise ValueError(
            f"source key {source_key!r} (data.source_key, --source-key): the first documents of {shown_files(files)} have no "
            f"text under it; {known}. Name the key of the source, with dots for inner objects, or leave the source key out"
        )


def _keys(block: Block, document: Document) -> list[str]:
    """Return the keys of a document's record, with dots for those of inner objects."""
    if block.file.format in ("parquet", "saved dataset"):
        path = block.file.path
        schema = open_parquet(path).schema_arrow if block.file.format == "parquet" else open_saved(path).data.schema
        return [inner.name for column in schema for inner in column.flatten()]
    return list(_dotted(json.loads(block.lines[document.position - block.first])))


def _dotted(record: Mapping[str, Any]) -> Iterator[str]:
    for key, value in record.items():
        if isinstance(value, dict) and value:
            yield from (f"{key}.{inner}" for inner in _dotted(value))
        else:
            yield key
