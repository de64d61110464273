"""Tokenizers lose nothing, end documents, and say what is wrong with a file."""

import json
import re
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from data.corpus.discovery import stdlib_files
from data.corpus.readers import read_documents
from data.tokenizer import load_tokenizer
from data.train_sentencepiece import train_sentencepiece

CODE = st.text(alphabet=" \n\t\r\0abcdef_=():\u2581é漢\U0001f600<|>", max_size=60)


@given(st.one_of(st.text(), CODE))
@example("\u2581 \u2581\u2581")
@example("def f():\r\n\treturn  1 \n\n\n")
@example("<|endoftext|><unk></s><0x41>")
@example("a\0b\ufffd\ufeff")
@example(" ")
@example("")
def test_sentencepiece_loses_nothing(sentencepiece, text):
    assert sentencepiece.decode(sentencepiece.encode(text)) == text


@given(st.text())
def test_bytes_lose_nothing(text):
    tokenizer = load_tokenizer("bytes")
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.decode([*tokenizer.encode(text), tokenizer.end_of_document_id]) == text


def test_a_whole_package_survives(sentencepiece):
    for document in read_documents(stdlib_files("json")):
        assert sentencepiece.decode(sentencepiece.encode(document.text)) == document.text


def test_ids_are_within_the_vocabulary(sentencepiece):
    ids = sentencepiece.encode("import asyncio  # \u2581 漢\n")
    assert 0 <= min(ids) <= max(ids) < sentencepiece.vocab_size == 600
    assert sentencepiece.end_of_document_id == 0
    assert 0 not in sentencepiece.encode("<|endoftext|>"), "text cannot end a document"
    assert sentencepiece.decode([0]) == ""


def test_indentation_is_short_and_a_prompt_may_end_in_a_space(sentencepiece):
    assert len(sentencepiece.encode("\n        return ")) <= 4
    assert sentencepiece.encode("async def f")[: len(sentencepiece.encode("async def "))] == sentencepiece.encode(
        "async def "
    )


def test_following_word_changes_no_id_of_the_context_before_its_last(sentencepiece):
    """Evaluation splits context and continuation by the number of ids of the context."""
    for document in read_documents(stdlib_files("json")):
        for match in list(re.finditer(r"\S(?=\s+\S)", document.text))[::29]:
            context = document.text[max(0, match.end() - 200) : match.end()]
            alone, whole = (
                sentencepiece.encode(text) for text in (context, document.text[match.end() - len(context) :][:300])
            )
            assert whole[: len(alone) - 1] == alone[:-1]
            assert sentencepiece.decode(whole[: len(alone)]).rstrip() == context, document.text[match.end() :][:20]


def test_encoded_batch_equals_single_texts_for_any_number_of_threads(sentencepiece):
    texts = ["import asyncio\n", "", "a \u2581 b", "x" * 5000, *("def f(x):\n    return x\n" * n for n in range(20))]
    for tokenizer in (sentencepiece, load_tokenizer("bytes")):
        singles = [tokenizer.encode(text) for text in texts]
        for threads in (1, 3):
            assert [ids.tolist() for ids in tokenizer.encode_batch(texts, threads)] == singles
        assert tokenizer.encode_batch([]) == []


def test_training_is_repeatable(tmp_path):
    texts = [document.text for document in read_documents(stdlib_files("json"))]
    for name in ("a.model", "b.model"):
        train_sentencepiece(texts, tmp_path / name, vocab_size=400)
    first, second = (load_tokenizer("sentencepiece", tmp_path / name) for name in ("a.model", "b.model"))
    assert first.hash == second.hash
    train_sentencepiece(texts, tmp_path / "b.model", vocab_size=401)
    assert load_tokenizer("sentencepiece", tmp_path / "b.model").hash != first.hash


def test_a_vocabulary_that_the_text_cannot_fill(tmp_path):
    with pytest.raises(
        ValueError, match=r"^the vocabulary size 5000 .* is too large .*: set \d+ or less, or add text$"
    ):
        train_sentencepiece(["a few words of text\n" * 3], tmp_path / "x.model", vocab_size=5000)
    with pytest.raises(ValueError, match=r"^vocab_size 90{10} is too large: set 10000000 or less$"):
        train_sentencepiece(["some words\n"], tmp_path / "x.model", vocab_size=9 * 10**10)
    with pytest.raises(ValueError, match=r"size 264 .* is too small for the characters of this text: set 770 or more$"):
        train_sentencepiece(["".join(map(chr, range(0x4E00, 0x5000)))], tmp_path / "x.model", vocab_size=264)
    for text in ("", "ab", "\0"):
        with pytest.raises(ValueError, match=r"^the text is too short to train a tokenizer: add text, or set data"):
            train_sentencepiece([text], tmp_path / "x.model", vocab_size=300)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ValueError, match="vocab_size 200 is too small"):
        train_sentencepiece(["a"], tmp_path / "x.model", vocab_size=200)


def test_ctrl_c_during_training_raises_keyboard_interrupt(tmp_path):
    def texts():
        yield "a few words of text\n"
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_sentencepiece(texts(), tmp_path / "x.model", vocab_size=300)
    assert list(tmp_path.iterdir()) == []


def test_wrong_files(tmp_path):
    with pytest.raises(ValueError, match="type 'spm' is unknown; allowed: sentencepiece, hf, gpt2, wordpiece, bytes"):
        load_tokenizer("spm")
    with pytest.raises(ValueError, match="type 'hf' needs a path"):
        load_tokenizer("hf")
    makefile = (Path(__file__).parents[2] / "Makefile").read_text()
    for kind, name in (("sentencepiece", "tokenizer.model"), ("hf", "tokenizer.json"), ("wordpiece", "vocab.txt")):
        with pytest.raises(FileNotFoundError, match=name) as missing:
            load_tokenizer(kind, tmp_path)
        assert all(target in str(missing.value) for target in re.findall(r"^data-[\w-]+", makefile, re.MULTILINE))
        (tmp_path / name).write_text("hello\n")
        with pytest.raises(ValueError, match=name):
            load_tokenizer(kind, tmp_path)


def test_damaged_sentencepiece_model_is_named(sentencepiece, tmp_path):
    path = tmp_path / "tokenizer.model"
    path.write_bytes(Path(sentencepiece.path).read_bytes().replace(b"<0x41>", b"<\xffx41>"))
    for content in (path.read_bytes(), b""):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"tokenizer\.model is not a SentencePiece model"):
            load_tokenizer("sentencepiece", path)


def hf_file(folder, tokens: list[str]) -> None:
    vocab = {token: number for number, token in enumerate(["[UNK]", "a", "b", *tokens])}
    model = {"type": "WordLevel", "vocab": vocab, "unk_token": "[UNK]"}
    (folder / "tokenizer.json").write_text(
        json.dumps({"version": "1.0", "model": model, "added_tokens": [], "pre_tokenizer": {"type": "Whitespace"}})
    )


def test_the_end_of_a_document_of_a_hugging_face_tokenizer(tmp_path):
    hf_file(tmp_path, ["</s>", "<end>"])
    assert load_tokenizer("hf", tmp_path).end_of_document_id == 3
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<end>"}}))
    assert load_tokenizer("hf", tmp_path / "tokenizer.json").end_of_document_id == 4
    hf_file(tmp_path, [])
    with pytest.raises(ValueError, match=r"no token that ends a document \(looked for .*<end>"):
        load_tokenizer("hf", tmp_path)


def test_the_pile_tokenizer(shared):
    tokenizer = load_tokenizer("hf", shared / "data/tokenizers/gpt-neox-20b")
    assert (tokenizer.vocab_size, tokenizer.end_of_document_id) == (50277, 0)
    text = "def f(x):\n    return x  # naïve\n"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert [ids.tolist() for ids in tokenizer.encode_batch([text, ""])] == [tokenizer.encode(text), []]


def test_wordpiece(shared):
    tokenizer = load_tokenizer("wordpiece", shared / "data/tokenizers/bert-base-uncased")
    assert tokenizer.vocab_size == 30522
    assert tokenizer.end_of_document_id == 102
    ids = tokenizer.encode("Tokenizers split words")
    assert ids == [19204, 17629, 2015, 3975, 2616]
    assert tokenizer.decode(ids) == "tokenizers split words"
    assert [i.tolist() for i in tokenizer.encode_batch(["Tokenizers split words"])] == [ids]
