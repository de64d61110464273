"""The loss of a set of held-out text."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from megatron_lite.config.schema import Config
from megatron_lite.engine.engine import Batch, Engine


@dataclass(frozen=True)
class ValidationSet:
    """Validation data of this process.

    Attributes:
        batches: (part, limit) -> this data rank's micro batches of a part of the set, the same number on every rank: of about
            `limit` global batches and the part's share of them; None: of all.
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
    engine: Engine,
    data: ValidationSet,
    limit: int | None,
    progress: Callable[[float], None] | None = None,
    *,
    stop: Callable[[], bool] = lambda: False,
) -> dict[str, float] | None:
    """Loss, perplexity and what else the data allow: accuracy, bits per byte, the loss of every part. Every process calls it.

    Args:
        limit: about so many global batches over all parts; None: the whole set.
        progress: is told the share of the whole set that is done, after every micro batch.
        stop: asked before every micro batch, with the same answer on every process; True ends it, and the result is None.
    """
    begin = time.perf_counter()
    done, stopped = 0, False

    def watched(batches: Iterable[Batch]) -> Iterator[Batch]:
        nonlocal done, stopped
        for batch in batches:
            if stopped := stop():
                return
            yield batch
            if progress is not None:
                done += 1
                progress(done / data.micro_batches)

    sums = {}
    for name in data.parts:
        sums[name] = engine.evaluate(watched(data.batches(name, limit)))
        if stopped:
            return None
    # A small part of a masked set may have no masked token, and then says nothing.
    weights = {name: part.weight for name, part in sums.items() if part.weight}
    # Of the whole set every token that is asked for counts alike; a selection stands for the text, with its shares.
    shares = weights if limit is None else {name: data.parts[name] for name in weights}
    by_part = {f"loss/{name}": sums[name].nll / sums[name].weight for name in shares}
    whole = sum(shares.values()) or math.nan
    loss = sum(share * by_part[f"loss/{name}"] for name, share in shares.items()) / whole
    correct = [
        share * num_correct / sums[name].weight
        for name, share in shares.items()
        if (num_correct := sums[name].num_correct) is not None
    ]
    accuracy = {"accuracy": sum(correct) / whole} if correct else {}
    values = {"loss": loss, "perplexity": math.exp(min(loss, 700.0)), **accuracy}
    if data.total_bytes:
        # Over the whole set this is total nll / ln 2 / bytes; over a part, the set's tokens per byte stand in.
        values["bits_per_byte"] = loss / math.log(2) * data.total_tokens / data.total_bytes
    if "" not in data.parts:
        values.update(by_part)
    values["evaluated_tokens"] = sum(part.weight for part in sums.values())
    values["seconds"] = time.perf_counter() - begin
    return values


def due_measurements(config: Config[Any], step: int, *, validation: bool, sample: bool, suites: bool) -> set[str]:
    """Return the kinds of metrics that are due after a step that is not the last one, of those that the run has."""
    settings, due = config.evaluation, set[str]()
    if validation and settings.interval and step % settings.interval == 0:
        due |= {"validation", "sample"} if sample else {"validation"}
    if suites and settings.suite_interval and step % settings.suite_interval == 0:
        due.add("evaluation")
    return due
