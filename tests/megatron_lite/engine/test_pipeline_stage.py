"""Inputs of the layers of a pipeline stage besides hidden states."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_lite.engine.pipeline_stage import Stage


@pytest.mark.parametrize("last", [False, True])
def test_stage_passes_the_inputs_of_each_micro_batch(last):
    received: list[dict[str, Any]] = []

    def layer(hidden: Tensor, **inputs: Any) -> Tensor:
        received.append(inputs)
        return hidden + 1

    names = ("tokens", "labels", "loss_weight", "mask", "cu_seqlens", "num_correct", "source")
    batches = [{name: torch.tensor(10.0 * at + n) for n, name in enumerate(names)} for at in range(2)]
    stage = Stage.__new__(Stage)  # without the processes of DeepSpeed's base class
    stage._calls, stage._is_last, stage._scale = [layer] * 3, last, 0.5
    stage._batches, stage._nll = deque(batches), torch.zeros((), dtype=torch.float64)
    for at, batch in enumerate(batches):
        result = stage.forward(torch.tensor(float(at)))
        of_blocks = {key: batch[key] for key in ("mask", "cu_seqlens")}
        of_head = {key: batch[key] for key in ("labels", "loss_weight", "num_correct")}
        assert received == [of_blocks, of_blocks, of_head if last else of_blocks]
        assert result == ((at + 3) * 0.5 if last else at + 3)
        received.clear()
    assert stage._nll == (3 + 4 if last else 0)
