"""Check combinations of keys of the sections `data` and `batch`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .files import KeyPath
from .image_schema import image_problems
from .schema import BatchConfig, Config, DataConfig
from .section import without_effect


def data_problems(config: Config[Any]) -> Iterator[tuple[KeyPath, str]]:
    """Yield (key, problem) of the sections `data` and `batch`, also in combination with the model."""
    data = config.data
    yield from image_problems(config)
    yield from _ramp(config.batch)
    if data.objective != "causal":
        yield from without_effect(config.evaluation, ("evaluation",), "data.objective = causal", name="prompt")
    if data.objective == "classification":
        return
    if not data.corpus and not data.train_files:
        yield ("data",), "has no text: set data.corpus (stdlib, or files) or data.train (a token file)"
    if data.corpus is not None and data.train is not None:
        yield ("data", "corpus"), "and data.train both given: one of them is allowed; set the other to null"
    if data.corpus is None and data.train is not None:
        yield from without_effect(data, ("data",), "data.corpus instead of data.train", name="source_key")
    for key in ("validation", "test"):
        if getattr(data, key) is not None and data.train is None:
            yield ("data", key), "is a token file, which requires data.train instead of data.corpus"
    yield from _tokenizer(config)
    yield from _blend(data)
    yield from _samples(config)


def _tokenizer(config: Config[Any]) -> Iterator[tuple[KeyPath, str]]:
    tokenizer = config.data.tokenizer
    path = ("data", "tokenizer", "path")
    if tokenizer.type == "bytes" and tokenizer.path is not None:
        yield path, f"= {tokenizer.path}: the tokenizer bytes has no file; remove this key"
    if tokenizer.path is None and tokenizer.type in ("hf", "gpt2", "wordpiece"):
        yield path, f"is missing: name the file of data.tokenizer.type = {tokenizer.type}"
    if tokenizer.path is None and tokenizer.type == "sentencepiece":
        if config.data.train is not None:
            yield path, "is missing: name the tokenizer that made data.train (it is trained here for data.corpus only)"
        elif tokenizer.vocab_size > (rows := getattr(config.model, "vocab_size", tokenizer.vocab_size)):
            text = f"= {tokenizer.vocab_size}: at most model.vocab_size = {rows} is allowed; set {rows}, or raise it"
            yield ("data", "tokenizer", "vocab_size"), text


def _blend(data: DataConfig) -> Iterator[tuple[KeyPath, str]]:
    weights, files, key = data.blend.weights, data.train_files, ("data", "blend", "weights")
    if len(files) < 2:
        yield from without_effect(data.blend, ("data", "blend"), "two or more files in data.train", name="temperature")
    if data.blend.by == "weights" and weights is None:
        yield key, "is missing: data.blend.by = weights needs one for each file of data.train"
    elif weights is not None and data.blend.by != "weights":
        yield (
            key,
            f"requires data.blend.by = weights, but it is {data.blend.by}; set data.blend.by=weights, or remove the weights",
        )
    elif weights is not None and len(weights) != len(files):
        yield key, f"= {list(weights)}: one weight per file of data.train is required, {len(files)} in all"
    limits = data.blend.min_tokens
    if limits is not None and len(limits) != len(files):
        text = f"= {list(limits)}: one number per file of data.train is required, {len(files)} in all"
        yield ("data", "blend", "min_tokens"), text
    if limits is not None and data.objective == "masked":
        text = f"= {list(limits)} requires data.objective = causal; remove it"
        yield ("data", "blend", "min_tokens"), text
    if data.objective == "masked" and len(files) > 1:
        yield (
            ("data", "train"),
            f"= {list(files)}: one file is allowed with data.objective = masked; preprocess the files together into one",
        )


def _ramp(batch: BatchConfig) -> Iterator[tuple[KeyPath, str]]:
    ramp, key = batch.ramp, ("batch", "ramp")
    if ramp.start is None:
        if ramp.samples:
            yield (*key, "start"), "is missing: the size of the first batches; or set batch.ramp.samples to 0"
        return
    if not ramp.samples:
        yield (*key, "samples"), "is missing: the samples over which the batch grows; or remove batch.ramp.start"
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
            f"= {ramp.increment} does not divide batch.global_batch_size - batch.ramp.start ="
            f" {batch.global_batch_size - ramp.start}"
        )
        yield (*key, "increment"), text


def _samples(config: Config[Any]) -> Iterator[tuple[KeyPath, str]]:
    data = config.data
    if data.objective == "causal":
        yield from without_effect(data.masked, ("data", "masked"), "data.objective = masked")
    if hasattr(config.model, "bidirectional_mixers"):
        bidirectional, mixers = config.model.bidirectional_mixers(), ", ".join(dict.fromkeys(config.model.mixers))
        if data.objective == "causal" and bidirectional:
            yield (
                ("data", "objective"),
                f"= causal: {', '.join(bidirectional)} sees the token that is to be predicted; set masked, or the "
                "option causal = true of the mixer",
            )
        if data.objective == "masked" and not bidirectional:
            yield (
                ("data", "objective"),
                f"= masked: {mixers} is causal and does not see the tokens after a masked token; set causal, or choose a "
                "bidirectional mixer (option causal = false, docs/reference/mixers.md)",
            )
    if data.objective == "masked" and data.masked.layout == "padded" and data.reset_at_documents:
        text = "= true: padded rows hold one document each; set it to false, or data.masked.layout = packed"
        yield ("data", "reset_at_documents"), text
    if data.packing == "best_fit" and data.objective == "masked":
        yield ("data", "packing"), "= best_fit requires data.objective = causal; set it to stream"
    elif data.packing == "best_fit" and data.order == "neox":
        text = "= neox with data.packing = best_fit: reshuffle is allowed; set data.order=reshuffle"
        yield ("data", "order"), text
    if data.objective == "masked" and data.mask_boundaries:
        yield ("data", "mask_boundaries"), "= true requires data.objective = causal; set it to false"
