"""Measure associative recall in context (MQAR) of a trained language model, without further training.

After Arora et al. 2023 (Zoology, arXiv 2312.04927): a row holds pairs of random tokens, then the same pairs in another order.
At every repeated key the model chooses among the values of its row.
"""

from __future__ import annotations

import statistics

import numpy as np
import torch
from numpy.typing import NDArray

from data.indexed import IndexedTokens
from tools.evaluation.perplexity import validation_text
from tools.evaluation.run_results import add_to_run
from tools.loading.model import LoadedModel

SUITE = "mqar"
PAIRS = (8, 32)
EXAMPLES = 128
_TOKENS = 1 << 20  # of the validation text, whose tokens are keys and values


def recall_rows(ids: NDArray[np.int64], pairs: int, examples: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows of tokens, [examples, 4 pairs], and the place of each query's value among the first pairs, [examples, pairs].

    ids: different tokens to draw from. Raises ValueError for fewer than 2 x `pairs` tokens.
    """
    if len(ids) < 2 * pairs:
        raise ValueError(
            f"{pairs} pairs need {2 * pairs} different tokens; the text has {len(ids)} that are frequent enough: name a longer "
            "validation text, or leave --recall out"
        )
    draw = np.random.default_rng([0, pairs])
    drawn = np.stack([draw.choice(ids, 2 * pairs, replace=False) for _ in range(examples)]).reshape(examples, pairs, 2)
    order = draw.permuted(np.tile(np.arange(pairs), (examples, 1)), axis=1)
    again = np.take_along_axis(drawn, order[..., None], 1)
    return torch.from_numpy(np.concatenate([drawn, again], 1).reshape(examples, -1)), torch.from_numpy(order)


@torch.inference_mode()
def associative_recall(
    loaded: LoadedModel, ids: NDArray[np.int64], pairs: int, examples: int = EXAMPLES
) -> tuple[float, float]:
    """Return the share of repeated keys whose value is ranked first among the row's values, and its standard error.

    Chance is 1 / pairs. ids: as `recall_rows`.
    """
    tokens, order = (part.to(loaded.device) for part in recall_rows(ids, pairs, examples))
    hidden, _ = loaded.model.hidden_states(tokens)
    logits = loaded.model.head(hidden[:, 2 * pairs :: 2].contiguous())
    values = tokens[:, 1 : 2 * pairs : 2]
    chosen = logits.gather(-1, values[:, None].expand(-1, pairs, -1)).argmax(-1)
    shares = (chosen == order).double().mean(1).tolist()
    return statistics.mean(shares), statistics.stdev(shares) / examples**0.5


def add_recall(loaded: LoadedModel) -> None:
    """Measure a run's model and add the scores to its results file."""
    file = IndexedTokens(validation_text(loaded).prefix)
    sequences = min(len(file), int(np.searchsorted(np.cumsum(file.sizes, dtype=np.int64), _TOKENS)) + 1)
    ids, counts = np.unique(np.concatenate([file[n] for n in range(sequences)])[:_TOKENS], return_counts=True)
    # Rare tokens have embeddings that were hardly trained.
    ids = ids[(counts >= 10) & (ids != loaded.tokenizer.end_of_document_id)].astype(np.int64)
    scores, details = {}, {}
    for pairs in PAIRS:
        score, error = associative_recall(loaded, ids, pairs)
        scores[f"MQAR with {pairs} pairs"] = {"accuracy": score}
        details[f"MQAR with {pairs} pairs"] = {"accuracy": {"stderr": error, "chance": 1 / pairs}}
    add_to_run(loaded, {SUITE: scores}, {SUITE: details})
