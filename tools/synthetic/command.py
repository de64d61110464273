"""`python eval.py --suite mqar`, `--suite mad` and `--suite lra`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_lite.plural import counted
from tools.cli.arguments import above_zero, command_line
from tools.reporting.tables import plain_table

if TYPE_CHECKING:  # --help answers at once
    from .experiment import Experiment, Run
    from .results import Line, Results
    from .workers import Group

    Sweeps = list[list[Run]]

NAMES = ("mqar", "mad", "lra")

EPILOG = """\
examples:
  python eval.py --suite mqar --dry-run                    list the runs and their steps
  python eval.py --suite mqar --check                      one minute on a GPU: 20 steps of every model
  python eval.py --suite mqar                              the paper's grid; to resume, run the same command again
  python eval.py --suite mqar tasks=[256x16,512x64] widths=[64,128,256]
  python eval.py --suite mqar tasks=[512x80]               Table A7
  python eval.py --suite mqar tasks=[64x4] models=[metala] widths=[64] epochs=8 devices=[cpu] data.train_examples=20000
  python eval.py --suite mad models=[metala]               six tasks, 66 settings, six runs per setting
  python eval.py --suite mad tasks=[memorization,compression/baseline]
  python eval.py --suite lra tasks=[listops]               nested operations on digits, 2000 tokens, ten classes
  python eval.py --suite lra tasks=[text,image] models=[metala,lion_s]        Long Range Arena
  python eval.py --suite mqar --report                     tables and figures of the finished runs

Each run writes one line to OUTPUT/results.jsonl. A run whose settings are already in this file is not run again. A sweep
is complete when its best run reaches the target. The same folder gets results.md, with the papers' numbers, and
results.png. On CUDA the runs of a sweep are trained together: one CUDA graph holds one step of all of them. Several
processes share the GPUs. See docs/guide/synthetic.md for the definitions."""


def synthetic_suite(words: Sequence[str]) -> str | None:
    """Return the name in NAMES that --suite gives, or None.

    Raises ValueError if it is combined with other suites, and UnknownNameError for an unknown suite.
    """
    from tools.evaluation.suites import check_suite_name

    for previous, word in zip(["", *words], words, strict=False):
        value = word if previous == "--suite" else word.removeprefix("--suite=") if word.startswith("--suite=") else ""
        names = value.split(",")
        matches = [name for name in names if name in NAMES]
        if matches and len(names) > 1:
            raise ValueError(f"--suite {value}: {matches[0]} trains its own models; run it without other suites")
        if matches:
            return matches[0]
        for name in filter(None, names):
            check_suite_name(name, NAMES)
    return None


def synthetic_command(words: Sequence[str]) -> int:
    """Run the command line after `python eval.py`.

    Returns 1 if runs remain, a check fails or --report has no result to show, else 0.
    """
    options = _parser(synthetic_suite(words) or "mqar").parse_intermixed_args(list(words))
    from .batches import check_data, data_key
    from .experiment import load_experiment, plan, sweeps
    from .network import model_config
    from .results import Results

    experiment = load_experiment(options.suite, options.override, options.config)
    precision, devices = _precision_and_devices(experiment)
    results = Results(experiment.output / "results.jsonl")
    if options.report and experiment.precision == "auto" and results.lines:
        # The tables may be made on a machine without the GPUs that trained.
        precision = next(reversed(results.lines.values()))["precision"]
    grouped = sweeps(plan(experiment, precision))
    if not (options.report or options.dry_run):
        _check_devices(devices)
    if options.check:
        return _check(experiment, grouped, devices)
    # Report data that cannot be generated and models that cannot be built before training begins.
    # A report needs no data: it may be made on another machine.
    if not options.report:
        for run in {repr(data_key(sweep[0])): sweep[0] for sweep in grouped}.values():
            check_data(run)
    for sweep in grouped:
        model_config(sweep[0])
    if options.dry_run:
        print(_listing(grouped, results))
        return 0
    failed: list[str] = []
    if not options.report:
        with results.writing():
            failed = _train(experiment, grouped, results, devices, options)
    has_results = _report(experiment, grouped, results)
    if options.report:
        if not has_results:
            print(
                f"{results.path} has no result of this grid yet: run the same command without --report", file=sys.stderr
            )
        return 0 if has_results else 1
    for text in failed:
        print(f"failed: {text}", file=sys.stderr)
    remaining = sum(len(results.pending(sweep)) for sweep in grouped)
    if remaining:
        advice = "solve the problem, then run the same command again" if failed else "run the same command again"
        print(f"{counted(remaining, 'run')} to do: {advice} to continue", file=sys.stderr)
    return 1 if remaining else 0


def _train(
    experiment: Experiment, grouped: Sweeps, results: Results, devices: list[str], options: argparse.Namespace
) -> list[str]:
    """Train all pending runs. Return one line per failed group."""
    import math

    from tqdm import tqdm

    from data.progress import ProgressBar

    from .report import best_line
    from .run_checkpoint import remove_checkpoints
    from .workers import groups_of, train_groups

    # A command that was killed after it wrote a result may have left the run's checkpoint.
    for sweep in grouped:
        pending = results.pending(sweep)
        remove_checkpoints(results.unfinished, [run for run in sweep if run not in pending])
    groups = groups_of(grouped, results, _group_size(experiment, devices), len(devices))
    total = sum(group.steps for group in groups)
    done = sum(len(results.of(sweep)) for sweep in grouped)
    to_do = counted(sum(len(g.runs) for g in groups), "run")
    print(f"{to_do} to do, {counted(total, 'step')} at most; {done} done: {results.path}\n")
    with ProgressBar(total=total, unit="step", unit_scale=True, disable=not options.progress) as bar:

        def show(steps: int, text: str) -> None:
            bar.update(steps)
            if text:
                bar.set_postfix_str(text)

        def finished(group: Group, lines: list[Line]) -> None:
            best = best_line(group.runs[0], lines)
            note = f", {best['stopped']}" if best["stopped"] else ""
            graph = "" if best["graph"] is True else f", no CUDA graph: {best['graph']}"
            rate = best["steps_per_second"]
            tqdm.write(
                f"{group.runs[0].name}: {100 * best['accuracy']:.1f} % at lr {best['lr']:g}{note}; "
                f"{counted(best['epochs'], 'epoch')}, "
                f"{best['side_by_side']} x {f'{rate:,.0f}' if rate >= 10 else f'{rate:.2g}'} steps/s{graph}"
            )

        return train_groups(
            groups,
            results,
            devices,
            graph=experiment.graph,
            seconds=math.inf if options.minutes is None else 60 * options.minutes,
            progress=show,
            finished=finished,
            saved=tqdm.write,
        )


def _check(experiment: Experiment, grouped: Sweeps, devices: list[str]) -> int:
    """Check the first setting of each model (in MAD and LRA: of each model and task) and print one row per check."""
    from .preflight import COLUMNS, STEPS, check_sweeps

    chosen: dict[tuple[str, str], list[Run]] = {}
    for sweep in grouped:
        kind = sweep[0].base_task if experiment.suite in ("mad", "lra") else ""
        chosen.setdefault((kind, sweep[0].model), sweep)
    group_size = _group_size(experiment, devices)
    if devices[0] == "cpu":
        print(
            f"{counted(len(chosen), 'model')}, {STEPS} steps several times for each: on a CPU this takes minutes per model",
            file=sys.stderr,
        )
    print(" | ".join(COLUMNS), flush=True)
    failures = 0
    for row in check_sweeps([sweep[:group_size] for sweep in chosen.values()], devices, graph=experiment.graph):
        failures += bool(row["problem"])
        cells = [row.get(key, "") for key in COLUMNS]
        print(" | ".join(f"{c:.4g}" if isinstance(c, float) else str(c) for c in cells), flush=True)
    print(f"{len(chosen)} checked, {failures} with a problem")
    return 1 if failures else 0


def _report(experiment: Experiment, grouped: Sweeps, results: Results) -> bool:
    """Print and write the tables and figures. Return False if there is no result."""
    from data.atomic_io import write_text

    from .learning_curves import draw_curves
    from .report import draw_results, markdown, scores

    cells = scores(experiment, grouped, results)
    if not cells:
        return False
    text = markdown(experiment, cells)
    target = results.path.with_suffix(".md")
    write_text(target, text)
    written = [results.path, target, results.path.with_suffix(".png")]
    draw_results(experiment, cells, written[-1])
    if experiment.suite in ("mqar", "lra"):
        written.append(results.path.with_name("learning_curves.png"))
        draw_curves(experiment, grouped, results, written[-1])
    print("\n".join(["", text, *map(str, written)]))
    return True


def _listing(grouped: Sweeps, results: Results) -> str:
    """Return one line per task and model: its widths, the number of runs, and the most steps that remain."""
    rows: dict[tuple[str, str], Sweeps] = {}
    for sweep in grouped:
        rows.setdefault((sweep[0].task, sweep[0].model), []).append(sweep)
    lines = [["task", "model", "widths", "runs", "done", "remaining", "steps per run", "remaining steps"]]
    remaining_steps = 0
    for (task, model), row_sweeps in rows.items():
        pending = [run for sweep in row_sweeps for run in results.pending(sweep)]
        steps = sum(run.steps for run in pending)
        remaining_steps += steps
        widths = ",".join(str(w) for w in dict.fromkeys(sweep[0].width for sweep in row_sweeps))
        done = sum(len(results.of(sweep)) for sweep in row_sweeps)
        counts = [sum(map(len, row_sweeps)), done, len(pending)]
        lines.append([task, model, widths, *map(str, counts), f"{row_sweeps[0][0].steps:,}", f"{steps:,}"])
    text = plain_table(lines[0], lines[1:], text_columns=3)
    runs = [run for sweep in grouped for run in sweep]
    rates = ", ".join(f"{rate:g}" for rate in sorted({run.lr for run in runs}))
    count = counted(len(runs), "run")
    return f"{text}\n\n{count}, at most {remaining_steps:,} steps remain; learning rates {rates}; {results.path}"


def _group_size(experiment: Experiment, devices: list[str]) -> int | None:
    """Return the most runs that train together; None for a whole sweep."""
    return experiment.side_by_side or (None if devices[0].startswith("cuda") else 1)


def _precision_and_devices(experiment: Experiment) -> tuple[str, list[str]]:
    """Return "bf16" or "fp32", in which the models compute, and one device name per process."""
    import torch

    names = list(experiment.devices) if experiment.devices != "auto" else []
    if not names:
        names = [f"cuda:{i}" for i in range(torch.cuda.device_count())] or ["cpu"]
    cuda = names[0].startswith("cuda")
    precision = experiment.precision
    if precision == "auto":
        precision = "bf16" if cuda else "fp32"
    workers = experiment.workers or (2 if cuda else 1)
    # List each device once before any device twice, so that the first sweeps use all devices.
    return precision, names * workers


def _check_devices(names: list[str]) -> None:
    from tools.cli.devices import device_of

    for name in names:
        try:
            device_of(name)
        except ValueError as error:
            raise ValueError(f"devices: {error}") from None


def _parser(suite: str) -> argparse.ArgumentParser:
    parser = command_line(
        f"python eval.py --suite {suite}",
        "Train small models on tasks that measure what their mixers store and retrieve. mqar: multi-query associative recall. "
        "mad: six tasks of token manipulation. lra: the six tasks of Long Range Arena, of which text, image and retrieval read "
        "data sets. All other tasks are generated.",
        EPILOG,
    )
    parser.add_argument(
        "override", nargs="*", metavar="key=value", help=f"override keys of configs/experiments/{suite}.yml"
    )
    parser.add_argument("--suite", choices=NAMES, required=True, help=argparse.SUPPRESS)
    parser.add_argument("--config", type=Path, metavar="FILE", help="read this experiment file instead")
    parser.add_argument("--dry-run", action="store_true", help="list the runs and their steps, without training")
    parser.add_argument(
        "--check",
        action="store_true",
        help="train 20 steps of every model, with and without CUDA graphs; write no results",
    )
    parser.add_argument("--report", action="store_true", help="write the tables and figures, without training")
    parser.add_argument(
        "--minutes",
        type=above_zero,
        metavar="M",
        help="stop after M minutes and write the report; the same command continues the training",
    )
    parser.add_argument("--no-progress", dest="progress", action="store_false", help="hide the progress bar")
    return parser
