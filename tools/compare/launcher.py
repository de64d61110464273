"""Train the runs of a comparison in parallel: worker processes on every device, one progress bar over all steps."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from tqdm import tqdm

from data.atomic_io import write_text
from data.progress import ProgressBar
from megatron_lite.metrics.logger import FILE_NAME
from megatron_lite.plural import counted
from tools.cli.process_status import describe_status
from tools.cli.worker_environment import worker_environment
from tools.compare.spec import Run, differing_keys
from tools.compare.token_files import check_token_files, write_token_files

if TYPE_CHECKING:
    from tools.loading.token_data import PreparedData

# Time that a run has to write its checkpoint after it was stopped.
_SECONDS_TO_SAVE = 180.0
_POLL_SECONDS = 0.2


@dataclass
class Outcome:
    """Hold how the runs ended.

    Attributes:
        failed: name of each failed run -> the end of its log.
        stopped: why training was stopped early, or "".
    """

    failed: dict[str, str] = field(default_factory=dict)
    stopped: str = ""


def check_existing_runs(runs: Sequence[Run], rates_file: Path | None = None) -> None:
    """Raise ValueError if a run was started with other values, or trained beyond the comparison's last step.

    rates_file: the file that sets the learning rates; None for those of the comparison's file.
    """
    remedy = "Give the comparison another --name, or remove the folder"
    for run in runs:
        begun = run.complete or (run.folder / FILE_NAME).is_file()
        if begun and run.file.is_file() and (differing := differing_keys(run)):
            source = ""
            if rates_file is not None and any(key.startswith("optimizer.lr:") for key in differing):
                source = f". {rates_file} sets the rates since --tune"
            raise ValueError(
                f"{run.folder} was started with other values ({'; '.join(differing[:3])}){source}. {remedy}"
            )
        if (done := steps_done(run)) > (steps := run.config.schedule.train_steps):
            raise ValueError(f"{run.folder} was trained to step {done}, but the comparison ends at {steps}. {remedy}")


def check_text(runs: Sequence[Run]) -> list[PreparedData]:
    """Return the text of all runs. Each corpus is prepared once, before several processes read it; all token files are opened.

    Raises ValueError if there is no validation text or image, or if the training text is shorter than a sample. Raises OSError
    and ValueError for missing and damaged token files, and as `check_token_files`, `tools.loading.token_data.prepared_data` and
    `tools.loading.image_data.open_images`.
    """
    from data.corpus.document_sources import read_sources
    from data.indexed import IndexedTokens
    from tools.loading.image_data import open_images
    from tools.loading.token_data import check_sequence_length, prepared_data

    texts = []
    for run in {run.config.data.model_dump_json(): run for run in runs}.values():
        if run.config.data.objective == "classification":
            for part in ("train", "validation"):
                if open_images(run.config.data, part, run.config.model.vocab_size) is None:
                    raise ValueError(
                        f"{run.name} has no {part} images, which the comparison needs: set data.images.{part}"
                    )
            continue
        texts.append(prepared_data(run.config.data, run.config.model.vocab_size))
        if texts[-1].validation is None:
            raise ValueError(
                f"{run.name} has no validation text, which the comparison needs: set data.validation with data.train, "
                "or data.validation_fraction > 0 with data.corpus"
            )
        of_text = [other for other in runs if other.config.data == run.config.data]
        check_sequence_length(texts[-1], max(other.config.batch.sequence_length for other in of_text))
        for prefix in texts[-1].prefixes:
            file = IndexedTokens(prefix)
            if any(other.config.logging.loss_by_source for other in of_text):
                read_sources(prefix, len(file))
    check_token_files(runs[0].folder.parent, texts)
    return texts


def write_runs(runs: Sequence[Run], texts: Sequence[PreparedData]) -> None:
    """Write the file of every run and the checksums of their token files. texts: of `check_text`."""
    write_token_files(runs[0].folder.parent, texts)
    for run in runs:
        write_text(run.file, run.text)


def run_all(
    runs: Sequence[Run],
    *,
    devices: Sequence[str],
    workers: int = 1,
    minutes: float | None = None,
    tune_kernels: bool = False,
    last: Collection[str] = (),
    progress: bool = True,
    after_run: Callable[[Collection[str]], None] = lambda failed: None,
) -> Outcome:
    """Train the runs that are not complete. A failed run is recorded and the others continue.

    SIGINT and SIGTERM save and stop all runs.

    Args:
        devices: "cpu", or numbers of GPUs.
        workers: processes per device.
        minutes: time limit, after which every run saves and stops. The same call continues.
        tune_kernels: see `Comparison`.
        last: names of runs that start when all others are complete or have failed.
        after_run: called before the training and after every run, with the names of the failed runs.
    """
    outcome = Outcome()
    waiting: queue.SimpleQueue[Run] = queue.SimpleQueue()
    incomplete = [run for run in _sorted_runs(runs) if not run.complete]
    for run in sorted(incomplete, key=lambda run: run.name in last):
        waiting.put(run)
    stop = threading.Event()
    slots = [_Slot(device, tune_kernels) for _ in range(workers) for device in devices][: len(incomplete)]
    threads_each = max(1, (os.cpu_count() or 1) // max(1, len(slots)))

    def others_ended() -> bool:
        return all(run.complete or run.name in outcome.failed for run in incomplete if run.name not in last)

    def serve(slot: _Slot) -> None:
        while not stop.is_set():
            try:
                run = waiting.get_nowait()
            except queue.Empty:
                break
            while run.name in last and not (stop.is_set() or others_ended()):
                time.sleep(_POLL_SECONDS)
            if stop.is_set():
                break
            try:
                status = slot.train(run, threads_each)
            except (OSError, ValueError) as error:  # the worker did not start, or wrote something else than a status
                outcome.failed[run.name] = f"the worker failed: {error}"
                tqdm.write(f"{run.name} failed: {error}", file=sys.stderr)
                break
            if not run.complete and not stop.is_set():
                outcome.failed[run.name] = _end_of_log(run, status)
                tqdm.write(f"{run.name} failed: {outcome.failed[run.name].splitlines()[-1]}", file=sys.stderr)
        slot.close()

    def interrupted(number: int, _frame: object) -> None:
        # Only set a flag: a handler must not wait for a lock that the loop below may hold.
        outcome.stopped = signal.Signals(number).name

    previous_handlers = {number: signal.signal(number, interrupted) for number in (signal.SIGINT, signal.SIGTERM)}
    threads = [threading.Thread(target=serve, args=(slot,), daemon=True) for slot in slots]
    started, ended = time.monotonic(), 0
    total = sum(run.config.schedule.train_steps for run in runs)
    try:
        with ProgressBar(
            total=total, unit="step", desc="compare", disable=not progress, dynamic_ncols=True, smoothing=0.05
        ) as bar:
            bar.update(_show(bar, runs, waiting.qsize))
            bar.initial = bar.n
            after_run(())
            for thread in threads:
                thread.start()
            while any(thread.is_alive() for thread in threads):
                if minutes is not None and time.monotonic() - started > 60 * minutes:
                    outcome.stopped = outcome.stopped or f"the time limit, --minutes {minutes:g}"
                if outcome.stopped:
                    stop.set()
                    break
                time.sleep(_POLL_SECONDS)
                if (count := sum(run.complete for run in incomplete) + len(outcome.failed)) > ended:
                    ended = count
                    after_run(list(outcome.failed))
                bar.update(_show(bar, runs, waiting.qsize) - bar.n)
            for slot in slots if stop.is_set() else ():
                slot.interrupt()
            end = time.monotonic() + _SECONDS_TO_SAVE
            for thread in threads:
                thread.join(max(0.0, end - time.monotonic()))
            after_run(list(outcome.failed))
            bar.update(_show(bar, runs, waiting.qsize) - bar.n)
    finally:
        for number, handler in previous_handlers.items():
            signal.signal(number, handler)
        for slot in slots:
            slot.kill()
    return outcome


def _sorted_runs(runs: Sequence[Run]) -> list[Run]:
    """Sort by seed, then longest first: the last runs are short, so that no device waits long for another."""
    seeds = list(dict.fromkeys(run.seed for run in runs))
    return sorted(runs, key=lambda run: (seeds.index(run.seed), -run.parameters * run.config.schedule.train_steps))


class _Slot:
    """Own one worker process on a device."""

    def __init__(self, device: str, tune_kernels: bool) -> None:
        self.device, self._options = device, [] if tune_kernels else ["--untuned"]
        self._interrupted = False
        self._process: subprocess.Popen[str] | None = None

    def train(self, run: Run, threads: int) -> int:
        """Train one run and return its exit status. Start a new worker if the previous one has ended."""
        if self._process is None or self._process.poll() is not None:
            self._process = self._start(threads)
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(f"{run.file}\n")
            process.stdin.flush()
            if self._interrupted:  # before this process existed
                process.terminate()
            status = process.stdout.readline()
        except BrokenPipeError:
            status = ""
        return int(status) if status else process.wait()

    def interrupt(self) -> None:
        """Make the current run, or the one about to start, save and end."""
        self._interrupted = True
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()

    def close(self) -> None:
        """Close the worker's input, so that it ends after its current run."""
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()

    def kill(self) -> None:
        """End the worker; kill it if it does not end within 10 seconds."""
        if self._process is None:
            return
        self.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _start(self, threads: int) -> subprocess.Popen[str]:
        environment = {**worker_environment(), "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads))}
        environment |= {"CUDA_VISIBLE_DEVICES": "" if self.device == "cpu" else self.device}
        return subprocess.Popen(
            [sys.executable, "-m", "tools.compare.worker", *self._options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            start_new_session=True,  # only this process receives Ctrl-C; it stops the workers
        )


def steps_done(run: Run) -> int:
    """Return the last step in the run's metrics, or 0."""
    file = run.folder / FILE_NAME
    if not file.is_file():
        return 0
    with file.open("rb") as lines:
        lines.seek(max(0, file.stat().st_size - 65536))
        for line in reversed(lines.read().split(b"\n")):
            try:
                return int(json.loads(line)["step"])
            except (ValueError, KeyError, TypeError):
                continue
    return 0


def _show(bar: ProgressBar, runs: Sequence[Run], waiting: Callable[[], int]) -> int:
    complete = sum(run.complete for run in runs)
    bar.set_postfix_str(f"{complete} of {counted(len(runs), 'run')} complete, {waiting()} waiting", refresh=False)
    return sum(steps_done(run) for run in runs)


def _end_of_log(run: Run, status: int) -> str:
    log = run.folder / "train.log"
    text = log.read_text(encoding="utf-8", errors="replace").rstrip() if log.is_file() else ""
    return "\n".join([*text.splitlines()[-8:], f"{describe_status(status)}; the whole log: {log}"])
