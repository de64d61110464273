"""ListOps of Long Range Arena through the runner: the classifier, the warmup, validation apart from the test, the command."""

from __future__ import annotations

import itertools
import json
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import eval as evaluation
from data.synthetic.listops import CLASSES, PAD
from tools.synthetic.batches import generate, prepare
from tools.synthetic.classifier import Classifier
from tools.synthetic.experiment import Run, _digest, load_experiment, plan
from tools.synthetic.model_run import ModelRun
from tools.synthetic.training import SideBySide, train_together

CPU = torch.device("cpu")
# Up to 24 tokens, three levels, four arguments.
SHORT = (
    "tasks=[listops]",
    "models=[attention]",
    "settings.listops={batch_size: 32, network: {num_layers: 1}, "
    "data: {train_examples: 256, validation_examples: 64, test_examples: 96, length: 24, shortest: 4, depth: 3, arguments: 4}}",
    "devices=[cpu]",
)


def runs_of(*more: str) -> list[Run]:
    return plan(load_experiment("lra", [*SHORT, *more]), "fp32")


def test_training_validation_and_test_sets_differ() -> None:
    (run, *_) = runs_of()
    assert [len(part.tokens) for part in generate(run)] == [256, 64, 96]
    sizes = dict.fromkeys(("train_examples", "validation_examples", "test_examples"), 64)
    sets = generate(replace(run, data={**run.data, **sizes}))
    for one, other in itertools.combinations(sets, 2):
        assert (one.tokens != other.tokens).any(1).mean() > 0.5


def test_the_papers_configuration() -> None:
    (run,) = plan(load_experiment("lra", ["tasks=[listops]", "models=[metala]"]), "bf16")
    assert (run.length, run.data["shortest"]) == (2000, 500)
    assert [run.data[f"{part}_examples"] for part in ("train", "validation", "test")] == [96_000, 2_000, 2_000]
    network = Classifier(run, CLASSES)
    block = network.blocks[0]
    assert len(network.blocks) == 6
    assert block.mixer.head_dim_k == 4
    assert block.mixer.q_proj.weight.shape == (16, 32)
    assert block.mlp.down_proj.weight.shape == (32, 64)
    assert network.output.weight.shape == (10, 32)


@pytest.mark.parametrize("value", ["mlp=identity", "attention_dropout=0.1", "head_bias=true", "first_weights=mad_lab"])
def test_options_without_support_in_the_classifier_are_refused(value: str) -> None:
    with pytest.raises(
        ValueError, match=rf"definitions.attention or network: {value.partition('=')[0]} = .*: allowed "
    ):
        Classifier(runs_of(f"network.{value}")[0], CLASSES)


def test_float32_residual_stream_of_a_classifier() -> None:
    tokens = torch.from_numpy(generate(runs_of()[0])[0].tokens[:8]).long()
    seen = [
        Classifier(runs_of(f"network.fp32_residual_connection={value}")[0], CLASSES).to(dtype).logits(tokens, None)
        for value, dtype in (("true", torch.float32), ("false", torch.float32), ("true", torch.bfloat16))
    ]
    torch.testing.assert_close(seen[0], seen[1])
    torch.testing.assert_close(seen[2], seen[1], rtol=0.1, atol=0.05)


def test_pytorchs_initial_weights_leave_those_that_lions_options_define() -> None:
    words = ["tasks=[listops]", "models=[lion_s_hippo]", "network.first_weights=pytorch"]
    (run,) = plan(load_experiment("lra", words), "fp32")
    network = Classifier(run, CLASSES)
    for block in network.blocks:
        values = block.mixer.v_proj.weight
        torch.testing.assert_close(values, values.diagonal().diag())
        for layer in (block.mixer.q_proj, block.mixer.k_proj):
            assert layer.weight.std().item() == pytest.approx(0.1, rel=0.05)
        for layer in (block.mixer.out_proj, block.mlp.down_proj):
            assert layer.weight.abs().max().item() == pytest.approx(layer.weight.shape[1] ** -0.5, rel=0.05)


def test_embeddings_of_harnesses_for_long_range_arena() -> None:
    """Check N(0, 1) embeddings plus fixed sines, with dropout on their sum in training."""
    words = ["network.first_weights=pytorch", "network.positions=sinusoidal", "network.embedding_dropout=0.25"]
    run, *_ = runs_of(*words)
    network = Classifier(run, CLASSES)
    assert network.embedding.weight.std().item() == pytest.approx(1, abs=0.1)
    weight = network.blocks[0].mlp.down_proj.weight
    assert weight.abs().max().item() == pytest.approx(weight.shape[1] ** -0.5, rel=0.05)
    seen: list[Tensor] = []
    network.blocks[0].register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    tokens = torch.from_numpy(generate(run)[0].tokens[:64]).long()
    labels = torch.zeros(64, 1, dtype=torch.long)
    network.loss(tokens, None, labels)
    network.logits(tokens, None)
    kept = seen[0] != 0
    assert kept.float().mean().item() == pytest.approx(0.75, abs=0.02)
    torch.testing.assert_close(seen[0][kept], seen[1][kept] / 0.75)
    sines = seen[1] - network.embedding(tokens)
    half = sines.shape[-1] // 2
    expected = torch.outer(torch.arange(sines.shape[1]), 10_000 ** (-torch.arange(half) / (half - 1)))
    torch.testing.assert_close(
        sines, torch.cat([expected.sin(), expected.cos()], 1).expand_as(sines), rtol=0, atol=1e-4
    )
    model_runs = [ModelRun(replace(run, seed=seed), torch.device("cpu")) for seed in (0, 0, 1)]
    losses = []
    for model_run in model_runs:
        model_run.network.load_state_dict(network.state_dict())
        model_run.begin_epoch(0)
        losses.append(model_run.network.loss(tokens, None, labels).item())
    assert losses[0] == losses[1] != losses[2]


@pytest.mark.parametrize("model", [*load_experiment("lra").definitions, "metala_bidirectional"])
def test_class_is_computed_from_the_mean_over_tokens(model: str) -> None:
    """Padding changes nothing; the gradient reaches every parameter."""
    bidirectional = "settings.listops.definitions.metala_bidirectional={mixers: [metala_bidirectional], head_dim: 8}"
    (run,) = runs_of(bidirectional, f"models=[{model}]")
    # With BatchNorm the loss in training would not be that of the logits.
    smaller = {"width": 32, "length": 40, "network": {**run.network, "num_layers": 1, "norm": "layernorm"}}
    network = Classifier(replace(run, **smaller), CLASSES)
    train, validation, test = generate(run)
    assert [len(part.tokens) for part in (train, validation, test)] == [256, 64, 96]
    tokens, labels = (torch.from_numpy(x[:8]).long() for x in train)
    longer = F.pad(tokens, (0, 16), value=PAD)
    logits = network.logits(tokens, None)
    assert logits.shape == (8, 1, CLASSES)
    torch.testing.assert_close(network.logits(longer, None), logits, rtol=1e-4, atol=1e-5)
    row, length = tokens[:1], int((tokens[0] != PAD).sum())
    x = network.embedding(row[:, :length])
    for block in network.blocks:
        x = block(x)
    expected = network.norm(x)[0].mean(0) @ network.output.weight.T
    torch.testing.assert_close(network.logits(row, None)[0, 0], expected, rtol=1e-4, atol=1e-5)
    loss = network.loss(tokens, None, labels)
    assert loss.item() == pytest.approx(F.cross_entropy(logits[:, 0], labels[:, 0]).item())
    loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in network.parameters())


def test_learning_rate_has_warmup_and_cosine() -> None:
    (run,) = runs_of("models=[attention]", "settings.listops.warmup_steps=10", "settings.listops.epochs=4")
    model_run = ModelRun(run, CPU)
    rates = []
    for epoch in range(4):
        model_run.begin_epoch(epoch)
        for step in range(8 * epoch, 8 * epoch + 8):
            model_run.warm_up(step)
            rates.append(model_run._optimizer.param_groups[0]["lr"])
    cosine = [run.lr * (1 + np.cos(np.pi * epoch / 4)) / 2 for epoch in range(4) for _ in range(8)]
    expected = [rate * min(1, (step + 1) / 10) for step, rate in enumerate(cosine)]
    assert rates == pytest.approx(expected)


def test_warmup_continues_in_the_next_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    (run,) = runs_of("models=[attention]", "settings.listops.warmup_steps=12", "settings.listops.epochs=4")
    steps = SideBySide([run], prepare(run, CPU), CPU)
    rates: list[float] = []
    monkeypatch.setattr(
        ModelRun, "train", lambda model_run, *batch: rates.append(model_run._optimizer.param_groups[0]["lr"])
    )
    steps.train_epoch(1)  # the steps 8 to 15
    assert rates == pytest.approx([run.lr * (1 + np.cos(np.pi / 4)) / 2 * min(1, (n + 1) / 12) for n in range(8, 16)])


def test_run_id_depends_on_the_warmup() -> None:
    (with_warmup,) = runs_of("scored=last")
    (without,) = runs_of("scored=last", "settings.listops.warmup_steps=0")
    assert with_warmup.id != without.id
    later = ("warmup_steps", "scored", "schedule", "drop_last", "epoch_steps", "compile")
    settings = {key: value for key, value in asdict(without).items() if key not in later}
    assert without.id == _digest(settings)


def test_history_is_on_validation_and_accuracy_on_test() -> None:
    (run,) = runs_of(*(f"settings.listops.{value}" for value in ("epochs=2", "warmup_steps=4", "lrs=[3e-3]")))
    train, validation, test = prepare(run, CPU)
    (result,) = train_together([run], (train, validation, test), CPU)
    (swapped,) = train_together([run], (train, test, validation), CPU)
    assert len(result["history"]) == 2
    assert result["accuracy"] == swapped["history"][-1]
    assert swapped["accuracy"] == result["history"][-1]
    assert result["accuracy"] * 96 == pytest.approx(
        round(result["accuracy"] * 96)
    )  # of 96 examples, the padding not counted


def test_the_command_trains_and_learns(tmp_path: Path, capsys) -> None:
    values = ("data.train_examples=1024", "epochs=2", "warmup_steps=10", "recipes.metala.lrs=[1e-2]")
    words = ["--suite", "lra", *SHORT, "models=[metala]", *(f"settings.listops.{value}" for value in values)]
    words += [f"output={tmp_path / 'out'}"]
    assert evaluation.main(words) == 0
    (line,) = [json.loads(text) for text in (tmp_path / "out" / "results.jsonl").read_text().splitlines()]
    train = generate(plan(load_experiment("lra", words[2:]), "fp32")[0])[0]
    commonest = np.bincount(train.labels[:, 0]).max() / len(train.labels)
    assert line["accuracy"] > commonest + 0.05
    assert (line["suite"], line["task"]) == ("lra", "listops")
    out = capsys.readouterr().out
    assert f"| MetaLA | {100 * line['accuracy']:.1f} |" in out
    assert (tmp_path / "out" / "results.png").stat().st_size > 5000
    assert evaluation.main(words) == 0
    assert "0 runs to do" in capsys.readouterr().out
    assert evaluation.main([*words, "tasks=[listop]"]) == 2
    assert "'listop' is unknown; did you mean listops?" in capsys.readouterr().err
