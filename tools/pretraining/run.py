"""Run a training from its configuration to its exit status: checks, folder locks, preparation, training loop."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_lite.config.loader import explain_config, load_config
from megatron_lite.config.schema import Config
from megatron_lite.fault_tolerance.guards import StopSignal
from tools.cli.arguments import FAILED, FULL, interrupted, refused

# torch and DeepSpeed are imported where they are used, so that a wrong configuration is refused at once.
if TYPE_CHECKING:
    from megatron_lite.parallel.grid import Grid
    from models.config import ModelConfig

ROOT = Path(__file__).resolve().parents[2]


def run(
    files: Sequence[str | Path],
    overrides: Sequence[str] = (),
    *,
    print_config: bool = False,
    dry_run: bool = False,
) -> int:
    """Train with configuration files and `key=value` overrides. `print_config` and `dry_run` print and do not train.

    Returns:
        The exit status: 0 if the run is complete or was stopped by a signal, 1 or 2 after an error, 130 after Ctrl-C
        before the first step or a second Ctrl-C.
    """
    try:
        return _run(files, overrides, print_config, dry_run)
    except KeyboardInterrupt:
        return interrupted("the same command resumes from the newest checkpoint, or starts if there is none")


def schema() -> type:
    """Return the class of a run's configuration."""
    from models.config import ModelConfig

    return Config[ModelConfig]


def _run(files: Sequence[str | Path], overrides: Sequence[str], print_config: bool, dry_run: bool) -> int:
    from models.config import ModelConfig
    from tools.loading.vocab_size import vocabulary_override

    try:
        overrides = [*overrides, *vocabulary_override(files, overrides)]
    except (ValueError, OSError) as error:
        return refused(ValueError(f"model.vocab_size is missing, and tokenizer or images do not give it: {error}"))

    def load(*more: str) -> Config[ModelConfig]:
        return load_config(files, [*overrides, *more], model_type=ModelConfig)

    try:
        if print_config:
            print(explain_config(files, overrides, model_type=ModelConfig), end="")
            return 0
        config = load()
        if dry_run:
            from tools.planning import dry_run as planning

            return planning.dry_run(config)
    except (ValueError, OSError) as error:
        return refused(error)
    # A pre-timeout signal waits for the first step: the preparation may take long, and a stop there would save nothing.
    with StopSignal([signal.SIGUSR1]) as early, ExitStack() as folder_locks:
        return _train(config, load, folder_locks, early)


def _train(
    config: Config[ModelConfig], reload: Callable[..., Config[ModelConfig]], folder_locks: ExitStack, early: StopSignal
) -> int:
    """Train until the end or a signal. `reload` loads the configuration with more overrides. Returns the exit status."""
    from data.checksum import DamagedDataError
    from megatron_lite.checkpoint.reader import CheckpointError
    from megatron_lite.fault_tolerance.guards import TooManySkippedSteps, print_stacks_on_signal
    from megatron_lite.fault_tolerance.replica_check import ReplicasDifferError
    from megatron_lite.fault_tolerance.run_lock import RunInUse
    from megatron_lite.parallel.collectives import on_main
    from megatron_lite.parallel.launcher import RankRefused
    from tools.pretraining.prepare import prepare_run

    print_stacks_on_signal()
    try:
        grid = _init_grid(config)
        on_main(grid, lambda: _hold_folders(config, folder_locks))
        fit = prepare_run(config, reload, grid, early)
    except (RunInUse, RankRefused) as error:  # not an error of the configuration: SLURM may try again
        print(f"\nerror: {error}", file=sys.stderr)
        return FAILED
    except (ValueError, OSError) as error:
        print(file=sys.stderr)
        return refused(_with_key(error, config))
    try:
        # Any other error after the first step is an error of the program and keeps its traceback.
        return fit()
    except (CheckpointError, DamagedDataError, ReplicasDifferError, TooManySkippedSteps) as error:
        print(f"\nerror: {error}", file=sys.stderr)
        return FAILED
    except OSError as error:
        if error.errno not in FULL:
            raise
        print(file=sys.stderr)
        return refused(error)


def _init_grid(config: Config[Any]) -> Grid:
    """Return the grid of the run, whose processes have the same configuration, code and packages.

    Raises ValueError where they differ, and as `init_grid`.
    """
    from megatron_lite.checkpoint.storage import versions
    from megatron_lite.fault_tolerance.rank_consistency import code_facts, configuration_facts, require_agreement
    from megatron_lite.parallel.grid import init_grid

    # The check comes first, because processes with different layouts would wait for one another forever.
    grid = init_grid(config.run.device)
    facts = {
        "configuration": configuration_facts(config.model_dump(mode="json")),
        "code": code_facts(ROOT, ("train.py", "data", "megatron_lite", "models", "tools")),
        "packages": versions(),
    }
    require_agreement(facts, grid)
    parallel = config.parallel
    return init_grid(config.run.device, tensor=parallel.tensor, pipeline=parallel.pipeline, context=parallel.context)


def _hold_folders(config: Config[Any], folder_locks: ExitStack) -> None:
    """Lock the folders that the run writes to and clear them of temporary files. Raises RunInUse and OSError."""
    from data.atomic_io import remove_leftovers
    from megatron_lite.fault_tolerance.run_lock import hold_folders

    folders = {"run.directory": config.run.path, "checkpoint.directory": Path(config.checkpoint.directory)}
    for folder in hold_folders(folders, folder_locks):
        remove_leftovers(folder)


def _with_key(error: Exception, config: Config[Any]) -> Exception:
    """Return the error; an OSError in a folder of the configuration names the key of the folder."""
    folders: dict[str, Path | str] = {
        "run.directory": config.run.path,
        "checkpoint.directory": config.checkpoint.directory,
        "data.cache_directory": config.data.cache_directory,
    }
    for key, folder in folders.items():
        if isinstance(error, OSError) and error.filename and Path(error.filename).is_relative_to(folder):
            message = f"{key} = {folder}: {error.strerror} ({error.filename}); name a folder that can be written"
            return OSError(error.errno, message)
    return error
