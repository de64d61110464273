"""A tiny trained run for the tests of tools: metrics, checkpoint and tokenizer."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import numpy as np
import pytest

from data.datasets.causal import CausalDataset, SequentialDataset
from data.indexed import IndexedWriter
from data.loader import batches
from data.tokenizer import load_tokenizer
from megatron_lite.checkpoint.checkpointer import Checkpointer
from megatron_lite.config.loader import dump_config, load_config
from megatron_lite.metrics.logger import MetricsLogger
from megatron_lite.parallel.grid import init_grid
from models.config import ModelConfig
from tests.cli.conftest import ROOT
from tools.benchmark import __main__ as benchmark
from tools.loading.engine import build_engine
from tools.loading.token_data import prepare_token_files
from tools.loading.tokenizer import save_tokenizer

STEPS = 30


def write_corpus(path: Path, documents: int = 120, seed: int = 0) -> None:
    """Write small made-up functions with names, numbers and characters of one to four bytes."""
    draw = random.Random(seed)
    names = ["alpha", "beta", "gamma", "naïve", "größe", "値", "🙂", "total", "count", "index"]
    with path.open("w", encoding="utf-8") as out:
        for _ in range(documents):
            a, b, c = draw.sample(names, 3)
            body = "".join(
                f"    {draw.choice(names)} = {a} + {draw.randrange(100)}\n" for _ in range(draw.randrange(8))
            )
            out.write(json.dumps({"text": f"def {a}({b}, {c}):\n{body}    return {b}\n"}) + "\n")


@pytest.fixture(scope="session")
def trained_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train a hybrid of MetaLA and attention whose vocabulary is padded, and return the run folder."""
    root = tmp_path_factory.mktemp("trained")
    run = root / "runs" / "tiny"
    write_corpus(root / "corpus.jsonl")
    config = load_config(
        ["configs/model/hybrid_tiny.yml"],
        [
            "run.name=tiny",
            f"run.directory={run}",
            "model.num_layers=2",
            f"data.corpus={root / 'corpus.jsonl'}",
            "data.validation_fraction=0.2",
            f"data.cache_directory={root / 'cache'}",
            "data.tokenizer.vocab_size=400",
            "batch.sequence_length=32",
            "batch.micro_batch_size=8",
            "batch.global_batch_size=8",
            "optimizer.lr=3e-3",
            f"schedule.train_steps={STEPS}",
            "precision.dtype=fp32",
        ],
        model_type=ModelConfig,
        world_size=1,
    )
    prepared = prepare_token_files(config.data)
    tokenizer = load_tokenizer(prepared.tokenizer_type, prepared.tokenizer_path)
    save_tokenizer(tokenizer, run)
    dataset = CausalDataset(prepared.train_prefix, sequence_length=32, num_samples=8 * STEPS, seed=1)
    engine = build_engine(config, init_grid("cpu"), "fp32")
    metrics = MetricsLogger(run, total_steps=STEPS, progress_bar=False)
    steps = batches(dataset, global_batch_size=8, micro_batch_size=8)
    for step, micro_batches in zip(range(1, STEPS + 1), steps, strict=False):
        result = engine.train_step(micro_batches, lr=config.optimizer.lr)
        values = {"loss": result.loss, "gradient_norm": result.gradient_norm, "tokens": step * 256}
        metrics.log(step, {**values, "learning_rate": config.optimizer.lr, "tokens_per_second": 1000.0})
        if step in (10, STEPS):
            directory = Path(config.checkpoint.directory)
            Checkpointer(engine, directory).save(step=step, state={"step": step}, config_yaml=dump_config(config))
    whole = SequentialDataset(prepared.validation_prefix, sequence_length=32, first_token=tokenizer.end_of_document_id)
    held_out = batches(whole, global_batch_size=8, micro_batch_size=8, fill_last=True)
    nll, weight, _ = engine.evaluate(batch for step_batches in held_out for batch in step_batches)
    metrics.log(STEPS, {"loss": nll / weight, "tokens": STEPS * 256}, kind="validation")
    metrics.close()
    engine.close()
    return run


@pytest.fixture(scope="session")
def places(tmp_path_factory: pytest.TempPathFactory, trained_run: Path) -> dict[str, str]:
    """Return the paths of existing and unusable files, by the words for them in arguments of tests.

    RUN: a trained run. BROKEN: a byte of its weights is changed. DAMAGED, UNREADABLE, LOST: its manifest, configuration or
    tokenizer's description is cut. TOKENS: token files whose .bin is cut. OTHERS: whose manifest is cut. HUGGING, EXPORT: a
    Hugging Face folder without and with a tokenizer. CLUSTER: a configuration without a model. WIDE: with a misspelt key.
    """
    folder = tmp_path_factory.mktemp("places")
    with IndexedWriter(folder / "others", np.dtype("<u2")) as writer:
        writer.add_document(np.arange(40))
    (folder / "others.json").write_text("{")
    shutil.copyfile(folder / "others.idx", folder / "tokens.idx")
    (folder / "tokens.bin").write_bytes((folder / "others.bin").read_bytes()[:-1])
    copies = ("broken", "damaged", "unreadable", "lost")
    for name in copies:
        shutil.copytree(trained_run, folder / name)
    for weights in (folder / "broken" / "checkpoints").glob("step_*/weights-00000.safetensors"):
        content = weights.read_bytes()
        weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    for step in (folder / "damaged" / "checkpoints").glob("step_*"):
        (step / "manifest.json").write_text('{"format": "metalion-checkpoint", "version": 2}')
    for step in (folder / "unreadable" / "checkpoints").glob("step_*"):
        (step / "config.yml").write_text("model: [")
        (step / "SHA256SUMS").unlink()  # as earlier versions wrote it
    (folder / "lost" / "tokenizer" / "description.json").write_text("{")
    for name in ("hugging", "export"):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text('{"model_type": "llama"}')
    (folder / "export" / "tokenizer.json").write_text("{}")
    (folder / "empty" / "rte").mkdir(parents=True)
    for split in ("train", "validation"):
        (folder / "empty" / "rte" / f"{split}.jsonl").touch()
    (folder / "file").write_text("in the way\n")
    (folder / "binary").write_bytes(b"text\n\xff\xfe")
    (folder / "wide.yml").write_text("model: {hiden_size: 3}")
    names = (*copies, "tokens", "others", "hugging", "export", "empty", "file", "binary")
    return {
        "RUN": str(trained_run),
        "NONE": str(folder / "nothing"),
        "CONFIG": str(ROOT / "configs" / "default.yml"),
        "CLUSTER": str(ROOT / "configs" / "cluster" / "1gpu.yml"),
        "WIDE": str(folder / "wide.yml"),
        "TEXT": str(ROOT / "README.md"),
        **{name.upper(): str(folder / name) for name in names},
    }


def refusal(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Return the message of `tools.benchmark` for refused arguments."""
    assert benchmark.main(words) == 2
    return capsys.readouterr().err
