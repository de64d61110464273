"""Train several models with the same settings and compare them: `python -m tools.compare FILE.yml`."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import shlex
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_lite.plural import counted
from tools.cli.arguments import above_zero, check_writable, command, command_line, numbers, positive, words

if TYPE_CHECKING:
    from tools.compare.spec import Comparison, Run

EPILOG = """examples:
  python -m tools.compare configs/experiments/compare_lm.yml --dry-run          list the runs, without training
  python -m tools.compare configs/experiments/compare_lm.yml                    train all runs, on all GPUs
  python -m tools.compare configs/experiments/compare_masked.yml --workers 3 --minutes 8
  python -m tools.compare configs/experiments/compare_lm.yml --models metala,softmax --sizes small --seeds 1 \\
    --name trial --devices cpu schedule.train_steps=50 batch.global_batch_size=4 batch.micro_batch_size=4
  python -m tools.compare configs/experiments/compare_lm.yml --data data/c4.yml   train on other text
  python -m tools.compare configs/experiments/ladder_small.yml --check                      check the text first
  python -m tools.compare configs/experiments/ladder_small.yml --tune --minutes 3           learning rates of the sizes
  python -m tools.compare configs/experiments/ladder_small.yml --minutes 8 --positions      sizes, a fit and the report
  python -m tools.compare configs/experiments/ladder_small.yml --report --page ladder.md    the results as one page

Each run equals `python train.py runs/NAME/RUN/run.yml`. Its folder also holds train.log. To continue after --minutes,
Ctrl-C or a kill, run the same command again. The tables and figures show the complete runs: runs/NAME/results.md,
results.json and *.png; of a ladder also ladder.html with the fits and predictions. See docs/guide/comparing.md for details.
"""


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line. Returns 0 if all runs are complete, 1 if some are not, 2 for an invalid comparison."""
    options = _parser().parse_intermixed_args(arguments)
    from tools.compare.launcher import check_existing_runs
    from tools.compare.spec import NAME, plan_runs, read_comparison
    from tools.compare.tuning import FILE, check_rates, tuned_sizes, tuning_comparison, with_tuned_rates

    comparison = read_comparison(options.file)
    if options.page is not None and comparison.ladder is None:
        raise ValueError(f"--page {options.page}: {options.file} has no section `ladder`, whose results the page shows")
    if options.page is not None:
        check_writable(options.page, "--page")
    changes: dict[str, Any] = {"name": options.name, "data": options.data, "workers": options.workers}
    changes["time_budget_minutes"] = options.minutes
    if options.name is not None and not re.fullmatch(NAME, options.name):
        raise ValueError(
            f"--name {options.name}: letters, digits, '.', '_', '+' and '-' are allowed; the first must be a letter or digit"
        )
    file_comparison = comparison.model_copy(update={key: value for key, value in changes.items() if value is not None})
    comparison = tuning_comparison(file_comparison) if options.tune else with_tuned_rates(file_comparison)
    if options.tune:
        options.sizes = tuned_sizes(file_comparison, options.sizes)
    runs = plan_runs(
        comparison, overrides=options.override, models=options.models, sizes=options.sizes, seeds=options.seeds
    )
    if options.tune:
        check_rates(runs)
    for folder in dict.fromkeys((file_comparison.folder, comparison.folder)):
        if folder.exists() and not folder.is_dir():
            raise ValueError(
                f"{folder} is a file, but the comparison needs a folder of this name: rename the file, or give another --name"
            )
    for option in ("positions", "recall"):
        if getattr(options, option) and not any(run.causal for run in runs):
            raise ValueError(
                f"--{option} measures causal language models, {options.file} trains none: leave --{option} out"
            )
    print(_plan_text(comparison, runs))
    if comparison.ladder is not None and not (options.tune or options.sizes):
        from tools.compare.ladder_predictions import too_few_points

        if reason := too_few_points(comparison.ladder, runs):
            print(f"{reason}\n")
    if options.dry_run:
        return 0
    shown = shown_runs(comparison, runs, options)
    rates_file = comparison.folder / FILE
    check_existing_runs(shown, rates_file if rates_file.is_file() else None)
    if options.check:
        prepare_runs(file_comparison, runs)
        print(
            f"The text is ready for all runs. To train on another machine, copy {file_comparison.folder} and the text there."
        )
        return 0
    trained = options.report or all(run.complete for run in runs)
    failed = {} if trained else _train(comparison, file_comparison, runs, shown, options)
    if options.report and not any(run.complete for run in runs):
        print("no run is complete yet: run the same command without --report", file=sys.stderr)
    if options.tune:
        return _report_rates(file_comparison, shown, failed)
    try:
        if options.positions or options.recall:
            _measure(comparison, runs, options)
    finally:  # a refused or interrupted measurement does not hide the results of the training
        write_results(comparison, shown, options.file, options.page, _recipe_words(options))
        _print_failures(failed)
    return 0 if all(run.complete for run in runs) else 1


def shown_runs(comparison: Comparison, runs: Sequence[Run], options: argparse.Namespace) -> list[Run]:
    """Return the runs that the results show: with --models, --sizes or --seeds also those that were not selected.

    With overrides or --data only the selected runs are returned, because the others may have been trained without them. --tune
    compares all of its runs, so its overrides apply to all.
    """
    from tools.compare.spec import plan_runs

    selected = options.models or options.sizes or options.seeds
    if not selected or (not options.tune and (options.override or options.data)):
        return list(runs)
    everything = plan_runs(comparison, overrides=options.override)
    return list({run.folder: run for run in (*everything, *runs)}.values())


def _print_failures(failed: Mapping[str, str]) -> None:
    for name, text in failed.items():
        print(f"\n{name} failed:\n{text}", file=sys.stderr)


def _recipe_words(options: argparse.Namespace) -> list[str]:
    """Return the words of the command line that change the recipe or the folder of the runs."""
    named = {"--name": options.name, "--data": options.data}
    return [word for pair in named.items() if pair[1] is not None for word in pair] + list(options.override)


def write_results(
    comparison: Comparison, runs: Sequence[Run], file: Path, page: Path | None = None, words: Sequence[str] = ()
) -> None:
    """Print the tables, and write results.md, results.json and the figures to the comparison's folder.

    file: of the comparison. page: also write a ladder's results as a Markdown page of the documentation. words: of the command
    that the page shows, after the file.
    """
    from data.atomic_io import write_text
    from megatron_lite.checkpoint.storage import versions
    from megatron_lite.metrics.logger import finite
    from tools.compare.figures import draw
    from tools.compare.launches import launch_note, launches, machine
    from tools.compare.results import plan_table, progress_note, read_results, rows_of, tables, unreadable_note

    results = read_results(runs)
    rows = rows_of(results)
    note = " ".join(filter(None, (progress_note(runs), unreadable_note(runs, results))))
    text = tables(rows, comparison.reference) if rows else "No run is complete yet.\n"
    written = [comparison.folder / "results.md", comparison.folder / "results.json"]
    if comparison.ladder is not None and rows:
        from tools.compare.ladder_report import markdown, write_ladder

        facts = [launch_note(comparison.folder), *([note] if note else [])]
        sections, files = write_ladder(comparison, comparison.ladder, runs, results, rows, facts)
        text, written = f"{markdown(sections)}\n{text}", written + files
        if page is not None:
            command = shlex.join(["python", "-m", "tools.compare", str(file), *words])
            measures = "--positions --recall" if any(run.causal for run in runs) else ""
            parts = [f"# {comparison.title}\n", *(f"{fact}\n" for fact in facts)]
            write_text(page, "\n".join([*parts, markdown(sections, command, measures)]))
            written.append(page)
    print("\n" + text + (f"\n{note}\n" if note else ""))
    document = (
        f"# {comparison.title}\n\n{launch_note(comparison.folder)}\n\n{text}\n{note}\n\n## Runs\n\n{plan_table(runs)}"
    )
    content = {
        "title": comparison.title,
        "date": datetime.date.today().isoformat(),
        "machine": machine(),
        "launches": launches(comparison.folder),
        "versions": versions(),
        "command": ["python", "-m", "tools.compare", *sys.argv[1:]],
        "runs": [
            {
                "run": result.run.name,
                "model": result.run.model,
                "size": result.run.size,
                "seed": result.run.seed,
                "parameters": result.run.parameters,
                "body_parameters": result.run.body,
                "tokens": result.tokens,
                "step_seconds": round(result.seconds, 2),
                "final": result.final and finite(result.final),
                "training_curve": [finite(line) for line in result.curve],
            }
            for result in results
        ],
    }
    write_text(comparison.folder / "results.md", document)
    write_text(
        comparison.folder / "results.json", json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    )
    if rows and comparison.ladder is None:
        written += draw(results, rows, comparison.folder, comparison.title, comparison.reference)
    print("\n".join(map(str, written)))


def prepare_runs(comparison: Comparison, runs: Sequence[Run]) -> None:
    """Check the text, then write the files of the runs. A refused text leaves no file of a run.

    comparison: that of the file, in whose folder the check of a ladder's text is stored.
    """
    from tools.compare.launcher import check_text, write_runs

    texts = check_text(runs)
    if comparison.ladder is not None:
        from tools.compare.held_out import check_held_out

        check_held_out(comparison, comparison.ladder, runs)
    write_runs(runs, texts)


def _report_rates(file_comparison: Comparison, runs: Sequence[Run], failed: Mapping[str, str]) -> int:
    """Print the table of learning rates. Return 1 while a run is neither complete nor failed.

    file_comparison: the ladder. runs: those of its rates.
    """
    from tools.compare.ladder_report import markdown
    from tools.compare.results import progress_note
    from tools.compare.tuning import FILE, write_rates

    _print_failures(failed)
    table = write_rates(file_comparison, runs, failed)
    print(progress_note(runs) if table is None else f"\n{markdown([table])}\n{file_comparison.folder / FILE}")
    return 1 if table is None else 0


def _train(
    comparison: Comparison,
    file_comparison: Comparison,
    runs: Sequence[Run],
    shown: Sequence[Run],
    options: argparse.Namespace,
) -> dict[str, str]:
    """Train the runs. Return the reason per failed run.

    comparison: of the runs; with --tune that of the learning rates. file_comparison: that of the file, in whose folder the check
    of the text is stored. shown: from `shown_runs`.
    """
    from tools.compare.ladder_predictions import store_predictions
    from tools.compare.launcher import run_all
    from tools.compare.launches import recorded_launch

    last: set[str] = set()
    if comparison.ladder is not None and not options.tune:
        last = {run.name for run in runs if comparison.ladder.is_largest(run.size)}

    def after_run(failed: Collection[str]) -> None:
        if comparison.ladder is not None and not options.tune:
            store_predictions(comparison, comparison.ladder, runs, failed, shown)

    devices = _devices(options.devices or comparison.devices)
    prepare_runs(file_comparison, runs)
    # `workers` of the file is for GPUs, which one small run does not fill. On a CPU the runs would share the cores.
    workers = 1 if devices == ["cpu"] and options.workers is None else comparison.workers
    with recorded_launch(comparison.folder, devices, workers):
        outcome = run_all(
            runs,
            devices=devices,
            workers=workers,
            minutes=comparison.time_budget_minutes,
            tune_kernels=comparison.tune_kernels,
            last=last,  # the smaller sizes predict the largest one
            progress=True,
            after_run=after_run,
        )
    if outcome.stopped:
        print(f"stopped ({outcome.stopped}): run the same command again to continue", file=sys.stderr)
    return outcome.failed


def _measure(comparison: Comparison, runs: Sequence[Run], options: argparse.Namespace) -> None:
    """Measure the loss by position of the largest requested rung, and the recall of all runs, as the options say."""
    from tools.compare.held_out import measure_positions, measure_recall

    device = "cpu" if _devices(options.devices or comparison.devices) == ["cpu"] else "cuda"
    if options.positions:
        rungs = list(comparison.rungs())
        # The models of a rung differ a little in size. Other sizes stand in any order in the file.
        ordered = comparison.ladder is not None
        largest = max(runs, key=lambda run: rungs.index(run.size) if ordered else run.body).size
        measure_positions([run for run in runs if run.size == largest], device)
    if options.recall:
        measure_recall(runs, device)


def _plan_text(comparison: Comparison, runs: Sequence[Run]) -> str:
    from tools.compare.results import plan_table

    complete = sum(run.complete for run in runs)
    text = f"{counted(len(runs), 'run')} in {comparison.folder}"
    text += f", {complete} of them complete" if complete else ""
    return f"{comparison.title}: {text}\n\n{plan_table(runs, plain=True)}"


def _devices(requested: Sequence[int | str] | None) -> list[str]:
    """Return one name for CUDA_VISIBLE_DEVICES per GPU, or ["cpu"]. Raises ValueError for a GPU that is not visible here."""
    import torch

    # CUDA ignores the names from the first invalid one (-1) on.
    count = torch.cuda.device_count()
    visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name][:count]
    gpus = visible or [str(i) for i in range(count)]
    if not requested:
        return gpus or ["cpu"]
    names = [str(device) for device in requested]
    for name in names:
        # CUDA also takes names such as GPU-8f2a0c.
        if name not in (*gpus, "cpu") and not (gpus and name.startswith(("GPU-", "MIG-"))):
            raise ValueError(f"--devices {name}: allowed are {', '.join([*gpus, 'cpu'])}; leave it out for all GPUs")
    return names


def _parser() -> argparse.ArgumentParser:
    parser = command_line("python -m tools.compare", __doc__, EPILOG)
    parser.add_argument("file", type=Path, help="YAML file, such as configs/experiments/compare_lm.yml")
    parser.add_argument(
        "override", nargs="*", metavar="key.sub=value", help="override keys of every run, as in train.py"
    )
    parser.add_argument("--models", type=words, default=[], metavar="A,B", help="train only these models")
    parser.add_argument("--sizes", type=words, default=[], metavar="A,B", help="train only these sizes")
    parser.add_argument("--seeds", type=numbers, default=[], metavar="1,2", help="seeds (default: `seeds` of the file)")
    parser.add_argument("--data", metavar="FILE", help="replace `data` of the file, as configs/data/*.yml")
    parser.add_argument("--name", help="folder under runs/ (default: `name` of the file)")
    parser.add_argument("--devices", type=words, default=[], metavar="0,1", help="GPUs, or cpu (default: all GPUs)")
    parser.add_argument(
        "--workers",
        type=positive,
        metavar="N",
        help="parallel runs per device (default: `workers` of the file; 1 on a CPU)",
    )
    parser.add_argument("--minutes", type=above_zero, metavar="M", help="save and stop every run after M minutes")
    parser.add_argument(
        "--positions",
        action="store_true",
        help="after training, measure the loss by position of the largest requested size",
    )
    parser.add_argument("--recall", action="store_true", help="after training, measure associative recall (MQAR)")
    parser.add_argument(
        "--page", type=Path, metavar="FILE", help="also write a ladder's results as a page, as docs/results/ladder.md"
    )
    parser.add_argument("--dry-run", action="store_true", help="list the runs with their parameters, without training")
    parser.add_argument(
        "--tune", action="store_true", help="train the learning rates of ladder.tuning first; the ladder takes the best"
    )
    parser.add_argument("--check", action="store_true", help="prepare and check the text, without training")
    parser.add_argument("--report", action="store_true", help="write tables and figures of complete runs, do not train")
    return parser


if __name__ == "__main__":
    sys.exit(main())
