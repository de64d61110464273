"""Build the batches of a run, for training and validation, from its configuration and its token files."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from data.corpus.document_sources import read_sources
from data.datasets.blend import BlendedDataset, Shares, training_dataset
from data.datasets.causal import Packing, SequentialDataset
from data.datasets.masked import MaskedDataset
from data.datasets.masking import masking_for
from data.indexed import IndexedTokens
from data.loader import Dataset, MicroBatch, ReadAhead, batches
from data.tokenizer import Tokenizer
from megatron_lite.config.schema import Config
from megatron_lite.parallel.grid import Grid
from megatron_lite.validation import ValidationSet
from tools.loading.token_data import PreparedData

PREPARATION_HOURS = 24.0  # longest time that ranks wait for the one that prepares the data


def training_samples(
    config: Config[Any], data: PreparedData, tokenizer: Tokenizer, steps: int, step: int = 0, consumed_samples: int = 0
) -> Any:
    """Return the training data set of a run of `steps` steps.

    step, consumed_samples: steps done and samples read by the checkpoint that the run resumes from.
    Raises as `training_dataset` and `MaskedDataset`.
    """
    settings = config.data
    common: dict[str, Any] = {
        "sequence_length": config.batch.sequence_length,
        "num_samples": num_samples(config, steps, step, consumed_samples),
        "seed": config.run.seed,
        "order": settings.order,
        "cache_directory": settings.cache_directory,
    }
    if settings.objective == "masked":
        return MaskedDataset(
            data.train[0],
            masking_for(tokenizer, settings.masked.rate, settings.masked.whole_word),
            tokenizer,
            layout=settings.masked.layout,
            reset_at_documents=settings.reset_at_documents,
            sources=config.logging.loss_by_source,
            **common,
        )
    packing = Packing(
        settings.reset_at_documents, settings.mask_boundaries, config.logging.loss_by_source, settings.packing
    )
    samples: Any = training_dataset(data.train, Shares(**settings.blend.model_dump()), packing=packing, **common)
    for part in samples.datasets if isinstance(samples, BlendedDataset) else [samples]:
        part.file.vocab_size = config.model.vocab_size
    return samples


def num_samples(config: Config[Any], steps: int, step: int, consumed_samples: int) -> int:
    """Return the samples that a run of `steps` steps needs if it resumes at `step`, after `consumed_samples`."""
    # The previous part of the run may have had a larger batch.
    batch = config.batch
    return max(batch.samples_of(steps), batch.samples_of(max(0, steps - step), consumed_samples))


def training_steps(config: Config[Any], samples: Dataset, grid: Grid) -> Callable[[int], ReadAhead[list[MicroBatch]]]:
    """Return a function of the consumed samples that yields this data rank's next steps, prefetched."""
    return lambda consumed: ReadAhead(
        batches(
            samples,
            consumed_samples=consumed,
            global_batch_size=config.batch.size_at,
            micro_batch_size=config.batch.micro_batch_size,
            data_rank=grid.data_rank,
            data_size=grid.data_size,
            threads=_threads(config),
        )
    )


def validation_batches(config: Config[Any], samples: Dataset, limit: int | None, grid: Grid) -> Iterator[MicroBatch]:
    """Yield this data rank's micro-batches of all samples, or of `limit` evenly spaced ones. The last may be incomplete."""
    size = config.batch.micro_batch_size
    selected: Any = samples if limit is None or limit >= len(samples) else EvenSubset(samples, limit)
    steps = batches(
        selected,
        global_batch_size=size * grid.data_size,
        micro_batch_size=size,
        data_rank=grid.data_rank,
        data_size=grid.data_size,
        fill_last=True,
        threads=_threads(config),
    )
    return (batch for step in steps for batch in step)


def _threads(config: Config[Any]) -> int:
    return config.data.images.threads if config.data.objective == "classification" else 1


def validation_set(
    config: Config[Any], prefix: str | None, total_bytes: int | None, tokenizer: Tokenizer, grid: Grid
) -> ValidationSet | None:
    """Return the validation data of a token file, or None without a file.

    A limited number of batches holds the same samples at every validation and in every layout. With
    `logging.loss_by_source` each source is one part.
    """
    if prefix is None:
        return None
    sources = _by_source(config, prefix)
    parts = {name: _validation_samples(config, prefix, tokenizer, ids) for name, ids in sources.items()}
    tokens = sum(part.num_tokens for part in parts.values())
    shares = {name: part.num_tokens / tokens for name, part in parts.items()}
    at_once = config.batch.micro_batch_size * grid.data_size

    def samples_of(name: str, limit: int) -> int:
        # Each source has its share of the samples, and at least one.
        return min(len(parts[name]), max(1, round(limit * config.batch.global_batch_size * shares[name])))

    def part_batches(name: str, limit: int | None) -> Iterator[MicroBatch]:
        return validation_batches(config, parts[name], None if limit is None else samples_of(name, limit), grid)

    def fraction(limit: int) -> float:
        return sum(samples_of(name, limit) for name in parts) / sum(map(len, parts.values()))

    known_bytes = total_bytes if config.data.objective == "causal" else None
    return ValidationSet(
        part_batches,
        parts=shares,
        total_bytes=known_bytes,
        total_tokens=tokens,
        micro_batches=sum(-(-len(part) // at_once) for part in parts.values()),
        fraction=fraction,
    )


@dataclass(frozen=True)
class EvenSubset:
    """Select `count` evenly spaced samples of a data set, the same at every validation."""

    dataset: Dataset
    count: int

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> Any:
        return self.dataset[round(number * (len(self.dataset) - 1) / max(1, self.count - 1))]


def _validation_samples(
    config: Config[Any], prefix: str, tokenizer: Tokenizer, sequences: Sequence[int] | None
) -> MaskedDataset | SequentialDataset:
    settings = config.data
    if settings.objective == "masked":
        return MaskedDataset(
            prefix,
            masking_for(tokenizer, settings.masked.validation_rate, settings.masked.whole_word),
            tokenizer,
            sequence_length=config.batch.sequence_length,
            num_samples=None,
            seed=0,  # the same masks for every run
            layout=settings.masked.layout,
            reset_at_documents=settings.reset_at_documents,
            sequences=sequences,
        )
    samples = SequentialDataset(
        prefix,
        sequence_length=config.batch.sequence_length,
        first_token=tokenizer.end_of_document_id,
        reset_at_documents=settings.reset_at_documents,
        sequences=sequences,
    )
    samples.file.vocab_size = config.model.vocab_size
    return samples


def _by_source(config: Config[Any], prefix: str) -> dict[str, Any]:
    """Return the sequence ids of each source; without `logging.loss_by_source` {"": None} for all sequences."""
    if not config.logging.loss_by_source:
        return {"": None}
    file = IndexedTokens(prefix)
    names, ids = read_sources(prefix, len(file))
    parts = {name: np.flatnonzero((ids == number) & (file.sizes > 0)) for number, name in enumerate(names)}
    return {name: sequences for name, sequences in parts.items() if len(sequences)}
