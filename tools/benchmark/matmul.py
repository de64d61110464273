"""Which algorithm of cuBLASLt computes each product of a training step's linears the fastest, as a file for `parallel.cublaslt`.

Candidates take turns, each long enough that the device's clock settles to what its power cap allows it: what counts in training
is the time at that clock. The first candidate is what cuBLAS takes by itself.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import yaml
from torch import Tensor
from tqdm import tqdm

from data.files import write_whole
from megatron_lite.config_schema import CublasLtConfig
from megatron_lite.cublaslt import CublasLt, Product, library
from megatron_lite.fan_out import join_fan_outs
from megatron_lite.own_layers import left_to_cublas
from megatron_lite.products import Products

from .report import table, write_csv
from .training_subjects import own_batch, own_config, own_engine

CANDIDATES, ROUNDS, SLICE = 8, 3, 0.15
# A smaller product is done in a few microseconds; a smaller gain is within what the same algorithm differs by from time to time.
SMALLEST, GAIN = 1e9, 0.01


def run(
    output: Path, config_file: Path, overrides: Sequence[str], length: int, batch: int, *, chosen: Path
) -> list[dict[str, Any]]:
    """Prints a row a product; writes matmul.csv and `chosen`. ValueError without CUDA, and for a configuration that cannot run
    or leaves nothing to choose."""
    if not torch.cuda.is_available():
        raise ValueError("no CUDA device: a choice of cuBLASLt's algorithms is made on the device that is to train")
    config = own_config(str(config_file), overrides, length, batch)
    if left_to_cublas(config.parallel):
        raise ValueError(
            "parallel: with tensor > 1, zero_stage: 3, compile, cuda_graph or selective activation checkpointing the products "
            "are left to cuBLAS: there is nothing to choose"
        )
    counts = _products(config, length, batch)
    if not counts:
        raise ValueError(
            f"no linear of {config_file} computes a product of 16 bits and {SMALLEST:.0e} FLOPs: precision.dtype (bf16 or fp16), "
            "--shape and the model decide"
        )
    algorithms, rows = {}, []
    _warm()
    for product in tqdm(sorted(counts, key=lambda one: one.name), unit="product"):
        candidates, microseconds = measured(product)
        best = min(range(len(candidates)), key=microseconds.__getitem__)
        if microseconds[best] > (1 - GAIN) * microseconds[0]:
            best = 0
        if best or product.addend:  # which the product adds only where it is named, else a pass of its own
            algorithms[product.name] = candidates[best].hex()
        calls, flops = counts[product], 2 * product.m * product.k * product.n
        rows.append(
            {
                "product": product.name,
                "a step": calls,
                "first us": microseconds[0],
                "chosen us": microseconds[best],
                "chosen": best,
                "TFLOP/s": flops / microseconds[best] / 1e6,
                "ms a step less": calls * (microseconds[0] - microseconds[best]) / 1e3,
            }
        )
    print(table(rows, f"{config_file.stem}, {length} x {batch}: cuBLASLt {library().version}"))
    write_csv(output / "matmul.csv", rows)
    less = sum(row["ms a step less"] for row in rows)
    device = torch.cuda.get_device_name()
    section = {"device": device, "version": library().version, "algorithms": algorithms}
    heading = f"# Products of {config_file}, {length} x {batch}, by python -m tools.benchmark matmul: {less:.1f} ms a step less\n"
    write_whole(chosen, heading + yaml.safe_dump({"parallel": {"cublaslt": section}}, sort_keys=False, width=200))
    print(
        f"\n{chosen}: for {len(algorithms)} of {len(rows)} products, {less:.1f} ms a step; give it after the configuration:"
    )
    print(f"  python train.py {config_file} {chosen}")
    return rows


def measured(product: Product) -> tuple[list[bytes], list[float]]:
    """The candidates, and microseconds of each: the mean over all turns. One whose result is not the first's is left out."""
    lt, operands = library(), _operands(product)
    candidates = lt.algorithms(product, CANDIDATES)
    wanted = lt(product, candidates[0], *operands).float()
    right = [one for one in candidates if _distance(lt(product, one, *operands), wanted) < 1e-2]
    once = _seconds(lt, product, right[0], operands, 3)
    calls = max(1, round(SLICE / once))
    totals = [0.0] * len(right)
    for turn in range(ROUNDS):
        # There and back, so that none always follows the same.
        for i in range(len(right)) if turn % 2 == 0 else reversed(range(len(right))):
            totals[i] += _seconds(lt, product, right[i], operands, calls)
    return right, [1e6 * total / ROUNDS for total in totals]


class _Recorder(Products):
    """PyTorch's products, and which they were."""

    def __init__(self) -> None:
        super().__init__(CublasLtConfig())
        self.counts: Counter[Product] = Counter()

    def mm(self, a: Tensor, b: Tensor, bias: Tensor | None = None, addend: Tensor | None = None) -> Tensor:
        product = Product.of(a, b, bias, addend)
        if product is not None and 2 * product.m * product.k * product.n >= SMALLEST:
            self.counts[product] += 1
        return super().mm(a, b, bias, addend)


def _products(config: Any, length: int, batch: int) -> Counter[Product]:
    """Of a training step's linears, and how often each is computed."""
    engine = own_engine(
        config, torch.device("cuda"), "bf16" if config.precision.dtype == "auto" else config.precision.dtype
    )
    recorder = _Recorder()
    for layer in engine.layers:
        join_fan_outs(layer, None, recorder)
    tokens = torch.randint(0, config.model.vocab_size, (batch, length + 1), generator=torch.Generator().manual_seed(0))
    engine.train_step([own_batch(tokens)], lr=1e-5)
    engine.close()
    torch.cuda.empty_cache()
    return recorder.counts


def _operands(product: Product) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """a, b, bias, addend."""

    def made(rows: int, columns: int, transposed: bool) -> Tensor:
        shape = (columns, rows) if transposed else (rows, columns)
        x = torch.randn(shape, device="cuda", dtype=product.dtype)
        return x.t() if transposed else x

    a, b = (
        made(rows, columns, transposed)
        for rows, columns, transposed in zip(
            (product.m, product.k), (product.k, product.n), product.of_transposed, strict=True
        )
    )
    bias = torch.randn(product.n, device="cuda", dtype=product.dtype) if product.bias else None
    return a, b, bias, made(product.m, product.n, False) if product.addend else None


def _distance(y: Tensor, wanted: Tensor) -> float:
    return float((y.float() - wanted).norm() / wanted.norm())


def _seconds(lt: CublasLt, product: Product, algorithm: bytes, operands: Any, calls: int) -> float:
    """Of one of so many calls."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(calls):
        lt(product, algorithm, *operands)
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / calls / 1e3


def _warm() -> None:
    x = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    until = time.perf_counter() + 3
    while time.perf_counter() < until:
        F.linear(x, x)
        torch.cuda.synchronize()
