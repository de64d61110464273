"""Training with blocks as CUDA graphs equals training without."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_lite.engine.cuda_graph import GraphedBlocks
from megatron_lite.engine.engine import Engine
from megatron_lite.parallel.grid import Grid, init_grid
from tests.gpu.test_trainer import LR, engine_on, run
from tests.megatron_lite.conftest import batches, model_config


@pytest.fixture(scope="module")
def grid() -> Grid:
    return init_grid("cuda")


@pytest.mark.parametrize("mode", ["none", "elementwise", "full"])
@pytest.mark.parametrize("overlap", [False, True])
def test_graphed_steps_equal_eager_steps(grid: Grid, mode: str, overlap: bool) -> None:
    """Compare with gradient accumulation, an evaluation and a skipped step. Overlap also works with one process."""
    config, steps = model_config(("metala",), hidden_size=128), batches(6)
    histories: list[Any] = []
    for recorded in (False, True):
        options = {"activation_checkpointing": {"mode": mode}, "tensor_overlap": overlap, "cuda_graph": recorded}
        engine = engine_on(grid, config, "bf16", **options)
        history = run(engine, steps[:3])
        history.append(tuple(engine.evaluate(steps[0]))[:2])
        assert engine.train_step(steps[0], lr=LR, should_skip=lambda loss: True).skipped
        history += run(engine, steps[3:])
        assert [call._graphs is not None for call in _captured(engine)] == [True] * recorded
        histories.append(history)
        engine.close()
    for (loss, norm), (wanted_loss, wanted_norm) in zip(*reversed(histories), strict=True):
        assert loss == pytest.approx(wanted_loss, rel=1e-5)
        assert norm == pytest.approx(wanted_norm, rel=2e-3)


def test_gradients_accumulate_over_micro_batches(grid: Grid) -> None:
    """Use float32, which accumulates in the parameters' own gradients."""
    config, steps = model_config(("attention",)), batches(4)
    wanted, found = (_trained(grid, config, "fp32", steps, recorded) for recorded in (False, True))
    assert found[1] is True
    for a, b in zip(found[0], wanted[0], strict=True):
        assert a == pytest.approx(b, rel=1e-5)


def test_blocks_that_synchronise_fall_back_to_eager(grid: Grid) -> None:
    """Use MetaLA in float32, whose recurrence reads the strongest decay on the host."""
    config, steps = model_config(("metala",)), batches(3)
    wanted = _trained(grid, config, "fp32", steps, False)
    with pytest.warns(UserWarning, match="parallel.cuda_graph = true: a block synchronises"):
        found = _trained(grid, config, "fp32", steps, True)
    assert found[1] is False
    for a, b in zip(found[0], wanted[0], strict=True):
        assert a == pytest.approx(b, rel=1e-6)


def test_other_shapes_and_masks_equal_eager_steps(grid: Grid) -> None:
    config, steps = model_config(("metala",)), batches(4)
    mask = torch.arange(steps[0][0]["tokens"].shape[1]) < torch.tensor([[9], [24]])
    padded = [{**batch, "mask": mask} for batch in steps[2]]
    shorter = [{key: value[:, :20].contiguous() for key, value in batch.items()} for batch in steps[3]]
    steps = [*steps[:3], padded, shorter, steps[3]]
    wanted, found = (_trained(grid, config, "bf16", steps, recorded) for recorded in (False, True))
    assert found[1] is True
    for (loss, norm), (wanted_loss, wanted_norm) in zip(found[0], wanted[0], strict=True):
        assert loss == pytest.approx(wanted_loss, rel=1e-5)
        assert norm == pytest.approx(wanted_norm, rel=2e-3)


def _trained(grid: Grid, config: Any, dtype: str, steps: Any, recorded: bool) -> tuple[list[tuple[float, float]], bool]:
    """Return (loss, gradient norm) of every step, and whether the blocks were recorded."""
    engine = engine_on(grid, config, dtype, cuda_graph=recorded)
    history = run(engine, steps)
    is_recorded = any(call._graphs is not None for call in _captured(engine))
    engine.close()
    return history, is_recorded


def _captured(engine: Engine) -> list[GraphedBlocks]:
    return [call for call in engine._engine.module._calls if isinstance(call, GraphedBlocks)]
