"""The profile of a training step, on a CPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from models.kernels.cpu.build import shared_object
from tests.parity.launch import launch_forked
from tests.tools.benchmark.tiny_model import TINY, read
from tools.benchmark.__main__ import main
from tools.benchmark.profile import KernelCall, _busy, _kernel_calls, _local_device, by_kernel, by_part
from tools.benchmark.profile_parts import part_of


def test_parts_of_the_profile_add_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["profile", "--output", str(tmp_path), "--steps", "2", "--trace", "--shape", "64x2", *TINY]
    main([*words, "model.num_layers=2", "model.hidden_size=64"])
    parts = {row["part"]: row for row in read(tmp_path / "profile_parts.csv")}
    whole = float(parts.pop("whole step")["ms per step"])
    assert sum(float(row["ms per step"]) for row in parts.values()) == pytest.approx(whole, rel=0.02)
    expected = {"matmuls", "recurrence", "convolution", "norms", "cross entropy", "optimizer"}
    assert expected | {"mixer, elementwise", "MLP, elementwise"} <= set(parts)
    kernels = read(tmp_path / "profile_kernels.csv")
    matmuls = [row for row in kernels if row["kernel"] in ("aten::mm", "aten::addmm", "aten::addmm_")]
    # 2 layers with 5 matmuls of the mixer and 3 of the MLP forward, twice as many backward, and 3 of the head. The C++ kernels
    # concatenate the gradients of q, a, v, gate and of the MLP's gate and up, which leaves two matmuls each.
    backward = 8 if shared_object("swiglu", torch.float32) else 16
    assert sum(int(row["launches"]) for row in matmuls) == 2 * (8 + backward) + 3
    assert {row["part"] for row in matmuls} == {"matmuls"}
    assert 0 < float(matmuls[0]["TFLOP/s"]) < 10
    assert (tmp_path / "profile.json.gz").stat().st_size > 1_000
    assert (tmp_path / "profile.png").stat().st_size > 5_000
    assert "| gap |" in capsys.readouterr().out


def test_first_of_two_processes_reports_its_time_and_communication(tmp_path: Path) -> None:
    words = ["profile", "--output", str(tmp_path), "--steps", "1", "--shape", "64x1", "--device", "cpu", *TINY]
    launch_forked("tools.benchmark", 2, *words, "parallel.context=2")
    parts = {row["part"]: row for row in read(tmp_path / "profile_parts.csv")}
    assert float(parts["communication"]["ms per step"]) > 0
    assert float(parts["recurrence"]["ms per step"]) > 0


def test_gpu_of_a_process_under_torchrun_is_that_of_its_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert _local_device("cpu") == "cpu"
    assert _local_device("auto") == "cpu"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert _local_device("auto") == "cuda:3"
    with pytest.raises(ValueError, match="--device cuda:1: under torchrun each process has its own GPU"):
        _local_device("cuda:1")


@pytest.mark.parametrize(
    ("kernel", "operators", "module", "part"),
    [
        (
            "nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_NTT",
            ("aten::mm", "aten::linear"),
            "block.mlp.up_proj",
            "matmuls",
        ),
        ("nvjet_hsh_64x8", ("aten::mm", "_CrossEntropySum"), "head", "matmuls"),
        (
            "void at::native::vectorized_elementwise_kernel<4>",
            ("aten::exp_", "_CrossEntropySum"),
            "head",
            "cross entropy",
        ),
        ("aten::addmm_", ("aten::addmm_", "_FusedProjectionsBackward"), "block.mixer", "matmuls"),
        ("chunk_gla_fwd_kernel_o", ("ChunkGLAFunction",), "block.mixer", "recurrence"),
        ("_backward", ("_ConvolutionBackward", "autograd::engine::evaluate_function: x"), "", "convolution"),
        ("_backward", ("_EpilogueBackward", "autograd::engine::evaluate_function: x"), "", "epilogue"),
        ("_backward", ("_MetaLACoreBackward", "autograd::engine::evaluate_function: x"), "", "recurrence"),
        ("Memcpy DtoD (Device -> Device)", ("aten::copy_", "aten::to"), "block.mixer", "copies and casts"),
        ("vectorized_elementwise_kernel", ("aten::mul", "x"), "block.mlp", "MLP, elementwise"),
        ("multi_tensor_apply_kernel", ("aten::_fused_adamw_", "Optimizer.step#AdamW.step"), "", "optimizer"),
        ("nvjet_hsh_128x256", ("aten::bmm", "Muon.orthogonalize"), "", "optimizer"),
        ("_decay_and_add", (), "", "optimizer"),
        ("vectorized_elementwise_kernel", ("aten::mul_",), "", "around the model"),
        ("vectorized_elementwise_kernel", ("aten::mul", "block.norm1"), "block.norm1", "norms"),
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL", (), "", "communication"),
        ("triton_poi_fused_mul_silu_0", ("CompiledFunction",), "block", "fused by torch.compile"),
        ("vectorized_elementwise_kernel", ("aten::add",), "block", "other"),
    ],
)
def test_part_of_a_kernel(kernel: str, operators: tuple[str, ...], module: str, part: str) -> None:
    assert part_of(kernel, operators, module) == part


def test_flops_follow_from_shapes() -> None:
    product = KernelCall("gemm", ("aten::mm",), "block.mlp", 100.0, 2e9, None)
    copy = KernelCall("copy", ("aten::copy_",), "block.mlp", 50.0, None, 1e8)
    kernels = by_kernel([product, product, copy, copy], steps=2, whole=2.0)
    assert [row["kernel"] for row in kernels] == ["gemm", "copy"]
    assert kernels[0]["TFLOP/s"] == pytest.approx(20)
    assert kernels[1]["GB/s"] == pytest.approx(2000)
    parts = by_part([product, product, copy, copy], 2, 2.0, 1.85)
    assert [row["part"] for row in parts] == ["matmuls", "copies and casts", "gap", "whole step"]
    assert [row["ms per step"] for row in parts] == pytest.approx([0.1, 0.05, 1.85, 2.0])
    assert [row["share"] for row in parts] == pytest.approx([0.05, 0.025, 0.925, 1.0])
    # Launches are per step, microseconds per launch. A rate known for a quarter of the time is not shown.
    (row,) = by_kernel([product] * 4 + [replace(product, microseconds=300.0, flops=None)] * 4, steps=2, whole=2.0)
    assert (row["launches"], row["us each"], row["TFLOP/s"]) == (4, 200.0, None)
    (row,) = by_kernel([product] * 4 + [replace(product, microseconds=5.0, flops=None)] * 4, steps=2, whole=2.0)
    assert row["TFLOP/s"] == pytest.approx(20)


def test_overlapping_kernels_count_once() -> None:
    ranges = [(0, 10), (5, 12), (6, 8), (20, 25), (30, 30)]
    events = [
        SimpleNamespace(device_type=torch.autograd.DeviceType.CUDA, time_range=SimpleNamespace(start=start, end=end))
        for start, end in ranges
    ]
    other = SimpleNamespace(device_type=torch.autograd.DeviceType.CPU, time_range=SimpleNamespace(start=0, end=99))
    note = SimpleNamespace(**vars(other), is_user_annotation=True)
    note.device_type = torch.autograd.DeviceType.CUDA
    assert _busy(SimpleNamespace(events=lambda: [*events[::-1], other, note])) == 12 + 5


@pytest.mark.parametrize(
    ("operator", "moved"),
    [
        ("mm", 4 * (48 * 32 + 32 * 8 + 48 * 8)),
        ("addmm", 4 * (8 + 48 * 32 + 32 * 8 + 48 * 8)),
        ("bmm", 4 * (6 * 8 * 5 + 6 * 5 * 7 + 6 * 8 * 7)),
        ("add", 4 * (2 * 48 * 32 + 48)),
        ("mul_", 4 * 2 * 48 * 32),
        ("copy_", 4 * 48 * 32 + 2 * 48 * 32),
        ("fill_", 4 * 48 * 32),
        ("sum", 4 * 48 * 32),
        ("linalg_vector_norm", 4 * 48 * 32),
        ("argmax", 4 * 48 * 32),
        ("embedding", None),
        ("index_select", None),
    ],
)
def test_bytes_of_an_operator(operator: str, moved: int | None) -> None:
    """Count inputs once and the result once. A lookup by index has no count."""
    a, b, column, index = torch.ones(48, 32), torch.ones(32, 8), torch.ones(48, 1), torch.zeros(5, dtype=torch.long)
    calls = {
        "mm": lambda: a @ b,
        "addmm": lambda: torch.addmm(b[0], a, b),
        "bmm": lambda: torch.ones(6, 8, 5) @ torch.ones(6, 5, 7),
        "add": lambda: a + column,
        "mul_": lambda: a.mul_(1.0),
        "copy_": lambda: a.to(torch.bfloat16),
        "fill_": lambda: a.fill_(1.0),
        "sum": lambda: a.sum(1),
        "linalg_vector_norm": lambda: torch.linalg.vector_norm(a),
        "argmax": lambda: a.argmax(1),
        "embedding": lambda: torch.nn.functional.embedding(index, a),
        "index_select": lambda: a.index_select(0, index),
    }
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profiler:
        calls[operator]()
    pieces = [piece for piece in _kernel_calls(profiler, "cpu") if piece.name == f"aten::{operator}"]
    assert [piece.bytes for piece in pieces[-1:]] == [moved]
    flops = {"mm": 2 * 48 * 32 * 8, "addmm": 2 * 48 * 32 * 8, "bmm": 2 * 6 * 8 * 5 * 7}
    assert pieces[-1].flops == flops.get(operator)
