"""Check the layouts and the table of `tools.plan`."""

from __future__ import annotations

import re

import pytest
import torch

from megatron_lite.parallel.layout import Layout
from megatron_lite.planning.flops import listed_peak_flops
from megatron_lite.planning.memory import GIB
from models.language_model import LanguageModel
from tools import plan
from tools.planning.estimate import read_config

from .test_memory import SMALL


def test_command_lists_layouts_and_exits_with_1_if_none_fits(capsys):
    words = [*SMALL, "batch.global_batch_size=8", "model.num_layers=4", "--gpus", "4", "--rows", "0"]
    assert plan.main(words) == 0
    out = capsys.readouterr().out
    rows = re.findall(r"^(\d)( \+SP)? +(\d) +(\d) +(\d) +(\d) +(\d) \|", out, re.MULTILINE)
    assert {tuple(map(int, (row[0], *row[2:5]))) for row in rows} >= {
        (1, 1, 1, 4),
        (2, 2, 1, 1),
        (4, 1, 1, 1),
        (1, 1, 4, 1),
    }
    assert all(stage == "1" for _, _, pipe, _, _, stage, _ in rows if pipe != "1")  # DeepSpeed supports no other
    assert f"{len(rows)} layouts, {len(rows)} fit into 141 GB" in out
    assert plan.main([*SMALL, "batch.global_batch_size=1", "schedule.train_steps=1", "--gpus", "1"]) == 0
    assert "\n1 sample of 256 per step in micro-batches of 1; 1 step, " in capsys.readouterr().out
    assert plan.main([*words, "batch.micro_batch_size=1", "--gpu-memory", "0.001"]) == 1
    out, error = capsys.readouterr()
    assert out.count("does not fit") == len(rows)
    assert "0 fit into 0.001 GB" in out
    assert re.search(
        r"error: no layout fits into 0.001 GB. The smallest \(parallel.tensor=\d .*\) needs 0\.\d+ GB", error
    )
    assert "parallel.activation_checkpointing.mode=full, precision.optimizer_state=bf16, more --gpus" in error
    assert "batch.micro_batch_size" not in error
    assert plan.main([*words, "--gpu", "Voodoo2"]) == 2
    assert plan.main(["configs/default.yml", "model.zzz=1"]) == 2


def test_layouts_with_a_divisible_batch_are_listed_if_the_files_layout_has_none(capsys):
    """At most four of eight GPUs can be data ranks."""
    words = [*SMALL, "model.num_layers=4", "--gpus", "8", "--rows", "0"]
    for batch in (
        ["batch.global_batch_size=4"],
        ["batch.global_batch_size=4", "batch.gradient_accumulation_steps=2"],
        ["batch.global_batch_size=4", "batch.gradient_accumulation_steps=2", "parallel.tensor=3"],
    ):
        assert plan.main([*words, *batch]) == 0
        rows = re.findall(r"^\d(?: \+SP)? +\d +\d +(\d) +\d +(\d) \|", capsys.readouterr().out, re.MULTILINE)
        assert {tuple(map(int, row)) for row in rows} == {(4, 1), (2, 2), (1, 4)}
    assert plan.main([*words, "batch.global_batch_size=4", "--gpus", "65536"]) == 2
    assert "no multiple of micro_batch_size 1 x 65536 data ranks" in capsys.readouterr().err


def test_links_between_machines_begin_after_the_gpus_of_a_machine(monkeypatch):
    links = []

    def layouts(*words: object) -> None:
        links.append(words[-1])
        raise ValueError("no table is needed")

    monkeypatch.setattr(plan, "layouts", layouts)
    words = [*SMALL, "batch.global_batch_size=8", "--gpus", "2", "--gpus-per-machine", "4", "--network-bandwidth", "12"]
    assert plan.main(words) == 2
    assert (links[0].machine, links[0].outside) == (4, 12e9)


def test_all_layouts_have_the_batch_size_of_the_file(capsys):
    """Keep the batch of 1 sample x 4 micro-batches x 2 data ranks."""
    words = [
        *SMALL,
        "batch.global_batch_size=null",
        "batch.gradient_accumulation_steps=4",
        "--gpus",
        "2",
        "--rows",
        "0",
    ]
    assert plan.main(words) == 0
    out = capsys.readouterr().out
    assert "8 samples of 256 per step in micro-batches of 1" in out
    rows = re.findall(r"^\d(?: \+SP)? +\d +\d +(\d) +\d +(\d) \|", out, re.MULTILINE)
    assert {tuple(map(int, row)) for row in rows} == {(2, 4), (1, 8)}


def test_table_row_shows_memory_speed_and_days():
    config = read_config([*SMALL, "batch.global_batch_size=8", "schedule.train_steps=86400"], 1)
    memory = {
        "weights": GIB,
        "gradients": 2 * GIB,
        "optimizer": 3 * GIB,
        "activations": 4 * GIB,
        "workspace": 0.5 * GIB,
    }
    row = plan.Row(Layout(), 1, 2, 8, memory, {"compute": 1.5, "data": 0.5})
    cells = plan.table([row], config, 10 * GIB).splitlines()[2].replace("|", " ").split()
    # 8 samples of 256 tokens in 2 seconds; 86,400 steps take 2 days.
    assert cells[6:] == ["1.00", "2.00", "3.00", "4.50", "10.5", "1,024", "2.00", "75%", "does", "not", "fit"]


def test_fastest_fitting_layout_comes_first(capsys):
    """Give a single GPU the speed of --mfu, and read --gpu-memory in 10^9 bytes."""
    words = [*SMALL, "model.hidden_size=2048", "batch.global_batch_size=8", "--mfu", "0.1", "--rows", "0"]

    def rows(*more: str) -> list[tuple[float, float, bool]]:
        """Return (GiB, tokens per second, whether it fits) of each row."""
        assert plan.main([*words, *more]) == 0
        lines = (line.split("|") for line in capsys.readouterr().out.splitlines() if line[:1].isdigit() and "|" in line)
        cells = ((memory.split()[-1], speed.split()[0].replace(",", ""), speed) for _, memory, speed in lines)
        return [(float(gib), float(tokens), "not" not in text) for gib, tokens, text in cells]

    with torch.device("meta"):
        lm = LanguageModel(read_config(words[: words.index("--mfu")], 1).model)
    (_, speed, _), *_ = rows()
    assert speed == pytest.approx(0.1 * listed_peak_flops("H200", "bf16") / (3 * lm.flops_per_token(256)), rel=1e-3)
    sums = sorted(gib for gib, *_ in rows("--gpus", "2"))
    limit = 0.97 * sums[len(sums) // 2]
    listed = rows("--gpus", "2", "--gpu-memory", str(limit * GIB / 1e9))
    for gib, _, fits in listed:
        assert fits == (gib < limit) or abs(gib - limit) <= 0.05, "sums are printed with one decimal"
    assert listed == sorted(listed, key=lambda row: (not row[2], -row[1]))


def test_plan_counts_cuda_graphs_if_configured(capsys):
    words = ["configs/metala_1.4b.yml", "--gpus", "4"]
    sums = []
    for more in ([], ["parallel.cuda_graph=true", "parallel.tensor_overlap=false"]):
        assert plan.main([*words, *more, "--rows", "0"]) == 0
        rows = re.findall(r"^(1|2|4) +1 +1 +(\d) +(\d) .* ([\d.]+) \|", capsys.readouterr().out, re.MULTILINE)
        sums.append({(tensor, data, stage): float(total) for tensor, data, stage, total in rows})
    plain, graphs = sums
    assert {stage for *_, stage in graphs} == {"1", "2"}  # ZeRO 3 with graphs is refused
    assert all(graphs[row] > plain[row] for row in graphs)


def test_plan_omits_layouts_that_train_refuses(capsys):
    """Tensor-parallel overlap excludes ZeRO 3."""
    words = [*SMALL, "batch.micro_batch_size=2", "parallel.tensor=2", "parallel.tensor_overlap=true", "--gpus", "2"]
    assert plan.main(words) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if line[:1].isdigit() and "|" in line]
    assert sorted((row[0], row[4]) for row in rows) == [("2", "1"), ("2", "2")]
