"""Measure the accuracy of a masked model by length: the same masked tokens, in rows of each length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from data.datasets.masked import MaskedDataset
from data.datasets.masking import masking_for
from tools.length.causal import cut, pieces_read
from tools.loading.model import LoadedModel


@torch.inference_mode()
def masked_accuracy(
    loaded: LoadedModel, prefix: str, length: int, *, longest: int, tokens: int, progress: Any
) -> dict[str, float]:
    """Return accuracy, loss and number of masked tokens with rows of one length.

    Args:
        prefix: of a token file, read in pieces of `longest`. The last piece of the file may be padded with unmasked tokens.
        longest: a multiple of `length`.
        progress: called after each piece.

    Raises:
        ValueError: no token is masked.
    """
    settings = loaded.config["data"]["masked"]
    masking = masking_for(loaded.tokenizer, settings["validation_rate"], settings["whole_word"])
    rows = MaskedDataset(
        prefix,
        masking,
        loaded.tokenizer,
        sequence_length=longest,
        num_samples=None,
        seed=0,
        layout="packed",
        reset_at_documents=loaded.config["data"]["reset_at_documents"],
    )
    nll = weight = 0.0
    num_correct = torch.zeros((), dtype=torch.float64, device=loaded.device)
    for number in range(pieces_read(rows.num_tokens, longest, tokens)):
        batch = cut(rows[number], length, loaded.device)
        hidden, _ = loaded.model.hidden_states(batch["tokens"], cu_seqlens=batch.get("cu_seqlens"))
        targets = {"labels": batch["labels"], "loss_weight": batch["loss_weight"], "num_correct": num_correct}
        nll += loaded.model.head(hidden, **targets).item()
        weight += batch["loss_weight"].sum().item()
        progress()
    if not weight:
        raise ValueError(f"{prefix}: none of the first {tokens:,} tokens is masked; raise --tokens")
    return {"length": length, "accuracy": num_correct.item() / weight, "loss": nll / weight, "tokens": weight}


def accuracy_table(results: dict[str, list[dict[str, float]]], lengths: Sequence[int]) -> str:
    """Return a table with one line per run and one column per length."""
    lines = ["tokens   " + "  ".join(f"{length:>7}" for length in lengths)]
    for run, values in results.items():
        by_length = {row["length"]: row for row in values}
        cells = [f"{by_length[n]['accuracy']:7.2%}" if n in by_length else f"{'-':>7}" for n in lengths]
        lines.append("accuracy " + "  ".join(cells) + f"   {run}, {int(values[0]['tokens']):,} masked tokens")
    return "\n".join(lines)
