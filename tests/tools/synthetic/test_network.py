"""The models of runs: labelled positions, dropout, and blocks without MLPs."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from models.operators.dot_product import dot_product
from tools.synthetic.batches import generate, prepare, to_device
from tools.synthetic.experiment import Run, load_experiment, plan
from tools.synthetic.model_run import ModelRun
from tools.synthetic.network import Network
from tools.synthetic.training import SideBySide, train_together

CPU = torch.device("cpu")
Runs = Callable[..., list[Run]]


class _StopError(Exception):
    pass


def test_dropout_on_embeddings(runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Apply embedding dropout only in training, with a generator seeded by seed and epoch, so that a resumed run is equal."""
    words = ["epochs=3", "data.train_examples=640", "target=null", "network.embedding_dropout=0.25", "seeds=[0,1]"]
    run, other_seed = runs(*words)
    examples = prepare(run, CPU)
    (model_run,) = SideBySide([run], examples, CPU).model_runs
    assert isinstance(model_run.network, Network)
    tokens = torch.arange(16).repeat(500, 1)
    seen: list[Tensor] = []
    model_run.network.model.blocks[0].register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    for epoch in (0, 0, 1):
        model_run.begin_epoch(epoch)
        model_run.network.loss(tokens, None, tokens)
    model_run.network.logits(tokens, None)
    first, same, next_epoch, whole = seen
    assert torch.equal(first, same)
    assert not torch.equal(first, next_epoch)
    kept = first != 0
    assert kept.float().mean().item() == pytest.approx(0.75, abs=0.005)
    torch.testing.assert_close(first[kept], whole[kept] / 0.75)
    (expected,) = train_together([run], examples, CPU)
    (without,) = train_together(runs(*words, "network.embedding_dropout=0")[:1], examples, CPU)
    assert expected["loss"] != without["loss"]
    model_run_of_other = ModelRun(other_seed, CPU)
    assert model_run_of_other.dropout_generator is not None
    assert model_run.dropout_generator is not None
    model_run_of_other.begin_epoch(1)
    assert model_run_of_other.dropout_generator.initial_seed() != model_run.dropout_generator.initial_seed()
    for name in ("SECONDS_BETWEEN", "_MIN_TRAINING_PER_WRITING"):
        monkeypatch.setattr(f"tools.synthetic.run_checkpoint.{name}", 0.0)

    def stop(steps: int, text: str) -> None:
        if "epoch 2 " in text:
            raise _StopError

    with pytest.raises(_StopError):
        train_together([run], examples, CPU, progress=stop, checkpoint_folder=tmp_path)
    (result,) = train_together([run], examples, CPU, checkpoint_folder=tmp_path)
    assert result["loss"] == expected["loss"]


def test_dropout_of_attention(runs: Runs) -> None:
    """Apply attention dropout after the softmax, only in training, with a generator seeded by seed and epoch."""
    words = ["models=[attention]", "definitions.attention.attention_dropout=0.25"]
    run, without = *runs(*words), *runs(*words, "definitions.attention.attention_dropout=0")
    model_run, model_run_without = ModelRun(run, CPU), ModelRun(without, CPU)
    assert isinstance(model_run.network, Network)
    tokens = torch.randint(16, (300, 8))
    shown: list[Tensor] = []
    # With the identity as values, the mixer's sum is the attention weights.
    mixer = model_run.network.model.blocks[0].mixer
    attend = mixer.dot_product

    def weights(q: Tensor, k: Tensor, v: Tensor, *masks: Any) -> Tensor:
        shown.append(attend(q, k, torch.eye(8).expand(len(q), 1, 8, 8), *masks))
        return attend(q, k, v, *masks)

    mixer.dot_product = weights
    for epoch in (0, 0, 1):
        model_run.begin_epoch(epoch)
        model_run.network.loss(tokens, None, tokens)
    logits = model_run.network.logits(tokens, None)
    first, same, next_epoch, whole = shown
    assert torch.equal(first, same)
    assert not torch.equal(first, next_epoch)
    # Each token attends to itself and to all earlier ones.
    assert torch.equal(whole > 0, torch.ones(8, 8, dtype=torch.bool).tril().expand_as(whole))
    kept = first > 0
    assert kept.sum() / (whole > 0).sum() == pytest.approx(0.75, abs=0.02)
    torch.testing.assert_close(first[kept], whole[kept] / 0.75)
    torch.testing.assert_close(logits, model_run_without.network.logits(tokens, None))


def test_attention_equals_the_library() -> None:
    """Equal the library's attention at a dropout probability near 0, with each kind of mask."""
    run = plan(load_experiment("mqar", ["models=[attention]", "definitions.attention.attention_dropout=1e-9"]), "fp32")[
        0
    ]
    network = Network(run)
    network._dropout_active = True
    q, k, v = torch.randn(3, 2, 4, 6, 8)
    for allowed, is_causal in [(None, True), (None, False), (torch.rand(2, 1, 6, 6) > 0.4, False)]:
        if allowed is not None:
            allowed |= torch.eye(6, dtype=torch.bool)
        got = network._attend(q, k, v, allowed, is_causal)
        torch.testing.assert_close(got, F.scaled_dot_product_attention(q, k, v, allowed, is_causal=is_causal))
    torch.testing.assert_close(network._attend(q, k, v, None, True, 3), dot_product(q, k, v, None, True, 3))


@pytest.mark.parametrize("key", ["embedding_dropout", "attention_dropout"])
@pytest.mark.parametrize("value", ["1.0", "-0.1", "much"])
def test_invalid_dropout_is_refused(runs: Runs, key: str, value: str) -> None:
    with pytest.raises(ValueError, match=rf"{key} = .*: allowed are numbers >= 0 and < 1"):
        Network(runs(f"network.{key}={value}")[0])


@pytest.mark.parametrize("changes", [[], ["network.mlp=identity"], ["network.parallel_residual=true"]])
def test_float32_residual_stream_reduces_the_error_of_bf16(runs: Runs, changes: list[str]) -> None:
    """Check also that it changes nothing in float32."""
    words = ["models=[attention]", "network.num_layers=12", *changes]
    tokens = torch.arange(64).view(8, 8) % 16
    seen: dict[tuple[bool, torch.dtype], Tensor] = {}
    for wide in (False, True):
        (run,) = runs(*words, f"network.fp32_residual_connection={str(wide).lower()}")
        for dtype in (torch.float32, torch.bfloat16):
            network = Network(run).to(torch.bfloat16).to(dtype)  # of the same values
            seen[wide, dtype] = network.rows(tokens, None)
            assert seen[wide, dtype].dtype == dtype
            network.loss(tokens, None, tokens).backward()
            assert all(p.grad is not None and p.grad.isfinite().all() for p in network.parameters())
    expected = seen[False, torch.float32]
    torch.testing.assert_close(seen[True, torch.float32], expected)
    plain, wide_error = ((seen[wide, torch.bfloat16].float() - expected).norm() for wide in (False, True))
    assert wide_error < 0.7 * plain


def test_invalid_fp32_residual_connection_is_refused(runs: Runs) -> None:
    with pytest.raises(ValueError, match="fp32_residual_connection = 'much': allowed are true and false"):
        Network(runs("network.fp32_residual_connection=much")[0])


def test_compression_decodes_from_the_last_position() -> None:
    words = ["models=[metala]", "widths=[32]", "lrs=[5e-3]", "weight_decays=[0]", "tasks=[compression/baseline]"]
    (run,) = plan(load_experiment("mad", words), "fp32")
    network = Network(run)
    data = to_device(generate(replace(run, data={**run.data, "train_examples": 2}))[0], CPU)
    seen: list[Tensor] = []
    assert network.decoder is not None
    network.decoder.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    rows = network.rows(data.tokens.long(), None)
    assert seen[0].shape == (2, 32)
    assert rows.shape == (2, 32, 32)
    assert not torch.allclose(rows[:, 0], rows[:, 1]), "positions differ"
    # Wave lengths of 2 pi to 20,000 pi, the sines first.
    (positions,) = network.decoder.buffers()
    expected = [math.sin(3), math.sin(3e-4), math.cos(3), math.cos(3e-4)]
    assert positions[3, [0, 15, 16, 31]].tolist() == pytest.approx(expected, rel=1e-5)


def test_blocks_without_an_mlp(runs: Runs) -> None:
    """y = h + norm2(h) with h = x + mixer(norm1(x)), as Zoology's published models with the identity for a state mixer."""
    (run,) = runs("network.mlp=identity")
    network = Network(run)
    x = torch.randn(2, 5, run.width, generator=torch.Generator().manual_seed(0))
    block = network.model.blocks[0]
    hidden = x + block.mixer(F.layer_norm(x, (run.width,)))
    torch.testing.assert_close(block(x), hidden + F.layer_norm(hidden, (run.width,)))
    assert not [name for name, _ in network.named_parameters() if ".mlp." in name]
