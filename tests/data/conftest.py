import pytest

from data.corpus.discovery import stdlib_files
from data.corpus.readers import read_documents
from data.preprocessing import pipeline as preprocess
from data.tokenizer import SentencePieceTokenizer
from data.train_sentencepiece import train_sentencepiece
from tests.data.inline_pool import Inline


@pytest.fixture(scope="session")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> SentencePieceTokenizer:
    """Return a small SentencePiece tokenizer, trained on one package of the standard library."""
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.model"
    train_sentencepiece((d.text for d in read_documents(stdlib_files("asyncio"))), path, vocab_size=600)
    return SentencePieceTokenizer(path)


@pytest.fixture
def inline(monkeypatch):
    monkeypatch.setattr(preprocess, "_pool", lambda recipe, workers: Inline(recipe))
    monkeypatch.setattr(Inline, "done", [])
    monkeypatch.setattr(Inline, "stop_at", None)
