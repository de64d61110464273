"""The options of a classifier's blocks: BatchNorm and dropout of whole channels."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from models.config import ModelConfig
from tests.tools.synthetic.test_lra import SMALL_PATHS
from tools.synthetic.batches import generate, prepare
from tools.synthetic.classifier import BatchNorm, Classifier
from tools.synthetic.experiment import Run, load_experiment, plan
from tools.synthetic.model_run import ModelRun
from tools.synthetic.network import _run_block, model_config
from tools.synthetic.run_checkpoint import TimeUpError
from tools.synthetic.training import SideBySide, train_together

CPU = torch.device("cpu")
BATCHNORM = "network.norm=batchnorm"


def run_of(*words: str, precision: str = "fp32") -> Run:
    (run,) = plan(load_experiment("lra", [*SMALL_PATHS, *words]), precision)
    return run


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_batch_norm_equals_the_library(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    norm = BatchNorm(ModelConfig(vocab_size=2, hidden_size=6, num_layers=1, num_heads=1))
    weight, bias = torch.randn(2, 6, generator=generator).to(dtype)
    norm.load_state_dict({"weight": weight, "bias": bias}, strict=False)
    norm.to(dtype)
    expected = torch.nn.BatchNorm1d(6)
    expected.load_state_dict({"weight": weight.float(), "bias": bias.float()}, strict=False)
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 1e-2, "atol": 1e-2}
    for training in (True, True, False):
        norm.training = expected.training = training
        x, delta = (torch.randn(3, 5, 6, generator=generator) * 2 + 1).to(dtype), torch.ones(3, 5, 6).to(dtype)
        y, h = norm(x, delta, return_sum=True)
        torch.testing.assert_close(h, x + delta)
        torch.testing.assert_close(y.float(), expected(h.float().mT).mT, **tolerance)
        assert norm(x).dtype == dtype
        expected(x.float().mT)
    assert norm.mean.dtype == norm.variance.dtype == torch.float32
    torch.testing.assert_close(norm.mean, expected.running_mean)
    torch.testing.assert_close(norm.variance, expected.running_var)


def test_training_uses_the_batch_and_evaluation_the_averages() -> None:
    run = run_of(BATCHNORM)
    model_run = ModelRun(run, CPU)
    network = model_run.network
    norms = [module for module in network.modules() if isinstance(module, BatchNorm)]
    assert len(norms) == 3
    tokens, labels = (torch.from_numpy(part).long() for part in (generate(run)[0].tokens, generate(run)[0].labels))
    before = network.logits(tokens, None)
    network.loss(tokens, None, labels)
    assert all(norm.mean.abs().max() > 0 for norm in norms)
    after = network.logits(tokens, None)
    assert not torch.allclose(before, after)
    torch.testing.assert_close(network.logits(tokens[:1], None), after[:1], rtol=1e-4, atol=1e-5)
    model_run.reset()
    torch.testing.assert_close(network.logits(tokens, None), before)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_resumed_run_keeps_the_averages(precision: str, tmp_path: Path) -> None:
    run = run_of(BATCHNORM, precision=precision)
    examples = prepare(run, CPU)
    (expected,) = train_together([run], examples, CPU)
    with pytest.raises(TimeUpError):
        train_together([run], examples, CPU, checkpoint_folder=tmp_path, end=0.0)
    (resumed,) = train_together([run], examples, CPU, checkpoint_folder=tmp_path)
    for key in ("history", "perplexity", "loss"):
        assert resumed[key] == expected[key]


def test_loaded_moments_are_on_the_device_of_the_weights() -> None:
    """Load into an optimizer that has made no step, as in a resumed run without a CUDA graph."""
    run = run_of()
    trained = SideBySide([run], prepare(run, CPU), CPU)
    trained.train_epoch(0)
    resumed = ModelRun(run, torch.device("meta"))
    resumed.load_state(trained.model_runs[0].state())
    moments = [value for flat in resumed.flats for value in resumed._optimizer.state[flat.master].values()]
    assert {value.device.type for value in moments} == {"meta"}
    assert len(moments) == 3 * len(resumed.flats)


def test_compiled_blocks_equal_plain_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trace blocks with dropout and BatchNorm's averages. Code is not generated, because its compilation takes a minute."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    words = BATCHNORM, "network.residual_dropout=0.5", "network.tie_dropout=true"
    results = []
    for run in (run_of(*words), run_of(*words, "compile=true")):
        steps = SideBySide([run], prepare(run, CPU), CPU)
        steps.train_epoch(0)
        evaluations, losses = steps.evaluate()
        results.append([*losses, evaluations[0].perplexity, *steps.model_runs[0].state()["weights"][0].tolist()])
    assert results[1] == pytest.approx(results[0], rel=1e-4, abs=1e-6)


def test_tied_dropout_drops_a_channel_at_all_tokens() -> None:
    model_run = ModelRun(run_of("network.residual_dropout=0.5", "network.tie_dropout=true"), CPU)
    network = model_run.network
    model_run.begin_epoch(0)
    network._dropout_active = True
    dropped = network._dropout(torch.ones(40, 7, 50), 0.5)
    assert (dropped == dropped[:, :1]).all()
    assert sorted(set(dropped.flatten().tolist())) == [0.0, 2.0]
    assert dropped.mean().item() == pytest.approx(1, abs=0.1)
    assert (dropped[0] != dropped[1]).any()


def test_outputs_that_stay_are_scaled() -> None:
    """Keep the mixer's outputs and drop the MLP's."""
    network = Classifier(run_of("network.residual_dropout=0.3"), 2, images=True)
    block = network.blocks[0]
    x = torch.randn(2, 256, 16)
    mixed = block.mixer(block.norm1(x))
    kept = torch.ones_like(x), torch.zeros_like(x)
    y = _run_block(block, x, None, x.dtype, *kept, 1 / 0.7)
    torch.testing.assert_close(y, x + mixed / 0.7)


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("network.tie_dropout=3", "tie_dropout = 3: allowed are true and false, true only for a classifier"),
        (
            "network.norm=groupnorm",
            "norm = 'groupnorm': allowed are layernorm and rmsnorm, for a classifier also batchnorm",
        ),
    ],
)
def test_wrong_options_are_refused(word: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        model_config(run_of(word))


@pytest.mark.parametrize(
    ("word", "message"),
    [("network.tie_dropout=true", "true only for a classifier"), (BATCHNORM, "for a classifier also batchnorm")],
)
def test_a_language_model_has_neither(word: str, message: str) -> None:
    run = plan(load_experiment("mqar", ["models=[metala]", "widths=[64]", "lrs=[1e-3]", word]), "fp32")[0]
    with pytest.raises(ValueError, match=message):
        model_config(run)


def test_rows_that_fill_a_batch_are_not_in_the_statistics() -> None:
    """Refuse a last batch that is filled with rows without labels."""
    with pytest.raises(ValueError, match=r"drop_last = false with norm = batchnorm: .*; set drop_last = true"):
        model_config(run_of(BATCHNORM, "drop_last=false"))
