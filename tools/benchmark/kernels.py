"""Measure the kernels of LION-s and MetaLA's epilogue, softmax attention, plain PyTorch and flash-linear-attention.

The times of LION-s include the projection of the decay logits, logsigmoid and the cumulative sum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from data.progress import ProgressBar
from models.operators.lion.bidirectional_attention import ProjectedDecayLogits, bidirectional_linear_attention
from models.operators.metala import metala_epilogue
from models.precision import NORMALIZER_EPS

from .report import machine, plot_lines, table, write_csv
from .timing import Measurement, Step, capture, launched_ms, measure

# (length, batch), with about as many tokens each.
SHAPES = ((128, 128), (512, 32), (2048, 8), (8192, 2), (32768, 1))
HEADS, HEAD_DIM = 16, 64
ATTENTION, LION, PLAIN, FLIPPED = (
    "softmax attention (SDPA)",
    "LION-s, kernels",
    "LION-s, PyTorch",
    "LION-s, two FLA calls",
)

Work = tuple[Step, list[Tensor]]


def run(output: Path) -> None:
    """Print the tables of times, of the epilogue and of the errors, and write kernels.csv and kernels.png."""
    _needs_cuda()
    methods: dict[str, Callable[[int, int], Work]] = {
        ATTENTION: attention,
        LION: lion,
        PLAIN: plain_lion,
        FLIPPED: flipped_lion,
    }
    if (reason := _flipped_refused()) is not None:
        print(f"{FLIPPED}: skipped, {reason}")
        del methods[FLIPPED]
    work = [(name, build, *shape) for shape in SHAPES for name, build in methods.items()]
    rows = []
    for name, build, length, batch in (bar := ProgressBar(work, unit="case")):
        bar.set_postfix_str(f"{name} {length} x {batch}")
        rows.append(measure(name, length, batch, lambda build=build, shape=(length, batch): build(*shape)))
        write_csv(output / "kernels.csv", [asdict(row) for row in rows])
    epilogue = [
        measure(f"MetaLA epilogue, {form}", 2048, 8, lambda form=form: metala(form, 2048, 8))
        for form in ("reference", "triton")
    ]
    print(table(_with_ratios(rows, ATTENTION), f"{HEADS} heads of {HEAD_DIM}, bf16, forward and backward, ms and GiB"))
    print(table(_with_ratios(epilogue, epilogue[0].method), "8 heads of 64 and 128, bf16, forward and backward"))
    print(table([errors(*shape) for shape in SHAPES], "LION-s, kernels in bf16: relative error against float32"))
    everything = [asdict(row) for row in rows + epilogue]
    write_csv(output / "kernels.csv", everything)
    plot_lines(
        output / "kernels.png",
        everything[: len(rows)],
        {"replayed": "milliseconds", "memory": "GiB beyond the inputs"},
        f"{HEADS} heads of {HEAD_DIM}, forward and backward, {machine()}",
    )
    print(f"\n{output / 'kernels.csv'} and kernels.png written")


def choice(output: Path) -> None:
    """Print the ratio of device times, tile kernel to chunk kernel, by length, head size and decay; write choice.csv."""
    _needs_cuda()
    rows: list[dict[str, Any]] = []
    cases = [(dim, length) for dim in (32, 64, 128) for length in (32, 64, 128, 192, 256, 512, 1024)]
    for dim, length in ProgressBar(cases, unit="case"):
        row: dict[str, Any] = {"head size": dim, "length": length}
        # Log decay per token. The name is the number of tokens after which the decay reaches e^-20.
        for memory, rate in (("30 tokens", 20 / 30), ("200 tokens", 0.1), ("all", 0.0)):
            tensors = _random(2**14 // length, length, 1024 // dim, dim, count=4)
            q, k, v = (x.abs() for x in tensors[:3])
            log_decay = torch.full(q.shape[:3], -rate, device="cuda")
            leaves = _leaves(q, k, v, log_decay)
            times = []
            for form in ("triton_tile", "triton_chunk"):

                def step(form: str = form, leaves: list[Tensor] = leaves, dy: Tensor = tensors[3]) -> None:
                    bidirectional_linear_attention(*leaves, form=form).backward(dy)

                times.append(launched_ms(capture(step, leaves).replay, [], seconds=0.05))
            row |= {f"tile, {memory}": times[0], f"chunk, {memory}": times[1], f"ratio, {memory}": times[0] / times[1]}
        rows.append(row)
    print(table(rows, "16,384 tokens of 1024 channels, bf16, forward and backward, replayed, ms"))
    write_csv(output / "choice.csv", rows)


def attention(length: int, batch: int) -> Work:
    q, k, v, dy = _random(batch, HEADS, length, HEAD_DIM, count=4)
    return lambda: F.scaled_dot_product_attention(q, k, v).backward(dy), _leaves(q, k, v)


def lion(length: int, batch: int) -> Work:
    x, weight, q, k, v, dy = _lion_inputs(length, batch)

    def step() -> None:
        bidirectional_linear_attention(q, k, v, decay_logits=ProjectedDecayLogits(x, weight)).backward(dy)

    return step, _leaves(x, weight, q, k, v)


def plain_lion(length: int, batch: int) -> Work:
    """Compute the formula in plain PyTorch, with the decayed attention matrix and the mask in memory."""
    x, weight, q, k, v, dy = (t.transpose(1, 2) if t.ndim == 4 else t for t in _lion_inputs(length, batch))

    def step() -> None:
        c = F.logsigmoid(F.linear(x, weight).float()).transpose(1, 2).contiguous().cumsum(-1)
        mask = (c[..., :, None] - c[..., None, :]).abs().neg().exp().to(q.dtype)
        weights = q @ k.transpose(-1, -2) * mask
        (weights @ v / (weights.sum(-1, keepdim=True) + NORMALIZER_EPS)).backward(dy)

    return step, _leaves(x, weight, q, k, v)


def flipped_lion(length: int, batch: int) -> Work:
    """Call a causal kernel forward and on the flipped sequence, with decays one token later, and subtract one diagonal."""
    from fla.ops.simple_gla import chunk_simple_gla

    x, weight, q, k, v, dy = _lion_inputs(length, batch)

    def step() -> None:
        g = F.logsigmoid(F.linear(x, weight).float())
        ones = F.pad(v, (0, 16), value=1.0)
        later = F.pad(g[:, 1:], (0, 0, 0, 1))
        forward, _ = chunk_simple_gla(q, k, ones, g, scale=1.0)
        backward, _ = chunk_simple_gla(q.flip(1), k.flip(1), ones.flip(1), later.flip(1), scale=1.0)
        both = forward + backward.flip(1) - (q * k).sum(-1, keepdim=True) * ones
        (both[..., :HEAD_DIM] / (both[..., -1:] + NORMALIZER_EPS)).backward(dy)

    return step, _leaves(x, weight, q, k, v)


def metala(form: str, length: int, batch: int) -> Work:
    """Return MetaLA's epilogue at the shape of metala_360m: 8 heads, key dimension 64, value dimension 128."""
    heads, dim_k, dim_v = 8, 64, 128
    o, v = _random(batch, length, heads, dim_v, count=2)
    q, k = _random(batch, length, heads, dim_k, count=2)
    gate, dy = _random(batch, length, heads * dim_v, count=2)
    weight = torch.randn(heads * dim_k, device="cuda")
    leaves = _leaves(o, q, k, v, weight, gate)
    return lambda: metala_epilogue(o, q, k, v, weight, gate, form=form).backward(dy), leaves


def errors(length: int, batch: int) -> dict[str, Any]:
    """Return the relative error of the output and of each gradient in bf16 against float32, on random inputs."""
    *inputs, dy = _lion_inputs(length, batch)
    results = []
    for form, dtype in (("auto", torch.bfloat16), ("chunked", torch.float32)):
        x, weight, q, k, v = leaves = _leaves(*(t.detach().to(dtype, copy=True) for t in inputs))
        y = bidirectional_linear_attention(q, k, v, decay_logits=ProjectedDecayLogits(x, weight), form=form)
        y.backward(dy.to(dtype))
        results.append([y.detach(), *(leaf.grad for leaf in leaves)])
    names = ("output", "dx", "dW of the decay logits", "dq", "dk", "dv")
    relative = {name: ((a.float() - b).norm() / b.norm()).item() for name, a, b in zip(names, *results, strict=True)}
    return {"length x batch": f"{length} x {batch}", **relative}


def _with_ratios(rows: Sequence[Measurement], peer: str) -> list[dict[str, Any]]:
    """Return the rows of the table with the ratios of replayed and launched time to those of `peer` at the same shape."""
    base = {(row.length, row.batch): row for row in rows if row.method == peer}
    out = []
    for row in rows:
        other = base[row.length, row.batch]
        ratios = {
            f"{name} / peer": getattr(row, name) / getattr(other, name)
            if getattr(row, name) and getattr(other, name)
            else None
            for name in ("replayed", "launched")
        }
        values = {name: getattr(row, name) for name in ("launched", "queued", "replayed", "memory")}
        out.append({"length x batch": f"{row.length} x {row.batch}", "method": row.method, **values, **ratios})
    return out


def _flipped_refused() -> str | None:
    """Return why the two flash-linear-attention calls do not run here, or None if they do."""
    try:
        flipped_lion(256, 1)[0]()
    except (ImportError, RuntimeError, NotImplementedError) as error:
        return (str(error).strip().splitlines() or [type(error).__name__])[0]
    return None


def _needs_cuda() -> None:
    if not torch.cuda.is_available():
        raise ValueError(
            "`kernels` and `choice` measure CUDA kernels, but no CUDA device is visible; on a CPU use `mixers`"
        )


def _lion_inputs(length: int, batch: int) -> tuple[Tensor, ...]:
    """Return x, the weights of the decay logits, q and k (LION's phi of random numbers), v, dy."""
    (x,), (weight,) = _random(batch, length, HEADS * HEAD_DIM), _random(HEADS, HEADS * HEAD_DIM)
    q, k, v, dy = _random(batch, length, HEADS, HEAD_DIM, count=4)
    q, k = (F.normalize(F.silu(t) + 0.5, dim=-1) for t in (q, k))
    return x, 0.03 * weight, q, k, v, dy


def _random(*shape: int, count: int = 1) -> list[Tensor]:
    return [torch.randn(*shape, device="cuda", dtype=torch.bfloat16) for _ in range(count)]


def _leaves(*tensors: Tensor) -> list[Tensor]:
    return [x.requires_grad_() for x in tensors]
