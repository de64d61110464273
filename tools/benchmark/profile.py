"""Measure the time of the trainer's step by part and by kernel with torch.profiler, of the first of several processes.

On CUDA the times are of kernels on the device, on a CPU of operators without the operators that they call. The step time
is measured without the profiler. "gap" is the time without a running kernel, in which the device waits for the host.
"""

from __future__ import annotations

import contextlib
import os
import re
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from data.progress import ProgressBar
from tools.cli.devices import use_device

from .image_step import image_batch, image_config, is_image_classifier
from .profile_parts import PARTS, part_of
from .report import machine, plot_bars, table, write_csv
from .timing import timed
from .training_models import project_batch, project_config, project_engine

WARM_UP, TIMED = 3, 5


@dataclass(frozen=True)
class KernelCall:
    """Describe one run of a kernel (on a CPU: of an operator).

    Attributes:
        name: name of the kernel.
        operators: the operators that launched it, innermost first.
        module: the module of its forward or backward pass, such as "mixer.conv", or "".
        flops: None if the shapes do not determine them.
        bytes: as `_bytes` computes them; None if the shapes do not determine them.
    """

    name: str
    operators: tuple[str, ...]
    module: str
    microseconds: float
    flops: float | None
    bytes: float | None


def run(
    output: Path,
    config_file: Path,
    overrides: Sequence[str],
    length: int,
    batch: int,
    *,
    steps: int,
    top: int,
    trace: bool,
    device: str,
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Print both tables; write profile_parts.csv, profile_kernels.csv, profile.png and with `trace` profile.json.gz.

    Of several processes, which torchrun starts, the first one reports its own time; the others return two empty lists.

    length: tokens per sequence; of an image classifier pixels per side.
    Raises ValueError for an invalid configuration, for a GPU of `device` under torchrun, and as `device_of`.
    """
    from megatron_lite.engine.precision import faster_dtype

    processes = int(os.environ.get("WORLD_SIZE", 1))
    torch_device = use_device(_local_device(device) if processes > 1 else device)
    device = torch_device.type
    images = is_image_classifier(config_file, overrides)
    if images:
        config = image_config(config_file, overrides, length, batch)
    else:
        config = project_config(str(config_file), overrides, length, batch, processes)
    dtype = config.precision.dtype
    if dtype == "auto":
        dtype = faster_dtype(torch_device, config.model.hidden_size, config.batch.sequence_length * batch)
    engine = project_engine(config, torch_device, dtype)
    if images:
        micro_batch = image_batch(config)
    else:
        generator = torch.Generator().manual_seed(engine.grid.data_rank)
        tokens = torch.randint(0, config.model.vocab_size, (batch, length + 1), generator=generator)
        micro_batch = project_batch(tokens)

    with ProgressBar(total=WARM_UP + TIMED + steps + 1, unit="step", disable=not engine.grid.is_main) as bar:

        def next_step(words: str) -> float:
            bar.set_postfix_str(words)
            _, seconds = timed(lambda: engine.train_step([micro_batch], lr=1e-5), cuda=device == "cuda")
            bar.update()
            return seconds

        for _ in range(WARM_UP):
            next_step("warm-up")
        milliseconds = 1e3 * statistics.median(next_step("timed") for _ in range(TIMED))
        with _named(engine.layers) if not config.parallel.compile else contextlib.nullcontext():
            next_step("before the profile")
            activities = [torch.profiler.ProfilerActivity.CPU]
            if device == "cuda":
                activities.append(torch.profiler.ProfilerActivity.CUDA)
            with torch.profiler.profile(activities=activities, record_shapes=True) as profiler:
                profiled = 1e3 * sum(next_step("profiled") for _ in range(steps)) / steps
    if not engine.grid.is_main:
        engine.close()
        return [], []
    if trace:
        profiler.export_chrome_trace(str(output / "profile.json.gz"))
    calls = list(_kernel_calls(profiler, device))
    busy = _busy(profiler) / steps / 1e3 if device == "cuda" else sum(p.microseconds for p in calls) / steps / 1e3
    # On a CPU the profiler slows the step, so the shares refer to the profiled step.
    whole = milliseconds if device == "cuda" else profiled
    parts, kernels = by_part(calls, steps, whole, max(0.0, whole - busy)), by_kernel(calls, steps, whole)
    engine.close()
    title = f"{config_file.stem}{''.join(f', {word}' for word in overrides)}, {length} x {batch}, {dtype}"
    title += f", first of {processes} processes" if processes > 1 else ""
    print(table(parts, f"{title}, {milliseconds:.1f} ms per step ({profiled:.1f} with the profiler)"))
    print(table(kernels[:top], "the longest kernels" if device == "cuda" else "the longest operators"))
    write_csv(output / "profile_parts.csv", parts)
    write_csv(output / "profile_kernels.csv", kernels)
    bars = [{**row, "method": row["part"]} for row in parts if row["part"] != "whole step"]
    plot_bars(output / "profile.png", bars, {"ms per step": "milliseconds per step"}, f"{title}, {machine()}")
    print(f"\n{output / 'profile_parts.csv'}, profile_kernels.csv and profile.png written")
    return parts, kernels


def _local_device(name: str) -> str:
    """Return the device of this process under torchrun. Raises ValueError for a GPU that the command line names."""
    if name not in ("auto", "cpu"):
        raise ValueError(f"--device {name}: under torchrun each process has its own GPU; auto and cpu are allowed")
    return f"cuda:{os.environ['LOCAL_RANK']}" if name == "auto" and torch.cuda.is_available() else "cpu"


def by_part(calls: Sequence[KernelCall], steps: int, whole: float, gap: float) -> list[dict[str, Any]]:
    """Return one row per part of `PARTS` with a kernel, one for the gap, and one for the whole step (`whole` in ms)."""
    groups: dict[str, list[KernelCall]] = {}
    for call in calls:
        groups.setdefault(part_of(call.name, call.operators, call.module), []).append(call)
    rows = [{"part": part, **_totals(groups[part], steps, whole)} for part in PARTS if part in groups]
    rows.sort(key=lambda row: -row["ms per step"])
    nothing = {"launches": None, "TFLOP/s": None, "GB/s": None}
    rows.append({"part": "gap", "ms per step": gap, "share": gap / whole, **nothing})
    rows.append({"part": "whole step", "ms per step": whole, "share": 1.0, **nothing})
    return rows


def by_kernel(calls: Sequence[KernelCall], steps: int, whole: float) -> list[dict[str, Any]]:
    """Return one row per kernel and part, the longest first."""
    groups: dict[tuple[str, str], list[KernelCall]] = {}
    for call in calls:
        key = _without_template(call.name), part_of(call.name, call.operators, call.module)
        groups.setdefault(key, []).append(call)
    rows = []
    for (name, part), group in groups.items():
        totals = _totals(group, steps, whole)
        mean = sum(call.microseconds for call in group) / len(group)
        rows.append({"kernel": name, "part": part, **totals, "us each": mean})
    return sorted(rows, key=lambda row: -row["ms per step"])


def _totals(group: Sequence[KernelCall], steps: int, whole: float) -> dict[str, Any]:
    milliseconds = sum(call.microseconds for call in group) / steps / 1e3
    row: dict[str, Any] = {"ms per step": milliseconds, "share": milliseconds / whole, "launches": len(group) // steps}
    for column, unit, amount in (("TFLOP/s", 1e6, "flops"), ("GB/s", 1e3, "bytes")):
        known = [call for call in group if getattr(call, amount) is not None]
        busy = sum(call.microseconds for call in known)
        # Shown only if most of the row's time has a known amount.
        representative = busy > 0.8 * sum(call.microseconds for call in group) > 0
        row[column] = sum(getattr(call, amount) for call in known) / busy / unit if representative else None
    return row


@contextlib.contextmanager
def _named(layers: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Record each module's forward pass as a profiler range with the module's name."""
    handles, ranges = [], []

    def enter(name: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            ranges.append(torch.profiler.record_function(f"module {name}"))
            ranges[-1].__enter__()

        return hook

    def leave(*_: Any) -> None:
        ranges.pop().__exit__(None, None, None)

    for layer in layers:
        for name, module in layer.named_modules():
            words = f"{type(layer).__name__.lower()}.{name}".rstrip(".")
            handles += [module.register_forward_pre_hook(enter(words)), module.register_forward_hook(leave)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _kernel_calls(profiler: Any, device: str) -> Iterator[KernelCall]:
    events = profiler.events()
    recorded = profiler.profiler.kineto_results.events()
    types = {event.correlation_id(): event.dtypes() for event in recorded if event.linked_correlation_id() == 0}
    cpu = [event for event in events if event.device_type == torch.autograd.DeviceType.CPU]
    chains = {id(event): _chain(event) for event in cpu}
    places: dict[int, str] = {}
    for event in sorted(cpu, key=lambda event: event.time_range.start):
        if event.sequence_nr >= 0 and not any(name.startswith("autograd::") for name in chains[id(event)]):
            # The last operator with a sequence number created the backward node with this number.
            places[event.sequence_nr] = _module(chains[id(event)])
    attributed: Counter[str] = Counter()
    for event in cpu:
        if event.name.startswith("module "):
            continue
        chain = chains[id(event)]
        place = _module(chain)
        if not place:
            place = next(
                (places.get(e.sequence_nr, "") for e in _ancestors(event) if e.name.startswith("autograd::")), ""
            )
        flops = _flops(event.name, event.input_shapes)
        size = _bytes(event.name, event.input_shapes, types.get(event.id))
        if device == "cpu":
            # The self time of a Python function is the interpreter's.
            size = size if event.name.startswith("aten::") else None
            yield KernelCall(event.name, chain, place, event.self_cpu_time_total, flops, size)
            continue
        # Attribute the operator's FLOPs and bytes to its longest kernel.
        kernels = [kernel for kernel in event.kernels if kernel.name != event.name]  # not a profiler range
        for number, kernel in enumerate(sorted(kernels, key=lambda kernel: -kernel.duration)):
            attributed[kernel.name] += 1
            yield KernelCall(kernel.name, chain, place, kernel.duration, *((None, None) if number else (flops, size)))
    for event in _device_events(profiler):  # kernels of CUDA graphs, which no operator launches
        if attributed[event.name]:
            attributed[event.name] -= 1
        else:
            yield KernelCall(event.name, (), "", event.time_range.elapsed_us(), None, None)


def _device_events(profiler: Any) -> list[Any]:
    cuda = torch.autograd.DeviceType.CUDA
    return [e for e in profiler.events() if e.device_type == cuda and not getattr(e, "is_user_annotation", False)]


def _busy(profiler: Any) -> float:
    """Return the microseconds in which at least one kernel ran."""
    total, until = 0.0, 0.0
    for begin, end in sorted((e.time_range.start, e.time_range.end) for e in _device_events(profiler)):
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total


def _ancestors(event: Any) -> Iterator[Any]:
    while event is not None:
        yield event
        event = event.cpu_parent


def _chain(event: Any) -> tuple[str, ...]:
    return tuple(above.name for above in _ancestors(event))


def _module(chain: Sequence[str]) -> str:
    return next((name.removeprefix("module ") for name in chain if name.startswith("module ")), "")


def _factors(name: str, shapes: Any) -> tuple[list[int], list[int]] | None:
    """Return the shapes of the two factors of a matmul, or None for another operator."""
    match = re.fullmatch(r"aten::(add|badd)?(b?mm)_?", name)
    factors = (shapes or [])[1 if match and match[1] else 0 :][:2]
    if match is None or len(factors) < 2 or not factors[0] or not factors[1]:
        return None
    return factors[0], factors[1]


def _flops(name: str, shapes: Any) -> float | None:
    """Return the FLOPs of a matmul from the shapes of its factors, or None for another operator."""
    factors = _factors(name, shapes)
    return None if factors is None else 2.0 * torch.Size(factors[0]).numel() * factors[1][-1]


def _bytes(name: str, shapes: Any, types: Any) -> float | None:
    """Return the bytes of an operator that moves each input and the result once, or None. Expanded views count in full."""
    if not shapes or not types or len(shapes) != len(types) or _NOTHING_MOVED.fullmatch(name):
        return None
    inputs = [
        (shape, _ELEMENT[kind])
        for shape, kind in zip(shapes, types, strict=True)
        if shape and all(isinstance(extent, int) for extent in shape) and kind in _ELEMENT
    ]
    if not inputs:
        return None
    sizes = [float(torch.Size(shape).numel() * width) for shape, width in inputs]
    if _WRITES_ALONE.fullmatch(name):
        return sizes[0]
    read = sum(sizes)
    if name == "aten::copy_" or _REDUCES.fullmatch(name):
        return read  # the destination of a copy is an input; the result of a reduction is small
    if name.endswith("_"):
        return read + sizes[0]
    if (factors := _factors(name, shapes)) is not None:
        rows, inner = torch.Size(factors[0]).numel(), factors[0][-1]
        return read + float(rows // max(1, inner) * factors[1][-1] * inputs[0][1])
    return read + max(sizes)


# Views, operators that call another operator, and lookups by index: their shapes do not give the number of rows read.
_NOTHING_MOVED = re.compile(
    r"aten::(view|_unsafe_view|select|slice|narrow|transpose|t|permute|expand|unsqueeze|squeeze|reshape|flatten|unflatten"
    r"|unbind|split|chunk|detach|alias|as_strided|resolve_conj|resolve_neg|matmul|linear|to|empty\w*|embedding\w*"
    r"|_?index\w*|gather\w*|scatter\w*|masked_select|nll_loss\w*)"
)
_WRITES_ALONE = re.compile(r"aten::(fill|zero)_")
_REDUCES = re.compile(
    r"aten::(sum|mean|prod|var|std|norm|linalg_vector_norm|logsumexp|count_nonzero|any|all|dot|(a|arg)?(max|min))"
)
_ELEMENT: Mapping[str, int] = {
    "float": 4, "double": 8, "c10::BFloat16": 2, "c10::Half": 2, "long int": 8, "long": 8, "int": 4, "bool": 1,
}  # fmt: skip


def _without_template(name: str) -> str:
    """Return a C++ kernel's name without template arguments, with the functor that distinguishes elementwise kernels."""
    head = name.removeprefix("void ").split("<", 1)[0].split("(", 1)[0]
    functor = next((word for word in _words(name) if "Functor" in word or word.endswith("_kernel_cuda")), "")
    return f"{head} {functor}".strip() if functor and functor not in head else head


def _words(name: str) -> list[str]:
    for mark in "<>(),:&":
        name = name.replace(mark, " ")
    return name.split()
