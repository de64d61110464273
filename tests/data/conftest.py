from pathlib import Path

import pytest
from hypothesis import settings

from data import preprocess
from data.corpora import stdlib_files
from data.readers import read_documents
from data.tokenizer import SentencePieceTokenizer, train_sentencepiece
from tests.data.inline_pool import Inline

# The same cases every time, and no time limit a case: the machine may be busy.
settings.register_profile("deterministic", deadline=None, derandomize=True, database=None, max_examples=60)
settings.load_profile("deterministic")


@pytest.fixture(scope="session")
def shared() -> Path:
    """The optional folder of real samples beside the checkout."""
    folder = Path(__file__).resolve().parents[3] / "shared"
    if not (folder / "data").is_dir():
        pytest.skip(f"the real data samples are not there: {folder}/data")
    return folder


@pytest.fixture(scope="session")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> SentencePieceTokenizer:
    """A small model trained on one package of the standard library."""
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.model"
    train_sentencepiece((d.text for d in read_documents(stdlib_files("asyncio"))), path, vocab_size=600)
    return SentencePieceTokenizer(path)


@pytest.fixture
def inline(monkeypatch):
    monkeypatch.setattr(preprocess, "_pool", lambda recipe, workers: Inline(recipe))
    monkeypatch.setattr(Inline, "done", [])
    monkeypatch.setattr(Inline, "stop_at", None)
