"""Measure the training step of the project and of other models: tokens/s, MFU, memory, time to the first step.

A step is forward, backward, clipping and AdamW on random tokens. Each model under test has its own process, one after the
other. Each result is appended to train.jsonl at once, so that a stopped run can be resumed.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data.progress import ProgressBar
from tools.cli.process_status import describe_status, signal_name
from tools.cli.worker_environment import worker_environment

from .report import plot_bars, plot_lines, table, write_csv
from .training_models import MODELS_UNDER_TEST, PRECISIONS, PROJECT, PROJECT_CHANGES, project_config

Shape = tuple[int, int]  # length and batch
_MACHINE_SECONDS = 300

# Caches of compiled or autotuned kernels: Triton, Inductor, CUDA, torch's extensions, and others.
CACHES = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "CUDA_CACHE_PATH", "TORCH_EXTENSIONS_DIR", "XDG_CACHE_HOME")


@dataclass(frozen=True)
class Plan:
    """Hold what to measure.

    Attributes:
        shapes: (length, batch) of a step with one micro-batch.
        models: models under test, from `MODELS_UNDER_TEST`.
        precisions: of the models that are not the project's, from `PRECISIONS`.
        peer_loss: see `Settings`.
        steps: timed steps per shape.
        limit: seconds per model under test, including its start.
        cold: also measure the time to the first step with an empty kernel cache.
        tuned: whether Triton kernels are autotuned. If not, each kernel of every model has one configuration.
        peak: FLOP/s on which MFU is based; None takes the measured FLOP/s of a matmul.
        resume: continue an existing train.jsonl.
    """

    config: Path
    overrides: tuple[str, ...]
    shapes: tuple[Shape, ...]
    models: tuple[str, ...]
    precisions: tuple[str, ...]
    peer_loss: str
    steps: int
    limit: float
    cold: bool
    tuned: bool
    peak: float | None
    device: str
    resume: bool

    def settings(self) -> dict[str, Any]:
        """Return the settings that two runs in one table must share."""
        settings = {"config": str(self.config), "overrides": list(self.overrides), "tuned": self.tuned}
        return settings | {"peer loss": self.peer_loss, "device": self.device}


def run(output: Path, plan: Plan) -> list[dict[str, Any]]:
    """Print the table; write train.jsonl during the measurements, then train.csv and train.png.

    Raises ValueError for an unknown model or an invalid configuration.
    """
    if unknown := [name for name in plan.models if name not in MODELS_UNDER_TEST]:
        raise ValueError(f"--subjects {' '.join(unknown)}: allowed are {', '.join(MODELS_UNDER_TEST)}")
    config = project_config(str(plan.config), plan.overrides, *plan.shapes[0])
    size = {
        "vocab_size": config.model.vocab_size,
        "num_layers": config.model.num_layers,
        "hidden_size": config.model.hidden_size,
        "num_heads": config.model.num_heads,
        "mlp_width": config.model.mlp_width,
        "tied": config.model.tie_embeddings,
    }
    record = output / "train.jsonl"
    earlier = _earlier(record, plan)
    # The log holds the other output of the workers: warnings and the reasons of failures.
    with record.open("a", encoding="utf-8") as file, (output / "train.log").open("a", encoding="utf-8") as log:
        tokens = plan.shapes[0][0] * plan.shapes[0][1]
        task = {"device": plan.device, "dtype": config.precision.dtype, "hidden_size": size["hidden_size"]}
        machine = _read_machine({**task, "tokens": tokens}, log)
        previous = next((line["machine"] for line in earlier if "machine" in line), None)
        if previous is None:
            _write(file, {"settings": plan.settings()})
            _write(file, {"machine": machine})
        else:
            _check_same_machine(record, previous, machine)
            machine = previous
        rows = [line["row"] for line in earlier if "row" in line]
        settings = {
            "size": size,
            "config": str(plan.config),
            "overrides": list(plan.overrides),
            "dtype": machine["dtype"],
            "peer_loss": plan.peer_loss,
            "longest": max(length for length, _ in plan.shapes),
        }
        cases = [
            (name, precision)
            for name in plan.models
            for precision in (plan.precisions if name not in PROJECT_CHANGES else PRECISIONS[:1])
        ]
        with (
            contextlib.suppress(KeyboardInterrupt),
            _interrupted_by_sigterm(),
            ProgressBar(total=len(cases) * len(plan.shapes), unit="case", file=sys.stderr) as bar,
        ):
            for name, precision in cases:
                task = {"subject": name, "steps": plan.steps, "tuned": plan.tuned, "device": plan.device}
                task["settings"] = {**settings, "precision": precision}
                for row in _measure_model(task, plan, rows, bar, log):
                    rows.append(row)
                    _write(file, {"row": row})
    return _report(output, plan, rows, machine)


def _read_machine(task: dict[str, Any], log: Any) -> dict[str, Any]:
    """Return the properties of the machine, which a worker reads. Raises ValueError if it fails."""
    machine: dict[str, Any] | None = None
    status: int | None = None
    for line in _messages(task, {}, log, time.monotonic() + _MACHINE_SECONDS):
        machine, status = line.get("machine", machine), line.get("ended", status)
    if machine is None:
        reason = f"took over {_MACHINE_SECONDS} s" if status is None else describe_status(status)
        raise ValueError(f"the process that reads this machine's properties failed ({reason}); see {log.name}")
    return machine


def _check_same_machine(record: Path, previous: Mapping[str, Any], machine: Mapping[str, Any]) -> None:
    """Raise ValueError if the run to resume is from another machine or other packages. record: its file."""
    if other := [
        f"{previous[key]} in the file, {machine[key]} now"
        for key in ("name", "packages")
        if previous[key] != machine[key]
    ]:
        raise ValueError(
            f"--resume: {record} is from another machine or other packages ({'; '.join(other)}); leave --resume out"
        )


def method_of(name: str, precision: str) -> str:
    return name if precision == "bf16" else f"{name}, {precision}"


def _measure_model(
    task: dict[str, Any], plan: Plan, rows: Sequence[Mapping[str, Any]], bar: Any, log: Any
) -> Iterator[dict[str, Any]]:
    """Measure one model and yield the rows that `rows` does not contain yet."""
    method = method_of(task["subject"], task["settings"]["precision"])
    done = {(row["length"], row["batch"]) for row in rows if row["method"] == method}
    remaining = [shape for shape in plan.shapes if shape not in done]
    bar.update(len(plan.shapes) - len(remaining))
    if not remaining:
        return
    end = time.monotonic() + plan.limit
    with contextlib.ExitStack() as stack:
        caches: dict[str, str] = {}
        empty = None
        if plan.cold:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="benchmark-cache-"))
            caches = {key: str(Path(folder, key.lower())) for key in CACHES}
            for line in _launch(
                {**task, "first_only": True}, remaining[:1], caches, log, end, bar, f"{method}, empty cache"
            ):
                empty = line.get("row", {}).get("to first step s", empty)
        while remaining:
            current = remaining[0]
            status: int | None = None
            for line in _launch({**task, "first_only": False}, remaining, caches, log, end, bar, method):
                if "begun" in line:
                    current = line["begun"]["length"], line["begun"]["batch"]
                if "row" in line:
                    row = {"method": method, **line["row"], "empty cache s": empty}
                    remaining.remove((row["length"], row["batch"]))
                    empty = None
                    bar.update()
                    yield row
                status = line.get("ended")
            ended_by = signal_name(status or 0)
            if ended_by:
                bar.write(f"{method} {current[0]}x{current[1]}: {describe_status(status or 0)}", file=sys.stderr)
            if remaining and (time.monotonic() >= end or current in remaining):
                # After the time limit no other shape is tried. A shape that ended the process is not tried again.
                over = time.monotonic() >= end
                for length, batch in list(remaining) if over else [current]:
                    remaining.remove((length, batch))
                    failed = f"ended by {ended_by}" if ended_by else "failed"
                    error = f"over {plan.limit:.0f} s" if over else f"{failed}, see {Path(log.name).name}"
                    bar.update()
                    yield {"method": method, "length": length, "batch": batch, "error": error, "empty cache s": empty}
            elif remaining and status != 0:
                raise RuntimeError(f"{method}: the process ended between two shapes; see {log.name} for its output")


def _launch(
    task: dict[str, Any], shapes: Sequence[Shape], caches: dict[str, str], log: Any, end: float, bar: Any, label: str
) -> Iterator[dict[str, Any]]:
    shape = ""
    for line in _messages({**task, "shapes": list(shapes)}, caches, log, end):
        if "begun" in line:
            shape = f"{line['begun']['length']}x{line['begun']['batch']}"
        bar.set_postfix_str(f"{label} {shape}" + (f" step {line['step']}" if "step" in line else ""))
        yield line


def _messages(task: dict[str, Any], caches: dict[str, str], log: Any, end: float) -> Iterator[dict[str, Any]]:
    """Start a worker, end it at `end`, and yield its lines of JSON. Its other output goes to the log.

    The last line is {"ended": exit status}, unless the worker was ended at `end`.
    """
    log.write(f"\n== {json.dumps(task)}\n")
    log.flush()
    worker = subprocess.Popen(
        [sys.executable, "-m", "tools.benchmark.training_worker", json.dumps({**task, "launched": time.time()})],
        env={**worker_environment(), **caches, "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=log,
        text=True,
        start_new_session=True,
    )
    assert worker.stdout is not None

    timed_out = threading.Event()

    def time_is_up() -> None:
        timed_out.set()
        stop()

    def stop() -> None:
        # End the whole session: Triton and Inductor compile in child processes.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(worker.pid, signal.SIGKILL)

    timer = threading.Timer(max(0.0, end - time.monotonic()), time_is_up)
    timer.daemon = True  # SIGTERM may interrupt this function anywhere, and the process must end then
    try:
        timer.start()
        for line in worker.stdout:
            if line.startswith("{"):
                yield json.loads(line)
            else:
                log.write(line)
        status = worker.wait()
        if not timed_out.is_set():
            log.write(f"{describe_status(status)}\n" if status else "")
            log.flush()
            yield {"ended": status}
    finally:
        timer.cancel()
        stop()
        worker.wait()


def _earlier(record: Path, plan: Plan) -> list[dict[str, Any]]:
    """Return the lines of the run to resume. Without --resume, rename an existing file."""
    if not record.exists():
        return []
    if not plan.resume:
        number = 1
        while (archived := record.with_name(f"train.{number}.jsonl")).exists():
            number += 1
        record.rename(archived)
        return []
    content = record.read_bytes()
    whole = content.rfind(b"\n") + 1
    try:
        lines = [json.loads(text) for text in content[:whole].splitlines()]
    except ValueError as error:
        raise ValueError(f"--resume: {record} is damaged ({error}); leave --resume out, which renames it") from error
    os.truncate(record, whole)  # remove an incomplete last line
    settings = next((line["settings"] for line in lines if "settings" in line), None)
    if settings is not None and settings != plan.settings():
        other = [f"{key} {settings[key]!r}" for key, value in plan.settings().items() if settings.get(key) != value]
        raise ValueError(
            f"--resume: {record} was measured with {', '.join(other)}; use the same settings, or leave --resume out"
        )
    return lines


def _report(
    output: Path, plan: Plan, rows: Sequence[Mapping[str, Any]], machine: Mapping[str, Any]
) -> list[dict[str, Any]]:
    peak = plan.peak or machine["peak"]
    order = [(method_of(name, p), shape) for shape in plan.shapes for name in MODELS_UNDER_TEST for p in PRECISIONS]
    by_case = {(row["method"], (row["length"], row["batch"])): row for row in rows}
    cases = [by_case[case] for case in order if case in by_case]
    project = {(row["length"], row["batch"]): _figures(row, peak) for row in cases if row["method"] == PROJECT}
    full = []
    for row in cases:
        figures, reference = _figures(row, peak), project.get((row["length"], row["batch"]), {})
        for column in ("tokens/s", "peak GiB"):
            both = figures[column] and reference.get(column)
            figures[f"{PROJECT} / it, {column}"] = reference[column] / figures[column] if both else None
        full.append({"method": row["method"], "length": row["length"], "batch": row["batch"], **figures})
    if not full:
        print("no shape was measured")
        return []
    write_csv(output / "train.csv", full)
    versions = ", ".join(f"{name} {version}" for name, version in machine["packages"].items())
    title = f"{plan.config.stem}, training step, {'' if plan.tuned else 'Triton kernels not tuned, '}"
    title += f"MFU against {peak / 1e12:.4g} TFLOP/s, {versions}"
    hidden = ("error", "spread", "first loss", "first step s", "parameters", "keeps")
    shown = [{key: value for key, value in row.items() if key not in hidden} for row in full]
    for row, cells in zip(full, shown, strict=True):
        cells["tokens/s"] = row["error"] or row["tokens/s"]
    print(table(shown, title))
    for method in dict.fromkeys(row["method"] for row in full):
        first = next((row for row in full if row["method"] == method and row["keeps"]), None)
        if first is not None:
            print(f"{method}: {first['parameters'] / 1e6:.1f} M parameters; stored between steps: {first['keeps']}")
    _plot(output / "train.png", full, f"{plan.config.stem}, {machine['name']}")
    print(f"\n{output / 'train.csv'} and train.png written")
    return full


def _figures(row: Mapping[str, Any], peak: float) -> dict[str, Any]:
    """Return the columns of the table. A value is None if the model did not reach it."""
    steps = row.get("steps s")
    median = statistics.median(steps) if steps else None
    speed = row.get("micro batches", 1) * row["length"] * row["batch"] / median if median else None
    return {
        "tokens/s": speed,
        "MFU": speed * row["flops a token"] / peak if speed else None,
        "step s": median,
        "peak GiB": row.get("peak GiB"),
        "held GiB": row.get("held GiB"),
        "to first step s": row.get("to first step s"),
        "the same, empty cache": row.get("empty cache s"),
        "spread": (max(steps) - min(steps)) / median if median else None,
        "first step s": row.get("first step s"),
        "first loss": row.get("first loss"),
        "parameters": row.get("parameters"),
        "keeps": row.get("keeps"),
        "error": row.get("error"),
    }


def _plot(path: Path, rows: Sequence[Mapping[str, Any]], title: str) -> None:
    """Plot against length if one number of tokens per step was measured at several lengths, else plot bars."""
    columns = {"tokens/s": "tokens per second"}
    if any(row["peak GiB"] for row in rows):
        columns["peak GiB"] = "peak memory, GiB"
    measured = [row for row in rows if row["tokens/s"]]
    if not measured:
        return
    lengths: dict[int, set[int]] = {}
    for row in measured:
        lengths.setdefault(row["length"] * row["batch"], set()).add(row["length"])
    tokens = max(lengths, key=lambda tokens: len(lengths[tokens]))
    if len(lengths[tokens]) > 1:
        chosen = [row for row in measured if row["length"] * row["batch"] == tokens]
        plot_lines(path, chosen, columns, f"{title}, {tokens:,} tokens per step", linear=True)
    else:
        bars = [{**row, "method": f"{row['method']}, {row['length']} x {row['batch']}"} for row in measured]
        plot_bars(path, bars, columns, title)


@contextlib.contextmanager
def _interrupted_by_sigterm() -> Iterator[None]:
    """Turn SIGTERM into KeyboardInterrupt, so that the table of the finished measurements is still written."""

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def _write(file: Any, line: Mapping[str, Any]) -> None:
    file.write(json.dumps(line) + "\n")
    file.flush()
    os.fsync(file.fileno())
