"""Fine-tune a masked or causal model on GLUE through its Hugging Face export and transformers.Trainer."""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from data.atomic_io import read_json, write_json, write_text
from tools.cli.arguments import command, command_line, interrupted, positive, words
from tools.evaluation.glue_training import Recipe, finetune, load_recipe, majority_scores, splits_read
from tools.reporting.tables import markdown_table, plain_table

RECIPE = Path(__file__).parents[1] / "configs" / "finetune" / "glue.yml"

EPILOG = """
examples:
  python -m tools.finetune_glue runs/lion_s_large                              every task, from the hub, three seeds
  python -m tools.finetune_glue runs/lion_s_large --tasks sst2,mrpc,rte --data glue
  python -m tools.finetune_glue EXPORT --tasks cola --seeds 5 lr=2e-5 tasks.cola.epochs=5
  python -m tools.finetune_glue runs/c4_sample --tasks sst2 --data glue --hold-out 0.5 --start pretrained

--data FOLDER holds TASK/train.jsonl.gz and TASK/validation.jsonl.gz (of MNLI validation_matched and
validation_mismatched) with the columns of the hub's nyu-mll/glue. RTE, MRPC and STS-B start from the weights of
MNLI, which is trained first. An interrupted command resumes after its last finished run.
"""


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line. Returns 2 for invalid input."""
    parser = command_line("python -m tools.finetune_glue", __doc__, EPILOG)
    parser.add_argument("checkpoint", type=Path, help="a run, a step folder, or a Hugging Face export")
    parser.add_argument("override", nargs="*", metavar="key=value", help="values of the recipe")
    parser.add_argument("--tasks", type=words, default=[], metavar="A,B", help="tasks (default: all of the recipe)")
    parser.add_argument("--seeds", type=positive, default=3, metavar="N", help="runs per task (default %(default)s)")
    parser.add_argument(
        "--recipe", type=Path, default=RECIPE, metavar="FILE", help="settings (default configs/finetune/glue.yml)"
    )
    parser.add_argument("--data", type=Path, metavar="FOLDER", help="folder of the tasks (default: the hub)")
    parser.add_argument(
        "--output", type=Path, metavar="FOLDER", help="results (default: glue/ in the checkpoint's run)"
    )
    parser.add_argument(
        "--start",
        choices=("recipe", "pretrained"),
        default="recipe",
        help="recipe: some tasks start from the weights of another; pretrained: none does",
    )
    parser.add_argument(
        "--hold-out",
        type=float,
        metavar="SHARE",
        help="for a trial without training data: train on the rest of the validation split, evaluate on this share of it",
    )
    options = parser.parse_intermixed_args(arguments)
    recipe = load_recipe(options.recipe, options.override)
    if options.hold_out is not None and not 0 < options.hold_out < 1:
        raise ValueError(f"--hold-out {options.hold_out}: a number between 0 and 1 is allowed")
    names = options.tasks or list(recipe.tasks)
    unknown = [name for name in names if name not in recipe.tasks]
    if unknown:
        raise ValueError(f"--tasks {unknown[0]}: the recipe has {', '.join(recipe.tasks)}")
    from tools.loading.model import run_of

    is_export = (options.checkpoint / "config.json").is_file()
    output = options.output or (options.checkpoint if is_export else run_of(options.checkpoint)) / "glue"
    session = Session(options.checkpoint, recipe, output, options.data, options.seeds, options.hold_out)
    try:
        scores = session.run(names, chained=options.start == "recipe")
    except KeyboardInterrupt:
        return interrupted("the same command resumes after the last finished run")
    print(f"\n{scores}\n{output / 'glue.md'}")
    return 0


def _differences(key: str, saved: Any, current: Any) -> str:
    """Return up to three parts of a value of results that differ from the saved ones, as words of a message."""
    from megatron_lite.fault_tolerance.rank_consistency import configuration_facts

    saved_facts, current_facts = configuration_facts({key: saved}), configuration_facts({key: current})
    changed = [
        f"{name}: {saved_facts.get(name, 'not given')} there, {current_facts.get(name, 'not given')} now"
        for name in {**saved_facts, **current_facts}
        if saved_facts.get(name) != current_facts.get(name)
    ]
    return "; ".join(changed[:3])


class Session:
    """A checkpoint's fine-tuning: which runs are done, and their results, in `output`/glue.json."""

    def __init__(
        self, checkpoint: Path, recipe: Recipe, output: Path, data: Path | None, seeds: int, hold_out: float | None
    ) -> None:
        """Raise ValueError if `output` holds results of another checkpoint, CheckpointError without a checkpoint."""
        self.checkpoint, self.recipe, self.output, self.data = checkpoint, recipe, output, data
        self.seeds, self.hold_out = seeds, hold_out
        identity = {
            "checkpoint": f"{checkpoint.resolve()}, weights {_weights_hash(checkpoint)}",
            "recipe": recipe.model_dump(mode="json"),
            "data": None if data is None else str(data.resolve()),
            "hold_out": hold_out,
        }
        self._file = output / "glue.json"
        self.results: dict[str, Any] = {**identity, "majority": {}, "runs": {}}
        if self._file.is_file():
            self.results = read_json(self._file, f"remove {output} to begin again", "runs", *identity)
            self.results.setdefault("majority", {})  # files of earlier versions have none
            for key, value in identity.items():
                if self.results[key] != value:
                    differences = _differences(key, self.results[key], value)
                    raise ValueError(
                        f"{self._file} is of another {key} ({differences}); name another folder with --output"
                    )
            for runs in self.results["runs"].values():
                for key, scores in runs.items():
                    # JSON has null for an undefined correlation.
                    runs[key] = {metric: math.nan if value is None else value for metric, value in scores.items()}

    def run(self, names: Sequence[str], *, chained: bool) -> str:
        """Fine-tune every task with every seed, write `output`/glue.md, and return its table for standard output."""
        starts = {name: self.recipe.tasks[name].start if chained else None for name in names}
        self._check_data(starts)
        self._write()  # identifies the weights of the export in `output`
        model = _exported(self.checkpoint, self.output)
        for name, start in starts.items():
            weights = model if start is None else self._weights_of(start, model)
            for seed in range(self.seeds):
                keep = self.output / name if seed == 0 and name in starts.values() else None
                self._run_once(name, seed, weights, start, keep=keep)
        runs, majority = self.results["runs"], self.results["majority"]
        write_text(self.output / "glue.md", table(runs, starts, self.hold_out, majority))
        return table(runs, starts, self.hold_out, majority, plain_table)

    def _check_data(self, starts: Mapping[str, str | None]) -> None:
        """Raise FileNotFoundError for a missing data file before the first task is trained."""
        from tools.evaluation.glue_tasks import split_file

        if self.data is None:
            return
        for name, start in starts.items():
            done = self.results["runs"].get(name, {})
            read = [name] if any(f"{start or 'pretrained'}/{seed}" not in done for seed in range(self.seeds)) else []
            if start is not None and not (self.output / start / "config.json").is_file():
                read.append(start)
            for task in read:
                for split in splits_read(task, self.hold_out):
                    try:
                        split_file(task, split, self.data)
                    except FileNotFoundError as error:
                        if task == name:
                            raise
                        raise FileNotFoundError(
                            f"{error}. {name} starts from the weights of {task}; --start pretrained does not need them"
                        ) from error

    def _weights_of(self, name: str, model: Path) -> Path:
        folder = self.output / name
        if not (folder / "config.json").is_file():
            self.results["runs"].get(name, {}).pop("pretrained/0", None)  # trained without saving its weights
            self._run_once(name, 0, model, None, keep=folder)
        return folder

    def _run_once(self, name: str, seed: int, weights: Path, start: str | None, keep: Path | None = None) -> None:
        key = f"{start or 'pretrained'}/{seed}"
        runs = self.results["runs"].setdefault(name, {})
        if key in runs:
            return
        print(f"{name}, seed {seed}, from {start or 'the pretrained weights'}", flush=True)
        if name not in self.results["majority"]:
            self.results["majority"][name] = majority_scores(name, self.data, self.hold_out)
        runs[key] = finetune(
            name,
            self.recipe,
            weights,
            seed=seed,
            data=self.data,
            hold_out=self.hold_out,
            scratch=self.output,
            keep=keep,
        )
        print("  " + "  ".join(f"{metric} {value:.4f}" for metric, value in runs[key].items()), flush=True)
        self._write()

    def _write(self) -> None:
        write_json(self._file, self.results)


def table(
    runs: Mapping[str, Mapping[str, Mapping[str, float]]],
    starts: Mapping[str, str | None],
    hold_out: float | None,
    majority: Mapping[str, Mapping[str, float]],
    write: Callable[..., str] = markdown_table,
) -> str:
    """Return mean and sample standard deviation of every metric in percent, and the mean over several tasks.

    starts: task -> the task from whose weights it starts, for the runs to show. majority: task -> metric -> the score of the
    most frequent label. write: `markdown_table` or `plain_table`.
    """
    rows: list[list[str]] = []
    means = []
    for name, start in starts.items():
        chosen = start or "pretrained"
        results = [values for key, values in runs[name].items() if key.startswith(f"{chosen}/")]
        columns = {metric: [100 * result[metric] for result in results] for metric in results[0]}
        for metric, values in columns.items():
            finite = all(map(math.isfinite, values))
            spread = f"{statistics.stdev(values):.2f}" if len(values) > 1 and finite else "-"
            mean = statistics.mean(values)
            share = majority.get(name, {}).get(metric)
            constant = "-" if share is None else f"{100 * share:.2f}"
            rows.append([name, chosen, metric, f"{mean:.2f}", spread, f"{len(values)}", constant])
        means.append(statistics.mean(statistics.mean(values) for values in columns.values()))
    header = ["task", "starts from", "metric", "mean", "spread", "seeds", "most frequent label"]
    lines = [write(header, rows, text_columns=3)]
    if len(means) > 1:
        lines += ["", f"Mean over {len(means)} tasks: {statistics.mean(means):.2f}"]
    if hold_out is not None:
        lines += [
            "",
            f"A trial: trained on {1 - hold_out:.0%} of the validation split, evaluated on the rest; no GLUE score.",
        ]
    return "\n".join(lines) + "\n"


def _weights_hash(checkpoint: Path) -> str | None:
    """Return the hash of an export's weights, or of a run's newest checkpoint.

    Raises CheckpointError, and ValueError for an image classifier.
    """
    if (checkpoint / "config.json").is_file():
        from tools.evaluation.huggingface import folder_hash
        from tools.evaluation.huggingface_checks import refuse_image_classifier

        config = read_json(checkpoint / "config.json", "name an export of python -m tools.convert_hf")
        refuse_image_classifier(str(checkpoint), config)
        return folder_hash(str(checkpoint))
    from megatron_lite.checkpoint.reader import resolve
    from tools.evaluation.open_model import checkpoint_hash
    from tools.loading.model import locate_checkpoint

    locate_checkpoint(checkpoint, device="cpu").refuse_images()
    return checkpoint_hash(resolve(checkpoint))


def _exported(checkpoint: Path, output: Path) -> Path:
    """Return the Hugging Face folder of a checkpoint; export the checkpoint if it is not such a folder."""
    if (checkpoint / "config.json").is_file():
        return checkpoint
    folder = output / "pretrained"
    if not folder.exists():
        from tools.conversion.export_hf import export

        export(checkpoint, folder)
    written = read_json(folder / "config.json", "name an export of python -m tools.convert_hf", "architectures")
    if written["architectures"] != ["MetalionForMaskedLM"]:
        print("note: a causal model; the classifier reads its last token", file=sys.stderr)
    return folder


if __name__ == "__main__":
    sys.exit(main())
