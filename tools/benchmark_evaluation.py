"""Measure the whole SuperGLUE and commonsense sets through this project's adapter and through lm-eval's `hf` model.

Both read the same exported weights in one process, one after the other, after a warm-up. Sets that are incomplete in the
folder are filled to their whole size with rows of shuffled words (tools/evaluation/full_size_sets.py).
For a side that --limit-minutes stops, the time of the rest is estimated.
"""

from __future__ import annotations

import argparse
import random
import re
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data.atomic_io import write_json
from tools.cli.arguments import above_zero, check_writable, command, command_line, positive
from tools.evaluation.full_size_sets import write_whole_sets
from tools.reporting.tables import printed_table

EPILOG = """
examples:
  python -m tools.benchmark_evaluation --data-dir DATA --tokenizer TOKENIZER_JSON         360M, random weights, one GPU
  python -m tools.benchmark_evaluation --data-dir DATA --checkpoint runs/metala_360m      a trained model
  python -m tools.benchmark_evaluation --data-dir DATA --tokenizer TOKENIZER_JSON --scale 0.1 --limit-minutes 2 --only hf
"""


@dataclass(frozen=True)
class Timing:
    """Hold the seconds of one side: this project's adapter or lm-eval's `hf`.

    Attributes:
        name: metalion or hf.
        total: seconds of the evaluation, with the harness's requests and metrics.
        tokenising, scoring: seconds of these two parts.
        requests, tokens: number of answered requests, and their tokens.
        share: answered share of all tokens; below 1 the evaluation was stopped, and `whole` is an estimate.
        answers: log-likelihood by (context, continuation).
        batches: tokens with and without padding, number of batches and of their shapes; None for `hf`.
    """

    name: str
    total: float
    tokenising: float
    scoring: float
    requests: int
    tokens: int
    share: float
    answers: dict[tuple[str, str], float]
    batches: dict[str, int] | None = None

    @property
    def tokens_per_second(self) -> float:
        """Return the tokens per second of scoring."""
        return self.tokens / max(1e-9, self.scoring)

    @property
    def whole(self) -> float:
        """Return the seconds of the whole evaluation, measured or estimated; nan without an answer."""
        if self.share == 1.0:
            return self.total
        return self.total + self.scoring * (1 / self.share - 1) if self.share else float("nan")

    @property
    def model_time(self) -> float:
        """Return the seconds of tokenising and scoring all requests, as `whole`."""
        return self.tokenising + self.scoring / self.share if self.share else float("nan")


@command
def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    if options.tokenizer is None and options.checkpoint is None:
        _parser().error("--tokenizer is missing: the random model needs one; or give a --checkpoint")
    import torch

    from tools.cli.devices import device_of
    from tools.conversion.export_hf import export
    from tools.evaluation.harness import data_folder, prepare_tasks
    from tools.evaluation.request import TaskRequest
    from tools.loading.model import locate_checkpoint

    device = str(device_of(options.device))
    check_writable(options.output / "evaluation.json", "--output")
    if options.checkpoint is not None:  # refused before whole sets are written
        locate_checkpoint(options.checkpoint, device=device, dtype=options.dtype).refuse_images()
    data_dir = data_folder(options.data_dir)
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = options.checkpoint or random_checkpoint(
            options.model, options.tokenizer, Path(folder) / "run", device
        )
        data = Path(folder) / "data"
        documents = write_whole_sets(data_dir, data, options.scale)
        exported = Path(folder) / "exported"
        export(checkpoint, exported, dtype=options.dtype)
        prepared = prepare_tasks(TaskRequest(suites=("superglue", "commonsense"), data_dir=data))
        timings = []
        for name in [options.only] if options.only else ["metalion", "hf"]:
            lm = (
                _project_model(checkpoint, device, options)
                if name == "metalion"
                else _hf_model(exported, device, options)
            )
            if not timings:
                parameters = sum(p.numel() for p in lm.model.parameters())
                machine = torch.cuda.get_device_name() if device.startswith("cuda") else device
                print(
                    f"{parameters / 1e6:,.1f} M parameters, {options.dtype} on {machine}, {documents:,} documents",
                    flush=True,
                )
            _warm_up(lm)
            timings.append(measure(name, lm, prepared, options.limit_minutes))
            del lm
            if device.startswith("cuda"):
                torch.cuda.empty_cache()
        report(timings, options.output)
    return 0


def random_checkpoint(model: Path, tokenizer: Path, run: Path, device: str) -> Path:
    """Write a run with initial weights. The tokenizer is a Hugging Face tokenizer.json."""
    import torch

    from data.tokenizer import load_tokenizer, padded_vocab_size
    from megatron_lite.checkpoint.storage import write_weights
    from megatron_lite.config.loader import dump_config, load_config
    from megatron_lite.parallel.sharding_plan import sharding_specs
    from models.config import ModelConfig
    from models.language_model import LanguageModel
    from tools.loading.tokenizer import save_tokenizer

    reader = load_tokenizer("hf", tokenizer)
    overrides = [
        f"run.directory={run}",
        f"model.vocab_size={padded_vocab_size(reader.vocab_size)}",
        "data.corpus=stdlib",
        "data.tokenizer.type=hf",
        f"data.tokenizer.path={tokenizer}",
        "batch.micro_batch_size=1",
        "batch.global_batch_size=1",
        "schedule.train_steps=1",
        "optimizer.lr=1e-3",
    ]
    config = load_config([model], overrides, model_type=ModelConfig, world_size=1)
    with torch.device(device):
        built = LanguageModel(config.model, seed=config.run.seed)
    weights = {name: parameter.detach().cpu() for name, parameter in built.named_parameters()}
    shapes = {name: tuple(weight.shape) for name, weight in weights.items()}
    specs = sharding_specs(built)
    saved = write_weights(run / "checkpoints", weights.items(), shapes, specs=specs, config_yaml=dump_config(config))
    save_tokenizer(reader, run)
    return saved


def measure(name: str, lm: Any, prepared: Any, limit_minutes: float | None = None) -> Timing:
    """Run the suites with a model and print a line every few seconds."""
    from tools.evaluation.harness import evaluate
    from tools.evaluation.progress import ProgressMonitor, TimeUpError, attach_monitor

    monitor = ProgressMonitor(name, sys.stdout, None if limit_minutes is None else 60 * limit_minutes)
    attach_monitor(lm, monitor)
    monitor.start()
    try:
        evaluate(lm, prepared)
    except TimeUpError as stop:
        print(stop, flush=True)
    total = monitor.seconds
    batches = None
    if (scorer := getattr(lm, "scorer", None)) is not None:
        shapes = scorer.shapes
        batches = {
            "tokens_read": scorer.read,
            "with_padding": sum(rows * length * times for (rows, length), times in shapes.items()),
            "batches": sum(shapes.values()),
            "shapes": len(shapes),
        }
    return Timing(
        name,
        total,
        tokenising=(monitor.tokenised or monitor.seconds) - monitor.received,
        scoring=monitor.ended - monitor.tokenised,
        requests=monitor.answered,
        tokens=monitor.answered_tokens,
        share=monitor.share,
        answers=monitor.answers,
        batches=batches,
    )


def report(timings: Sequence[Timing], output: Path) -> None:
    """Print the table and write `evaluation.json`, which has null for an unknown time."""
    header = ["model", "requests", "tokens", "whole, s", "tokenising, s", "scoring, s", "tokens per second"]
    rows = []
    for t in timings:
        whole = f"{t.total:.1f}" if t.share == 1.0 else f"about {t.whole:.0f} (stopped at {t.total:.0f})"
        times = [whole, f"{t.tokenising:.1f}", f"{t.scoring:.1f}", f"{t.tokens_per_second:,.0f}"]
        rows.append([t.name, f"{t.requests:,}", f"{t.tokens:,}", *times])
    print(f"\n{printed_table(header, rows)}")
    content: dict[str, Any] = {t.name: _entry(t) for t in timings}
    print()
    for t in timings:
        if t.batches is not None:
            padding = 1 - t.batches["tokens_read"] / max(1, t.batches["with_padding"])
            print(
                f"{t.name} read {t.batches['tokens_read'] / 1e6:.2f} M tokens in {t.batches['batches']} batches of "
                f"{t.batches['shapes']} shapes, {padding:.0%} padding"
            )
    if len(timings) == 2:
        mine, other = timings
        both = mine.answers.keys() & other.answers.keys()
        differences = [(abs(mine.answers[key] - other.answers[key]), abs(other.answers[key])) for key in both]
        difference = max((value for value, _ in differences), default=float("nan"))
        relative = max((value / max(1.0, size) for value, size in differences), default=float("nan"))
        estimated = "" if mine.share == other.share == 1.0 else ", partly estimated"
        print(
            f"largest difference over {len(both):,} requests of both sides: {difference:.3g}, relative {relative:.2g} "
            "(the harness rounds each token's log-likelihood and their sum to the model's dtype)"
        )
        print(
            f"{other.name} over {mine.name}: {other.whole / mine.whole:.2f} x whole, "
            f"{other.model_time / mine.model_time:.2f} x tokenising and scoring{estimated}"
        )
        content["largest_difference"], content["largest_relative_difference"] = difference, relative
        content["ratio"] = {
            "whole": other.whole / mine.whole,
            "tokenising and scoring": other.model_time / mine.model_time,
        }
    write_json(output / "evaluation.json", content)


def _entry(timing: Timing) -> dict[str, Any]:
    entry = {key: value for key, value in vars(timing).items() if key not in ("name", "answers")}
    return {
        **entry,
        "whole": timing.whole,
        "tokenising and scoring": timing.model_time,
        "estimated": timing.share < 1.0,
    }


def _project_model(checkpoint: Path, device: str, options: argparse.Namespace) -> Any:
    from tools.evaluation.adapter import ProjectLM
    from tools.loading.model import load_model

    loaded = load_model(checkpoint, device=device, dtype=options.dtype)
    return ProjectLM(
        loaded.model, loaded.tokenizer, max_length=options.max_length, name="metalion", progress=sys.stderr.isatty()
    )


def _hf_model(exported: Path, device: str, options: argparse.Namespace) -> Any:
    from tools.evaluation.huggingface import HuggingFaceLM

    lm = HuggingFaceLM(
        str(exported),
        device=device,
        dtype=options.dtype,
        batch_size=options.hf_batch,
        max_length=options.max_length,
        trust_remote_code=True,
    )
    lm.max_batch_size = options.hf_max_batch
    return lm


def _warm_up(lm: Any) -> None:
    """Compile kernels at their first use, with contexts and continuations of many lengths."""
    from lm_eval.api.instance import Instance

    from tools.evaluation.request_pairs import RequestCounts

    draw = random.Random(0)

    def text(words: int) -> str:
        return " ".join(draw.choice(["state", "decay", "gate"]) for _ in range(words))

    compiles = next(lm.model.parameters()).is_cuda
    pairs = []
    for context in (text(n) for n in ((3, 15, 16, 21, 60, 64, 150, 400) if compiles else (3,))):
        pairs += [(context, f" {text(n)}") for n in (1, 2, 7, 16, 17, 32, 41, 80)]
    for number in range(3 if compiles else 1):  # other batch sizes
        lm.loglikelihood(
            [Instance("loglikelihood", {}, pair, i, metadata=("", i, 1)) for i, pair in enumerate(pairs[number:])],
            disable_tqdm=True,
        )
    lm.counts = RequestCounts()
    if hasattr(lm, "scorer"):
        lm.scorer.read = 0
        lm.scorer.shapes.clear()


def _batch_size(text: str) -> str | int:
    return text if re.fullmatch(r"auto(:[1-9]\d*)?", text) else positive(text)


def _parser() -> argparse.ArgumentParser:
    parser = command_line("python -m tools.benchmark_evaluation", __doc__, EPILOG)
    parser.add_argument("--data-dir", type=Path, required=True, help="rows of every task, as for eval.py")
    parser.add_argument("--checkpoint", type=Path, help="a run or step folder (default: --model at its random start)")
    parser.add_argument("--model", type=Path, default=Path("configs/model/metala_360m.yml"), help="default %(default)s")
    parser.add_argument("--tokenizer", type=Path, help="tokenizer.json of the random model")
    parser.add_argument("--scale", type=above_zero, default=1.0, help="part of the whole sets (default 1)")
    parser.add_argument("--only", choices=["metalion", "hf"], help="measure one side only")
    parser.add_argument(
        "--limit-minutes", type=above_zero, help="stop each side after this time, and estimate the rest"
    )
    parser.add_argument(
        "--max-length", type=positive, default=2048, help="tokens that the model reads at once (default %(default)s)"
    )
    parser.add_argument("--dtype", default="bf16", choices=["bf16", "fp16", "fp32"])
    parser.add_argument("--device", default="auto", help="cpu, cuda, cuda:1 ... (default: a GPU where there is one)")
    parser.add_argument("--hf-batch", type=_batch_size, default="auto", help="lm-eval's batch size (default auto)")
    parser.add_argument(
        "--hf-max-batch", type=positive, default=512, help="largest batch size that lm-eval tries (default %(default)s)"
    )
    parser.add_argument("--output", type=Path, default=Path("runs/benchmark"), help="folder of evaluation.json")
    return parser


if __name__ == "__main__":
    sys.exit(main())
