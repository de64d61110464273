"""Tables and plots of the benchmark, and layouts compared with one GPU."""

from __future__ import annotations

import csv
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tools.benchmark import layouts, timing
from tools.benchmark.report import machine, plot_bars, plot_lines, table


def test_numbers_in_tables() -> None:
    values = (0.0, 0.00987, 0.0123, 999.25, 1234.6, None, 99999, 100000, "x")
    cells = table([{str(number): value for number, value in enumerate(values)}], "title")
    row = cells.splitlines()[-1].strip("| ").split(" | ")
    assert row == ["0.000", "9.9e-03", "0.012", "999.250", "1,235", "-", "99999", "100,000", "x"]


def test_one_thread_is_in_the_singular(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for count, text in ((1, ", 1 thread, "), (4, ", 4 threads, ")):
        monkeypatch.setattr(torch, "get_num_threads", lambda count=count: count)
        assert text in machine()


def test_lines_and_bars_show_the_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import matplotlib.pyplot as plt

    monkeypatch.setattr(plt, "close", lambda _: None)
    rows = [
        {"method": method, "length": length, "batch": 2, "ms": length / of, "GiB": None if of == 4 else length / 8}
        for method, of in (("ours", 4), ("attention", 2))
        for length in (64, 128)
    ]
    plot_lines(tmp_path / "lines.png", rows, {"ms": "time", "GiB": "memory"}, "", linear=True)
    left, right = plt.gcf().axes
    found = {line.get_label(): [*map(tuple, line.get_xydata().tolist())] for line in left.lines}
    assert found == {"ours": [(64, 16), (128, 32)], "attention": [(64, 32), (128, 64)]}
    assert [line.get_xydata().tolist() for line in right.lines] == [[[64, 8], [128, 16]]]
    assert left.get_ylim() == pytest.approx((0, 1.08 * 64))
    assert [label.get_text() for label in left.get_xticklabels()] == ["64", "128"]
    assert (left.get_xlabel(), left.get_ylabel(), right.get_ylabel()) == ("length", "time", "memory")
    # One bar per method, the longest on top.
    plot_bars(tmp_path / "bars.png", [rows[3], rows[0]], {"ms": "time", "GiB": "memory"}, "")
    for axis, widths in zip(plt.gcf().axes, ([16, 64], [0, 16]), strict=True):
        assert [bar.get_width() for bar in axis.patches] == widths
    assert [label.get_text() for label in plt.gcf().axes[0].get_yticklabels()] == ["ours", "attention"]
    monkeypatch.undo()
    plt.close("all")


def test_layouts_have_powers_of_two_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each layout is compared with one GPU on the same sequences."""
    long = layouts.LONG
    found = {case.name: case for case in layouts.cases(6, 2048, 8)}
    alone = ("1 GPU", f"1 GPU, {long} tokens")
    kinds = ("data {}", "tensor {}", "tensor {}, sequence parallel", "pipeline {}", f"context {{}}, {long} tokens")
    assert [*found] == [*alone, *(kind.format(count) for count in (2, 4) for kind in kinds)]
    for name, case in found.items():
        sizes = [case.parallel.get(key, 1) for key in ("tensor", "pipeline", "context")]
        assert math.prod(sizes) == (1 if name in alone or "data" in name else case.gpus)
        assert (case.length, case.micro_batch_size) == ((long, 1) if "tokens" in name else (2048, 8))
        assert case.peer == (alone[1] if "context" in name else alone[0])
    assert found["pipeline 4"].accumulation == 16  # stages are idle for three of them
    speeds = {alone[0]: 10.0, alone[1]: 5.0, "data 2": 18.0, f"context 2, {long} tokens": 8.0}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for module in ("layouts", "report"):
        monkeypatch.setattr(f"tools.benchmark.{module}.machine", lambda: "a machine")

    def launched(
        _config: Path, overrides: list[str], group: list[layouts.LayoutCase], count: int, _steps: int
    ) -> dict[str, dict[str, float]]:
        assert {case.gpus for case in group} == {count}
        assert overrides == ["optimizer.name=muon"]
        return {case.name: {"tokens/s": speeds[case.name], "GiB per GPU": 1.0} for case in group if case.name in speeds}

    monkeypatch.setattr(layouts, "_launch", launched)
    layouts.run(tmp_path, Path("a.yml"), ["optimizer.name=muon"], 2, 2048, 8, 4, [])
    rows = csv.DictReader((tmp_path / "layouts.csv").open(encoding="utf-8"))
    assert {row["method"]: float(row["x 1 GPU"]) for row in rows} == dict(zip(speeds, (1, 0.5, 1.8, 1.6), strict=True))
    layouts.run(tmp_path, Path("a.yml"), ["optimizer.name=muon"], 2, 2048, 8, 4, ["1 GPU", "ata 2"])
    rows = csv.DictReader((tmp_path / "layouts.csv").open(encoding="utf-8"))
    assert [row["method"] for row in rows] == ["1 GPU", "data 2"]
    with pytest.raises(
        ValueError, match="--only expert is in no name; the layouts are: 1 GPU; 1 GPU, 131072 tokens; data 2"
    ):
        layouts.run(tmp_path, Path("a.yml"), [], 2, 2048, 8, 4, ["expert"])
    with pytest.raises(ValueError, match=r"batch\.micro_batch_size=4: each layout has its own `parallel` and `batch`"):
        layouts.run(tmp_path, Path("a.yml"), ["batch.micro_batch_size=4"], 2, 2048, 8, 4, [])


def test_tokens_of_a_layout_are_counted_per_data_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    class Engine:
        muon_parameters = ("layers.1.mlp.up_proj.weight",)
        optimizer_state = SimpleNamespace(compute_muon_update=lambda: now.__setitem__(0, now[0] + next(updates)))

        def train_step(self, batches: list[dict[str, torch.Tensor]], lr: float) -> SimpleNamespace:
            assert [batch["tokens"].shape for batch in batches] == [(2, 64)] * 3
            assert all((batch["tokens"][:, 1:] == batch["labels"][:, :-1]).all() for batch in batches)
            now[0] += next(seconds)
            return SimpleNamespace(loss=7.0)

        def close(self) -> None: ...

    now, seconds = [0.0], iter([9.0, 8.0, 1.0, 3.0, 2.0])  # the first two do not count
    updates = iter([7.0, 0.5, 0.25, 0.75])  # the first one does not count
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr("tools.loading.engine.build_engine", lambda *_: Engine())
    for name, value in (("synchronize", None), ("max_memory_allocated", 3 << 30), ("reset_peak_memory_stats", None)):
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    for name in ("barrier", "all_reduce"):
        monkeypatch.setattr(f"torch.distributed.{name}", lambda *_: None)
    grid = SimpleNamespace(data_rank=0, data_size=2, world_size=4, device=torch.device("cpu"))
    case = layouts.LayoutCase("tensor 2 x data 2", 4, 64, 2, 3, {"tensor": 2})
    found = layouts._measure(case, "configs/metala_1.4b.yml", ["optimizer.name=muon"], grid, 3)
    speeds = {"tokens/s": 2 * 3 * 64 * 2 / 2, "step s": 2, "Muon update ms": 500, "GiB per GPU": 3}
    assert found == {**speeds, "loss": 7, "first step s": 9}
