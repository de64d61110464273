"""Times and peak memory on this machine's GPU, each beside its peers in the same run.

python -m tools.benchmark kernels                          # LION and MetaLA's epilogue against PyTorch
python -m tools.benchmark kernels --output results         # where table, CSV and plot go (default: runs/benchmark)

A time is the median of forward and backward together, bfloat16, random inputs, caches emptied in between. "launched"
is timed as PyTorch runs it, so a small problem waits for the host; "replayed" is the same work as one CUDA graph, what
the device alone needs. LION-s begins at the layer's input: projection of the gate, logsigmoid and running sum count.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from models.bidirectional import ProjectedGate, bidirectional
from models.kernels.metala_epilogue import metala_epilogue
from models.precision import ROW_SUM_EPS

# Sequences of one length and their number, about as many tokens each.
SHAPES = ((128, 128), (512, 32), (2048, 8), (8192, 2), (32768, 1))
HEADS, HEAD_DIM = 16, 64


@dataclass(frozen=True)
class Measurement:
    """Times in milliseconds, memory in GiB at its peak over what was held before; None where it did not fit."""

    method: str
    length: int
    batch: int
    launched: float | None
    replayed: float | None
    memory: float | None


Work = tuple[Callable[[], None], list[Tensor]]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, function in COMMANDS.items():
        command = commands.add_parser(name, help=function.__doc__.splitlines()[0])
        command.add_argument("--output", type=Path, default=Path("runs/benchmark"), help="folder of CSV and plot")
        command.set_defaults(function=function)
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        sys.exit("tools.benchmark times CUDA kernels, and no CUDA device is visible here")
    options.output.mkdir(parents=True, exist_ok=True)
    options.function(options.output)


def kernels(output: Path) -> None:
    """LION-s against softmax attention and its plain PyTorch form; MetaLA's epilogue against plain PyTorch."""
    rows = [
        measure(name, build, length, batch)
        for length, batch in SHAPES
        for name, build in ((ATTENTION, attention), ("LION-s, kernels", lion), ("LION-s, PyTorch", plain_lion))
    ]
    epilogue = [
        measure(f"MetaLA epilogue, {form}", lambda *shape, form=form: metala(form, *shape), length, batch)
        for length, batch in ((2048, 8),)
        for form in ("reference", "triton")
    ]
    print(table(rows, ATTENTION))
    print(table(epilogue, epilogue[0].method))
    write_csv(output / "kernels.csv", rows + epilogue)
    plot(output / "kernels.png", rows, f"{HEADS} heads of {HEAD_DIM}, forward and backward, {machine()}")


ATTENTION = "softmax attention (SDPA)"
COMMANDS = {"kernels": kernels}


def attention(length: int, batch: int) -> Work:
    q, k, v, dy = (_random(batch, HEADS, length, HEAD_DIM) for _ in range(4))
    return lambda: F.scaled_dot_product_attention(q, k, v).backward(dy), _leaves(q, k, v)


def lion(length: int, batch: int) -> Work:
    x, weight, q, k, v, dy = _lion_inputs(length, batch)

    def step() -> None:
        bidirectional(q, k, v, gate=ProjectedGate(x, weight)).backward(dy)

    return step, _leaves(x, weight, q, k, v)


def plain_lion(length: int, batch: int) -> Work:
    """The formula as one writes it in PyTorch, attention map and mask in memory."""
    x, weight, q, k, v, dy = (t.transpose(1, 2) if t.ndim == 4 else t for t in _lion_inputs(length, batch))

    def step() -> None:
        c = F.logsigmoid(F.linear(x, weight).float()).cumsum(1).transpose(1, 2).contiguous()
        mask = (c[..., :, None] - c[..., None, :]).abs().neg().exp().to(q.dtype)
        weights = q @ k.transpose(-1, -2) * mask
        (weights @ v / (weights.sum(-1, keepdim=True) + ROW_SUM_EPS)).backward(dy)

    return step, _leaves(x, weight, q, k, v)


def metala(form: str, length: int, batch: int) -> Work:
    """At the shape of metala_360m: 8 heads, 64 channels of keys and 128 of values."""
    heads, dim_k, dim_v = 8, 64, 128
    o, v = (_random(batch, length, heads, dim_v) for _ in range(2))
    q, k = (_random(batch, length, heads, dim_k) for _ in range(2))
    gate, dy = (_random(batch, length, heads * dim_v) for _ in range(2))
    weight = torch.randn(heads * dim_k, device="cuda")
    leaves = _leaves(o, q, k, v, weight, gate)
    return lambda: metala_epilogue(o, q, k, v, weight, gate, form=form).backward(dy), leaves


def measure(method: str, build: Callable[[int, int], Work], length: int, batch: int) -> Measurement:
    print(f"{method}, length {length}, batch {batch} ...", file=sys.stderr, flush=True)
    torch.cuda.empty_cache()
    launched = replayed = memory = None
    try:
        step, leaves = build(length, batch)
        launched = _median(step, leaves)
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step()
        memory = (torch.cuda.max_memory_allocated() - before) / 2**30
        replayed = _median(_capture(step, leaves).replay, [])
    except torch.OutOfMemoryError:
        print("  out of memory", file=sys.stderr)
    return Measurement(method, length, batch, launched, replayed, memory)


def table(rows: Sequence[Measurement], peer: str) -> str:
    """Markdown; the last column is the device time over that of `peer` at the same shape."""
    base = {(row.length, row.batch): row.replayed for row in rows if row.method == peer}
    lines = [
        f"\n{machine()}, {datetime.date.today()}\n",
        "| length x batch | method | launched, ms | replayed, ms | memory, GiB | time over peer |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        reference = base[row.length, row.batch]
        ratio = row.replayed / reference if row.replayed and reference else None
        values = " | ".join("-" if x is None else f"{x:.3f}" for x in (row.launched, row.replayed, row.memory, ratio))
        lines.append(f"| {row.length} x {row.batch} | {row.method} | {values} |")
    return "\n".join(lines)


def write_csv(path: Path, rows: Sequence[Measurement]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Measurement)])
        writer.writeheader()
        writer.writerows(asdict(row) for row in rows)


def plot(path: Path, rows: Sequence[Measurement], title: str) -> None:
    """Time and memory against length, one line a method."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(11, 4.2), constrained_layout=True)
    for method in dict.fromkeys(row.method for row in rows):
        of_method = [row for row in rows if row.method == method]
        for axis, name in zip(axes, ("replayed", "memory"), strict=True):
            points = [(row.length, getattr(row, name)) for row in of_method if getattr(row, name) is not None]
            axis.loglog(*zip(*points, strict=True), marker="o", label=method, base=2)
    axes[0].set_ylabel("milliseconds")
    axes[1].set_ylabel("GiB over the inputs")
    for axis in axes:
        axis.set_xlabel("length")
        axis.grid(True, which="major", alpha=0.3)
    axes[0].legend()
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def machine() -> str:
    import triton

    return f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}"


def _median(step: Callable[[], object], leaves: Sequence[Tensor], seconds: float = 0.2) -> float:
    """Milliseconds. The second-level cache is overwritten before every run, the gradients are dropped."""
    scratch = torch.empty(64 * 2**20, dtype=torch.int32, device="cuda")

    def run() -> float:
        for leaf in leaves:
            leaf.grad = None
        scratch.zero_()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        step()
        end.record()
        end.synchronize()
        return start.elapsed_time(end)

    once = min(run() for _ in range(4))
    return statistics.median(run() for _ in range(max(5, min(200, int(1e3 * seconds / once)))))


def _capture(step: Callable[[], None], leaves: Sequence[Tensor]) -> torch.cuda.CUDAGraph:
    for leaf in leaves:
        leaf.grad = None
    torch.cuda.empty_cache()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    for leaf in leaves:
        leaf.grad = None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph


def _lion_inputs(length: int, batch: int) -> tuple[Tensor, ...]:
    """x, gate weights, q, k (Lion's phi of random numbers), v, dy."""
    x, weight = _random(batch, length, HEADS * HEAD_DIM), 0.03 * _random(HEADS, HEADS * HEAD_DIM)
    q, k = (F.normalize(F.silu(_random(batch, length, HEADS, HEAD_DIM)) + 0.5, dim=-1) for _ in range(2))
    v, dy = (_random(batch, length, HEADS, HEAD_DIM) for _ in range(2))
    return x, weight, q, k, v, dy


def _random(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def _leaves(*tensors: Tensor) -> list[Tensor]:
    return [x.requires_grad_() for x in tensors]


if __name__ == "__main__":
    main()
