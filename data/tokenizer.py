"""Load tokenizers (SentencePiece, Hugging Face JSON, BERT WordPiece, bytes) behind one interface.

Start with ``load_tokenizer(type, path)``. ``data.train_sentencepiece`` trains a model from text.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from .atomic_io import read_json

TOKENIZER_TYPES = ("sentencepiece", "hf", "gpt2", "wordpiece", "bytes")

END_OF_DOCUMENT = "<|endoftext|>"
SPACE_MARK = "\u2581"  # the character that SentencePiece uses for a space
SPACE_MARK_BYTES = SPACE_MARK.encode()


class Tokenizer(Protocol):
    """Interface of all tokenizers.

    vocab_size: number of ids. end_of_document_id: ends a document. hash: identifies the tokenization.
    mask_id: the mask token; without one, an entry that no text contains, or the first row after the vocabulary.
    begin_id: ``[CLS]``, or None. special_ids: ids that are never masked. ``piece(id)``: text of one id.

    ``decode(encode(text)) == text`` holds for "bytes" and for SentencePiece models trained with this project.
    """

    type: str
    path: str | None
    vocab_size: int
    end_of_document_id: int
    mask_id: int
    begin_id: int | None
    pad_id: int
    special_ids: tuple[int, ...]
    hash: str

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...

    def piece(self, id: int) -> str: ...

    def encode_batch(self, texts: Sequence[str], threads: int = 1) -> list[NDArray]:
        """Return the ids of each text as an integer array [n], independent of the number of threads."""
        ...


def load_tokenizer(type: str, path: str | Path | None = None) -> Tokenizer:
    """Return a tokenizer by type and file.

    sentencepiece: a ``.model`` file. hf: a ``tokenizer.json`` or its folder. gpt2: GPT-2's ``vocab.json`` or its folder, with
    the merges beside it. wordpiece: a BERT ``vocab.txt`` or its folder. bytes: no file; ids 0 to 255 are bytes and 256 ends a
    document.

    Raises ValueError for an unknown type, a missing path, a path of bytes or a file of another type, and FileNotFoundError if the
    file does not exist.
    """
    if type not in TOKENIZER_TYPES:
        raise ValueError(f"tokenizer type {type!r} is unknown; allowed: {', '.join(TOKENIZER_TYPES)}")
    if type == "bytes":
        if path is not None:
            raise ValueError(
                f"{path}: the tokenizer bytes has no file; leave it out (data.tokenizer.path, or --vocab-file)"
            )
        return ByteTokenizer()
    if path is None:
        raise ValueError(f"a tokenizer of type {type!r} needs a path (data.tokenizer.path, or --vocab-file)")
    if type == "sentencepiece":
        return SentencePieceTokenizer(_file(path, "tokenizer.model"))
    if type == "hf":
        return HuggingFaceTokenizer(_file(path, "tokenizer.json"))
    if type == "gpt2":
        return GPT2Tokenizer(_file(path, "vocab.json"))
    return WordPieceTokenizer(_file(path, "vocab.txt"))


def padded_vocab_size(vocab_size: int, multiple: int = 128) -> int:
    """Return the number of embedding rows: ``vocab_size`` rounded up to a multiple, as in GPT-NeoX.

    The result does not depend on the number of processes. 50,277 entries become 50,304 rows.
    """
    return -(-vocab_size // multiple) * multiple


def needed_vocab_size(tokenizer: Tokenizer, *, masked: bool) -> int:
    """Return the number of ids that a model reads: those of its tokenizer and, in a masked model, the mask token."""
    return max(tokenizer.vocab_size, tokenizer.mask_id + 1) if masked else tokenizer.vocab_size


class ByteTokenizer:
    """Encode text as UTF-8 bytes; id 256 ends a document."""

    type = "bytes"
    path: str | None = None
    vocab_size = 257
    end_of_document_id = pad_id = 256
    mask_id = 257
    begin_id: int | None = None
    special_ids: tuple[int, ...] = (256,)
    hash = "bytes-257"

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(i for i in ids if i < 256).decode(errors="replace")

    def piece(self, id: int) -> str:
        return self.decode([id])

    def encode_batch(self, texts: Sequence[str], threads: int = 1) -> list[NDArray]:
        return [np.frombuffer(text.encode(), np.uint8) for text in texts]


class SentencePieceTokenizer:
    """Encode text with a SentencePiece model (Kudo and Richardson, 2018). Its ``</s>`` (eos) id ends a document."""

    type = "sentencepiece"

    def __init__(self, path: Path) -> None:
        import sentencepiece

        content = path.read_bytes()
        try:
            if not content:  # the library takes an empty file for a model
                raise EOFError
            self._model = sentencepiece.SentencePieceProcessor(model_proto=content)
        except (RuntimeError, OSError, EOFError, UnicodeDecodeError) as error:
            raise ValueError(
                f"{path} is not a SentencePiece model. Train one with python -m tools.train_tokenizer, or set"
                " data.tokenizer.type to the type of the file."
            ) from error
        self.path: str | None = str(path)
        self.hash = _hash(self.type, content)
        self.vocab_size = self._model.vocab_size()
        self.end_of_document_id = self._model.eos_id()
        if self.end_of_document_id < 0:
            raise ValueError(
                f"{path} has no end-of-sentence id, which is needed to end a document: train the model with one"
            )
        self.pad_id = self.end_of_document_id
        self.begin_id: int | None = None
        controls = (self._model.is_control, self._model.is_unknown, self._model.is_unused)
        self.special_ids = tuple(i for i in range(self.vocab_size) if any(test(i) for test in controls))
        byte_ids = [self._model.piece_to_id(f"<0x{byte:02X}>") for byte in SPACE_MARK_BYTES]
        has_bytes = all(self._model.is_byte(i) for i in byte_ids)
        # With byte fallback, the unknown token never occurs in a text.
        self.mask_id = self._model.unk_id() if has_bytes else self.vocab_size
        # A model that adds a space before every text would add one before every part.
        adds_space = self._model.encode("a", out_type=str)[0].startswith(SPACE_MARK)
        self._space_mark_ids = byte_ids if has_bytes and not adds_space else None

    def encode(self, text: str) -> list[int]:
        if SPACE_MARK not in text or self._space_mark_ids is None:
            return self._model.encode(text)
        # SentencePiece cannot distinguish this character from a space, so it is encoded as bytes.
        ids: list[int] = []
        for number, part in enumerate(text.split(SPACE_MARK)):
            if number:
                ids += self._space_mark_ids
            ids += self._model.encode(part)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        return self._model.decode([int(i) for i in ids])

    def piece(self, id: int) -> str:
        if self._model.is_byte(int(id)):
            return self.decode([id])
        return self._model.id_to_piece(int(id)).replace(SPACE_MARK, " ")

    def encode_batch(self, texts: Sequence[str], threads: int = 1) -> list[NDArray]:
        if not texts:
            return []
        encoded = self._model.encode(list(texts), num_threads=threads)
        return [
            np.array(self.encode(text) if SPACE_MARK in text else ids, np.int32)
            for text, ids in zip(texts, encoded, strict=True)
        ]


class HuggingFaceTokenizer:
    """Encode text with a Hugging Face ``tokenizer.json``, without adding special tokens around the text.

    The first of these tokens in the vocabulary ends a document: ``<|endoftext|>``, the ``eos_token`` of a
    ``tokenizer_config.json`` in the same folder, ``<|end_of_text|>``, ``</s>``, ``<eos>``, ``[SEP]``.
    """

    type = "hf"

    def __init__(self, path: Path) -> None:
        import tokenizers

        try:
            model = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:
            raise ValueError(
                f"{path} is not a Hugging Face tokenizer.json ({error}): copy it again, or set data.tokenizer.type"
            ) from error
        model.no_padding()
        model.no_truncation()
        self._set(model, path)
        candidates = [END_OF_DOCUMENT, _configured_eos(path), "<|end_of_text|>", "</s>", "<eos>", "[SEP]"]
        known = [i for i in (model.token_to_id(c) for c in candidates if c) if i is not None]
        if not known:
            raise ValueError(
                f"{path} has no token that ends a document (looked for {', '.join(c for c in candidates if c)}): set"
                " eos_token in a tokenizer_config.json in the same folder"
            )
        self._set_special(known[0])

    def _set(self, model: Any, path: Path) -> None:
        self._model = model
        self.path: str | None = str(path)
        self.hash = _hash(self.type, path.read_bytes())
        # Ids may have gaps, and the embedding must have a row for the largest id.
        self.vocab_size = max(model.get_vocab(with_added_tokens=True).values()) + 1

    def _set_special(self, end_of_document_id: int) -> None:
        def first(*names: str) -> int | None:
            return next((i for i in map(self._model.token_to_id, names) if i is not None), None)

        self.end_of_document_id = end_of_document_id
        mask, pad = first("[MASK]", "<mask>"), first("[PAD]", "<pad>", "<|padding|>")
        self.mask_id = self.vocab_size if mask is None else mask
        self.pad_id = end_of_document_id if pad is None else pad
        self.begin_id = first("[CLS]")
        added = [i for i, token in self._model.get_added_tokens_decoder().items() if token.special]
        named = [i for i in (mask, pad, self.begin_id, first("[UNK]", "<unk>"), first("[SEP]")) if i is not None]
        self.special_ids = tuple(sorted({end_of_document_id, *added, *named}))

    def piece(self, id: int) -> str:
        return self._model.id_to_token(int(id)) if self.type == "wordpiece" else self.decode([id])

    def encode(self, text: str) -> list[int]:
        return self._model.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        return self._model.decode([int(i) for i in ids], skip_special_tokens=False)

    def encode_batch(self, texts: Sequence[str], threads: int = 1) -> list[NDArray]:
        # The library uses its own threads, unless TOKENIZERS_PARALLELISM is false.
        encodings = self._model.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, np.int32) for encoding in encodings]


class GPT2Tokenizer(HuggingFaceTokenizer):
    """Encode text with GPT-2's byte-level BPE from a vocabulary and a merges file (Radford et al., 2019).

    ``<|endoftext|>`` ends a document. In a text it is plain text, as in GPT-NeoX's GPT2BPETokenizer.
    """

    type = "gpt2"

    def __init__(self, path: Path) -> None:
        import tokenizers

        merges = _file(merges_of(path), "merges.txt")
        try:
            model = tokenizers.ByteLevelBPETokenizer.from_file(str(path), str(merges))._tokenizer
        except Exception as error:
            raise ValueError(
                f"{path} and {merges} are not GPT-2's vocabulary and merges ({error}): copy them again, or set "
                "data.tokenizer.type"
            ) from error
        if (end := model.token_to_id(END_OF_DOCUMENT)) is None:
            raise ValueError(f"{path} has no {END_OF_DOCUMENT}, which ends a document: use GPT-2's vocabulary")
        self._set(model, path)
        self.hash = _hash(self.type, path.read_bytes() + b"\0" + merges.read_bytes())
        self._set_special(end)


def merges_of(vocabulary: str | Path) -> Path:
    """Return the merges file beside GPT-2's vocabulary: ``gpt2-vocab.json`` -> ``gpt2-merges.txt``, ``encoder.json`` ->
    ``vocab.bpe``.
    """
    path = Path(vocabulary)
    path = path / "vocab.json" if path.is_dir() else path
    name = "vocab.bpe" if path.name == "encoder.json" else f"{path.stem.replace('vocab', 'merges')}.txt"
    return path.with_name(name)


def companion_files(tokenizer: Tokenizer) -> list[Path]:
    """Return the files beside ``tokenizer.path`` that it reads too."""
    if tokenizer.path is None:
        return []
    path = Path(tokenizer.path)
    merges = [merges_of(path)] if tokenizer.type == "gpt2" else []
    return [file for file in (*merges, path.with_name("tokenizer_config.json")) if file.is_file()]


class WordPieceTokenizer(HuggingFaceTokenizer):
    """Encode text with the WordPiece of BERT from a ``vocab.txt`` (Devlin et al., 2019). ``[SEP]`` ends a document.

    Text is lower-cased if no entry begins with a capital letter.
    """

    type = "wordpiece"

    def __init__(self, path: Path) -> None:
        import tokenizers

        entries = path.read_text(encoding="utf-8", errors="replace").splitlines()
        missing = [token for token in ("[UNK]", "[SEP]", "[CLS]") if token not in entries]
        if missing:
            raise ValueError(
                f"{path} is not a BERT vocabulary: {', '.join(missing)} is missing. Copy it again, or set data.tokenizer.type"
            )
        uncased = not any("A" <= entry[:1] <= "Z" for entry in entries)
        try:
            model = tokenizers.BertWordPieceTokenizer(str(path), lowercase=uncased)._tokenizer
        except Exception as error:
            raise ValueError(f"{path} is not a BERT vocabulary ({error}): copy it again") from error
        self._set(model, path)
        self._set_special(self._model.token_to_id("[SEP]"))


def _file(path: str | Path, name_in_folder: str) -> Path:
    path = Path(path).expanduser()
    if path.is_dir():
        path = path / name_in_folder
    if not path.is_file():
        raise FileNotFoundError(
            f"the tokenizer file {path} does not exist: set data.tokenizer.path (--vocab-file) to a file that exists, or train"
            " one with python -m tools.train_tokenizer; make data-pile-sample, data-c4-sample, data-text-sample and"
            " data-text-corpus write those of the samples (docs/guide/data.md)"
        )
    return path


def _hash(type: str, content: bytes) -> str:
    return hashlib.sha256(type.encode() + b"\0" + content).hexdigest()[:32]


def _configured_eos(path: Path) -> str | None:
    config = path.with_name("tokenizer_config.json")
    if not config.is_file():
        return None
    token = read_json(config, "copy it again, or remove it if the tokenizer needs none").get("eos_token")
    return token.get("content") if isinstance(token, dict) else token
