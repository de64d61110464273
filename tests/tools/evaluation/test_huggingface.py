"""Refused Hugging Face models, and the split and the count of their requests."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lm_eval.api.instance import Instance
from safetensors.torch import save_file
from transformers import GPT2Config, GPT2LMHeadModel

from tools.evaluation import huggingface_text
from tools.evaluation.huggingface import HuggingFaceLM
from tools.evaluation.huggingface_checks import refuse_unscorable
from tools.evaluation.huggingface_text import HuggingFaceText
from tools.evaluation.open_model import locate_model
from tools.evaluation.request import EvaluationRequest, TextRequest
from tools.evaluation.request_pairs import RequestCounts


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "bert", "architectures": ["BertForMaskedLM"]},
        {"model_type": "roberta", "architectures": ["RobertaForMaskedLM"]},
        {"model_type": "bert", "architectures": ["BertLMHeadModel"], "is_decoder": False},
        {"model_type": "metalion", "architectures": ["MetalionForMaskedLM"]},
        {"model_type": "distilbert"},
    ],
)
def test_masked_model_is_refused(config: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"^folder \(.*\) is a masked model: .*pseudo-log-likelihood"):
        refuse_unscorable("folder", config)


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]},
        {"model_type": "bert", "architectures": ["BertLMHeadModel"], "is_decoder": True},
        {"model_type": "xlm", "architectures": ["XLMWithLMHeadModel"], "causal": True},
        {"model_type": "bart", "architectures": ["BartForConditionalGeneration"]},
        {"model_type": "metalion", "architectures": ["MetalionForCausalLM"]},
    ],
)
def test_causal_model_is_accepted(config: dict[str, Any]) -> None:
    refuse_unscorable("folder", config)


def test_folder_is_checked_before_data_and_weights(tmp_path: Path) -> None:
    def refusal() -> str:
        with pytest.raises((ValueError, OSError)) as error:
            locate_model(EvaluationRequest(str(tmp_path), device="cpu"))
        return str(error.value)

    config = tmp_path / "config.json"
    config.write_text('{"model_type": ')
    assert f"{config} is no JSON" in refusal()
    assert "get the model's folder again" in refusal()
    config.write_text(json.dumps({"model_type": "bert", "architectures": ["BertForMaskedLM"]}))
    assert "is a masked model" in refusal()
    config.write_text(json.dumps({"model_type": "metalion", "architectures": ["MetalionForImageClassification"]}))
    assert "(MetalionForImageClassification) is an image classifier, and this command reads text" in refusal()
    config.write_text(json.dumps({"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}))
    assert f"{tmp_path} holds no tokenizer" in refusal()
    (tmp_path / "tokenizer.json").write_text("{}")
    weights = tmp_path / "model.safetensors"
    save_file({"a": torch.zeros(64)}, weights)
    locate_model(EvaluationRequest(str(tmp_path), device="cpu"))
    weights.write_bytes(weights.read_bytes()[:-9])
    assert f"{weights} is no safetensors file, or is cut short" in refusal()


def test_continuation_without_own_token_is_encoded_apart_and_counted() -> None:
    lm: Any = HuggingFaceLM.__new__(HuggingFaceLM)
    lm.backend, lm._max_length, lm._pairs, lm.counts = "causal", 8, {}, RequestCounts()
    lm.tok_encode = lambda text, **_: [99] if text == "ab" else [ord(c) for c in text]
    assert lm._encode_pair("a", "b") == ([97], [98])
    assert lm._encode_pair("c ", "d") == ([99], [32, 100])
    arguments = [("a", "b"), ("c ", "d"), ("x" * 9, "y")]
    lm.count(Instance("loglikelihood", {}, pair, i, metadata=("made up", i, 1)) for i, pair in enumerate(arguments))
    assert lm.counts.by_task() == {
        "requests": {"made up": 3},
        "truncated": {"made up": 1},
        "apart": {"made up": 1},
        "recut": {},
    }
    assert (lm.counts.longest, lm.counts.tokens) == (10, 1 + 2 + 9)


def test_context_of_spaces_is_the_beginning_of_a_text() -> None:
    lm: Any = HuggingFaceLM.__new__(HuggingFaceLM)
    lm.backend, lm._pairs, lm.custom_prefix_token_id = "causal", {}, 99
    lm.tok_encode = lambda text, **_: [ord(c) for c in text]
    assert lm._encode_pair(" ", "a") == ([99], [32, 97])


def test_unknown_number_format_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^dtype = 'float33': allowed are auto, "):
        HuggingFaceLM("org/tiny", device="cpu", dtype="float33")


def open_text(monkeypatch: pytest.MonkeyPatch, positions: int, **settings: Any) -> HuggingFaceText:
    """Return a small GPT-2 with random weights for texts. settings: of the request."""
    config = GPT2Config(vocab_size=8, n_positions=positions, n_embd=4, n_layer=1, n_head=1)
    model = GPT2LMHeadModel(config)

    class Tokenizer:
        eos_token_id = 0

        def __len__(self) -> int:
            return 8

    def opened(*_: Any, max_length: int | None, **__: Any) -> Any:
        return SimpleNamespace(model=model, tokenizer=Tokenizer(), max_length=max_length or positions, device="cpu")

    monkeypatch.setattr(huggingface_text, "HuggingFaceLM", opened)
    return huggingface_text.load_huggingface_text(EvaluationRequest("org/tiny", device="cpu", **settings))


@pytest.mark.parametrize(("max_length", "length"), [(None, 2048), (3000, 3000), (64, 64)])
def test_max_length_is_the_length_of_the_pieces(max_length: int | None, length: int, monkeypatch) -> None:
    assert open_text(monkeypatch, 4096, max_length=max_length).config["batch"]["sequence_length"] == length


def test_pieces_beyond_the_learned_positions_are_refused(monkeypatch) -> None:
    open_text(monkeypatch, 16, max_length=16, texts=TextRequest(("a.txt",), sequence_length=16))
    with pytest.raises(ValueError, match=r"^--max-length 17: org/tiny has 16 positions; name 16 or less"):
        open_text(monkeypatch, 16, max_length=17, texts=TextRequest(("a.txt",)))
    with pytest.raises(ValueError, match=r"^--sequence-length 17: org/tiny has 16 positions; name 16 or less"):
        open_text(monkeypatch, 16, texts=TextRequest(("a.txt",), sequence_length=17))
