"""`python -m tools.benchmark matmul` but for what a device does: what is recorded, chosen, written, and read again."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor, nn

from megatron_lite.engine.cublaslt import Product
from megatron_lite.parallel.fused_projections import join_fan_outs
from tools.benchmark import matmul
from tools.benchmark.__main__ import main
from tools.benchmark.training_models import own_config

SHAPES = (
    Product(64, 32, 48, (False, True), torch.bfloat16, False),
    Product(48, 64, 32, (True, False), torch.bfloat16, True),
)


def test_what_is_faster_is_written_and_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first product's third candidate; of the second all are alike, and cuBLAS's own stays."""
    times = {SHAPES[0]: [10.0, 11.0, 9.0], SHAPES[1]: [10.0, 9.95, 12.0]}
    candidates = [bytes([value]) * 64 for value in (1, 2, 255)]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr("tools.benchmark.report.machine", lambda: "here")
    monkeypatch.setattr(matmul, "library", lambda: SimpleNamespace(version=130100))
    monkeypatch.setattr(matmul, "_warm", lambda: None)
    monkeypatch.setattr(matmul, "_products", lambda *_: Counter({SHAPES[0]: 24, SHAPES[1]: 48}))
    monkeypatch.setattr(matmul, "measured", lambda product: (candidates, times[product]))
    assert main(["matmul", "--output", str(tmp_path), "--config", "configs/default.yml", "--shape", "64x1"]) == 0
    chosen = tmp_path / "cublaslt.yml"
    assert f"python train.py configs/default.yml {chosen}" in capsys.readouterr().out
    assert len((tmp_path / "matmul.csv").read_text().splitlines()) == 3
    both = tmp_path / "both.yml"
    both.write_text(f"include: [{Path('configs/default.yml').resolve()}, cublaslt.yml]\n")
    read = own_config(str(both), [], 64, 1).parallel.cublaslt
    assert (read.device, read.version) == ("NVIDIA H200", 130100)
    assert read.algorithms == {"64x32x48 nt bfloat16": "ff" * 64}
    rows = matmul.run(tmp_path, Path("configs/default.yml"), [], 64, 1, chosen=chosen)
    assert [row["chosen"] for row in rows] == [0, 2]
    assert rows[1]["ms a step less"] == pytest.approx(24 * 1e-3)


class _Candidates:
    """In place of cuBLASLt: an algorithm is its tile, cluster and variant; some tiles are refused or compute something else."""

    refused, wrong = 2, 1

    def __init__(self, clusters: int) -> None:
        self.clusters = clusters

    def algorithms(self, _: Product, count: int) -> list[bytes]:
        return [bytes([30, 1, 0]), bytes([20, 1, 0])][:count]

    def varied(self, _: Product, algorithm: bytes, *attributes: int) -> list[bytes]:
        ranges = {matmul.TILE: range(1, 40), matmul.CLUSTER: range(1, self.clusters + 1), matmul.CUSTOM: range(2)}
        found = [algorithm]
        for place, attribute in enumerate((matmul.TILE, matmul.CLUSTER, matmul.CUSTOM)):
            if attribute in attributes:
                found = [x[:place] + bytes([value]) + x[place + 1 :] for x in found for value in ranges[attribute]]
        return found

    def __call__(self, _: Product, algorithm: bytes, a: Tensor, b: Tensor, *__: Tensor | None) -> Tensor:
        if algorithm[0] == self.refused:
            raise RuntimeError("cublasLtMatmul failed with status 15")
        y = a @ b
        if algorithm[0] == self.wrong:
            y[3, 5] += 1.0
        return y


@pytest.mark.parametrize(("clusters", "best"), [(3, bytes([3, 3, 1])), (0, bytes([3, 1, 1]))])
def test_of_all_algorithms_the_fastest_right_one_is_found(
    clusters: int, best: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The smaller the tile's number the faster here, then the larger the cluster's, where there are any, and the variant's."""
    candidates, operands = _Candidates(clusters), (torch.randn(64, 32), torch.randn(32, 48), None, None)

    def seconds(lt: Any, product: Product, algorithm: bytes, _: Any, calls: int) -> float:
        lt(product, algorithm, *operands)
        tile, cluster, custom = algorithm
        return 1e-3 * tile - 1e-5 * cluster - 1e-6 * custom

    monkeypatch.setattr(matmul, "library", lambda: candidates)
    monkeypatch.setattr(matmul, "_operands", lambda _: operands)
    monkeypatch.setattr(matmul, "_seconds", seconds)
    found, microseconds = matmul.measured(SHAPES[0])
    assert found[0] == bytes([30, 1, 0])
    assert found[1] == best
    assert len(found) == len(microseconds) == matmul.LAST + 1
    assert microseconds[0] == pytest.approx(29990)
    assert microseconds[1] == min(microseconds) < 3000


def test_a_product_that_the_library_refuses_is_left_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refused(*_: object) -> list[bytes]:
        raise RuntimeError("cublasLtMatmulAlgoGetHeuristic failed with status 15")

    monkeypatch.setattr(matmul, "library", lambda: SimpleNamespace(version=130100, algorithms=refused))
    monkeypatch.setattr(matmul, "_operands", lambda _: ())
    assert matmul.measured(SHAPES[0]) == ([], [])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr("tools.benchmark.report.machine", lambda: "here")
    monkeypatch.setattr(matmul, "_warm", lambda: None)
    monkeypatch.setattr(matmul, "_products", lambda *_: Counter(SHAPES))
    chosen = tmp_path / "chosen.yml"
    with pytest.raises(ValueError, match=r"default\.yml: cuBLASLt 130100 takes none of its products"):
        matmul.run(tmp_path, Path("configs/default.yml"), [], 64, 1, chosen=chosen)
    found = {SHAPES[0]: ([], []), SHAPES[1]: ([b"\1" * 64], [10.0])}
    monkeypatch.setattr(matmul, "measured", found.__getitem__)
    assert len(matmul.run(tmp_path, Path("configs/default.yml"), [], 64, 1, chosen=chosen)) == 1


def test_what_was_measured_before_an_interruption_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def until_the_second(product: Product) -> tuple[list[bytes], list[float]]:
        if product != first:
            raise KeyboardInterrupt
        return [b"\1" * 64, b"\2" * 64], [10.0, 9.0]

    first = min(SHAPES, key=lambda one: one.name)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(matmul, "library", lambda: SimpleNamespace(version=130100))
    monkeypatch.setattr(matmul, "_warm", lambda: None)
    monkeypatch.setattr(matmul, "_products", lambda *_: Counter(SHAPES))
    monkeypatch.setattr(matmul, "measured", until_the_second)
    with pytest.raises(KeyboardInterrupt):
        matmul.run(tmp_path, Path("configs/default.yml"), [], 64, 1, chosen=tmp_path / "chosen.yml")
    assert len((tmp_path / "matmul.csv").read_text().splitlines()) == 2
    read = yaml.safe_load((tmp_path / "chosen.yml").read_text())["parallel"]["cublaslt"]
    assert read["algorithms"] == {first.name: "02" * 64}


def test_the_products_of_linears_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matmul, "SMALLEST", 2 * 64 * 32 * 48)
    layer = nn.Sequential(nn.Linear(32, 48), nn.Linear(48, 32, bias=False), nn.Linear(32, 4)).bfloat16()
    recorder = matmul._Recorder()
    join_fan_outs(layer, None, recorder)
    memory = torch.randn(64 * 32 + 128, dtype=torch.bfloat16)
    begin = -memory.data_ptr() % 256 // 2
    x = memory[begin : begin + 64 * 32].view(2, 32, 32)
    wanted = torch.nn.functional.linear(x, layer[0].weight, layer[0].bias)
    monkeypatch.setattr("megatron_lite.engine.cublaslt.ALIGNMENT", 1)
    assert torch.equal(layer[0](x), wanted)
    layer(x).sum().backward()
    names = {product.name: count for product, count in recorder.counts.items()}
    forward = {"64x32x48 nt bfloat16 bias": 2, "64x48x32 nt bfloat16": 1}
    assert names == forward | {"64x48x32 nn bfloat16": 1, "64x32x48 nn bfloat16": 1} | {
        "48x64x32 tn bfloat16": 1,
        "32x64x48 tn bfloat16": 1,
    }


@pytest.mark.parametrize(
    "override",
    [
        "parallel.zero_stage=3",
        "parallel.compile=true",
        "parallel.cuda_graph=true",
        "parallel.activation_checkpointing.mode=selective",
    ],
)
def test_nothing_to_choose(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, override: str) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ValueError, match="left to cuBLAS: there is nothing to choose"):
        matmul.run(tmp_path, Path("configs/default.yml"), [override], 64, 1, chosen=tmp_path / "file.yml")


def test_no_product_to_choose_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(matmul, "_products", lambda *_: Counter())
    with pytest.raises(
        ValueError, match=r"no linear of configs/default.yml .* 16 bits and 1e\+09 FLOPs: precision.dtype"
    ):
        matmul.run(tmp_path, Path("configs/default.yml"), [], 64, 1, chosen=tmp_path / "file.yml")
    assert not list(tmp_path.iterdir())


def test_without_a_device(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    assert main(["matmul", "--output", str(tmp_path)]) != 0
    assert "no CUDA device" in capsys.readouterr().err
