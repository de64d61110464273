"""The model of communication: what is sent, how long a step takes, links measured and assumed, the simulation."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megatron_lite.parallel.layout import Layout
from megatron_lite.planning.communication_cost import Links, Workload, scaling, step_seconds, volumes
from megatron_lite.planning.memory import GIB
from models.config import ModelConfig
from models.mixers import MIXERS
from tests.cli.conftest import ROOT, environment
from tools import measure_links, simulate_scaling
from tools.measure_links import read_links
from tools.planning.estimate import layer_flops, read_config, state_elements, workload


@pytest.mark.parametrize(("dtype", "width"), [("fp32", 4), ("bf16", 2)])
def test_what_is_sent_is_as_wide_as_what_is_computed(dtype: str, width: int) -> None:
    config = read_config(
        ["configs/default.yml", "run.device=cpu", "model.vocab_size=512", "data.tokenizer.vocab_size=512"], 1
    )
    assert workload(config, layer_flops(config), dtype).width == width


def work(**changes: object) -> Workload:
    values = {"parameters": 10**9, "layers": 24, "hidden": 2048, "state_elements": 2048 * 128, "sequence_length": 2048}
    values |= {"micro_batch_size": 4, "global_batch_size": 512, "flops_per_token": 6e9}
    return Workload(**{**values, **changes})  # type: ignore[arg-type]


def test_what_is_sent():
    assert volumes(work(), Layout(), 1) == {"data": 0, "tensor": 0, "pipeline": 0, "context": 0}
    assert volumes(work(), Layout(), 4)["data"] == pytest.approx(2 * 0.75 * 2e9)
    assert volumes(work(zero_stage=3), Layout(), 4)["data"] == pytest.approx(32 * 3 * 0.75 * 2e9)
    hidden = 2 * 4 * 2048 * 2048
    assert volumes(work(), Layout(tensor=2), 2)["tensor"] == pytest.approx(128 * 24 * 4 * hidden)
    assert volumes(work(recompute=True), Layout(tensor=2), 2)["tensor"] == pytest.approx(128 * 24 * 6 * hidden)
    assert volumes(work(), Layout(pipeline=4), 4)["pipeline"] == pytest.approx(128 * 2 * hidden)
    # States, not tokens: the same bytes for a sequence of any length.
    sent = volumes(work(), Layout(context=4), 4)["context"]
    assert sent == volumes(work(sequence_length=1 << 17), Layout(context=4), 4)["context"] > 0


@pytest.mark.parametrize(
    ("name", "options"), [*((name, {}) for name in MIXERS), ("linear_attention", {"feature_map": "taylor"})]
)
def test_gathered_numbers_are_the_state_of_the_mixer(name: str, options: dict[str, str]):
    model = ModelConfig(
        vocab_size=64, num_layers=2, hidden_size=256, num_heads=4, mixers=(name, "attention"),
        mixer_options={name: options} if options else {},
    )  # fmt: skip
    found = state_elements(model)
    if name == "attention":
        assert found == 0
    elif not model.bidirectional_mixers():
        mixer = MIXERS[name](model, 0, model.options_of(name))
        with torch.no_grad():
            _, state = mixer(torch.zeros(1, 8, 256), return_state=True)
        held = state["recurrent"].numel()
        # Attention beside it halves the mean. Channel by channel, decays are as many as states.
        scanned = name in ("hgrn", "mamba", "qlstm", "rg_lru", "rwkv4", "s5")
        assert held <= 2 * found <= (2 if scanned else 1.12) * held
    else:
        assert 2 * found == 2 * 4 * (32 * 64 + 32)  # MetaLA's, to both sides


def test_the_page_shows_what_is_sent():
    config = read_config(["configs/metala_1.4b.yml"], 8)
    work = workload(config, layer_flops(config), "bf16")
    page = (Path(__file__).parents[3] / "docs" / "scaling.md").read_text()
    shown = {
        "data, ZeRO 1": (work, Layout(), "data"),
        "data, ZeRO 2": (replace(work, zero_stage=2), Layout(), "data"),
        "data, ZeRO 3": (replace(work, zero_stage=3), Layout(), "data"),
        "tensor 8": (work, Layout(tensor=8), "tensor"),
        "pipeline 4": (work, Layout(pipeline=4), "pipeline"),
        "context 4": (work, Layout(context=4), "context"),
    }
    for name, (here, layout, kind) in shown.items():
        gib = volumes(here, layout, 8)[kind] / GIB
        assert re.search(rf"^\| {name} \|.*\| ([\d,.]+) GiB \|$", page, re.MULTILINE)[1] == (
            f"{gib:.1f}" if gib < 8 else f"{gib:,.0f}"
        )


def test_how_long_a_step_takes():
    links = Links()
    alone = step_seconds(work(), Layout(), 1, 4e14, links)
    assert sum(alone.values()) == alone["compute"] == pytest.approx(6e9 * 512 * 2048 / 4e14)
    piped = step_seconds(work(), Layout(pipeline=4), 4, 4e14, links)
    assert piped["bubble"] == pytest.approx(piped["compute"] * 3 / 128)
    inside, outside = (step_seconds(work(), Layout(tensor=t), t, 4e14, links)["tensor"] for t in (8, 16))
    assert outside > 5 * inside  # over the network
    weak = scaling(work(global_batch_size=64), Layout(), [1, 8, 1024], 4e14, links, grow_batch=True)
    assert weak[1] == 1 > weak[8] > weak[1024] > 0.3
    strong = scaling(work(), Layout(), [1, 8, 128, 1024], 4e14, links, grow_batch=False)
    assert list(strong) == [1, 8, 128]  # 512 samples do not divide into micro batches of 4 on 1024
    assert strong[128] < weak[8]


def test_measured_links_take_the_place_of_assumed_ones(tmp_path):
    rows = {"device": "H200", "processes": 4, "machines": 1, "speed": {"all-reduce": [1e9, 3e11]}, "latency": {}}
    rows["latency"] = {"all-reduce": 6e-5}
    path = tmp_path / "links.json"
    path.write_text(json.dumps(rows))
    links = read_links(path, 4)
    assert (links.inside, links.outside, links.machine) == (3e11, Links().outside, 4)
    assert links.latency_inside == pytest.approx(1e-5)
    path.write_text(json.dumps({**rows, "machines": 2}))
    assert read_links(path, 8).outside == 3e11


def test_the_simulation_draws_its_curves(tmp_path, capsys):
    picture = tmp_path / "scaling.png"
    assert simulate_scaling.main(["configs/metala_1.4b.yml", "-o", str(picture)]) == 0
    out = capsys.readouterr().out
    # The page shows what the command prints.
    page = (Path(__file__).parents[3] / "docs" / "scaling.md").read_text()
    for name in ("data", "tensor 2 x data", "tensor 8 x data", "pipeline 4 x data", "tensor 2 x pipeline 4 x data"):
        printed = re.search(rf"^{name}  (.*)$", out, re.MULTILINE)[1].split()
        shown = re.search(rf"^\| {name} \|(.*)\|$", page, re.MULTILINE)[1].replace(" %", "%").split("|")
        columns = [printed[power] for power in (3, 5, 7, 8, 9, 10)]
        assert [cell.strip() or "-" for cell in shown] == columns
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_curves_are_speeds_and_efficiencies(tmp_path, monkeypatch):
    import matplotlib.pyplot as plt

    monkeypatch.setattr(plt, "close", lambda _: None)
    simulate_scaling.draw({"data": {1: 1.0, 4: 0.5}}, "title", "note", tmp_path / "scaling.png")
    left, right = plt.gcf().axes
    assert [line.get_xydata().tolist() for line in left.lines[1:]] == [[[1, 1], [4, 2]]]
    assert [line.get_xydata().tolist() for line in right.lines] == [[[1, 100], [4, 50]]]
    monkeypatch.undo()
    plt.close("all")


def test_the_simulation_has_the_stage_of_the_configuration(capsys):
    """Of ZeRO 3 more is sent, and no pipeline runs with it; a machine of one GPU has no curve that is data's again."""
    words = ["configs/metala_1.4b.yml", "--gpus-per-machine", "1"]
    curves = []
    for stage in (1, 3):
        assert simulate_scaling.main([*words, f"parallel.zero_stage={stage}"]) == 0
        out = capsys.readouterr().out
        assert f"samples of 2048 a step, ZeRO {stage};" in out
        rows = [line.split("  ")[0] for line in out.splitlines()[4:]]
        assert rows == [
            "data",
            "tensor 2 x data",
            *(["pipeline 4 x data", "tensor 2 x pipeline 4 x data"] if stage == 1 else []),
        ]
        curves.append([int(cell[:-1]) for cell in out.splitlines()[4].split()[1:9]])
    assert curves[1] != curves[0]


def test_a_layout_that_the_model_cannot_take_has_no_curve(capsys):
    """BERT-base has twelve heads, which eight processes cannot share; the file's own layout is none of the curves'."""
    assert simulate_scaling.main(["configs/bert_base.yml", "parallel.tensor=2"]) == 0
    out = capsys.readouterr().out
    assert "tensor 2 x data" in out
    assert "tensor 8 x data" not in out


def test_speeds_are_those_of_what_a_ring_sends(monkeypatch, capsys):
    """As nccl-tests counts, here of collectives that take 3 ms each; in GB/s and microseconds."""
    now = [0.0]

    def collective(*_: object) -> None:
        now[0] += 0.003

    for name in ("all_gather_into_tensor", "reduce_scatter_tensor", "barrier"):
        monkeypatch.setattr(f"torch.distributed.{name}", collective)
    # The one of the times themselves is over two processes more, the slower one of which took 4 ms.
    monkeypatch.setattr(
        "torch.distributed.all_reduce",
        lambda x, *op: collective() if not op else x.copy_(torch.tensor(0.004, dtype=x.dtype)),
    )
    monkeypatch.setattr("torch.distributed.P2POp", lambda *_: None)
    monkeypatch.setattr("torch.distributed.batch_isend_irecv", lambda _: [SimpleNamespace(wait=collective)])
    monkeypatch.setattr(measure_links.time, "perf_counter", lambda: now[0])
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    grid = SimpleNamespace(device=torch.device("cpu"), world_size=4, rank=0, is_main=True)
    monkeypatch.setattr("megatron_lite.parallel.grid.init_grid", lambda _: grid)
    assert measure_links.main(["--largest", "65536"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "4 processes on cpu; GB/s of each process, one direction (bus)"
    assert out[2].split() == ["65,536", "0.02", "0.01", "0.01", "0.02"]
    assert "all-reduce 4000.0 us" in out[3]
    rows = measure_links.measure([65536], grid)
    sent = [values[0] * 0.004 for values in rows["speed"].values()]
    assert sent == pytest.approx([2 * 0.75 * 65536, 0.75 * 65536, 0.75 * 65536, 65536])
    assert (rows["machines"], rows["processes"]) == (2, 4)


def test_links_are_measured_between_processes(tmp_path):
    path = tmp_path / "links.json"
    words = [
        "--standalone",
        "--nproc-per-node=2",
        "-m",
        "tools.measure_links",
        "--device",
        "cpu",
        "--largest",
        "1048576",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *words, "-o", str(path)],
        cwd=ROOT,
        text=True,
        capture_output=True,
        timeout=60,
        env=environment(),
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads(path.read_text())
    assert (rows["processes"], rows["machines"], rows["bytes"]) == (2, 1, [65536, 262144, 1048576])
    assert all(0 < value < 1e12 for values in rows["speed"].values() for value in values)
    assert "all-reduce" in done.stdout
