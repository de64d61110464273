"""Measure perplexity and bits per byte on a text: token files, raw files, or the validation set of a run.

The text is one stream, cut into pieces of `sequence_length` tokens. Every token is predicted once; the first token of a
piece from one token only. Ends of documents are predicted too. bits per byte = total nll / ln 2 / bytes compares models with
different tokenizers, and compressors. With `data.reset_at_documents` each document starts with an empty state, as in
training.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from data.corpus.discovery import source_files
from data.corpus.readers import read_documents
from data.datasets.causal import SequentialDataset
from data.indexed import IndexedTokens, IndexedWriter, token_dtype
from data.loader import batches
from data.manifest import check_tokenizer, read_manifest
from data.tokenizer import Tokenizer
from tools.loading.model import LoadedModel
from tools.loading.token_data import data_config, prepare_token_files


@dataclass(frozen=True)
class TokenText:
    """A text as token files.

    Attributes:
        name: its name in tables.
        prefix: the path of its .bin and .idx, without the ending.
        bytes: bytes of its UTF-8 text, without the ends of documents.
        documents: number of documents.
    """

    name: str
    prefix: Path
    bytes: int
    documents: int


def validation_text(loaded: LoadedModel) -> TokenText:
    """Return the validation set of the run.

    Raises:
        ValueError: the run has none, or its corpus has another tokenizer.
        FileNotFoundError: its files are missing.
    """
    data = data_config(loaded.config)
    prefix: Path | None
    if data.corpus is not None:
        prefix = prepare_token_files(data).validation_prefix
    else:
        prefix = None if data.validation is None else Path(data.validation)
    if prefix is None:
        raise ValueError(f"{loaded.run} was trained without a validation set: name a text with --data")
    return token_file_text(prefix, loaded.tokenizer, name="validation")


def token_file_text(prefix: Path, tokenizer: Tokenizer, name: str | None = None) -> TokenText:
    """Return token files as a text. Without a manifest, bytes are counted by decoding every document.

    Raises ValueError for files of another tokenizer, FileNotFoundError and ValueError as `IndexedTokens`.
    """
    check_tokenizer(prefix, tokenizer)
    file = IndexedTokens(prefix)
    size = (read_manifest(prefix) or {}).get("bytes")
    if not isinstance(size, int):
        size = sum(_decoded_bytes(file[sequence], tokenizer, prefix) for sequence in range(len(file)))
    return TokenText(name or prefix.name, prefix, size, file.num_documents)


def raw_text(path: str, tokenizer: Tokenizer, folder: Path, *, text_key: str = "text") -> TokenText:
    """Tokenise a raw file, or a folder or glob of them, into `folder`. Raises as `source_files` and `read_documents`."""
    prefix = folder / f"text{len(list(folder.glob('*.idx')))}"
    size = documents = 0
    with IndexedWriter(prefix, token_dtype(tokenizer.vocab_size)) as writer:
        for document in read_documents(source_files(path), text_key):
            writer.add_document(np.array([*tokenizer.encode(document.text), tokenizer.end_of_document_id]))
            size += len(document.text.encode())
            documents += 1
    if not size:
        raise ValueError(f"{path} holds no text")
    return TokenText(path, prefix, size, documents)


@torch.inference_mode()
def perplexity(
    loaded: LoadedModel,
    text: TokenText,
    *,
    sequence_length: int | None = None,
    batch_size: int = 8,
    progress: bool = True,
) -> dict[str, float]:
    """Measure a model on a text.

    Args:
        sequence_length: tokens per piece; None for the trained length.
        batch_size: pieces per batch; changes only the speed.

    Returns:
        loss (nats per token), perplexity, bits_per_byte; tokens, bytes and documents of the text; sequence_length;
        seconds.
    """
    length = sequence_length or int(loaded.config["batch"]["sequence_length"])
    reset = loaded.config["data"]["reset_at_documents"]
    started = time.perf_counter()
    nll = weight = 0.0
    for batch in text_batches(loaded, text, length, batch_size, reset_at_documents=reset, progress=progress):
        nll += loaded.model(**batch).item()
        weight += batch["loss_weight"].sum().item()
    loss = nll / weight
    return {
        "loss": loss,
        "perplexity": math.exp(min(loss, 700.0)),
        "bits_per_byte": nll / math.log(2) / text.bytes,
        "tokens": int(weight),
        "bytes": text.bytes,
        "documents": text.documents,
        "sequence_length": length,
        "seconds": round(time.perf_counter() - started, 3),
    }


def text_batches(
    loaded: LoadedModel,
    text: TokenText,
    length: int,
    batch_size: int,
    *,
    reset_at_documents: bool = False,
    progress: bool = True,
) -> Iterator[dict[str, torch.Tensor]]:
    """Yield a text in batches of pieces, [batch_size, length] each, on the device of the model."""
    from tqdm import tqdm

    pieces = SequentialDataset(
        text.prefix,
        sequence_length=length,
        first_token=loaded.tokenizer.end_of_document_id,
        reset_at_documents=reset_at_documents,
    )
    steps = batches(pieces, global_batch_size=batch_size, micro_batch_size=batch_size, fill_last=True)
    total = -(-len(pieces) // batch_size)
    for (batch,) in tqdm(steps, total=total, desc=text.name, unit="batch", disable=not progress, leave=False):
        yield {key: value.to(loaded.device) for key, value in batch.items()}


def _decoded_bytes(tokens: Sequence[int] | np.ndarray, tokenizer: Tokenizer, prefix: Path) -> int:
    ids = np.asarray(tokens)
    if ids.size and int(ids.max()) >= tokenizer.vocab_size:
        raise ValueError(
            f"{prefix} holds token {int(ids.max())} and the checkpoint's tokenizer has {tokenizer.vocab_size} entries: "
            f"prepare it with the checkpoint's tokenizer"
        )
    return len(tokenizer.decode(ids[ids != tokenizer.end_of_document_id].tolist()).encode())
