"""What the keys of the data, the batch and the model owe one another."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .files import KeyPath
from .schema import BatchConfig, Config, DataConfig


def data_problems(config: Config[Any]) -> Iterator[tuple[KeyPath, str]]:
    """(key, what is wrong with it) of the sections `data` and `batch`, among themselves and with the model."""
    data = config.data
    if data.corpus is None and not data.train_files:
        yield ("data",), "has no text: give data.corpus (stdlib, or files) or data.train (a token file)"
    if data.corpus is not None and data.train is not None:
        yield ("data", "corpus"), "and data.train both given: one of them is allowed; set the other to null"
    for key in ("validation", "test"):
        if getattr(data, key) is not None and data.train is None:
            yield ("data", key), "is a token file, which goes with data.train, not with data.corpus"
    yield from _tokenizer(config)
    yield from _blend(data)
    yield from _ramp(config.batch)
    yield from _samples(config)


def _tokenizer(config: Config[Any]) -> Iterator[tuple[KeyPath, str]]:
    tokenizer = config.data.tokenizer
    path = ("data", "tokenizer", "path")
    if tokenizer.type == "bytes" and tokenizer.path is not None:
        yield path, f"= {tokenizer.path}: the tokenizer bytes has no file, leave it out"
    if tokenizer.path is None and tokenizer.type in ("hf", "wordpiece"):
        yield path, f"is missing: name the file of data.tokenizer.type = {tokenizer.type}"
    if tokenizer.path is None and tokenizer.type == "sentencepiece":
        if config.data.train is not None:
            yield path, "is missing: name the tokenizer that made data.train (it is trained here for data.corpus only)"
        elif tokenizer.vocab_size > (rows := getattr(config.model, "vocab_size", tokenizer.vocab_size)):
            text = f"= {tokenizer.vocab_size}: at most model.vocab_size = {rows} is allowed"
            yield ("data", "tokenizer", "vocab_size"), text


def _blend(data: DataConfig) -> Iterator[tuple[KeyPath, str]]:
    weights, files, key = data.blend.weights, data.train_files, ("data", "blend", "weights")
    if data.blend.by == "weights" and weights is None:
        yield key, "is missing: data.blend.by = weights needs one for each file of data.train"
    elif weights is not None and data.blend.by != "weights":
        yield key, f"goes with data.blend.by = weights, not with {data.blend.by}"
    elif weights is not None and len(weights) != len(files):
        yield key, f"= {list(weights)}: one for each of the {len(files)} files of data.train is allowed"
    if data.objective == "masked" and len(files) > 1:
        yield (
            ("data", "train"),
            f"= {list(files)}: one file is allowed with data.objective = masked; preprocess them together",
        )


def _ramp(batch: BatchConfig) -> Iterator[tuple[KeyPath, str]]:
    ramp, key = batch.ramp, ("batch", "ramp")
    if ramp.start is None:
        if ramp.samples:
            yield (*key, "start"), "is missing: the size of the first batches; or set batch.ramp.samples to 0"
        return
    unit = batch.micro_batch_size * batch.data_ranks
    for name, size in (("start", ramp.start), ("increment", ramp.increment)):
        if size % unit:
            yield (
                (*key, name),
                f"= {size} is no multiple of batch.micro_batch_size x data ranks = {unit}; nearest: "
                + " or ".join(str(near) for near in (size // unit * unit, (size // unit + 1) * unit) if near),
            )
    if ramp.start > batch.global_batch_size:
        yield (*key, "start"), f"= {ramp.start}: at most batch.global_batch_size = {batch.global_batch_size} is allowed"
    elif (batch.global_batch_size - ramp.start) % ramp.increment:
        text = (
            f"= {ramp.increment} does not lead from {ramp.start} to batch.global_batch_size = {batch.global_batch_size}"
        )
        yield (*key, "increment"), text


def _samples(config: Config[Any]) -> Iterator[tuple[KeyPath, str]]:
    data = config.data
    if hasattr(config.model, "bidirectional_mixers"):
        two_sided, mixers = config.model.bidirectional_mixers(), ", ".join(dict.fromkeys(config.model.mixers))
        if data.objective == "causal" and two_sided:
            yield (
                ("data", "objective"),
                f"= causal: {', '.join(two_sided)} sees the token that is to be predicted; masked is allowed, or the "
                "mixer's option causal = true",
            )
        if data.objective == "masked" and not two_sided:
            yield (
                ("data", "objective"),
                f"= masked: {mixers} sees nothing of what follows a hidden token; causal is allowed, or a mixer that sees "
                "both sides (the option causal = false, docs/mixers.md)",
            )
    if data.objective == "masked" and data.masked.layout == "padded" and data.reset_at_documents:
        text = "= true: padded rows hold one document each; it goes with data.masked.layout = packed"
        yield ("data", "reset_at_documents"), text
    if data.objective == "masked" and data.mask_boundaries:
        yield ("data", "mask_boundaries"), "= true goes with data.objective = causal"
