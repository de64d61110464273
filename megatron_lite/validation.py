"""The loss of a set of held-out text."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from megatron_lite.engine.engine import Batch, Engine


@dataclass(frozen=True)
class ValidationSet:
    """Validation data of this process.

    Attributes:
        batches: (part, limit) -> at most about `limit` micro batches of this data rank (None: all) of a part of the set, the
            same number on every rank.
        parts: name of each part (one source of the text; "" where they are not told apart) -> its share of the tokens.
        total_bytes: bytes of the text of the whole set; None when it is not known.
        total_tokens: tokens that carry a loss in the whole set.
        micro_batches: of this data rank in the whole set.
    """

    batches: Callable[[str, int | None], Iterable[Batch]]
    parts: Mapping[str, float]
    total_bytes: int | None
    total_tokens: int
    micro_batches: int


def evaluate(
    engine: Engine, data: ValidationSet, limit: int | None, progress: Callable[[float], None] | None = None
) -> dict[str, float]:
    """Loss, perplexity and what else the data allow: accuracy, bits per byte, the loss of every part. Every process calls it.

    Args:
        limit: at most about so many micro batches of each part; None: all.
        progress: is told the share of the whole set that is done, after every micro batch.
    """
    begin = time.perf_counter()
    done = 0

    def watched(batches: Iterable[Batch]) -> Iterator[Batch]:
        nonlocal done
        for batch in batches:
            yield batch
            if progress is not None:
                done += 1
                progress(done / data.micro_batches)

    sums = {name: engine.evaluate(watched(data.batches(name, limit))) for name in data.parts}
    # A small part of a masked set may have no masked token, and then says nothing.
    weights = {name: part.weight for name, part in sums.items() if part.weight}
    # Of the whole set every token that is asked for counts alike; a selection stands for the text, with its shares.
    shares = weights if limit is None else {name: data.parts[name] for name in weights}
    by_part = {f"loss/{name}": sums[name].nll / sums[name].weight for name in shares}
    whole = sum(shares.values()) or math.nan
    loss = sum(share * by_part[f"loss/{name}"] for name, share in shares.items()) / whole
    rights = [
        share * right / sums[name].weight for name, share in shares.items() if (right := sums[name].right) is not None
    ]
    accuracy = {"accuracy": sum(rights) / whole} if rights else {}
    values = {"loss": loss, "perplexity": math.exp(min(loss, 700.0)), **accuracy}
    if data.total_bytes:
        # Over the whole set this is total nll / ln 2 / bytes; over a part, the set's tokens per byte stand in.
        values["bits_per_byte"] = loss / math.log(2) * data.total_tokens / data.total_bytes
    if "" not in data.parts:
        values.update(by_part)
    values["evaluated_tokens"] = sum(part.weight for part in sums.values())
    values["seconds"] = time.perf_counter() - begin
    return values
