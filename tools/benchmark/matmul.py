"""Which algorithm of cuBLASLt computes each product of a training step's linears the fastest, as a file for `parallel.cublaslt`.

Thousands can compute a large product. One call of each tile, then of the fastest ones with other clusters of thread blocks,
leaves a few. These take turns, each long enough that the device's clock settles to what its power cap allows it: what counts in
training is the time at that clock. Among them is what cuBLAS takes by itself.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import yaml
from torch import Tensor
from tqdm import tqdm

from data.atomic_io import write_whole
from megatron_lite.config.schema import CublasLtConfig
from megatron_lite.engine.cublaslt import CLUSTER, CUSTOM, TILE, CublasLt, Product, library
from megatron_lite.engine.model_shard import left_to_cublas
from megatron_lite.engine.tuned_matmul import Products
from megatron_lite.parallel.fused_projections import join_fan_outs

from .report import table, write_csv
from .training_models import own_batch, own_config, own_engine

# How many the library's heuristics name; are looked at again; take turns.
NAMED, AGAIN, LAST = 8, 48, 8
ROUNDS, SLICE = 3, 0.15
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
        if not candidates:
            continue
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
        # What was measured before an interruption is kept, and of use.
        write_csv(output / "matmul.csv", rows)
        less = sum(row["ms a step less"] for row in rows)
        _write(chosen, f"{config_file}, {length} x {batch}, {less:.1f} ms a step less", algorithms)
    if not rows:
        raise ValueError(
            f"{config_file}: cuBLASLt {library().version} takes none of its products: there is nothing to choose"
        )
    print(table(rows, f"{config_file.stem}, {length} x {batch}: cuBLASLt {library().version}"))
    print(
        f"\n{chosen}: for {len(algorithms)} of {len(rows)} products, {less:.1f} ms a step; give it after the configuration:"
    )
    print(f"  python train.py {config_file} {chosen}")
    return rows


def _write(chosen: Path, what: str, algorithms: dict[str, str]) -> None:
    section = {"device": torch.cuda.get_device_name(), "version": library().version, "algorithms": algorithms}
    heading = f"# Products of {what}; by python -m tools.benchmark matmul\n"
    write_whole(chosen, heading + yaml.safe_dump({"parallel": {"cublaslt": section}}, sort_keys=False, width=200))


def measured(product: Product) -> tuple[list[bytes], list[float]]:
    """The candidates, the first of them cuBLAS's own, and microseconds of each: the mean over all turns. None of a product that
    the library refuses, as of a width that is odd."""
    lt, operands = library(), _operands(product)
    named: list[bytes] = []
    with suppress(RuntimeError):
        named = lt.algorithms(product, NAMED)
    if not named:
        return [], []
    wanted = lt(product, named[0], *operands).float()

    def fastest(candidates: Iterable[bytes], count: int, calls: int) -> list[bytes]:
        seconds = {}
        for one in dict.fromkeys(candidates):
            with suppress(RuntimeError):  # of those that the heuristics do not name the library may refuse one at last
                seconds[one] = _seconds(lt, product, one, operands, calls)
        return sorted(seconds, key=seconds.__getitem__)[:count]

    some = fastest([*named, *lt.varied(product, named[0], TILE, CUSTOM)], AGAIN, 1)
    some = fastest([*some, *(other for one in some for other in lt.varied(product, one, CLUSTER))], AGAIN, 1)
    right = [one for one in some if _agrees(lt(product, one, *operands), wanted)]
    last = [named[0], *(one for one in fastest(right, LAST, 8) if one != named[0])]
    calls = max(1, round(SLICE / _seconds(lt, product, last[0], operands, 3)))
    totals = [0.0] * len(last)
    for turn in range(ROUNDS):
        # There and back, so that none always follows the same.
        for i in range(len(last)) if turn % 2 == 0 else reversed(range(len(last))):
            totals[i] += _seconds(lt, product, last[i], operands, calls)
    return last, [1e6 * total / ROUNDS for total in totals]


class _Recorder(Products):
    """PyTorch's products, and which they were."""

    def __init__(self) -> None:
        super().__init__(CublasLtConfig())
        self.counts: Counter[Product] = Counter()

    def _algorithm(self, product: Product, a: Tensor) -> None:
        if 2 * product.m * product.k * product.n >= SMALLEST:
            self.counts[product] += 1


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


def _agrees(y: Tensor, wanted: Tensor) -> bool:
    """Whether no element differs by more than the roundings of its sum and of itself do."""
    return bool(torch.isclose(y.float(), wanted, rtol=2**-6, atol=2**-6 * float(wanted.std())).all())


def _seconds(lt: CublasLt, product: Product, algorithm: bytes, operands: Any, calls: int) -> float:
    """Of one of so many calls, after one that may have to load the algorithm."""
    lt(product, algorithm, *operands)
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
