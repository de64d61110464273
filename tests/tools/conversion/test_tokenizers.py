"""Check that AutoTokenizer gives the ids of each training tokenizer, also without SentencePiece."""

from __future__ import annotations

import json
import random
import sysconfig
from pathlib import Path
from typing import Any

import pytest

from data.tokenizer import Tokenizer, load_tokenizer
from data.train_sentencepiece import train_sentencepiece
from tests.tools.conversion.conftest import WORDS
from tools.conversion.tokenizer import check_same_ids, export_tokenizer

STDLIB = Path(sysconfig.get_paths()["stdlib"])
TEXTS = [(STDLIB / name).read_text(encoding="utf-8") for name in ("textwrap.py", "heapq.py", "bisect.py")]


def hard_texts(count: int) -> list[str]:
    """Return repeated and mixed characters, which depend on the order of merges, U+2581, and names of tokens."""
    generator = random.Random(0)
    random_texts = ["".join(generator.choices("a  \n=-#_▁eé🙂0", k=generator.randrange(60))) for _ in range(count)]
    return [*random_texts, "▁x ▁", "<|endoftext|>a", "<0x41>", "</s>"]


def saved(tokenizer: Tokenizer, folder: Path, causal: bool = True) -> Any:
    from transformers import AutoTokenizer

    folder.mkdir()
    export_tokenizer(tokenizer, folder, causal=causal)
    return AutoTokenizer.from_pretrained(folder)


def sentencepiece(folder: Path, model_type: str) -> Tokenizer:
    train_sentencepiece(TEXTS, folder / "trained.model", vocab_size=600, model_type=model_type)
    return load_tokenizer("sentencepiece", folder / "trained.model")


def test_the_default_tokenizer(tmp_path: Path) -> None:
    tokenizer = sentencepiece(tmp_path, "bpe")
    loaded = saved(tokenizer, tmp_path / "out")
    assert check_same_ids(tokenizer, tmp_path / "out", [*TEXTS, *hard_texts(2000)]) > 20_000
    for text in hard_texts(50):
        assert loaded.decode(loaded(text)["input_ids"]) == text
    assert loaded.eos_token_id == loaded.pad_token_id == loaded.bos_token_id == tokenizer.end_of_document_id
    assert loaded.padding_side == "left"
    assert loaded.decode([*loaded("a")["input_ids"], 0], skip_special_tokens=True) == "a"


def test_unigram(tmp_path: Path) -> None:
    """Never match the pieces that SentencePiece never matches, with known and with unknown characters."""
    strange = str.maketrans("", "", "<|0_")
    for name, texts in (("known", TEXTS), ("strange", [text.translate(strange) for text in TEXTS])):
        folder = tmp_path / name
        train_sentencepiece(texts, folder / "trained.model", vocab_size=600, model_type="unigram")
        tokenizer = load_tokenizer("sentencepiece", folder / "trained.model")
        loaded = saved(tokenizer, folder / "out")
        names = [
            f"{a}{piece}{b}" for piece in ("<|endoftext|>", "<unk>", "<0x41>") for a in ("", "a ") for b in ("", "b<")
        ]
        assert check_same_ids(tokenizer, folder / "out", [*TEXTS, *names]) > 5000
        assert all(loaded.decode(loaded(text)["input_ids"]) == text for text in names)


def test_sentencepiece_with_a_dummy_prefix(tmp_path: Path) -> None:
    """Export with the settings of Llama's tokenizer, and with SentencePiece's defaults (normalized, spaces collapsed)."""
    import sentencepiece as spm

    for number, settings in enumerate(
        (
            {"normalization_rule_name": "identity", "remove_extra_whitespaces": False, "byte_fallback": True},
            {"byte_fallback": True},
        )
    ):
        prefix = tmp_path / f"m{number}"
        spm.SentencePieceTrainer.train(
            sentence_iterator=iter("\n".join(TEXTS).split("\n")),
            model_prefix=str(prefix),
            model_type="bpe",
            vocab_size=600,
            minloglevel=2,
            **settings,
        )
        tokenizer = load_tokenizer("sentencepiece", prefix.with_suffix(".model"))
        saved(tokenizer, tmp_path / f"out{number}")
        lines = [line for line in "\n".join(TEXTS).split("\n") if line.strip()]
        assert check_same_ids(tokenizer, tmp_path / f"out{number}", lines) > 1000


@pytest.mark.parametrize("model_type", ["bpe", "unigram"])
@pytest.mark.parametrize("spaces", [True, False], ids=["plain", "trimmed"])
def test_sentencepiece_without_bytes(model_type: str, spaces: bool, tmp_path: Path) -> None:
    """Never match names of tokens, also with unknown characters. Remove only spaces at the ends."""
    import sentencepiece as spm

    rare = str.maketrans("", "", "</>")
    spm.SentencePieceTrainer.train(
        sentence_iterator=iter("\n".join(TEXTS).translate(rare).split("\n")),
        model_prefix=str(tmp_path / "m"),
        model_type=model_type,
        vocab_size=500,
        normalization_rule_name="identity",
        add_dummy_prefix=not spaces,
        remove_extra_whitespaces=not spaces,
        minloglevel=2,
    )
    tokenizer = load_tokenizer("sentencepiece", tmp_path / "m.model")
    saved(tokenizer, tmp_path / "out")
    texts = ["</s>", "a</s>b <unk> <s>", "</🙂/>", "a▁b", "\n  a  b \t", " \u3000a \u2028 "]
    assert check_same_ids(tokenizer, tmp_path / "out", [*texts, *TEXTS, *hard_texts(300)]) > 5000


@pytest.mark.parametrize("model_type", ["bpe", "unigram"])
def test_symbols_that_a_user_defined(model_type: str, tmp_path: Path) -> None:
    """SentencePiece takes them whole, wherever they stand, and the spaces at the ends are those of the whole text."""
    import sentencepiece as spm

    def tokenizer(name: str, **settings: bool) -> Tokenizer:
        spm.SentencePieceTrainer.train(
            sentence_iterator=iter("\n".join(TEXTS).split("\n")),
            model_prefix=str(tmp_path / name),
            model_type=model_type,
            vocab_size=700,
            user_defined_symbols=["return", "<x>"],
            normalization_rule_name="identity",
            byte_fallback=True,
            minloglevel=2,
            **settings,
        )
        return load_tokenizer("sentencepiece", tmp_path / f"{name}.model")

    plain = tokenizer("plain", add_dummy_prefix=False, remove_extra_whitespaces=False)
    saved(plain, tmp_path / "out")
    texts = ["returned", "a <x> b", "x return ", " <x><x>return"]
    assert check_same_ids(plain, tmp_path / "out", [*texts, *TEXTS]) > 5000
    for name, settings in (("prefix", {"remove_extra_whitespaces": False}), ("strip", {"add_dummy_prefix": False})):
        with pytest.raises(ValueError, match=r"has user-defined symbols \(return\)"):
            saved(tokenizer(name, **settings), tmp_path / name)


def test_bytes(tmp_path: Path) -> None:
    tokenizer = load_tokenizer("bytes")
    loaded = saved(tokenizer, tmp_path / "out")
    check_same_ids(tokenizer, tmp_path / "out", [*TEXTS, *hard_texts(200)])
    assert loaded.decode(loaded("größe 🙂")["input_ids"]) == "größe 🙂"
    assert len(loaded) == 257
    cut = tokenizer.encode("größe 🙂")[:-1]  # as after the last generated byte
    assert loaded.decode(cut) == tokenizer.decode(cut) == "größe \ufffd"
    generator = random.Random(0)
    for _ in range(200):
        ids = generator.choices(range(256), k=20)
        assert loaded.decode(ids) == tokenizer.decode(ids)


def test_template_of_a_tokenizer_json_is_not_exported(tmp_path: Path) -> None:
    """Export a tokenizer.json whose template adds a token before each text."""
    from tokenizers import Tokenizer as Fast
    from tokenizers import decoders, models, pre_tokenizers, processors, trainers

    model = Fast(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=["<|begin|>", "<|end_of_text|>"], initial_alphabet=alphabet, show_progress=False
    )
    model.train_from_iterator(TEXTS, trainer)
    model.post_processor = processors.TemplateProcessing(single="<|begin|> $A", special_tokens=[("<|begin|>", 0)])
    model.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer("hf", tmp_path / "tokenizer.json")
    loaded = saved(tokenizer, tmp_path / "out")
    assert loaded(TEXTS[0])["input_ids"] == tokenizer.encode(TEXTS[0])
    check_same_ids(tokenizer, tmp_path / "out", [*TEXTS, *hard_texts(200), "a<|end_of_text|>b"])
    assert loaded.eos_token == "<|end_of_text|>"


def test_wordpiece_of_a_masked_model(tmp_path: Path) -> None:
    path = tmp_path / "vocab.txt"
    path.write_text("\n".join(dict.fromkeys(WORDS.split(" "))) + "\n")
    tokenizer = load_tokenizer("wordpiece", path)
    loaded = saved(tokenizer, tmp_path / "out", causal=False)
    check_same_ids(tokenizer, tmp_path / "out", ["The cat sat on the mat.", "dogs running [MASK]"])
    ids = loaded("the cat", "a dog")
    assert loaded.convert_ids_to_tokens(ids["input_ids"]) == ["[CLS]", "the", "cat", "[SEP]", "a", "dog", "[SEP]"]
    assert (loaded.mask_token, loaded.pad_token, loaded.unk_token) == ("[MASK]", "[PAD]", "[UNK]")
    assert (loaded.cls_token, loaded.sep_token) == ("[CLS]", "[SEP]")
    assert loaded.padding_side == "right"


@pytest.mark.parametrize("kind", ["bytes", "sentencepiece"])
def test_mask_token_is_added_to_a_vocabulary_without_one(kind: str, tmp_path: Path) -> None:
    tokenizer = load_tokenizer("bytes") if kind == "bytes" else sentencepiece(tmp_path, "bpe")
    loaded = saved(tokenizer, tmp_path / "out", causal=False)
    assert loaded.mask_token_id == tokenizer.mask_id
    assert loaded.eos_token_id == loaded.pad_token_id == tokenizer.end_of_document_id
    check_same_ids(tokenizer, tmp_path / "out", [*TEXTS, *hard_texts(200), "a<mask>b<unk>"])


def test_first_difference_is_named(tmp_path: Path) -> None:
    tokenizer = sentencepiece(tmp_path, "bpe")
    saved(tokenizer, tmp_path / "out")
    file = tmp_path / "out" / "tokenizer.json"
    content = json.loads(file.read_text())
    content["model"]["merges"] = content["model"]["merges"][::-1]
    file.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"the exported tokenizer encodes .* the trainer's as \["):
        check_same_ids(tokenizer, tmp_path / "out", TEXTS)
