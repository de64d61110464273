"""Measure the perplexity of a Hugging Face model through the code for runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from models.precision import to_accumulation_dtype
from tools.cli.devices import device_of
from tools.evaluation.haystack import position_limit
from tools.evaluation.huggingface import HuggingFaceLM
from tools.evaluation.request import EvaluationRequest

LONGEST = 2048  # tokens per piece by default


class HuggingFaceTokens:
    """Encode texts with a Hugging Face tokenizer, without special tokens around them.

    Raises ValueError for a tokenizer without a token that ends a text.
    """

    path = None
    type = "huggingface"

    def __init__(self, tokenizer: Any, name: str) -> None:
        end = tokenizer.eos_token_id if tokenizer.eos_token_id is not None else tokenizer.bos_token_id
        if end is None:
            raise ValueError(
                f"{name}: its tokenizer has neither eos_token nor bos_token: set one in tokenizer_config.json"
            )
        self._tokenizer, self.end_of_document_id, self.vocab_size = tokenizer, int(end), len(tokenizer)

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text."""
        return list(self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


class SummedLoss(nn.Module):
    """Return the summed nll of a batch, as `models.language_model.LanguageModel` with labels."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, labels: Tensor, loss_weight: Tensor) -> Tensor:
        """Return sum(weight * nll) in nats. All arguments are [batch, length]."""
        total = torch.zeros((), dtype=torch.float64, device=tokens.device)
        logits = self.model(input_ids=tokens, use_cache=False).logits
        for row, row_labels, weight in zip(logits, labels, loss_weight, strict=True):  # one row at a time, in float32
            nll = nn.functional.cross_entropy(to_accumulation_dtype(row), row_labels, reduction="none")
            total += (nll * weight).sum().double()
        return total


@dataclass
class HuggingFaceText:
    """Hold a Hugging Face model with the attributes of `tools.loading.model.LoadedModel` that texts need.

    commit: the commit on the hub, None for a local folder.
    """

    checkpoint: str
    model: SummedLoss
    tokenizer: Any
    device: torch.device
    config: dict[str, Any]
    num_parameters: int
    commit: str | None = None
    step: None = None


def load_huggingface_text(request: EvaluationRequest) -> HuggingFaceText:
    """Load the model of a request.

    Raises as `HuggingFaceLM` and `HuggingFaceTokens`; ValueError for pieces beyond the learned positions.
    """
    name = request.checkpoint
    lm = HuggingFaceLM(
        name,
        device=str(device_of(request.device)),
        dtype=request.dtype,
        max_length=request.max_length,
        trust_remote_code=request.trust_remote_code,
    )
    model = lm.model.eval().requires_grad_(False)
    length = request.max_length or min(lm.max_length, LONGEST)
    _check_positions(request, model, length)
    config = {"batch": {"sequence_length": length}, "data": {"reset_at_documents": False}}
    place = str(Path(name).resolve()) if Path(name).is_dir() else name
    num_parameters = sum(p.numel() for p in model.parameters())
    tokens = HuggingFaceTokens(lm.tokenizer, name)
    commit = getattr(model.config, "_commit_hash", None)
    return HuggingFaceText(place, SummedLoss(model), tokens, torch.device(lm.device), config, num_parameters, commit)


def _check_positions(request: EvaluationRequest, model: Any, length: int) -> None:
    """Raise ValueError for pieces beyond the learned positions. length: tokens per piece without --sequence-length."""
    requested = None if request.texts is None else request.texts.sequence_length
    option = "--max-length" if request.max_length and not requested else "--sequence-length"
    limit, length = position_limit(model), requested or length
    if limit is not None and length > limit:
        raise ValueError(f"{option} {length}: {request.checkpoint} has {limit:,} positions; name {limit} or less")
