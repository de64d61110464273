"""Compute the loss of held-out text or images."""

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
        batches: (part, limit) -> this data rank's micro-batches of a part, the same number on every rank. `limit`: number of
            global batches over all parts, of which each part has its share; None: all.
        parts: name of each part (a source of the text; "" for a single part) -> its share of the tokens.
        total_bytes: bytes of the text of the whole set; None if unknown, and for images.
        total_tokens: tokens with a label, or images, in the whole set.
        micro_batches: number of micro-batches of this data rank in the whole set.
        fraction: limit -> the share of the set's samples that `limit` global batches read, from 0 to 1.
        metrics: returns further metrics of the batches since the last `batches`; every process calls it. None: perplexity.
    """

    batches: Callable[[str, int | None], Iterable[Batch]]
    parts: Mapping[str, float]
    total_bytes: int | None
    total_tokens: int
    micro_batches: int
    fraction: Callable[[int], float]
    metrics: Callable[[], dict[str, float]] | None = None


def evaluate(
    engine: Engine,
    data: ValidationSet,
    limit: int | None,
    progress: Callable[[float], None] | None = None,
    *,
    stop: Callable[[], bool] = lambda: False,
) -> dict[str, float] | None:
    """Return loss, perplexity and, if available, accuracy, bits per byte and the loss per part. Every process calls it.

    Args:
        limit: number of global batches over all parts; None: the whole set.
        progress: called after every micro-batch with the completed fraction of the whole set.
        stop: called before every micro-batch, with the same result on every process. True ends the evaluation with None.
    """
    begin = time.perf_counter()
    done, stopped = 0, False

    def counted(batches: Iterable[Batch]) -> Iterator[Batch]:
        nonlocal done, stopped
        for batch in batches:
            if stopped := stop():
                return
            yield batch
            done += 1
            if progress is not None:
                progress(done / data.micro_batches)

    sums = {}
    for name in data.parts:
        sums[name] = engine.evaluate(counted(data.batches(name, limit)))
        if stopped:
            return None
    # A small part of a masked set may have no masked token, and then no loss.
    weights = {name: part.weight for name, part in sums.items() if part.weight}
    # In the whole set every labelled token has the same weight. In a selection the parts have their shares of the text.
    shares = weights if limit is None else {name: data.parts[name] for name in weights}
    by_part = {f"loss/{name}": sums[name].nll / sums[name].weight for name in shares}
    total_share = sum(shares.values()) or math.nan
    loss = sum(share * by_part[f"loss/{name}"] for name, share in shares.items()) / total_share
    correct = [
        share * num_correct / sums[name].weight
        for name, share in shares.items()
        if (num_correct := sums[name].num_correct) is not None
    ]
    accuracy = {"accuracy": sum(correct) / total_share} if correct else {}
    metrics = {"perplexity": math.exp(min(loss, 700.0))} if data.metrics is None else data.metrics()
    values = {"loss": loss, **accuracy, **metrics}
    if data.total_bytes:
        # For the whole set this is total nll / ln 2 / bytes. A selection uses the tokens per byte of the whole set.
        values["bits_per_byte"] = loss / math.log(2) * data.total_tokens / data.total_bytes
    if "" not in data.parts:
        values.update(by_part)
    values["evaluated_tokens"] = sum(part.weight for part in sums.values())
    values["evaluated_fraction"] = 1.0 if limit is None else data.fraction(limit)
    values["seconds"] = time.perf_counter() - begin
    return values


def due_measurements(config: Config[Any], step: int, *, validation: bool, sample: bool, suites: bool) -> set[str]:
    """Return the kinds of evaluation that are due after a step before the last, among those that the run has."""
    settings, due = config.evaluation, set[str]()
    if validation and settings.interval and step % settings.interval == 0:
        due |= {"validation", "sample"} if sample else {"validation"}
    if suites and settings.suite_interval and step % settings.suite_interval == 0:
        due.add("evaluation")
    return due
