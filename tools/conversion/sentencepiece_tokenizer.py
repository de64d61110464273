"""Convert a SentencePiece model to a tokenizer of Hugging Face tokenizers with equal ids (Kudo and Richardson 2018)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from data.tokenizer import Tokenizer

_SPACE = "\u2581"  # SentencePiece's character for a space


class _Piece(NamedTuple):
    """Hold a piece of the vocabulary. kind: SentencePiece's type. normal: whether the text of a corpus can become it."""

    text: str
    score: float
    kind: int
    normal: bool


def convert_sentencepiece(tokenizer: Tokenizer) -> Any:
    """Return a `tokenizers.Tokenizer` with BPE merges or Unigram scores (arXiv 1808.06226).

    Spaces inside pieces stay spaces, not U+2581, so that U+2581 in a text becomes its bytes, as in the trainer. A model that
    adds a space before each text does not distinguish the two characters, here and in the trainer.

    Raises ValueError for a model that no tokenizer.json can express.
    """
    import sentencepiece.sentencepiece_model_pb2 as pb2
    import tokenizers
    from tokenizers import Regex, pre_tokenizers

    path = Path(tokenizer.path or "")
    proto = pb2.ModelProto.FromString(path.read_bytes())
    spec, rules, kinds = proto.trainer_spec, proto.normalizer_spec, pb2.ModelProto.SentencePiece
    adds_space = rules.add_dummy_prefix
    pieces = [
        _Piece(p.piece if adds_space else p.piece.replace(_SPACE, " "), p.score, p.type, p.type == kinds.NORMAL)
        for p in proto.pieces
    ]
    if not adds_space and len({piece.text for piece in pieces}) != len(pieces):
        raise ValueError(f"{path} holds pieces with both spaces and U+2581: it cannot be written as JSON")
    unknown = next(index for index, piece in enumerate(pieces) if piece.kind == kinds.UNKNOWN)
    has_bytes = any(piece.kind == kinds.BYTE for piece in pieces)
    if spec.model_type == spec.BPE:
        model = tokenizers.Tokenizer(_bpe(pieces, unknown, has_bytes))
    elif spec.model_type == spec.UNIGRAM:
        model = tokenizers.Tokenizer(_unigram(pieces, unknown, has_bytes))
        # The text is split at each run of characters that no normal piece has; the run is one unknown piece or its bytes.
        characters = {character for piece in pieces if piece.normal for character in piece.text}
        model.pre_tokenizer = pre_tokenizers.Split(Regex(f"[^{_ranges(characters)}]+"), "isolated")
    else:
        raise ValueError(f"{path}: only BPE and Unigram models of SentencePiece can be written as JSON")
    symbols = [piece.text for piece in pieces if piece.kind == kinds.USER_DEFINED]
    if symbols and (rules.remove_extra_whitespaces or adds_space):
        raise ValueError(
            f"{path} has user-defined symbols ({symbols[0]}) and adds or removes spaces at the ends of a text. A "
            "tokenizer.json would do so at the ends of each part between symbols: this tokenizer cannot be exported"
        )
    if adds_space and spec.treat_whitespace_as_suffix:
        raise ValueError(f"{path} puts a space after every text: it cannot be written as JSON")
    if (normalizer := _normalizer(rules, has_bytes)) is not None:
        model.normalizer = normalizer
    model.decoder = _decoder(adds_space)
    special = [piece.text for piece in pieces if piece.kind in (kinds.CONTROL, kinds.UNKNOWN)]
    model.add_special_tokens([tokenizers.AddedToken(text, special=True, normalized=False) for text in special])
    model.add_tokens([tokenizers.AddedToken(text, special=False, normalized=False) for text in symbols])
    return model


def _bpe(pieces: Sequence[_Piece], unknown: int, has_bytes: bool) -> Any:
    """Return the BPE model. unknown: index of the unknown piece."""
    from tokenizers import models

    vocab = {piece.text: index for index, piece in enumerate(pieces)}
    unknown_text = pieces[unknown].text
    return models.BPE(
        vocab=vocab, merges=_merges(pieces), byte_fallback=has_bytes, unk_token=unknown_text, fuse_unk=True
    )


def _merges(pieces: Sequence[_Piece]) -> list[tuple[str, str]]:
    """Return all merges of two pieces to a known piece, best piece first, as SentencePiece merges them."""
    normal = [piece for piece in pieces if piece.normal]
    known = {piece.text for piece in normal}
    merges = []
    for text in (piece.text for piece in sorted(normal, key=lambda piece: -piece.score)):
        for end in range(1, len(text)):
            if text[:end] in known and text[end:] in known:
                merges.append((text[:end], text[end:]))
    return merges


def _unigram(pieces: Sequence[_Piece], unknown: int, has_bytes: bool) -> Any:
    """Return the Unigram model. unknown: index of the unknown piece."""
    from tokenizers import models

    # SentencePiece never matches the other pieces (<unk>, <0x41>, the end of a document). Here a score below that of
    # their single characters excludes them.
    excluded = max(len(piece.text) for piece in pieces) * min(piece.score for piece in pieces) - 1
    scores = [(piece.text, piece.score if piece.normal else excluded) for piece in pieces]
    return models.Unigram(scores, unk_id=unknown, byte_fallback=has_bytes)


def _ranges(characters: set[str]) -> str:
    """Return a regular expression class of these characters, within the limit of about 10,000 ranges."""
    codes = set(map(ord, characters))
    first, last = (sorted(c for c in codes if c + step not in codes) for step in (-1, 1))
    return "".join(f"\\x{{{a:X}}}-\\x{{{b:X}}}" for a, b in zip(first, last, strict=True))


def _normalizer(rules: Any, has_bytes: bool) -> Any:
    """Return the normalizer of a text, or None if it changes no text. rules: SentencePiece's `normalizer_spec`."""
    from tokenizers import Regex, normalizers

    steps: list[Any] = []
    if rules.precompiled_charsmap:
        steps.append(normalizers.Precompiled(rules.precompiled_charsmap))
    if rules.remove_extra_whitespaces:
        # At the end U+2581 counts as a space too.
        ends = Regex(f"\\A +|[ {_SPACE}]+\\z")
        steps += [normalizers.Replace(ends, ""), normalizers.Replace(Regex(" {2,}"), " ")]
    if rules.add_dummy_prefix:
        steps += [normalizers.Prepend(_SPACE), normalizers.Replace(" ", _SPACE)]
    elif not has_bytes:  # the trainer does not distinguish the two characters either
        steps.append(normalizers.Replace(_SPACE, " "))
    return normalizers.Sequence(steps) if steps else None


def _decoder(adds_space: bool) -> Any:
    """Return the decoder. adds_space: the model adds a space before each text, which decoding removes."""
    from tokenizers import decoders

    steps = [decoders.ByteFallback(), decoders.Fuse()]
    if adds_space:
        steps = [decoders.Replace(_SPACE, " "), *steps, decoders.Strip(content=" ", left=1)]
    return decoders.Sequence(steps)
