"""FP8 matmuls in an engine: which layers, activation recomputation, resume, and refusals."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
import torch

from megatron_lite.checkpoint.checkpointer import Checkpointer
from megatron_lite.config.fp8_schema import Fp8Config, fp8_problems
from megatron_lite.config.schema import ParallelConfig, PrecisionConfig
from megatron_lite.engine.precision import fp8_summary, is_fp8_layer
from megatron_lite.parallel.fp8_projections import check_device, select_projections, use_fp8
from models.language_model import layer_specs
from models.mixers import MIXERS
from tests.megatron_lite.conftest import batches, model_config
from tests.megatron_lite.engine.test_engine import run

ROWWISE = {"fp8": {"recipe": "rowwise"}}


def test_fp8_differs_and_recomputation_does_not(build):
    """Compare two steps with and without FP8, and between the modes of activation recomputation."""
    config, steps = model_config(("metala", "attention"), num_layers=4), batches(2)
    fp8 = run(build(config, precision=ROWWISE), steps)
    assert fp8[1].loss != run(build(config), steps)[1].loss
    for mode in ("elementwise", "selective", "full"):
        engine = build(config, precision=ROWWISE, activation_checkpointing={"mode": mode})
        assert run(engine, steps) == fp8, mode


@pytest.mark.parametrize(("dtype", "state"), [("fp32", "fp32"), ("bf16", "fp32"), ("bf16", "bf16")])
def test_resume_is_bit_exact(build, tmp_path, dtype, state):
    """Also load a checkpoint of an FP8 run without FP8. There is no amax history."""
    steps, precision = batches(4), {**ROWWISE, "optimizer_state": state}
    engine = build(model_config(), dtype=dtype, precision=precision)
    run(engine, steps[:2])
    Checkpointer(engine, tmp_path).save(step=2, state={"step": 2}, config_yaml="a: 1\n")
    expected = [engine.train_step(step, lr=1e-4) for step in steps[2:]]
    resumed = build(model_config(), seed=99, dtype=dtype, precision=precision)
    assert Checkpointer(resumed, tmp_path).load() == {"step": 2}
    assert [resumed.train_step(step, lr=1e-4) for step in steps[2:]] == expected
    plain = build(model_config(), seed=99, dtype=dtype, precision={"optimizer_state": state})
    Checkpointer(plain, tmp_path).load()
    assert plain.train_step(steps[2], lr=1e-4).loss == pytest.approx(expected[0].loss, rel=1e-2)


def test_summary_names_the_projections_in_fp8_and_the_others(build):
    engine = build(model_config(intermediate_size=152), precision=ROWWISE)
    assert engine.fp8_summary == (
        "FP8 (rowwise) in 2 of 2 blocks: mixer.q_proj, mixer.v_proj, mixer.gate_proj, mixer.out_proj; in fp32: "
        "mixer.a_proj (not declared for FP8); mlp.gate_proj, mlp.up_proj (64 x 152 per rank is no multiple of 16); "
        "mlp.down_proj (152 x 64 per rank is no multiple of 16)"
    )
    assert build(model_config()).fp8_summary == ""


def test_summary_names_the_blocks_whose_projection_of_this_name_is_not_in_fp8():
    """Check a hybrid, whose projections of one name differ in width: keys of gated_delta_net have 24 channels per rank."""
    layers = model_layers(mixers=("gated_delta_net", "gated_delta_net", "attention"), num_layers=3)
    summary = fp8_summary(Fp8Config(recipe="rowwise"), layers, 2, "fp32")
    assert "mixer.q_proj of blocks 0, 1, mixer.k_proj of blocks 0, 1 (64 x 24 per rank is no multiple of 16)" in summary
    assert "mixer.gate_proj (not declared for FP8)" in summary  # attention has none


def test_widths_are_those_of_a_tensor_parallel_rank():
    (_, block, *_) = model_layers(intermediate_size=160)
    assert "mlp.down_proj" in select_projections(block, 2)[0]
    assert select_projections(block, 4)[1]["mlp.down_proj"] == "40 x 64 per rank is no multiple of 16"


@pytest.mark.parametrize("mixer", MIXERS)
def test_every_mixer_declares_projections_without_gates_and_decays(mixer):
    """Compare with names that mean a gate or a decay in every mixer; the gate of an MLP is a large matmul like the others."""
    options = {"lion": {"variant": "s"}, "metala": {"key_projection": True}}
    (_, block, *_) = model_layers(mixers=(mixer,), mixer_options={mixer: options.get(mixer, {})})
    selected, _ = select_projections(block, 1)
    in_mixer = [name.removeprefix("mixer.") for name in selected if name.startswith("mixer.")]
    assert "out_proj" in in_mixer
    assert set(in_mixer) <= set(type(block.mixer).fp8_projections)
    others = ("a_proj", "b_proj", "dt_proj", "eta_proj", "f_proj", "input_proj", "w_proj")
    assert not set(in_mixer) & set(others)
    assert ("gate_proj" in in_mixer) == (mixer == "metala")  # its loss in FP8 equals that in bf16
    assert not [name for name in in_mixer if name.endswith(("_down", "_up")) or "decay" in name]
    assert {"mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"} <= set(selected)


def test_output_gate_of_metala_adds_as_much_error_as_the_output_projection():
    """Measure the relative error of a layer's output with initial weights, beside the layer without FP8."""
    config = model_config(hidden_size=256, num_heads=4)
    x = torch.randn(2, 128, 256, generator=torch.Generator().manual_seed(0))

    def output(*names: str) -> torch.Tensor:
        mixer = layer_specs(config)[1].build(0).mixer
        use_fp8(mixer, names)
        return mixer(x).detach()

    def error(*names: str) -> float:
        return ((output(*names) - output()).norm() / output().norm()).item()

    others = ("q_proj", "v_proj", "out_proj")
    assert error("gate_proj") == pytest.approx(error("out_proj"), rel=0.1) == pytest.approx(0.038, rel=0.1)
    assert error(*others) == pytest.approx(0.078, rel=0.1)
    assert error(*others, "gate_proj") == pytest.approx(0.088, rel=0.1)


def test_first_and_last_blocks_stay_in_bf16():
    fp8 = Fp8Config(recipe="rowwise", num_layers_at_start_in_bf16=1, num_layers_at_end_in_bf16=2)
    covered = [index for index in range(8) if is_fp8_layer(fp8, index, 8)]
    assert covered == [2, 3, 4]  # of the layers: embedding, six blocks, head
    assert not any(is_fp8_layer(Fp8Config(), index, 8) for index in range(8))
    assert fp8_summary(fp8, model_layers(num_layers=6), 1, "bf16").startswith("FP8 (rowwise) in 3 of 6 blocks: ")


def test_config_without_a_block_in_fp8_is_refused():
    fp8 = Fp8Config(recipe="rowwise", num_layers_at_start_in_bf16=3, num_layers_at_end_in_bf16=1)
    precision = PrecisionConfig(dtype="bf16", fp8=fp8)
    settings = SimpleNamespace(precision=precision, parallel=ParallelConfig(), model=model_config(num_layers=4))
    text = (
        "and num_layers_at_end_in_bf16 leave no block in FP8: their sum 4 must be less than model.num_layers = 4, or set "
        "recipe=none"
    )
    assert list(fp8_problems(settings)) == [(("precision", "fp8", "num_layers_at_start_in_bf16"), text)]
    settings.model = model_config(num_layers=5)
    assert not list(fp8_problems(settings))


def test_a_model_without_any_fp8_projection_is_refused(build):
    config = model_config(("lion",), hidden_size=40, intermediate_size=88)
    message = r"no projection of this model can run in FP8: mixer\.q_proj.*\. Choose widths per rank that are multiples of 16, or"
    with pytest.raises(ValueError, match=message):
        build(config, precision=ROWWISE)


@pytest.mark.parametrize(
    ("name", "capability", "cuda", "message"),
    [
        ("NVIDIA A100", (8, 0), "13.0", "NVIDIA A100 has 8.0; FP8 matmuls need compute capability 9.0 or higher"),
        ("AMD MI300X", (9, 4), None, "AMD MI300X is no CUDA device; FP8 matmuls need"),
    ],
)
def test_a_device_without_fp8_is_refused_by_name(monkeypatch, name, capability, cuda, message):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    with pytest.raises(ValueError, match=re.escape(message) + ".*precision.fp8.recipe=none, which trains in bf16"):
        check_device(torch.device("cuda", 0), "bf16", "rowwise")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    check_device(torch.device("cuda", 0), "bf16", "rowwise")
    with pytest.raises(ValueError, match=r"needs precision.dtype = bf16, but it is fp32; set precision.dtype=bf16, or"):
        check_device(torch.device("cuda", 0), "fp32", "rowwise")
    check_device(torch.device("cpu"), "fp32", "rowwise")


def model_layers(**changes):
    config = model_config(**changes)
    with torch.device("meta"):
        return [spec.build() for spec in layer_specs(config)]
