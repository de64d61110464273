"""Build the batches of a dataset, and prefetch them in a thread."""

from __future__ import annotations

import itertools
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Generic, Protocol, TypeVar

import torch

from .sampler import step_samples

MicroBatch = dict[str, torch.Tensor]
Item = TypeVar("Item")


class Dataset(Protocol):
    """A sequence of samples; each is a dict of tensors with the same shapes.

    A data set may have the method `batch(numbers)`, which returns several samples, stacked.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, number: int, /) -> dict[str, torch.Tensor]: ...


def batches(
    dataset: Dataset,
    *,
    consumed_samples: int = 0,
    global_batch_size: int | Callable[[int], int],
    micro_batch_size: int,
    data_rank: int = 0,
    data_size: int = 1,
    fill_last: bool = False,
    threads: int = 1,
) -> Iterator[list[MicroBatch]]:
    """Yield one list of micro-batches per step for this rank, from ``consumed_samples`` on.

    Tensors are stacked to [micro_batch_size, ...]. Samples with ``cu_seqlens`` are concatenated instead: tokens
    [1, micro_batch_size * T] and bounds [micro_batch_size * segments + 1].

    global_batch_size: samples per step, or a function of the consumed samples (batch size ramp).
    fill_last: also yield the last incomplete batch (validation). Missing samples repeat the last sample with loss_weight 0,
        so every rank takes the same number of steps. Without it, iteration ends with the last complete batch.
    threads: that read micro-batches at the same time, ahead of the one that is yielded.

    Raises ValueError as `check_batch_sizes`.
    """
    total = len(dataset)

    def step_numbers() -> Iterator[list[list[int]]]:
        consumed = consumed_samples
        while consumed < total:
            size = global_batch_size if isinstance(global_batch_size, int) else global_batch_size(consumed)
            if consumed + size > total and not fill_last:
                return
            yield step_samples(
                consumed,
                global_batch_size=size,
                micro_batch_size=micro_batch_size,
                data_rank=data_rank,
                data_size=data_size,
            ).tolist()
            consumed += size

    steps, sizes = itertools.tee(step_numbers())
    micro_batches = _read_ahead(partial(_micro_batch, dataset, total), itertools.chain.from_iterable(steps), threads)
    return ([next(micro_batches) for _ in step] for step in sizes)


def _read_ahead(
    read: Callable[[list[int]], MicroBatch], numbers: Iterator[list[int]], threads: int
) -> Iterator[MicroBatch]:
    """Yield read(number) of all numbers in their order. With several threads, each of them reads one ahead."""
    if threads == 1:
        yield from map(read, numbers)
        return
    with ThreadPoolExecutor(threads, "samples") as pool:
        started = deque(pool.submit(read, one) for one in itertools.islice(numbers, threads))
        while started:
            result = started.popleft().result()
            started.extend(pool.submit(read, one) for one in itertools.islice(numbers, 1))
            yield result


class ReadAhead(Generic[Item]):
    """Iterate over ``source`` in a background thread that prefetches ``depth`` items.

    An error in the source is raised by the ``next`` that would have returned the item. ``close``, or leaving a ``with``
    block, ends the thread.
    """

    def __init__(self, source: Iterator[Item], depth: int = 2) -> None:
        self._ready: queue.Queue[tuple[str, object]] = queue.Queue(maxsize=depth)
        self._stop = threading.Event()
        self._done = False
        self._thread = threading.Thread(target=self._fill, args=(source,), name="read-ahead", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[Item]:
        return self

    def __next__(self) -> Item:
        if self._done:
            raise StopIteration
        kind, value = self._ready.get()
        if kind == "item":
            return value  # type: ignore[return-value]
        self._done = True
        if kind == "error":
            raise value  # type: ignore[misc]
        raise StopIteration

    def close(self) -> None:
        """Stop the thread and discard the prefetched items."""
        self._stop.set()
        self._done = True
        while self._thread.is_alive():
            while not self._ready.empty():
                self._ready.get_nowait()
            self._thread.join(timeout=0.05)

    def __enter__(self) -> ReadAhead[Item]:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _fill(self, source: Iterator[Item]) -> None:
        try:
            for item in source:
                self._ready.put(("item", item))
                if self._stop.is_set():
                    return
            self._ready.put(("end", None))
        except BaseException as error:
            self._ready.put(("error", error))


def _micro_batch(dataset: Dataset, total: int, numbers: list[int]) -> MicroBatch:
    """Return the stacked samples of a micro-batch. Numbers from `total` on repeat the last sample with loss_weight 0."""
    if (read := getattr(dataset, "batch", None)) is None:
        return _stack([_sample(dataset, total, number) for number in numbers])
    batch: MicroBatch = read([min(number, total - 1) for number in numbers])
    batch["loss_weight"][torch.tensor(numbers) >= total] = 0.0
    return batch


def _sample(dataset: Dataset, total: int, number: int) -> dict[str, torch.Tensor]:
    if number < total:
        return dataset[number]
    filler = dict(dataset[total - 1])
    filler["loss_weight"] = torch.zeros_like(filler["loss_weight"])
    return filler


def _stack(samples: list[dict[str, torch.Tensor]]) -> MicroBatch:
    if "cu_seqlens" not in samples[0]:
        return {key: torch.stack([sample[key] for sample in samples]) for key in samples[0]}
    row = {key: torch.cat([sample[key] for sample in samples])[None] for key in samples[0] if key != "cu_seqlens"}
    length = len(samples[0]["tokens"])
    bounds = [sample["cu_seqlens"][:-1] + number * length for number, sample in enumerate(samples)]
    row["cu_seqlens"] = torch.cat([*bounds, torch.tensor([len(samples) * length], dtype=torch.int32)])
    return row
