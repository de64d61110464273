"""A process of a comparison: trains run after run on one device, as `python train.py FILE` would each.

The interpreter, the packages and what the kernels' autotuning found serve all of its runs. It reads the names of run
files from its standard input, a line each, and answers each with the exit status, or ends with it after an error that has a
traceback; what a run prints goes to `train.log` beside its file. SIGTERM ends a run with a checkpoint, as it ends train.py.
"""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path


def main() -> int:
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    if "--untuned" in sys.argv:
        from tools.loading.triton_autotune import without_tuning

        without_tuning()
    from tools.pretraining.run import run

    for line in sys.stdin:
        file = Path(line.rstrip("\n"))
        with (file.parent / "train.log").open("ab") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        sys.argv = ["train.py", str(file)]  # the command that the run's summary repeats
        try:
            status = run([file])
        except Exception:
            # What it left on the device cannot be known. The end of this process is the answer: after one in words the
            # next run would be given to a process that is about to end.
            traceback.print_exc()
            return 1
        sys.stdout.flush()
        sys.stderr.flush()
        answers.write(f"{status}\n")
        answers.flush()
        _release_memory()
    return 0


def _release_memory() -> None:
    import gc

    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


if __name__ == "__main__":
    sys.exit(main())
