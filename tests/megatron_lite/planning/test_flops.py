"""Training FLOPs against 6 N, and the peak FLOP/s by device name."""

import time

import pytest
import torch

from megatron_lite.planning.flops import (
    PEAK_TERAFLOPS,
    forward_flops,
    listed_peak_flops,
    measure_peak_flops,
    peak_flops,
    training_flops_per_token,
)
from models.config import ModelConfig
from models.language_model import LanguageModel


class Projection:
    """A linear layer without a bias: one multiply-add per weight and token."""

    def __init__(self, rows: int, columns: int) -> None:
        self.weights = rows * columns

    def flops_per_token(self, length: int) -> int:
        return 2 * self.weights + length


def test_training_is_three_forward_passes() -> None:
    layers = [Projection(8, 4), Projection(16, 8)]
    weights = 8 * 4 + 16 * 8
    assert training_flops_per_token(layers, 0) == 6 * weights
    assert training_flops_per_token(layers, 10) == 6 * weights + 60


def test_head_of_a_masked_model_runs_at_labelled_positions() -> None:
    body, head = Projection(8, 4), Projection(16, 8)
    assert forward_flops([body, head], 10, 0.25) == [2 * 8 * 4 + 10, 0.25 * (2 * 16 * 8 + 10)]
    assert training_flops_per_token([body, head], 0, 0.25) == 6 * (8 * 4 + 0.25 * 16 * 8)


def test_real_model_is_near_six_flops_per_weight() -> None:
    config = ModelConfig(vocab_size=50304, num_layers=24, hidden_size=1024, num_heads=8)
    with torch.device("meta"):
        model = LanguageModel(config)
    weights = sum(p.numel() for p in model.parameters())
    flops = training_flops_per_token([model.embedding, *model.blocks, model.head], 2048)
    assert weights == pytest.approx(360.0e6, rel=1e-3)
    # The recurrence adds 4 dk dv and the matmuls within a chunk, per head and token, to the matmuls with weights.
    assert 1.0 < flops / (6 * weights) < 1.1


@pytest.mark.parametrize(
    ("name", "dtype", "teraflops"),
    [
        ("NVIDIA A100-SXM4-80GB", "bf16", 312.0),
        ("NVIDIA A100-PCIE-40GB", "fp32", 19.5),
        ("NVIDIA A10", "bf16", 125.0),
        ("NVIDIA H100 80GB HBM3", "bf16", 989.0),
        ("NVIDIA H100 PCIe", "bf16", 756.5),
        ("NVIDIA H100 NVL", "tf32", 417.5),
        ("NVIDIA H200", "fp16", 989.0),
        ("NVIDIA H20", "bf16", 148.0),
        ("NVIDIA B200", "bf16", 2250.0),
        ("NVIDIA L40S", "bf16", 362.0),
        ("NVIDIA L4", "bf16", 121.0),
        ("NVIDIA GeForce RTX 4090", "bf16", 165.2),
        ("AMD Instinct MI300X", "bf16", 1307.4),
        ("Tesla V100-SXM2-32GB", "fp16", 125.0),
    ],
)
def test_peak_of_a_known_device(name: str, dtype: str, teraflops: float) -> None:
    assert listed_peak_flops(name, dtype) == teraflops * 1e12


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "bf16"),
        ("NVIDIA GeForce RTX 4090 D", "bf16"),
        ("NVIDIA GeForce RTX 3090 Ti", "bf16"),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "bf16"),
        ("NVIDIA GeForce GTX 1080", "bf16"),
        ("NVIDIA A1000", "bf16"),
        ("Tesla V100-SXM2-32GB", "bf16"),
    ],
)
def test_no_peak_is_claimed_for_another_device(name: str, dtype: str) -> None:
    assert listed_peak_flops(name, dtype) is None


def test_every_entry_is_dense_and_consistent() -> None:
    for name, figures in PEAK_TERAFLOPS.items():
        assert set(figures) <= {"bf16", "fp16", "tf32", "fp32"}, name
        assert figures.get("bf16", figures["fp16"]) == figures["fp16"], name
        assert figures["fp32"] <= figures.get("tf32", figures["fp16"]) <= figures["fp16"], name


def test_a_cpu_is_measured() -> None:
    threads = torch.get_num_threads()
    measured = measure_peak_flops(torch.device("cpu"), "fp32", seconds=0.05)
    assert 1e9 < measured < 1e12 * threads, "between one and a thousand GFLOP/s per thread"
    assert 0.1 < peak_flops(torch.device("cpu"), "fp32") / measured < 10


def test_measured_peak_is_the_fastest_of_at_least_two_matmuls(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([0.0, 0.0, 4.0, 4.0, 6.0, 7.0])  # the start; two matmuls of 4 and 2 seconds; the end
    monkeypatch.setattr(time, "perf_counter", lambda: next(times))
    assert measure_peak_flops(torch.device("cpu"), "bf16", seconds=1.0) == 2 * 1024**3 / 2


def test_cuda_reads_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    device = torch.device("cuda")
    assert peak_flops(device, "bf16") == 989e12
    former = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("highest")
        assert peak_flops(device, "fp32") == 67e12
        for precision in ("high", "medium"):
            torch.set_float32_matmul_precision(precision)
            assert peak_flops(device, "fp32") == 494.5e12
        assert peak_flops(device, "fp16") == 989e12
    finally:
        torch.set_float32_matmul_precision(former)
