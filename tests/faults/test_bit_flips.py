"""A flipped bit in a replicated tensor ends the run. The message names the tensor and the ranks."""

from __future__ import annotations

import pytest
import torch

from megatron_lite.fault_tolerance.replica_check import _combined, _named, hash_rows
from tests.cli.conftest import run_words
from tests.faults import bit_flips


def test_every_flipped_bit_of_replicas_is_noticed_within_one_interval(corpus, tmp_path):
    settings = {"run.replica_check_interval": 4, "checkpoint.interval": 2, "batch.micro_batch_size": 2}
    counts = bit_flips.run(5, 1, tmp_path, run_words(corpus, tmp_path, "run", **settings))
    assert counts == {"tried": 5, "noticed": 5, "named": 5, "status": 1}
    error = (tmp_path / "stderr.txt").read_text()
    assert "replicas differ at step 2: weight blocks.0.norm1.weight: ranks 0-1 (" in error
    assert not list((tmp_path / "run" / "checkpoints").glob("step_*"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_hash_depends_on_every_bit_and_position(dtype):
    torch.manual_seed(0)
    x = torch.randn(301).to(dtype)
    original = _combined(hash_rows(x, 128))
    words = x.view({2: torch.int16, 4: torch.int32}[x.element_size()])
    bits = 8 * x.element_size()
    hashes = {original.item()}
    for element in (0, 63, 64, 299, 300):
        for bit in range(bits):
            bit_flips.flip(x, element, bit)
            hashes.add(_combined(hash_rows(x, 128)).item())
            bit_flips.flip(x, element, bit)
    assert len(hashes) == 1 + 5 * bits
    assert _combined(hash_rows(x, 128)) == original
    words[[0, 200]] = words[[200, 0]]
    assert _combined(hash_rows(x, 128)) != original
    assert len(hash_rows(x, 128)) == -(-x.nbytes // 128)


def test_minority_of_replicas_is_named():
    hosts = ["a", "a", "b", "b"]
    assert _named({0: 7, 1: 7, 2: 5, 3: 7}, hosts) == "rank 2 (b) differs from ranks 0-1, 3"
    assert _named({0: 7, 1: 7, 2: 7, 3: 5, 4: 6}, [*hosts, "c"]) == "ranks 3-4 (b, c) differ from ranks 0-2"
    assert _named({0: 7, 3: 5}, hosts) == "ranks 0, 3 (a, b) differ from one another"
