"""Describe a run at its start and end: the result beside general compressors, a sample, the files, the next commands."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import shlex
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from data.atomic_io import write_json
from megatron_lite.checkpoint.reader import describe_layout, is_own_checkpoint, read_config_yaml, read_manifest
from megatron_lite.checkpoint.resume import StartPoint
from megatron_lite.config.loader import dump_config
from megatron_lite.config.schema import Config
from megatron_lite.engine.engine import Engine
from megatron_lite.fault_tolerance.rank_consistency import configuration_facts
from megatron_lite.metrics.logger import read_metrics
from megatron_lite.plural import counted
from megatron_lite.trainer import FitResult, TrainState
from tools.loading.model import model_config
from tools.pretraining.objective import Objective

# Keys that change no result.
_FREE = ("checkpoint.resume", "data.cache_directory", "data.images.threads")
_MOST_CHANGES = 8  # changed values in one message


def summary(config: Config[Any], result: FitResult, objective: Objective) -> str:
    """Return the closing text of a run. Plot `loss.png` if a step is logged, then write `summary.json`, which marks the end."""
    from tools.reporting.run_curves import plot_loss

    folder, state = config.run.path, result.state
    if not result.finished:
        again = "the same command" + (" without checkpoint.resume" if _has_fixed_start(config) else "")
        return (
            f"\nstopped after step {state.step} of {config.schedule.train_steps}; saved to {result.checkpoint}\n"
            f"{again} resumes from there"
        )
    measured = read_metrics(folder)
    rate = state.consumed_tokens / max(state.seconds, 1e-9)
    amount, speed = f"{_millions(state.consumed_tokens)} tokens", f"{rate:,.0f} tokens/s"
    if config.data.objective == "classification":
        amount, speed = f"{state.consumed_samples:,} images", f"{rate / config.batch.sequence_length:,.0f} images/s"
    lines = [
        "",
        f"{counted(state.step, 'step')}, {amount} in {_duration(state.seconds)} ({speed})"
        + (f", {counted(state.skipped_steps, 'step')} skipped" if state.skipped_steps else ""),
    ]
    report: dict[str, Any] = {
        "steps": state.step,
        "tokens": state.consumed_tokens,
        "training_seconds": state.seconds,
        "tokens_per_second": rate,
        "skipped_steps": state.skipped_steps,
        "validation": result.validation,
    }
    if result.validation:
        shown = objective.validation_lines(result.validation, report)
        parts = [line["evaluated_fraction"] for line in measured if 0 < line.get("evaluated_fraction", 1) < 1]
        if parts:
            shown.insert(1, f"validations during the run read {parts[-1]:.1%} of this set, so their losses differ")
        lines += ["", *shown]
    tests = [line for line in measured if line["kind"] == "test" and line["step"] == state.step]
    if tests:
        test = report["test"] = {key: value for key, value in tests[-1].items() if key not in ("kind", "step", "time")}
        lines += ["", objective.test_line(test)]
    samples = [line for line in measured if line["kind"] == "sample"]
    if samples:
        report["sample"] = samples[-1].get("prompt", "") + samples[-1]["text"]
        lines += ["", "sample:", *("  | " + line for line in report["sample"].splitlines())]
    plot: Path | str = f"none: no step was logged (logging.interval = {config.logging.interval})"
    if any(line["kind"] == "train" for line in measured):
        plot = plot_loss(folder, baseline=report.get("unigram", {}).get("accuracy"))
    write_json(folder / "summary.json", report)
    lines += [
        "",
        f"checkpoint   {result.checkpoint}",
        f"loss plot    {plot}",
        f"metrics      {folder / 'metrics.jsonl'}",
        f"summary      {folder / 'summary.json'}",
        "",
        "next:",
        f"  {longer_command(config, 2 * state.step)}   # train twice as long",
        *_uses(config),
    ]
    return "\n".join(lines)


def _uses(config: Config[Any]) -> list[str]:
    """Return the commands that use the model."""
    run, checkpoints = config.run.path, Path(config.checkpoint.directory)
    folder = shlex.quote(str(run if checkpoints == run / "checkpoints" else checkpoints))
    if config.data.objective == "classification":
        sizes = f"  python -m tools.image_sizes {folder}   # accuracy at other image sizes"
        export = f"  python -m tools.convert_hf export {folder} EXPORT   # for transformers"
        return [sizes, export] if config.data.images.validation else [export]
    if config.data.objective == "masked":
        return [
            f"  python -m tools.length {folder}   # accuracy on longer texts",
            f"  python -m tools.finetune_glue {folder} --tasks sst2,mrpc,rte   # fine-tune",
            f"  python -m tools.convert_hf export {folder} EXPORT   # for transformers",
        ]
    generate = f"  python -m tools.generate {folder} --prompt {shlex.quote(config.evaluation.prompt)}   # generate text"
    if not (config.data.validation or (config.data.corpus and config.data.validation_fraction)):
        return [generate]
    return [
        generate,
        f"  python eval.py {folder}   # evaluate",
        f"  python -m tools.length {folder}   # loss at other context lengths",
    ]


def _has_fixed_start(config: Config[Any]) -> bool:
    """Return whether each start with this `checkpoint.resume` begins at the same step."""
    resume = config.checkpoint.resume
    return resume == "never" or is_own_checkpoint(resume, Path(config.checkpoint.directory))


def longer_command(config: Config[Any], steps: int) -> str:
    """Return the command that continues the training to `steps`, with the arguments of the running command."""
    values = {"schedule.train_steps": str(steps)}
    if config.schedule.time_budget_minutes is not None:
        # A resumed run with a time budget keeps the number of steps of its checkpoint.
        values = {"schedule.time_budget_minutes": "null", **values}
    if _has_fixed_start(config):
        values = {"checkpoint.resume": "auto", **values}
    return _command(config, values)


def _command(config: Config[Any], values: Mapping[str, str]) -> str:
    """Return the running command with other values of some keys."""
    words = [word for word in sys.argv[1:] if word.partition("=")[0] not in values]
    words += [f"{key}={value}" for key, value in values.items()]
    processes = config.batch.data_ranks * config.parallel.model_ranks
    is_local = os.environ.get("LOCAL_WORLD_SIZE") == str(processes)  # torchrun started all of them on this machine
    launcher = f"torchrun --nproc-per-node {processes}" if is_local else "..."
    start = "python" if processes == 1 else launcher
    return f"{start} train.py {shlex.join(words)}"


def start_message(
    config: Config[Any], engine: Engine, objective: Objective, state: TrainState, start: StartPoint | None
) -> str:
    """Return the lines at the start of a run: model, layout, device, steps, tokens, start checkpoint, and FP8 if it is on.

    A line names the values of the model that differ from those of the checkpoint, and of a resumed run also those of its data.
    """
    source, changed = None, ""
    if start is not None:
        source = start.path
        changed = changed_values(config, source, ("model.", "data.", "run.seed") if start.is_trained else ("model.",))
    parameters = sum(math.prod(shape) for shape in engine.parameter_shapes().values())
    tokens = config.batch.tokens_of(config.schedule.train_steps)
    most = "" if config.batch.ramp.start is None else "up to "
    return (
        f"{config.run.name}: {'+'.join(dict.fromkeys(config.model.mixers))}, {parameters / 1e6:.1f} M parameters, "
        f"{describe_layout(engine.layout)} on {engine.grid.device.type}\n"
        f"{counted(config.schedule.train_steps, 'step')} of {most}{config.batch.tokens_per_step:,} tokens = {_millions(tokens)}, "
        f"from {objective.source}; "
        + (f"from {source} at step {state.step}{_resharded(engine, source)}" if source else "from step 0")
        + (f"\nthe checkpoint was trained with {changed}" if changed else "")
        + (f"\n{engine.fp8_summary}" if engine.fp8_summary else "")
    )


def _resharded(engine: Engine, source: Path) -> str:
    stored = read_manifest(source)["layout"]
    if {**engine.layout, **stored} == engine.layout:
        return ""
    return f", written by {describe_layout(stored)}, resharded to this layout"


def is_complete(config: Config[Any], manifest: Mapping[str, Any]) -> bool:
    """Return whether a run has done all steps with the checkpoint of this manifest, and the work after the last step."""
    try:
        report = json.loads((config.run.path / "summary.json").read_text())
        # An earlier run in this folder may have ended at the same step; its seconds differ.
        stored = manifest["step"], manifest["state"]["seconds"]
        for measured in (report["validation"], report.get("test", {})):
            if measured.get("loss", 0) is None and measured.get("evaluated_tokens"):
                return False  # not finite
        return stored == (report["steps"], report["training_seconds"]) and stored[0] >= config.schedule.train_steps
    except (OSError, ValueError, LookupError, TypeError, AttributeError):  # missing, or not a summary
        return False


def complete_message(config: Config[Any], source: Path, step: int) -> str:
    """Return the message of a run that has nothing left to do."""
    # Checkpoints in a folder of their own belong to this run.
    other = {"run.directory": f"{config.run.directory}-2"}
    if source.parent != config.run.path / "checkpoints":
        other["checkpoint.directory"] = f"{source.parent}-2"
    lines = [
        f"the run {config.run.name} is complete: {counted(step, 'step')}, {source}",
        *([f"  it was trained with {changed}"] if (changed := changed_values(config, source)) else []),
        f"  {longer_command(config, 2 * step)}   # train twice as long",
        f"  {_command(config, other)}   # another run",
        f"  {_command(config, {'checkpoint.resume': 'never'})}   # train again from step 0",
        *_uses(config),
    ]
    return "\n".join(lines)


def changed_values(config: Config[Any], source: Path, sections: tuple[str, ...] = ("",)) -> str:
    """Return "KEY = value of the checkpoint, not requested value; ..." of the first differences; "" without one.

    sections: beginnings of the keys that are compared. Options of mixers that a file omits have their defaults.
    """
    saved, requested = (_values(values) for values in (read_config_yaml(source), yaml.safe_load(dump_config(config))))
    names = [
        name
        for name in requested
        if name.startswith(sections)
        and name not in _FREE
        and json.loads(saved.get(name, requested[name])) != json.loads(requested[name])  # 4 equals 4.0
    ]
    more = f"; {len(names) - _MOST_CHANGES} more" if len(names) > _MOST_CHANGES else ""
    return "; ".join(f"{name} = {saved[name]}, not {requested[name]}" for name in names[:_MOST_CHANGES]) + more


def _values(config: dict[str, Any]) -> dict[str, str]:
    """Return dotted key -> value as JSON, with every option of the mixers."""
    with suppress(ValueError):  # an older version wrote an option that is unknown now
        model = model_config(config)
        options = {mixer: dataclasses.asdict(model.options_of(mixer)) for mixer in model.mixers}
        config = {**config, "model": {**config["model"], "mixer_options": options}}
    return configuration_facts(config)


def _millions(count: int) -> str:
    return f"{count / 1e6:,.1f} M" if count >= 100_000 else f"{count:,}"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
