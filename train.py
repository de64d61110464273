"""Train a language model: configuration -> data -> layers -> engine -> loop. `python train.py --help`."""

from __future__ import annotations

import argparse
import bisect
import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_lite.config.loader import dump_config, explain_config, load_config
from megatron_lite.config.schema import Config
from megatron_lite.fault_tolerance.guards import StopSignal
from megatron_lite.parallel.launcher import end_with_launcher
from tools.cli.arguments import FAILED, FULL, command_line, interrupted, refused

if TYPE_CHECKING:  # torch and DeepSpeed are imported where they are used, so that --help answers at once
    from megatron_lite.parallel.grid import Grid
    from megatron_lite.trainer import Steps
    from models.config import ModelConfig
    from tools.loading.token_data import PreparedData

DEFAULT_CONFIG = Path(__file__).parent / "configs" / "default.yml"

EPILOG = """
examples:
  python train.py                                        the default: a small MetaLA learns Python in 5 minutes on a CPU
  python train.py run.name=second optimizer.lr=1e-3      the same with other values, in runs/second
  python train.py configs/metala_360m.yml data.train=/data/pile_text_document
  python train.py configs/metala_1.4b.yml --dry-run      parameters, memory, FLOPs and a fake batch; nothing is saved
  torchrun --nproc-per-node 4 train.py configs/metala_360m.yml configs/cluster/4gpu.yml

A run that was stopped goes on when the same command is given again. SIGTERM, SIGUSR1 or Ctrl-C finish the step, save and
exit 0. Every key, its default and its meaning: configs/README.md
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line. Returns 0 when the run is complete or was stopped by a signal, 1 or 2 after an error, 130 after a
    Ctrl-C before the first step or a second one."""
    end_with_launcher()
    try:
        return _main(arguments)
    except KeyboardInterrupt:
        return interrupted("the same command goes on from the newest checkpoint, or begins where there is none")


def _main(arguments: Sequence[str] | None) -> int:
    parser = command_line("python train.py", "Train a linear-attention language model.", EPILOG)
    parser.add_argument(
        "config", nargs="*", metavar="FILE.yml | key.sub=value", help="files, merged left to right, and single values"
    )
    parser.add_argument("--print-config", action="store_true", help="print every value and where it comes from; stop")
    parser.add_argument("--dry-run", action="store_true", help="build, run a fake batch, report memory; save nothing")
    # The deepspeed launcher adds it to every command; the same number stands in the environment.
    parser.add_argument("--local_rank", "--local-rank", type=int, help=argparse.SUPPRESS)
    options = parser.parse_intermixed_args(arguments)
    files: list[str | Path] = [word for word in options.config if "=" not in word]
    overrides = [word for word in options.config if "=" in word]
    files = files or [DEFAULT_CONFIG]
    from models.config import ModelConfig
    from tools.loading.vocab_size import vocabulary_override

    try:
        overrides += vocabulary_override(files, overrides)
    except (ValueError, OSError) as error:
        return refused(ValueError(f"model.vocab_size is missing, and its tokenizer cannot be read: {error}"))

    def load(*more: str) -> Config[ModelConfig]:
        return load_config(files, [*overrides, *more], model_type=ModelConfig)

    try:
        if options.print_config:
            print(explain_config(files, overrides, model_type=ModelConfig), end="")
            return 0
        config = load()
        if options.dry_run:
            from tools.planning.dry_run import dry_run

            return dry_run(config)
    except (ValueError, OSError) as error:
        return refused(error)
    return train(config, load)


def train(config: Config[ModelConfig], reload: Callable[..., Config[ModelConfig]]) -> int:
    """Train to the end, or to a signal. `reload` gives the configuration again with more overrides."""
    # What says that the time is nearly over ends no preparation, which may take long, and nothing after the last step.
    with StopSignal([signal.SIGUSR1]) as early, ExitStack() as held:
        return _train(config, reload, held, early)


def _train(
    config: Config[ModelConfig], reload: Callable[..., Config[ModelConfig]], held: ExitStack, early: StopSignal
) -> int:
    from data.checksum import DamagedDataError
    from megatron_lite.checkpoint.reader import CheckpointError
    from megatron_lite.checkpoint.storage import versions
    from megatron_lite.fault_tolerance.guards import TooManySkippedSteps, print_stacks_on_signal
    from megatron_lite.fault_tolerance.rank_consistency import code_facts, configuration_facts, require_agreement
    from megatron_lite.fault_tolerance.replica_check import ReplicasDifferError
    from megatron_lite.fault_tolerance.run_lock import RunInUse
    from megatron_lite.parallel.collectives import on_main
    from megatron_lite.parallel.grid import init_grid
    from megatron_lite.parallel.launcher import RankRefused

    print_stacks_on_signal()
    try:
        grid = init_grid(config.run.device)
        # Before anything else: processes with different layouts, say, would wait for one another without end.
        facts = {
            "configuration": configuration_facts(config.model_dump(mode="json")),
            "code": code_facts(Path(__file__).parent, ("train.py", "data", "megatron_lite", "models", "tools")),
            "packages": versions(),
        }
        require_agreement(facts, grid)
        parallel = config.parallel
        sizes = {"tensor": parallel.tensor, "pipeline": parallel.pipeline, "context": parallel.context}
        grid = init_grid(config.run.device, **sizes)
        # Before hours of tokenising.
        on_main(grid, lambda: _hold_folders(config, held))
        fit = _prepare(config, reload, grid, early)
    except (RunInUse, RankRefused) as error:  # no mistake of the configuration: SLURM may try again
        print(f"\nerror: {error}", file=sys.stderr)
        return FAILED
    except (ValueError, OSError) as error:
        print(file=sys.stderr)
        return refused(_by_its_key(error, config))
    try:
        # From the first step on any other error is no answer to a configuration: it keeps its traceback.
        return fit()
    except (CheckpointError, DamagedDataError, ReplicasDifferError, TooManySkippedSteps) as error:
        print(f"\nerror: {error}", file=sys.stderr)
        return FAILED
    except OSError as error:
        if error.errno not in FULL:
            raise
        print(file=sys.stderr)
        return refused(error)


def _hold_folders(config: Config[Any], held: ExitStack) -> None:
    """Take the folders that the run writes to until `held` is closed; what is made here and stays empty is then removed.

    Raises RunInUse and OSError.
    """
    from data.atomic_io import remove_leftovers
    from megatron_lite.fault_tolerance.run_lock import RunLock

    run, checkpoints = config.run.path, Path(config.checkpoint.directory)
    for key, folder in (("run.directory", run), ("checkpoint.directory", checkpoints)):
        if not folder.is_dir():
            folder.mkdir(parents=True, exist_ok=True)
            held.callback(_remove_empty, folder)
        if folder is run or not folder.samefile(run):
            held.enter_context(closing(RunLock(folder, key))).acquire()
            remove_leftovers(folder)


def _remove_empty(folder: Path) -> None:
    with suppress(OSError):  # one that holds something stays
        folder.rmdir()


def _by_its_key(error: Exception, config: Config[Any]) -> Exception:
    """The error; one of the system about a folder of the configuration names its key."""
    folders = {
        "run.directory": config.run.path,
        "checkpoint.directory": config.checkpoint.directory,
        "data.cache_directory": config.data.cache_directory,
    }
    for key, folder in folders.items():
        if isinstance(error, OSError) and error.filename and Path(error.filename).is_relative_to(folder):
            words = f"{key} = {folder}: {error.strerror} ({error.filename}); name a folder that can be written"
            return OSError(error.errno, words)
    return error


def _prepare(
    config: Config[ModelConfig], reload: Callable[..., Config[ModelConfig]], grid: Grid, early: StopSignal
) -> Callable[[], int]:
    """Everything before the first step; returns what trains, to be called once. Raises ValueError, OSError and
    CheckpointError for what cannot run."""
    import torch

    from megatron_lite.checkpoint import engine_state as engine_checkpoint
    from megatron_lite.checkpoint import reader as checkpoint
    from megatron_lite.checkpoint.storage import rewind
    from megatron_lite.engine.precision import faster_dtype
    from megatron_lite.fault_tolerance.rank_consistency import file_facts, require_agreement
    from megatron_lite.metrics.logger import PREVIOUS_FILE_NAME, MetricsLogger, measured_kinds
    from megatron_lite.parallel.collectives import on_main
    from megatron_lite.planning.flops import peak_flops, training_flops_per_token
    from megatron_lite.trainer import Trainer, TrainState
    from megatron_lite.validation import due_measurements
    from models.language_model import LanguageModel
    from tools.evaluation.during_training import suite_evaluation
    from tools.inference.generation import complete
    from tools.loading.engine import build_engine
    from tools.loading.token_data import prepared_data
    from tools.loading.tokenizer import check_same_tokenizer, save_tokenizer
    from tools.pretraining.data import training_samples, training_steps, validation_set
    from tools.pretraining.summary import complete_message, is_complete, start_message, summary

    torch.manual_seed(config.run.seed)
    torch.set_float32_matmul_precision("highest")
    source, own, back = _resume_from(config, grid)
    stored = checkpoint.read_manifest(source) if source else None
    trained = stored is not None and own and stored["step"] > 0  # an import has no steps behind it
    if trained and config.schedule.time_budget_minutes:
        steps = checkpoint.read_config_yaml(source)["schedule"]["train_steps"]
        config = reload(f"schedule.train_steps={steps}")
    # Where the steps are done and the end is not (the last validation, say), `fit` has it to do.
    if stored is not None and own and on_main(grid, lambda: is_complete(config, stored)):
        with torch.device("meta"):  # of another architecture it is refused as if there were steps to do
            shapes = {name: tuple(weight.shape) for name, weight in LanguageModel(config.model).named_parameters()}
        engine_checkpoint.check_shapes(shapes, stored, source)
        if grid.is_main:
            print(complete_message(config, source, stored["step"]))
        return lambda: 0

    data: PreparedData = on_main(grid, lambda: prepared_data(config.data, config.model.vocab_size))
    require_agreement({"data": file_facts(data.files)}, grid)
    tokenizer = data.load_tokenizer()
    if stored is not None and trained:
        on_main(grid, lambda: check_same_tokenizer(tokenizer, config.run.path, stored))
    dtype = config.precision.dtype
    if dtype == "auto":
        dtype = stored["layout"]["dtype"] if trained else on_main(grid, lambda: _dtype(config, grid, faster_dtype))
    engine = build_engine(config, grid, dtype)

    state, aside = TrainState(), None

    def dataset(steps: int) -> Any:
        def build() -> Any:
            return training_samples(config, data, tokenizer, steps, state.step, state.consumed_samples)

        on_main(grid, lambda: build() and None)  # one process writes the cache of the sample order
        return build()

    if source is not None:
        state = TrainState.from_dict(engine_checkpoint.load(engine, source))
        if not own:  # weights and optimizer state of another run, from its first sample on
            state = TrainState()
        elif back:  # to an earlier step of this run, which can be read
            aside = on_main(grid, lambda: rewind(source))
    state.tokenizer = tokenizer.hash
    if not trained and config.schedule.time_budget_minutes:
        config = reload(
            f"schedule.train_steps={_steps_in_budget(config, engine, training_steps(config, dataset(1), grid)(0), grid)}"
        )
    samples = dataset(config.schedule.train_steps)
    validation = validation_set(config, data.validation, data.validation_bytes, tokenizer, grid)
    test = validation_set(config, data.test, None, tokenizer, grid)

    def model() -> LanguageModel:
        return LanguageModel(config.model, layers=engine.layers)

    suites = suite_evaluation(config, tokenizer, grid, model)
    if state.evaluation_due:  # unless it was done after the checkpoint
        has = {
            "validation": validation is not None,
            "sample": _writes_samples(config, grid),
            "suites": suites is not None,
        }
        due = due_measurements(config, state.step, **has)
        state.evaluation_due = on_main(grid, lambda: not due <= measured_kinds(config.run.path, state.step))
    metrics = None
    if grid.is_main:
        save_tokenizer(tokenizer, config.run.path)
        print(start_message(config, engine, data, state, source))
        if aside is not None:
            print(f"what came after that step is kept: {aside}, {config.run.path / PREVIOUS_FILE_NAME}")
        metrics = MetricsLogger(
            config.run.path,
            total_steps=config.schedule.train_steps,
            initial_step=state.step,
            measures_again=state.evaluation_due,
            keep_previous=aside is not None,
            progress_bar=config.logging.progress_bar,
            tensorboard=config.logging.tensorboard,
            wandb=config.logging.wandb.model_dump(),
            config=config.model_dump(mode="json"),
        )

    def sample() -> str:
        limit = config.evaluation.sample_tokens
        return complete(model(), tokenizer, config.evaluation.prompt, max_tokens=limit, temperature=0.7, top_p=0.9)

    trainer = Trainer(
        engine,
        config,
        metrics,
        batches=training_steps(config, samples, grid),
        validation=validation,
        test=test,
        sources=samples.sources,
        state=state,
        config_yaml=dump_config(config),
        flops_per_token=training_flops_per_token(engine.model, config.batch.sequence_length, config.data.asked_share),
        peak_flops=peak_flops(grid.device, dtype) if grid.is_main else None,
        sample=sample if _writes_samples(config, grid) else None,
        suites=suites,
        early=early,
    )

    def fit() -> int:
        try:
            result = trainer.fit()
        finally:
            if metrics is not None:
                metrics.close()
            engine.close()
        if grid.is_main:
            print(summary(config, result, data))
        return 0

    return fit


def _resume_from(config: Config[Any], grid: Grid) -> tuple[Path | None, bool, bool]:
    """The step folder to start from, whether it is one of this run, and whether the run goes back to it.

    None for a new run, for which resume=never moves old checkpoints aside. What a run starts from is for its first start:
    later ones find checkpoints of its own.
    """
    from megatron_lite.checkpoint import reader as checkpoint
    from megatron_lite.checkpoint import storage as checkpoint_folder
    from megatron_lite.checkpoint.verify import newest_whole
    from megatron_lite.parallel.collectives import on_main

    folder = Path(config.checkpoint.directory)

    def find() -> tuple[Path | None, bool, bool]:
        resume = _asked_start(config)
        if resume == "never":
            checkpoint_folder.set_aside(folder)
            return None, False, False
        if resume == "newest_readable":
            newest, problems = newest_whole(folder)
            for problem in problems:
                print(f"not readable: {problem}", file=sys.stderr)
            return newest, newest is not None, bool(problems)
        begun = checkpoint.exists(folder)
        if resume != "auto" and (not begun or checkpoint.names_own(resume, folder)):
            source = checkpoint.resolve(resume)
            own = source.resolve().parent == folder.resolve()
            return (folder / source.resolve().name if own else source), own, own
        if begun and resume != "auto":
            print(
                f"checkpoint.resume = {resume} was for the first start: this run goes on from its own checkpoints "
                f"(to start from there again, give it another run.name or run.directory, or move {folder} away)"
            )
        return (checkpoint.resolve(folder), True, False) if begun else (None, False, False)

    return on_main(grid, find)


def _asked_start(config: Config[Any]) -> str:
    """`checkpoint.resume`; auto where a launcher starts the command again that has written a checkpoint since it was given."""
    from megatron_lite.checkpoint import reader as checkpoint

    folder, resume = Path(config.checkpoint.directory), config.checkpoint.resume
    if resume == "newest_readable":
        return resume
    # torchrun --max-restarts; a job that SLURM queued again.
    counts = (os.environ.get(name, "0") for name in ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"))
    if any(count != "0" for count in counts) and checkpoint.exists(folder):
        with suppress(checkpoint.CheckpointError, KeyError):
            if checkpoint.read_config_yaml(folder)["checkpoint"]["resume"] == resume:
                return "auto"
    return resume


def _writes_samples(config: Config[Any], grid: Grid) -> bool:
    # A model whose layers are on several processes does not write text while it trains: tools.generate does.
    together = grid.pipe_size * grid.context_size == 1
    return bool(config.evaluation.sample_tokens) and together and config.data.objective == "causal"


def _dtype(config: Config[ModelConfig], grid: Grid, faster_dtype: Callable[..., str]) -> str:
    tokens = config.batch.micro_batch_size * config.batch.sequence_length
    return faster_dtype(grid.device, config.model.hidden_size, tokens)


def _steps_in_budget(config: Config[Any], engine: Any, steps: Steps, grid: Grid) -> int:
    """How many steps fit into `schedule.time_budget_minutes`, at most `schedule.train_steps`."""
    from megatron_lite.parallel.collectives import on_main

    with closing(steps):
        seconds = engine.measure_step_seconds(next(steps))
    # A batch that grows is measured where it is smallest.
    samples = config.schedule.time_budget_minutes * 60 / seconds * config.batch.size_at(0)
    steps_in = range(1, config.schedule.train_steps + 1)
    return on_main(grid, lambda: max(1, bisect.bisect_right(steps_in, samples, key=config.batch.samples_of)))


if __name__ == "__main__":
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # before and after what takes it, the end of the interpreter too
    try:
        sys.exit(main())
    except SystemExit as end:
        # A launcher that starts a crash again sees the status of whichever process died last; this file tells it that
        # one of them refused to run at all.
        if end.code == 2 and (mark := os.environ.get("METALION_REFUSED")):
            Path(mark).touch()
        raise
