"""The rank that is reported as slow, and the step of a layer that is timed."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from megatron_lite.config.schema import ParallelConfig
from megatron_lite.fault_tolerance.straggler_detection import StragglerDetector, StragglerReport, timed_layers
from megatron_lite.parallel.grid import Grid

STAGES = (0, 0, 1, 1)


def detector_of(ranks: int, interval: int = 2) -> StragglerDetector:
    grid = Grid(0, ranks, 0, data_rank=0, data_size=ranks, device=torch.device("cpu"))
    detector = StragglerDetector([torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)], grid, interval)
    detector._hosts = [f"gpu{rank}" for rank in range(ranks)]
    return detector


def judged(detector: StragglerDetector, data: list[float], forward: list[float], probe: list[float]) -> StragglerReport:
    return detector._judge([list(map(float, row)) for row in zip(STAGES, data, forward, probe, strict=True)])


def test_rank_that_is_slow_twice_in_its_stage_is_named():
    detector = detector_of(4)
    usual = {"data": [0.01] * 4, "forward": [0.1, 0.1, 0.3, 0.3], "probe": [0.01] * 4}
    assert judged(detector, **usual) == StragglerReport(0, 1.0, 1.0, [])  # the second stage holds more
    slow = {**usual, "forward": [0.1, 0.1, 0.3, 0.455], "probe": [0.02, 0.01, 0.01, 0.01]}
    for expected in (0, 2):
        report = judged(detector, **slow)
        assert (report.slowest, report.ratio, report.probe_ratio) == (
            3,
            pytest.approx(0.465 / 0.31),
            pytest.approx(2.0),
        )
        assert len(report.slow) == expected
    assert report.slow == [
        "rank 0 (gpu0) takes for a fixed matmul 20 ms, the median is 10 ms: every process waits for it",
        "rank 3 (gpu3) takes for its forward pass 455 ms, the median is 300 ms: every process waits for it",
    ]
    assert judged(detector, **usual).slow == []
    waiting = {**usual, "data": [0.01, 0.2, 0.01, 0.01]}
    assert (judged(detector, **waiting).slow, judged(detector, **waiting).slowest) == ([], 1)
    (sentence,) = judged(detector, **waiting).slow
    assert sentence.startswith("rank 1 (gpu1) waits for data 200 ms, the median is 10 ms")


def test_small_differences_are_noise():
    detector = detector_of(4)
    for _ in range(2):
        report = judged(detector, [0.0001, 0.0019, 0, 0], [0.1, 0.12, 0.1, 0.1], [0.001, 0.0029, 0.001, 0.001])
    assert report.slow == []
    assert report.probe_ratio == pytest.approx(2.9)


def test_forward_passes_of_due_steps_are_timed():
    detector = detector_of(2, interval=3)
    assert [step for step in range(1, 10) if detector.is_due(step)] == [3, 6, 9]
    assert not any(detector_of(1, interval=1).is_due(step) for step in range(5))
    for step, passes in ((3, 4), (4, 0), (6, 4)):
        with detector.timing(step):
            for layer in (*detector._layers, *detector._layers):
                layer(torch.ones(2))
        assert len(detector._passes) == passes
        detector._layers[0](torch.ones(2))
        assert len(detector._passes) == passes
    assert detector._forward_seconds() > 0
    detector._passes = [(1.0, 1.5), (2.0, 2.25)]
    assert detector._forward_seconds() == 0.75


@pytest.mark.parametrize("layers", [1, 2])
def test_stopped_recomputation_is_not_timed(monkeypatch, layers):
    detector = detector_of(2)
    detector._layers = [torch.nn.Sequential(torch.nn.Sigmoid(), torch.nn.Flatten(0)) for _ in range(layers)]
    clock = iter(range(100))
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    with detector.timing(2):
        x = torch.ones(2, 2, requires_grad=True)
        for layer in detector._layers:
            x = checkpoint(layer, x, use_reentrant=False)
        x.sum().backward()
    assert next(clock) == 3 * layers  # the second pass of each began
    assert detector._forward_seconds() == layers


@pytest.mark.parametrize("option", ["compile", "cuda_graph", "tensor_overlap"])
def test_layers_whose_hooks_do_not_run_are_not_timed(option):
    layers = [torch.nn.Linear(2, 2)]
    settings = ParallelConfig.model_validate({option: False})
    assert timed_layers(layers, settings) == layers
    assert timed_layers(layers, ParallelConfig.model_validate({option: True})) == []
