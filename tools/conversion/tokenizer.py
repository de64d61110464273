"""Export a training tokenizer to files that `AutoTokenizer` loads, with equal ids and without SentencePiece.

Each tokenizer becomes a `tokenizer.json` of Hugging Face tokenizers. A call returns the ids that the model was trained on,
without added tokens. Masked models keep the tokens that their classifiers read ([CLS], [SEP]).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from data.tokenizer import END_OF_DOCUMENT, Tokenizer, load_tokenizer
from tools.conversion.sentencepiece_tokenizer import convert_sentencepiece

# Test texts of `check_same_ids`: scripts, repeated characters, control characters, characters of one to four bytes.
HARD_TEXTS = (
    "",
    " ",
    "def f(x):\n\treturn x  # naïve größe 値 🙂🏽\r\n",
    "a" * 37 + " " * 29 + "\n" * 11 + "\t" * 7 + "=" * 40,
    "The quick brown fox, 1234567890 times; it's \"quoted\" -- don't.",
    "  leading and trailing  ",
    "mixed　width – dashes — “quotes” … ½ é é ﬁ",
    "Ελληνικά русский עברית العربية हिन्दी ไทย 한국어 日本語",
)


# Transformers' value for no limit, with which other programs compare: the float 1e30 as an integer.
NO_LIMIT = int(1e30)


def export_tokenizer(tokenizer: Tokenizer, folder: Path, *, causal: bool, max_length: int = NO_LIMIT) -> dict[str, int]:
    """Write tokenizer.json and tokenizer_config.json into `folder`.

    max_length: the trained sequence length; lm-eval's `hf` truncates requests to it, as eval.py does.

    Returns the ids of the special tokens by Transformers' names ("eos", "pad", "bos", "mask", ...).
    Raises ValueError for a tokenizer without an equal tokenizer.json.
    """
    import tokenizers
    from tokenizers import processors

    makers = {"bytes": _bytes, "sentencepiece": convert_sentencepiece, "hf": _json, "gpt2": _json, "wordpiece": _json}
    model = makers[tokenizer.type](tokenizer)
    if causal:
        # A template would add tokens that are not in the training text.
        model.post_processor = processors.Sequence([])
    end = model.id_to_token(tokenizer.end_of_document_id)
    special = {"eos": end, "bos": end, "pad": end} if causal else {"eos": end}
    known = {"pad": ("[PAD]", "<pad>"), "unk": ("[UNK]", "<unk>"), "mask": ("[MASK]", "<mask>")}
    if not causal:
        known |= {"cls": ("[CLS]", "<s>"), "sep": ("[SEP]", "</s>")}
    for role, names in known.items():
        for name in names:
            if model.token_to_id(name) is not None:
                special[role] = name
    special.setdefault("pad", end)
    if not causal:
        if model.get_vocab_size() == tokenizer.mask_id:  # the first row beyond the entries
            model.add_special_tokens([tokenizers.AddedToken("<mask>", special=True, normalized=False)])
        if (mask := model.id_to_token(tokenizer.mask_id)) is not None:  # no token can be added to a gap between ids
            special["mask"] = mask
    # `tokenizers.Tokenizer.save` raises no OSError on a full disk.
    (folder / "tokenizer.json").write_text(model.to_str(pretty=True), encoding="utf-8")
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{f"{role}_token": token for role, token in sorted(special.items())},
        "add_bos_token": False,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "attention_mask"],
        "model_max_length": max_length,
        "padding_side": "left" if causal else "right",
    }
    if tokenizer.type in ("bytes", "sentencepiece", "gpt2"):
        # As in training, names of special tokens inside a text are plain text.
        config["split_special_tokens"] = True
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n")
    return {role: model.token_to_id(token) for role, token in special.items()}


_FILES = {"tokenizer.json": "hf", "tokenizer.model": "sentencepiece", "vocab.txt": "wordpiece"}


def tokenizer_in(folder: Path) -> Tokenizer | None:
    """Load the tokenizer of a Hugging Face folder, or return None if it has none. Raises as `load_tokenizer`."""
    return next(
        (load_tokenizer(kind, folder / name) for name, kind in _FILES.items() if (folder / name).is_file()), None
    )


def tokenizer_at(path: Path) -> Tokenizer:
    """Load a tokenizer from its file, or from a folder that holds it. Raises ValueError and OSError."""
    kinds = {Path(name).suffix: kind for name, kind in _FILES.items()}
    tokenizer = tokenizer_in(path) if path.is_dir() else None
    if tokenizer is None and path.suffix in kinds:
        tokenizer = load_tokenizer(kinds[path.suffix], path)
    if tokenizer is None:
        raise ValueError(f"--tokenizer {path}: allowed are {', '.join(_FILES)} and a folder with one of them")
    return tokenizer


def check_same_ids(tokenizer: Tokenizer, folder: Path, texts: Sequence[str]) -> int:
    """Load `folder` with AutoTokenizer and compare its ids with the trainer's on HARD_TEXTS and `texts`.

    Returns the number of tokens compared. Raises ValueError with the first text that differs.
    """
    from transformers import AutoTokenizer

    loaded = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    count = 0
    for text in (*HARD_TEXTS, *texts):
        ours = [int(i) for i in tokenizer.encode(text)]
        theirs = loaded(text, add_special_tokens=False, verbose=False)["input_ids"]
        if ours != theirs:
            at = next(
                (i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs))
            )
            raise ValueError(
                f"{folder}: the exported tokenizer encodes {tokenizer.decode(ours[max(0, at - 3) : at + 6])!r} as "
                f"{theirs[at : at + 6]}, the trainer's as {ours[at : at + 6]}; this tokenizer cannot be exported"
            )
        count += len(ours)
    return count


def _bytes(tokenizer: Tokenizer) -> Any:
    """Return a tokenizer whose entries are the bytes under GPT-2's names (Radford et al. 2019).

    Each byte that is not UTF-8 decodes to one U+FFFD. Byte fallback would decode several such bytes to a single one.
    """
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    rest = (byte for byte in range(256) if byte not in printable)
    names = {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(rest)}
    model = tokenizers.Tokenizer(models.BPE(vocab={name: byte for byte, name in names.items()}, merges=[]))
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    model.decoder = decoders.ByteLevel()
    model.add_special_tokens([tokenizers.AddedToken(END_OF_DOCUMENT, special=True, normalized=False)])
    return model


def _json(tokenizer: Tokenizer) -> Any:
    """Return the tokenizer with the end of a document as a special token, so that decoding can skip it."""
    import tokenizers

    model = tokenizers.Tokenizer.from_str(tokenizer._model.to_str())
    end = model.id_to_token(tokenizer.end_of_document_id)
    if end not in {t.content for t in model.get_added_tokens_decoder().values() if t.special}:
        model.add_special_tokens([tokenizers.AddedToken(end, special=True, normalized=False)])
    return model
