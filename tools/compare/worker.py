"""Train one run after another on one device, each as `python train.py FILE`.

All runs share the interpreter, the imported packages and the kernels' autotuning results. The process reads one run file
per line from standard input and writes the exit status per run to standard output. It ends after an error with a traceback.
The output of a run goes to `train.log` in the run's folder. SIGTERM ends a run with a checkpoint, as in train.py. So does the
end of standard input, which follows a killed launcher: the next launch then finds no run in use.
"""

from __future__ import annotations

import os
import queue
import signal
import sys
import threading
import traceback
from pathlib import Path


def main() -> int:
    statuses = os.dup(sys.stdout.fileno())
    if "--untuned" in sys.argv:
        from tools.loading.triton_autotune import without_tuning

        without_tuning()
    from tools.pretraining.run import run

    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    training = threading.Event()
    threading.Thread(target=_read_lines, args=(lines, training), daemon=True).start()
    while line := lines.get():
        file = Path(line.rstrip("\n"))
        with (file.parent / "train.log").open("ab") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        sys.argv = ["train.py", str(file)]  # the command that the run's summary repeats
        try:
            status = run([file])
        except Exception:
            # The state of the device is unknown, so this process ends, which reports the failure. It writes no status,
            # because the launcher would answer with the next run.
            traceback.print_exc()
            return 1
        training.clear()
        sys.stdout.flush()
        sys.stderr.flush()
        try:
            os.write(statuses, f"{status}\n".encode())
        except BrokenPipeError:  # the launcher is gone
            return 0
        _release_memory()
    return 0


def _read_lines(lines: queue.SimpleQueue[str], training: threading.Event) -> None:
    """Put the lines of standard input into a queue. At its end, put "" and stop the current run."""
    for line in sys.stdin:
        training.set()
        lines.put(line)
    lines.put("")
    if training.is_set():
        os.kill(os.getpid(), signal.SIGTERM)


def _release_memory() -> None:
    import gc

    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


if __name__ == "__main__":
    sys.exit(main())
