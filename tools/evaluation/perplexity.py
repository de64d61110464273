"""Measure perplexity and bits per byte on a text: token files, raw files, or the validation set of a run.

The text is one stream, cut into pieces of `sequence_length` tokens. Every token is predicted once; the first token of a
piece from one token only. Ends of documents are predicted too. bits per byte = total nll / ln 2 / bytes compares models with
different tokenizers, and compressors. With `data.reset_at_documents` each document starts with an empty state, as in
training.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from data.corpus.discovery import source_files
from data.corpus.readers import read_documents
from data.datasets.causal import SequentialDataset
from data.indexed import IndexedTokens, IndexedWriter, token_dtype
from data.loader import batches
from data.manifest import check_tokenizer, read_manifest
from data.progress import ProgressBar
from data.tokenizer import Tokenizer
from tools.evaluation.request_cache import RequestCache
from tools.loading.model import LoadedModel
from tools.loading.token_data import data_config, prepare_token_files

if TYPE_CHECKING:
    from tools.evaluation.huggingface_text import HuggingFaceText, HuggingFaceTokens

    TextModel = LoadedModel | HuggingFaceText


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

    Raises ValueError for files of another tokenizer or without text, FileNotFoundError and ValueError as `IndexedTokens`.
    """
    check_tokenizer(prefix, tokenizer)
    file = IndexedTokens(prefix)
    size = (read_manifest(prefix) or {}).get("bytes")
    if not isinstance(size, int):
        size = sum(_decoded_bytes(file[sequence], tokenizer, prefix) for sequence in range(len(file)))
    if not size:
        raise ValueError(f"{prefix} holds no text: name another with --data")
    return TokenText(name or prefix.name, prefix, size, file.num_documents)


def raw_text(path: str, tokenizer: Tokenizer | HuggingFaceTokens, folder: Path, *, text_key: str = "text") -> TokenText:
    """Tokenise a raw file, or a folder or glob of them, into `folder`. Raises as `source_files` and `read_documents`."""
    prefix = folder / f"text{len(list(folder.glob('*.idx')))}"
    size = documents = 0
    with IndexedWriter(prefix, token_dtype(tokenizer.vocab_size)) as writer:
        for document in read_documents(source_files(path), text_key):
            writer.add_document(np.array([*tokenizer.encode(document.text), tokenizer.end_of_document_id]))
            size += len(document.text.encode())
            documents += 1
    if not size:
        raise ValueError(f"{path} holds no text: name another with --data")
    return TokenText(path, prefix, size, documents)


@torch.inference_mode()
def perplexity(
    loaded: TextModel,
    text: TokenText,
    *,
    sequence_length: int | None = None,
    stride: int | None = None,
    batch_size: int = 8,
    progress: bool = True,
    cache: RequestCache | None = None,
) -> dict[str, float]:
    """Measure a model on a text.

    Args:
        loaded: a model of this project, or of Hugging Face.
        stride: tokens between two pieces. The tokens that a piece shares with the previous one are context only. None:
            pieces share no tokens.
        sequence_length: tokens per piece; None for the trained length.
        batch_size: pieces per batch; changes only the speed.
        cache: keeps the result of every batch, so that an interrupted measurement resumes.

    Returns:
        loss (nats per token), perplexity, bits_per_byte; tokens, bytes and documents of the text; sequence_length;
        seconds.
    """
    length = sequence_length or int(loaded.config["batch"]["sequence_length"])
    started = time.perf_counter()
    nll = weight = 0.0
    for batch in text_batches(loaded, text, length, batch_size, stride=stride, progress=progress):
        nll += cached(cache, "nll", batch, lambda batch=batch: loaded.model(**batch).item())
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
        **({} if stride is None else {"stride": stride}),
        "seconds": round(time.perf_counter() - started, 3),
    }


class StridedDataset:
    """Return windows of a token file that overlap. Every token is a label once: in the first window that has it.

    The stream is `first_token` followed by all tokens. The last window is padded with loss weight 0.
    """

    def __init__(self, prefix: Path, *, sequence_length: int, stride: int, first_token: int) -> None:
        file = IndexedTokens(prefix)
        sequences = [np.asarray(file[number], np.int64) for number in range(len(file))]
        self._stream = np.concatenate([np.array([first_token]), *sequences])
        self._length, self._stride, self._padding = sequence_length, stride, first_token

    def __len__(self) -> int:
        return 1 + max(0, -(-(len(self._stream) - 1 - self._length) // self._stride))

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        begin = number * self._stride
        piece = self._stream[begin : begin + self._length + 1]
        padded = np.full(self._length + 1, self._padding)
        padded[: len(piece)] = piece
        weight = torch.zeros(self._length)
        weight[self._length - self._stride if number else 0 : len(piece) - 1] = 1.0
        return {"tokens": torch.from_numpy(padded[:-1]), "labels": torch.from_numpy(padded[1:]), "loss_weight": weight}


def cached(cache: RequestCache | None, kind: str, batch: Mapping[str, torch.Tensor], compute: Callable[[], Any]) -> Any:
    """Return the JSON value that `compute` gives for a batch, from the cache if it has the value."""
    if cache is None:
        return compute()
    key = cache.key(kind, *(batch[name].cpu().numpy() for name in sorted(batch)))
    value = cache.get(key)
    if value is None:
        value = compute()
        cache.add([(key, value)])
    return value


def text_batches(
    loaded: TextModel,
    text: TokenText,
    length: int,
    batch_size: int,
    *,
    stride: int | None = None,
    progress: bool = True,
) -> Iterator[dict[str, torch.Tensor]]:
    """Yield a text in batches of pieces, [batch_size, length] each, on the device of the model.

    With `data.reset_at_documents` a batch is one row with "cu_seqlens", as in training.
    """
    first_token, reset = loaded.tokenizer.end_of_document_id, loaded.config["data"]["reset_at_documents"]
    pieces: SequentialDataset | StridedDataset
    if stride is None:
        pieces = SequentialDataset(
            text.prefix, sequence_length=length, first_token=first_token, reset_at_documents=reset
        )
    else:
        _check_stride(stride, length, reset)
        pieces = StridedDataset(text.prefix, sequence_length=length, stride=stride, first_token=first_token)
    steps = batches(pieces, global_batch_size=batch_size, micro_batch_size=batch_size, fill_last=True)
    total = -(-len(pieces) // batch_size)
    for (batch,) in ProgressBar(steps, total=total, desc=text.name, unit="batch", disable=not progress, leave=False):
        yield {key: value.to(loaded.device) for key, value in batch.items()}


def _check_stride(stride: int, length: int, reset_at_documents: bool) -> None:
    if reset_at_documents:
        raise ValueError(
            f"--stride {stride}: the run has data.reset_at_documents, so that documents share no context; leave --stride out"
        )
    if stride > length:
        raise ValueError(f"--stride {stride}: allowed are 1 to {length}, the tokens per piece (--sequence-length)")


def _decoded_bytes(tokens: Sequence[int] | np.ndarray, tokenizer: Tokenizer, prefix: Path) -> int:
    ids = np.asarray(tokens)
    if ids.size and int(ids.max()) >= tokenizer.vocab_size:
        raise ValueError(
            f"{prefix} holds token {int(ids.max())} and the checkpoint's tokenizer has {tokenizer.vocab_size} entries: "
            "prepare it with the checkpoint's tokenizer"
        )
    return len(tokenizer.decode(ids[ids != tokenizer.end_of_document_id].tolist()).encode())
