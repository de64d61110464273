"""Log the metrics of a run to `metrics.jsonl`, a progress display, TensorBoard and Weights & Biases.

Plots, reports and comparisons read only `metrics.jsonl`. Each line is a JSON object
`{"kind": ..., "step": ..., "time": ..., **values}`. The kinds are `train`, `validation`, `test`, `sample`, `evaluation`
(scores of suites), `evaluation_error`, `checkpoint`, `stop`, `slow_rank`, `transient_fault` and `persistent_fault`. `time`
is in seconds since the epoch. NaN and infinities are written as `null`, because JSON has no number for them;
`read_metrics` returns NaN.

Only rank 0 creates a `MetricsLogger`.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from tqdm import tqdm

from megatron_lite.atomic_io import write_text
from megatron_lite.near_folders import near_folders
from megatron_lite.plural import counted

FILE_NAME = "metrics.jsonl"
PREVIOUS_FILE_NAME = "metrics.previous.jsonl"
_EVALUATION_KINDS = ("validation", "test", "sample", "evaluation", "evaluation_error")

Value = float | int | str


class MetricsLogger:
    """Write the metrics of one run and show its progress on stderr.

    Args:
        directory: folder of the run; created if missing.
        total_steps: the step at which the run ends.
        initial_step: step from which the run continues. Above 0, lines of later steps are removed. At 0, the file of an
            earlier run in the same folder is renamed to `metrics.previous.jsonl`.
        measures_again: the evaluations after `initial_step` run again, so their lines are removed. Implied at the last step.
        keep_previous: also copy the file to `metrics.previous.jsonl` when `initial_step` is above 0.
        progress_bar: show a bar on a terminal, else one plain line every 4 % or 10 minutes; False shows nothing.
        tensorboard: also write event files to `directory/tensorboard`.
        wandb: also log to Weights & Biases when its key `enabled` is true; further keys are `project`, `entity` and
            `mode` ("online" or "offline"; offline needs no account and writes to `directory/wandb`). The environment
            variable WANDB_MODE overrides `mode`.
        config: the resolved configuration, stored with TensorBoard and Weights & Biases.

    Raises:
        ValueError: Weights & Biases cannot be opened, for example without an API key.
    """

    def __init__(
        self,
        directory: Path,
        *,
        total_steps: int,
        initial_step: int = 0,
        measures_again: bool = False,
        keep_previous: bool = False,
        progress_bar: bool = True,
        tensorboard: bool = False,
        wandb: Mapping[str, Any] | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        self._wandb = _open_wandb(directory, initial_step, wandb, config) if wandb and wandb.get("enabled") else None
        self.path = directory / FILE_NAME
        previous = directory / PREVIOUS_FILE_NAME
        if initial_step > 0:
            if keep_previous and self.path.exists():
                shutil.copyfile(self.path, previous)
            again = measures_again or initial_step >= total_steps
            remove_later_steps(self.path, initial_step, _EVALUATION_KINDS if again else ())
        elif self.path.exists():
            os.replace(self.path, previous)
        self._file = self.path.open("ab", buffering=0)
        self._progress = _Progress(total_steps, initial_step) if progress_bar else None
        self._tensorboard = _open_tensorboard(directory, initial_step, config) if tensorboard else None

    def log(self, step: int, values: Mapping[str, Value], *, kind: str = "train") -> None:
        """Append one line to `metrics.jsonl`, unbuffered, and pass the values to the other outputs.

        Raises:
            ValueError: a key of `values` is reserved ("kind", "step", "time").
            TypeError: a value is neither a number nor a string. For a tensor, pass `tensor.item()`.
            OSError: the line cannot be written. The error names the file.
        """
        reserved = {"kind", "step", "time"} & values.keys()
        if reserved:
            raise ValueError(f"metrics key {sorted(reserved)[0]!r} is reserved; choose another name")
        line = {"kind": kind, "step": step, "time": round(time.time(), 3), **finite(values)}
        rest = memoryview((json.dumps(line, ensure_ascii=False, allow_nan=False) + "\n").encode())
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path)) from error
        if self._progress is not None:
            self._progress.show(step, values, kind)
        if self._tensorboard is not None:
            for key, value in values.items():
                add = self._tensorboard.add_text if isinstance(value, str) else self._tensorboard.add_scalar
                add(f"{kind}/{key}", value, step)
        if self._wandb is not None:
            self._wandb.log({"step": step, **{f"{kind}/{key}": value for key, value in values.items()}})

    def flush(self) -> None:
        """Flush the lines to disk, so that they are not older than a checkpoint written next."""
        os.fsync(self._file.fileno())

    def warn(self, step: int, text: str, *, kind: str) -> None:
        """Log a sentence and print it to stderr, above the progress bar if there is one."""
        self.log(step, {"text": text}, kind=kind)
        tqdm.write(f"step {step}: {text}", file=sys.stderr)

    def show_share(self, what: str, share: float) -> None:
        """Show the completed fraction of other work, such as a validation: on the progress bar, or as a line now and then."""
        if self._progress is not None:
            self._progress.show_share(what, share)

    def close(self) -> None:
        """End the display and close every file. A second call does nothing."""
        if self._progress is not None:
            self._progress.close()
        if self._tensorboard is not None:
            self._tensorboard.close()
        if self._wandb is not None:
            self._wandb.finish()
        self._progress = self._tensorboard = self._wandb = None
        self._file.close()


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """Return the lines of the `metrics.jsonl` of a run, in file order.

    Args:
        path: the file or the folder of the run.

    Returns:
        One dict per line, with NaN for `null`. An incomplete last line is skipped. Damaged lines are skipped with a
        line on stderr.

    Raises:
        FileNotFoundError: there is no such file or folder, or the folder holds no `metrics.jsonl`.
    """
    path = Path(path)
    file = path / FILE_NAME if path.is_dir() else path
    if not file.is_file():
        near = near_folders(path, FILE_NAME)
        raise FileNotFoundError(
            f"{file}: no metrics there{near}; name the folder of a run (it holds {FILE_NAME}) or the file"
        )
    return [_with_nan(line) for line in _parse(file)]


def measured_kinds(folder: Path, step: int) -> set[str]:
    """Return the kinds of the lines of this step in the `metrics.jsonl` of a run.

    Suites that failed count as evaluated. Lines whose loss is NaN do not count.
    """
    if not (folder / FILE_NAME).is_file():
        return set()
    lines = [line for line in read_metrics(folder) if line["step"] == step and not math.isnan(line.get("loss", 0.0))]
    return {line["kind"].removesuffix("_error") for line in lines}


def remove_later_steps(file: Path, step: int, kinds: Sequence[str] = ()) -> None:
    """Remove from a `metrics.jsonl` the lines after `step`, lines of `kinds` at `step`, and an incomplete last line.

    The file is replaced atomically.
    """
    if not file.is_file():
        return
    lines = [line for line in _parse(file) if line["step"] <= step - (line.get("kind") in kinds)]
    write_text(file, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))


def _parse(file: Path) -> list[dict[str, Any]]:
    lines, broken = [], []
    raw = file.read_bytes().split(b"\n")
    for number, text in enumerate(raw, start=1):
        if not text.strip():
            continue
        try:
            line = json.loads(text)
        except (ValueError, RecursionError):
            line = None
        if _is_line(line):
            lines.append(line)
        elif number < len(raw):
            broken.append(number)
    if broken:
        lines_skipped = counted(len(broken), "damaged line")
        print(f"warning: {file}: {lines_skipped} skipped, the first is line {broken[0]}", file=sys.stderr)
    return lines


def _is_line(line: Any) -> bool:
    """Return whether a value is a line of `log`: an object with step and kind whose losses are numbers."""
    if not (isinstance(line, dict) and isinstance(line.get("step"), int) and isinstance(line.get("kind"), str)):
        return False
    numbers = (value for key, value in line.items() if key in ("loss", "time") or not isinstance(value, str))
    return all(value is None or isinstance(value, int | float) for value in numbers)


def finite(values: Mapping[str, Value]) -> dict[str, Value | None]:
    """Return the values with None for NaN and infinities, because JSON has no number for them."""
    return {key: None if isinstance(v, float) and not math.isfinite(v) else v for key, v in values.items()}


def _with_nan(line: dict[str, Any]) -> dict[str, Any]:
    return {key: math.nan if value is None else value for key, value in line.items()}


class _Progress:
    """Show progress as a bar on a terminal, or as sparse plain lines in a log file."""

    def __init__(self, total_steps: int, initial_step: int, stream: TextIO | None = None) -> None:
        self.stream = sys.stderr if stream is None else stream
        self.total, self.initial = total_steps, initial_step
        self.start = time.monotonic()
        self.bar: tqdm[Any] | None = None
        if self.stream.isatty():
            form = "{desc} {percentage:3.0f}%|{bar}| {n}/{total} [{elapsed}<{remaining}{postfix}]"
            self.bar = tqdm(
                total=total_steps,
                initial=initial_step,
                desc="train",
                file=self.stream,
                bar_format=form,
                smoothing=0.05,
                **_size(self.stream),
            )
        self.line_every = max(1, math.ceil(total_steps / 25))
        self.seconds_between_lines = 600.0
        self.next_line_step = 0
        self.last_line = self.start
        self.last_share, self.share, self.step_text = 0.0, 1.0, ""

    def show(self, step: int, values: Mapping[str, Value], kind: str) -> None:
        if kind in ("validation", "test"):
            if self.bar is not None:
                self.bar.set_postfix_str(self.step_text, refresh=False)
            self._print(f"{self._place(step)}  {kind}  {_pairs(values, _VALIDATION_FORMATS)}{_part_of_set(values)}")
        if kind == "evaluation":
            named = {key: value for key, value in values.items() if "/" in key and not isinstance(value, str)}
            averages = {key: value for key, value in named.items() if key.endswith("/average")} or named
            self._print(f"{self._place(step)}  {'  '.join(f'{key} {value:.2f}' for key, value in averages.items())}")
        if kind != "train":
            return
        if self.bar is not None:
            self.step_text = _pairs(values, _TRAIN_FORMATS, separator=", ")
            self.bar.set_postfix_str(self.step_text, refresh=False)
            self.bar.update(step - self.bar.n)
            return
        now = time.monotonic()
        late = now - self.last_line >= self.seconds_between_lines
        if step >= self.next_line_step or step >= self.total or late:
            self.next_line_step = (step // self.line_every + 1) * self.line_every
            self.last_line = now
            remaining = (now - self.start) / max(1, step - self.initial) * (self.total - step)
            text = f"{self._place(step)}  {_pairs(values, _TRAIN_FORMATS)}"
            self._print(text + (f"  ETA {_duration(remaining)}" if step < self.total else ""))

    def show_share(self, what: str, share: float) -> None:
        now = time.monotonic()
        if self.bar is None and share <= self.share:  # other work begins
            self.last_share = now
        self.share = share
        if now - self.last_share < (_SECONDS_BETWEEN_SHARES if self.bar is None else 0.5):
            return
        self.last_share = now
        if self.bar is None:
            self._print(f"{what} {share:.0%}")
        else:
            self.bar.set_postfix_str(f"{what} {share:.0%}")

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()

    def _place(self, step: int) -> str:
        return f"step {step:>{len(str(self.total))}}/{self.total}"

    def _print(self, text: str) -> None:
        if self.bar is not None:
            self.bar.write(text, file=self.stream)
        else:
            print(text, file=self.stream, flush=True)


def _size(terminal: TextIO) -> dict[str, Any]:
    # A terminal may report the size 0 x 0 (`docker run -t` before the first resize), where tqdm shows nothing.
    known = all(os.get_terminal_size(terminal.fileno()))
    return {"dynamic_ncols": True} if known else {"ncols": 100, "nrows": 24}


_SECONDS_BETWEEN_SHARES = 30.0  # in a file or pipe

_TRAIN_FORMATS = {
    "loss": ("loss", ".4f"),
    "accuracy": ("accuracy", ".2%"),
    "images_per_second": ("images/s", ",.0f"),
    "tokens_per_second": ("tokens/s", ",.0f"),
    "skipped_steps": ("skipped", "d"),
}
_VALIDATION_FORMATS = {
    "loss": ("loss", ".4f"),
    "perplexity": ("perplexity", ".2f"),
    "accuracy": ("accuracy", ".2%"),
    "bits_per_byte": ("bits/byte", ".4f"),
}


def _pairs(values: Mapping[str, Value], formats: Mapping[str, tuple[str, str]], separator: str = "  ") -> str:
    shown: Iterable[str] = (
        f"{name} {values[key]:{form}}"
        for key, (name, form) in formats.items()
        if not isinstance(values.get(key, ""), str)
        and not (key == "skipped_steps" and values[key] == 0)
        and not (key == "tokens_per_second" and "images_per_second" in values)
    )
    return separator.join(shown)


def _part_of_set(values: Mapping[str, Value]) -> str:
    fraction = values.get("evaluated_fraction")
    if not isinstance(fraction, float):
        return ""
    return "  (whole set)" if fraction == 1 else f"  ({fraction:.1%} of the set)"


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes:02d}:{seconds:02d}"


def _open_tensorboard(directory: Path, initial_step: int, config: Mapping[str, Any] | None) -> Any:
    from torch.utils.tensorboard import SummaryWriter  # type: ignore[attr-defined]

    writer = SummaryWriter(str(directory / "tensorboard"), purge_step=initial_step + 1 if initial_step else None)
    if config is not None:
        text = json.dumps(config, indent=2, default=str)
        writer.add_text("config", "\n".join("    " + row for row in text.splitlines()), initial_step)
    return writer


def _open_wandb(
    directory: Path, initial_step: int, settings: Mapping[str, Any], config: Mapping[str, Any] | None
) -> Any:
    import wandb

    # The id is stored in the folder of the run, so that a resumed run continues the same Weights & Biases run.
    identity = directory / "wandb_run_id.txt"
    if initial_step == 0 or not identity.is_file():
        identity.write_text(uuid.uuid4().hex[:12] + "\n")
    mode: Any = os.environ.get("WANDB_MODE") or settings.get("mode") or "online"
    try:
        run = wandb.init(
            project=settings.get("project"),
            entity=settings.get("entity"),
            mode=mode,
            dir=str(directory),
            name=directory.name,
            id=identity.read_text().strip(),
            resume="allow" if mode == "online" else None,
            config=dict(config) if config is not None else None,
        )
    except wandb.Error as error:
        raise ValueError(
            f"logging.wandb: {str(error).splitlines()[0].rstrip('.')}. Run wandb login or set WANDB_API_KEY, write to the folder "
            "of the run with logging.wandb.mode=offline, or set logging.wandb.enabled=false"
        ) from error
    # The step of Weights & Biases cannot decrease, but a resumed run repeats steps. So the step is a metric and the x axis.
    run.define_metric("step")
    run.define_metric("*", step_metric="step")
    return run
