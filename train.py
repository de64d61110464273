"""Train a language model or an image classifier. `python train.py --help`."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_lite.parallel.launcher import end_with_launcher
from tools.cli.arguments import command_line, parse_with_overrides
from tools.pretraining.run import run, schema

DEFAULT_CONFIG = Path(__file__).parent / "configs" / "default.yml"

EPILOG = """
examples:
  python train.py                                        the default: a small MetaLA learns Python in 6 minutes on a CPU
  python train.py run.name=second optimizer.lr=1e-3      the same with other values, in runs/second
  python train.py configs/metala_360m.yml data.train=PREFIX data.validation=PREFIX     token files elsewhere
  python train.py configs/cifar10_lion_s.yml data.images.train=train.parquet data.images.validation=test.parquet
  python train.py configs/metala_1.4b.yml --dry-run      parameters, FLOPs, memory, refusals; nothing is saved
  torchrun --nproc-per-node 4 train.py configs/metala_360m.yml configs/cluster/4gpu.yml

The same command resumes a stopped run. SIGTERM, SIGUSR1 or Ctrl-C finish the step, save and exit 0.
Every key, its default and its meaning: configs/README.md
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return its exit status, which `tools.pretraining.run` describes."""
    end_with_launcher()
    parser = command_line(
        "python train.py", "Train a language model or an image classifier with linear attention.", EPILOG
    )
    parser.add_argument(
        "config", nargs="*", metavar="FILE.yml | key.sub=value", help="files, merged left to right, and single values"
    )
    parser.add_argument("--print-config", action="store_true", help="print every value and where it comes from; stop")
    parser.add_argument(
        "--dry-run", action="store_true", help="print costs and what a start would refuse; save nothing"
    )
    # The deepspeed launcher adds it to every command. LOCAL_RANK of the environment has the same value.
    parser.add_argument("--local_rank", "--local-rank", type=int, help=argparse.SUPPRESS)
    options = parse_with_overrides(parser, arguments, schema)
    files: list[str | Path] = [word for word in options.config if "=" not in word]
    overrides = [word for word in options.config if "=" in word]
    return run(files or [DEFAULT_CONFIG], overrides, print_config=options.print_config, dry_run=options.dry_run)


if __name__ == "__main__":
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # outside of `StopSignal`, and while the interpreter ends
    try:
        sys.exit(main())
    except SystemExit as end:
        # A launcher that restarts crashes sees only the status of the last process. This file marks that one process refused.
        if end.code == 2 and (mark := os.environ.get("METALION_REFUSED")):
            Path(mark).touch()
        raise
