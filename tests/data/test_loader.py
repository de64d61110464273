"""The order of samples is a function of consumed samples alone; reading ahead changes nothing but time."""

import gc
import itertools
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from data.datasets.causal import CausalDataset, Packing
from data.datasets.masked import MaskedDataset
from data.datasets.masking import masking_for
from data.indexed import IndexedWriter
from data.loader import ReadAhead, batches
from data.sampler import step_samples
from data.tokenizer import load_tokenizer
from megatron_lite.config.schema import BatchConfig, RampConfig


class Numbers:
    """A data set whose sample i holds i."""

    def __init__(self, length: int) -> None:
        self.length, self.weight = length, torch.ones(1)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        if not 0 <= number < self.length:
            raise IndexError(number)
        return {"tokens": torch.tensor([number]), "loss_weight": self.weight}


def taken(steps) -> list[list[int]]:
    return [[int(n) for micro in step for n in micro["tokens"]] for step in steps]


@given(
    micro=st.integers(1, 4), accumulation=st.integers(1, 4), ranks=st.integers(1, 4), consumed=st.integers(0, 10**12)
)
def test_step_has_the_same_samples_for_any_micro_batch_size(micro, accumulation, ranks, consumed):
    size = micro * accumulation * ranks
    rows = [
        step_samples(consumed, global_batch_size=size, micro_batch_size=micro, data_rank=rank, data_size=ranks)
        for rank in range(ranks)
    ]
    for index in range(accumulation):
        start = consumed + index * micro * ranks
        together = [int(n) for rank in range(ranks) for n in rows[rank][index]]
        assert together == list(range(start, start + micro * ranks)), "contiguous slices of each global micro-batch"
    assert sorted(n for row in rows for n in row.ravel()) == list(range(consumed, consumed + size))


@given(data=st.data(), steps=st.integers(1, 8))
def test_resuming_midway_equals_going_on(data, steps):
    micro, accumulation, ranks = (data.draw(st.integers(1, 3)) for _ in range(3))
    size = micro * accumulation * ranks
    cut = data.draw(st.integers(0, steps))
    settings = {"global_batch_size": size, "micro_batch_size": micro, "data_size": ranks}
    dataset = Numbers(size * steps)
    for rank in range(ranks):
        whole = taken(batches(dataset, **settings, data_rank=rank))
        resumed = taken(batches(dataset, **settings, data_rank=rank, consumed_samples=cut * size))
        assert resumed == whole[cut:]


def test_another_layout_takes_the_same_samples_after_a_resume():
    dataset = Numbers(48)
    first = taken(itertools.islice(batches(dataset, global_batch_size=12, micro_batch_size=3), 2))
    rest = [
        taken(batches(dataset, global_batch_size=12, micro_batch_size=2, data_rank=r, data_size=3, consumed_samples=24))
        for r in range(3)
    ]
    seen = sorted([n for step in first for n in step] + [n for rank in rest for step in rank for n in step])
    assert seen == list(range(48))


def test_a_rank_gets_stacked_micro_batches():
    (step,) = batches(Numbers(8), global_batch_size=8, micro_batch_size=2, data_rank=1, data_size=2)
    assert [micro["tokens"].tolist() for micro in step] == [[[2], [3]], [[6], [7]]]


def test_an_incomplete_step_is_dropped_in_training_and_filled_in_validation():
    dataset = Numbers(5)
    assert len(list(batches(dataset, global_batch_size=4, micro_batch_size=2))) == 1
    weights, numbers = [], []
    for rank in range(2):
        steps = list(
            batches(dataset, global_batch_size=4, micro_batch_size=1, data_rank=rank, data_size=2, fill_last=True)
        )
        assert len(steps) == 2, "every rank takes as many steps"
        for micro in itertools.chain.from_iterable(steps):
            weights.append(float(micro["loss_weight"]))
            numbers.append(int(micro["tokens"]))
    assert sorted(n for n, w in zip(numbers, weights, strict=True) if w) == [0, 1, 2, 3, 4]
    assert sum(weights) == 5
    assert float(dataset[4]["loss_weight"]) == 1.0


def test_batch_sizes_that_do_not_divide():
    with pytest.raises(
        ValueError, match="global_batch_size 10 is not a multiple of micro_batch_size 2 x 3 data ranks = 6"
    ):
        next(batches(Numbers(99), global_batch_size=10, micro_batch_size=2, data_rank=0, data_size=3))
    with pytest.raises(ValueError, match=r"data_rank 2 must be in \[0, 2\)"):
        next(batches(Numbers(99), global_batch_size=4, micro_batch_size=2, data_rank=2, data_size=2))


def test_reading_ahead_keeps_the_order():
    def settings(depth: int) -> list[int]:
        with ReadAhead(iter(range(50)), depth=depth) as ahead:
            return list(ahead)

    assert settings(1) == settings(7) == list(range(50))


def test_read_ahead_prefetches_at_most_its_depth():
    read: list[int] = []
    with ReadAhead((read.append(n) for n in range(1000)), depth=3) as ahead:
        next(ahead)
        time.sleep(0.1)
        assert len(read) <= 1 + 3 + 1, "given, waiting, and in the hand of the thread"


def test_reading_ahead_passes_an_error_on_and_then_ends():
    def broken():
        yield 1
        raise ValueError("line 7 of the corpus")

    ahead = ReadAhead(broken())
    assert next(ahead) == 1
    with pytest.raises(ValueError, match="line 7 of the corpus"):
        next(ahead)
    assert list(ahead) == []


def test_closing_ends_the_thread_of_an_endless_source():
    ahead = ReadAhead(itertools.count())
    assert next(ahead) == 0
    ahead.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "read-ahead"]
    assert list(ahead) == []


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc")
@pytest.mark.parametrize("objective", ["causal", "masked"])
def test_memory_does_not_grow_over_epochs(tmp_path, objective):
    """Memory of the process alone: pages of the mapped file are the system's to drop."""
    with IndexedWriter(tmp_path / "x", np.dtype("<u2")) as writer:
        for _ in range(200):
            writer.add_document(np.arange(1000) % 250)
    common = {"sequence_length": 128, "num_samples": 10_000, "seed": 1, "cache_directory": tmp_path / "cache"}
    if objective == "causal":
        dataset = CausalDataset(tmp_path / "x", packing=Packing(True, True, True), **common)
    else:
        tokenizer = load_tokenizer("bytes")
        dataset = MaskedDataset(tmp_path / "x", masking_for(tokenizer, 0.3), tokenizer, **common)
    used = []
    with ReadAhead(batches(dataset, global_batch_size=16, micro_batch_size=16)) as steps:
        for number, _ in enumerate(steps):
            if number % 100 == 0:
                gc.collect()
                status = Path("/proc/self/status").read_text()
                used.append(int(status.split("RssAnon:")[1].split()[0]))
    assert len(used) > 6, "more than six epochs of 1,562 samples"
    assert used[-1] - used[1] < 2_000, f"kB after each 1,600 samples: {used}"


def test_batch_size_ramp_reads_every_sample_once():
    """Ramp as in Megatron-LM, from 2 by 2 to 6 over 12 samples; a resumed run takes the same steps."""
    batch = BatchConfig(
        micro_batch_size=1,
        global_batch_size=6,
        gradient_accumulation_steps=6,
        ramp=RampConfig(start=2, increment=2, samples=12),
    )
    whole = taken(batches(Numbers(30), global_batch_size=batch.size_at, micro_batch_size=1))
    assert [len(step) for step in whole] == [2, 2, 2, 4, 4, 6, 6]
    assert [n for step in whole for n in step] == list(range(26))
    assert [batch.samples_of(steps) for steps in range(8)] == [0, 2, 4, 6, 10, 14, 20, 26]
    for done in range(7):
        consumed = batch.samples_of(done)
        rest = batches(Numbers(30), global_batch_size=batch.size_at, micro_batch_size=1, consumed_samples=consumed)
        assert taken(rest) == whole[done:]
    by_rank = [
        taken(batches(Numbers(30), global_batch_size=batch.size_at, micro_batch_size=1, data_rank=r, data_size=2))
        for r in range(2)
    ]
    assert [sorted(a + b) for a, b in zip(*by_rank, strict=True)] == whole
