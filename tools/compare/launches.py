"""Record machine, commit, duration and GPU utilisation of every training command of a comparison."""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import IO, Any

from data.atomic_io import write_text
from megatron_lite.plural import counted

FILE = "launches.jsonl"
_ROOT = Path(__file__).parents[2]
_SAMPLE_MILLISECONDS = 500


@contextmanager
def recorded_launch(folder: Path, devices: Sequence[str], workers: int) -> Iterator[None]:
    """Append one line to `launches.jsonl` of a folder when the training inside the context ends.

    Its `busy` is the share of time in which the GPUs run at least one kernel, as `nvidia-smi` samples it; null without samples.

    Args:
        devices: "cpu", or names for CUDA_VISIBLE_DEVICES.
        workers: processes per device.
    """
    begin = time.monotonic()
    with tempfile.TemporaryFile("w+") as samples:
        sampler = _start_sampler(devices, samples)
        try:
            yield
        finally:
            seconds = time.monotonic() - begin
            if sampler is not None:
                sampler.terminate()
                sampler.wait()
            samples.seek(0)
            percent = [float(line) for line in samples if line.strip().isdigit()]
            content = {
                "date": date.today().isoformat(),
                "command": ["python", "-m", "tools.compare", *sys.argv[1:]],
                "machine": machine(),
                "commit": _commit(),
                "devices": list(devices),
                "workers": workers,
                "seconds": round(seconds, 3),
                "busy": round(statistics.mean(percent) / 100, 4) if percent else None,
            }
            path = folder / FILE
            previous = path.read_text() if path.is_file() else ""
            write_text(path, f"{previous}{json.dumps(content)}\n")


def launches(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of the training commands, oldest first; empty before the first one.

    Raises ValueError that names the file and a damaged line.
    """
    path = folder / FILE
    lines = []
    for number, line in enumerate(path.read_text().splitlines() if path.is_file() else (), start=1):
        try:
            lines.append(json.loads(line))
        except ValueError as error:
            raise ValueError(f"{path} line {number} is no JSON ({error}): remove the line") from error
    return lines


def launch_note(folder: Path) -> str:
    """Return a sentence with machines, commits, duration and GPU utilisation of all launches."""
    lines = launches(folder)
    if not lines:
        return f"{machine()}; {date.today().isoformat()}."
    machines, commits = (dict.fromkeys(filter(None, (line[key] for line in lines))) for key in ("machine", "commit"))
    note = f"{'; '.join(machines)}; {lines[-1]['date']}; commit {', '.join(commits) or 'unknown'}; "
    note += f"{sum(line['seconds'] for line in lines):,.0f} s in {counted(len(lines), 'launch', 'launches')}"
    if sampled := [line for line in lines if line["busy"] is not None]:
        seconds = sum(line["seconds"] for line in sampled)
        busy = sum(line["seconds"] * line["busy"] for line in sampled) / max(seconds, 1e-9)
        *fewer, most = sorted({line["workers"] for line in sampled})
        workers = " or ".join([*map(str, fewer), counted(most, "run")])
        note += f"; kernels ran in {busy:.0%} of the GPU's time, {workers} at once per GPU"
    return note + "."


def machine() -> str:
    """Return the devices and torch's version."""
    import torch

    if torch.cuda.is_available():
        hardware = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
    else:
        hardware = f"{os.cpu_count()} processor cores"
    return f"{hardware}, torch {torch.__version__}"


def _start_sampler(devices: Sequence[str], out: IO[str]) -> subprocess.Popen[str] | None:
    program = None if list(devices) == ["cpu"] else shutil.which("nvidia-smi")
    if program is None:
        return None
    words = ["--query-gpu=utilization.gpu", "--format=csv,noheader,nounits", f"--id={','.join(devices)}"]
    return subprocess.Popen(
        [program, *words, f"--loop-ms={_SAMPLE_MILLISECONDS}"],
        stdout=out,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,  # Ctrl-C stops it with the training, not before
    )


def _commit() -> str:
    """Return the checked-out commit, with "-dirty" after changes; "" without git."""
    try:
        words = ["git", "-C", str(_ROOT), "describe", "--always", "--dirty", "--exclude=*"]
        return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""
