"""The whole SuperGLUE and commonsense set through this project's adapter and through lm-eval's own `hf` model.

python -m tools.benchmark_evaluation --data-dir DATA --tokenizer TOKENIZER_JSON         # 360M, random weights, one GPU
python -m tools.benchmark_evaluation --data-dir DATA --checkpoint runs/metala_360m      # a trained model

Both read the same exported weights in one process, one after the other, after a warm-up. Tasks of which the folder holds
only a part are filled up to the size of the whole set with rows whose words are shuffled, so that no two are alike and
what requests share is what they share in the whole set (MultiRC: 83 paragraphs, 953 questions, 4,848 answers).
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.arguments import command_line

# Documents of the whole sets, by data folder and the split that the harness evaluates.
SIZES = {
    "super_glue/boolq/validation": 3270,
    "super_glue/cb/validation": 56,
    "super_glue/copa/validation": 100,
    "super_glue/multirc/validation": 4848,
    "super_glue/rte/validation": 277,
    "super_glue/wic/validation": 638,
    "super_glue/wsc.fixed/validation": 104,
    "lambada_openai/test": 5153,
    "logiqa/test": 651,
    "wsc273/test": 273,
    "piqa/validation": 1838,
    "hellaswag/validation": 10042,
    "winogrande/validation": 1267,
    "ai2_arc/ARC-Easy/test": 2376,
    "ai2_arc/ARC-Challenge/test": 1172,
    "openbookqa/test": 500,
}
PARAGRAPHS, QUESTIONS = 83, 953
Row = dict[str, Any]


@dataclass(frozen=True)
class Timing:
    """Seconds of the whole evaluation, and of it those in which the model was asked (tokenising included)."""

    name: str
    total: float
    asked: float
    answers: list[float]
    results: dict[str, Any]


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)

    from tools.conversion.export import export
    from tools.devices import device_of
    from tools.evaluation.harness import Request, prepare_tasks
    from tools.evaluation.huggingface import HuggingFaceLM
    from tools.load_model import load_model

    device = str(device_of(options.device))
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data"
        documents = write_whole_sets(options.data_dir, data, options.scale)
        checkpoint = options.checkpoint or random_checkpoint(
            options.model, options.tokenizer, Path(folder) / "run", device
        )
        exported = Path(folder) / "exported"
        export(checkpoint, exported, dtype=options.dtype)
        prepared = prepare_tasks(Request(suites=("superglue", "commonsense"), data_dir=data))
        loaded = load_model(checkpoint, device=device, dtype=options.dtype)
        parameters = sum(p.numel() for p in loaded.model.parameters())
        print(
            f"{parameters / 1e6:,.1f} M parameters, {options.dtype} on {_machine(device)}, {documents:,} documents",
            flush=True,
        )

        ours = _ours(loaded, options.max_length)
        theirs = HuggingFaceLM(
            str(exported),
            device=device,
            dtype=options.dtype,
            batch_size=options.hf_batch,
            max_length=options.max_length,
            trust_remote_code=True,
        )
        theirs.max_batch_size = options.hf_max_batch
        timings = []
        for name, lm in (("metalion", ours), ("hf", theirs)):
            _warm_up(lm)
            timings.append(measure(name, lm, prepared, device))
            print(f"{name}: {timings[-1].total:.1f} s, of which asking the model {timings[-1].asked:.1f} s", flush=True)
        report(timings, ours, options.output)
    return 0


def write_whole_sets(source: Path, target: Path, scale: float = 1.0, seed: int = 0) -> int:
    """Every data set at its whole size (times `scale`), real rows first; returns the number of documents."""
    total = 0
    for name, size in SIZES.items():
        rows = _read(source, name)
        size = max(3, round(size * scale))
        draw = random.Random(f"{seed}/{name}")
        if name == "super_glue/multirc/validation":
            rows = _multirc(rows, size, scale, draw)
        else:
            rows = [*rows[:size], *(_shuffled(draw.choice(rows), draw) for _ in range(size - len(rows)))]
        path = target / f"{name}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
        total += len(rows)
    return total


def random_checkpoint(model: Path, tokenizer: Path, run: Path, device: str) -> Path:
    """A run whose weights are as at the start of training. The tokenizer is a Hugging Face tokenizer.json."""
    from data.tokenizer import load_tokenizer
    from megatron_lite import engine_checkpoint
    from megatron_lite.config import dump_config, load_config
    from megatron_lite.grid import init_grid
    from models.config import ModelConfig
    from tools.build_engine import build_engine
    from tools.load_model import keep_tokenizer

    entries = load_tokenizer("hf", tokenizer).vocab_size
    overrides = [
        f"run.directory={run}",
        f"model.vocab_size={-(-entries // 128) * 128}",
        f"run.device={device.partition(':')[0]}",
        "data.corpus=stdlib",
        "data.tokenizer.type=hf",
        f"data.tokenizer.path={tokenizer}",
        "batch.micro_batch_size=1",
        "batch.global_batch_size=1",
        "schedule.train_steps=1",
        "optimizer.lr=1e-3",
    ]
    config = load_config([model], overrides, model_type=ModelConfig, world_size=1)
    engine = build_engine(config, init_grid(config.run.device), "fp32")
    saved = engine_checkpoint.save(engine, run / "checkpoints", step=0, state={}, config_yaml=dump_config(config))
    engine.close()
    keep_tokenizer(load_tokenizer("hf", tokenizer), run)
    return saved


def measure(name: str, lm: Any, prepared: Any, device: str) -> Timing:
    """Runs the suites through a model."""
    import torch

    from tools.evaluation.harness import evaluate

    asked, answers = 0.0, []
    original = lm.loglikelihood

    def timed(requests: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal asked
        begin = time.perf_counter()
        found = original(requests, *args, **kwargs)
        asked += time.perf_counter() - begin
        answers.extend(value for value, _ in found)
        return found

    lm.loglikelihood = timed
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    begin = time.perf_counter()
    results = evaluate(lm, prepared)
    assert results is not None
    return Timing(name, time.perf_counter() - begin, asked, answers, results)


def report(timings: Sequence[Timing], ours: Any, output: Path) -> None:
    """Prints the table and writes `evaluation.json`."""
    mine, other = timings
    difference = max(abs(a - b) for a, b in zip(mine.answers, other.answers, strict=True))
    print(
        f"\n{len(mine.answers):,} requests, {ours.asked_tokens / 1e6:.2f} M tokens asked, {ours.scorer.read / 1e6:.2f} M read; "
        f"largest difference of a request {difference:.3g}\n"
    )
    print("| model | whole evaluation, s | asking the model, s | tokens asked a second |")
    print("|---|---:|---:|---:|")
    for timing in timings:
        print(f"| {timing.name} | {timing.total:.1f} | {timing.asked:.1f} | {ours.asked_tokens / timing.asked:,.0f} |")
    print(f"\nhf over metalion: {other.total / mine.total:.2f} x whole, {other.asked / mine.asked:.2f} x asking")
    output.mkdir(parents=True, exist_ok=True)
    content = {
        "requests": len(mine.answers),
        "tokens_asked": ours.asked_tokens,
        "tokens_read": ours.scorer.read,
        "largest_difference": difference,
        "seconds": {t.name: {"total": t.total, "asked": t.asked} for t in timings},
        "ratio": {"total": other.total / mine.total, "asked": other.asked / mine.asked},
    }
    (output / "evaluation.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _ours(loaded: Any, max_length: int) -> Any:
    from tools.evaluation.adapter import ProjectLM

    return ProjectLM(
        loaded.model, loaded.tokenizer, max_length=max_length, name="metalion", progress=sys.stderr.isatty()
    )


def _warm_up(lm: Any) -> None:
    """Compiles what is compiled on first use, at the shapes that come."""
    from lm_eval.api.instance import Instance

    draw = random.Random(0)
    texts = [" ".join(draw.choice(["state", "decay", "gate"]) for _ in range(n)) for n in (3, 20, 60, 150, 400) * 6]
    pairs = [(text, f" {word} end") for text in texts for word in ("some", "another long")]
    lm.loglikelihood([Instance("loglikelihood", {}, pair, i, metadata=("", i, 1)) for i, pair in enumerate(pairs)])
    for counter in ("requests", "truncated"):
        getattr(lm, counter).clear()
    lm.asked_tokens = lm.longest = 0
    if hasattr(lm, "scorer"):
        lm.scorer.read = 0


def _shuffled(value: Any, draw: random.Random) -> Any:
    """The same row with the words of every text in another order; labels, indices and single words stay."""
    if isinstance(value, dict):
        return {key: item if key in _KEPT else _shuffled(item, draw) for key, item in value.items()}
    if isinstance(value, list):
        return [_shuffled(item, draw) for item in value]
    if not isinstance(value, str):
        return value
    words = value.split(" ")
    if "_" in words:  # the blank stays where it is
        place = words.index("_")
        rest = words[:place] + words[place + 1 :]
        draw.shuffle(rest)
        return " ".join([*rest[:place], "_", *rest[place:]])
    draw.shuffle(words)
    return " ".join(words)


_KEPT = {"label", "answerKey", "answer", "idx", "id", "pronoun", "span1_text", "span2_text", "word", "text_label"}


def _multirc(rows: list[Row], size: int, scale: float, draw: random.Random) -> list[Row]:
    paragraphs = [_shuffled(draw.choice(rows)["paragraph"], draw) for _ in range(max(1, round(PARAGRAPHS * scale)))]
    questions = [
        (i % len(paragraphs), _shuffled(draw.choice(rows)["question"], draw))
        for i in range(max(1, round(QUESTIONS * scale)))
    ]
    found = []
    for number in range(size):
        question = number * len(questions) // size
        paragraph, text = questions[question]
        answer = " ".join(
            draw.choice(draw.choice(rows)["paragraph"].split(" "))
            for _ in range(len(draw.choice(rows)["answer"].split(" ")))
        )
        index = {"paragraph": paragraph, "question": question, "answer": number}
        row = {"paragraph": paragraphs[paragraph], "question": text, "answer": answer, "idx": index}
        found.append({**row, "label": draw.randrange(2)})
    return found


def _read(source: Path, name: str) -> list[Row]:
    # Where the evaluated split is there in part only, the rows of the other one help.
    rows: list[Row] = []
    for split in (name.rpartition("/")[2], "validation", "test"):
        for suffix in (".jsonl.gz", ".jsonl"):
            path = source / name.rpartition("/")[0] / f"{split}{suffix}"
            if path.is_file():
                text = gzip.decompress(path.read_bytes()) if suffix.endswith(".gz") else path.read_bytes()
                rows += [row for line in text.decode().splitlines() if (row := json.loads(line)) not in rows[:50]]
    if not rows:
        raise FileNotFoundError(f"{source} lacks {name}.jsonl.gz: a few rows of every task are needed to begin with")
    return rows


def _machine(device: str) -> str:
    import torch

    return torch.cuda.get_device_name() if device.startswith("cuda") else device


def _parser() -> argparse.ArgumentParser:
    parser = command_line("python -m tools.benchmark_evaluation", __doc__)
    parser.add_argument("--data-dir", type=Path, required=True, help="rows of every task, as for eval.py")
    parser.add_argument("--checkpoint", type=Path, help="a run or step folder (default: --model at its random start)")
    parser.add_argument("--model", type=Path, default=Path("configs/model/metala_360m.yml"), help="default %(default)s")
    parser.add_argument("--tokenizer", type=Path, help="tokenizer.json of the random model")
    parser.add_argument("--scale", type=float, default=1.0, help="part of the whole sets (default 1)")
    parser.add_argument("--max-length", type=int, default=2048, help="tokens seen at once (default %(default)s)")
    parser.add_argument("--dtype", default="bf16", choices=["bf16", "fp16", "fp32"])
    parser.add_argument("--device", default="auto", help="cpu, cuda, cuda:1 ... (default: a GPU where there is one)")
    parser.add_argument("--hf-batch", default="auto", help="lm-eval's batch size (default auto)")
    parser.add_argument(
        "--hf-max-batch", type=int, default=512, help="where lm-eval's search begins (default %(default)s)"
    )
    parser.add_argument("--output", type=Path, default=Path("runs/benchmark"), help="folder of evaluation.json")
    return parser


if __name__ == "__main__":
    sys.exit(main())
