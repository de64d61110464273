"""Check that GPT-NeoX configurations are translated."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_lite.config.loader import load_config
from models.config import ModelConfig
from models.language_model import count_parameters
from tools.neox_config import main

# The shape and recipe of Pythia-410M as GPT-NeoX writes it: dashes and underscores, JSON with commas at the end.
PYTHIA = """{
  "pipe-parallel-size": 1, "model-parallel-size": 1,
  "num-layers": 24, "hidden-size": 1024, "num-attention-heads": 16,
  "seq-length": 2048, "max-position-embeddings": 2048,
  "pos-emb": "rotary", "rotary-pct": 0.25, "no-weight-tying": true, "gpt-j-residual": true,
  "attention-config": [[["flash"], 24]],
  "bias-gelu-fusion": true,
  "init_method": "small_init", "output_layer_init_method": "wang_init",
  "optimizer": {"type": "Adam", "params": {"lr": 0.0003, "betas": [0.9, 0.95], "eps": 1.0e-8}},
  "min_lr": 0.00003,
  "zero_optimization": {"stage": 1, "overlap_comm": true, "cpu_offload": false},
  "train_micro_batch_size_per_gpu": 32, "gas": 1,
  "checkpoint-activations": true, "checkpoint-num-layers": 1,
  "gradient_clipping": 1.0, "weight-decay": 0.1, "hidden-dropout": 0,
  "fp16": {"fp16": true, "enabled": true, "loss_scale": 0, "initial_scale_power": 12, "min_loss_scale": 1,},
  "train-iters": 143000, "lr-decay-iters": 143000, "lr-decay-style": "cosine", "warmup": 0.01,
  "checkpoint-factor": 1000, "extra-save-iters": [0, 1, 2, 4],
  "eval-interval": 40000, "eval-iters": 10, "log-interval": 10,
  "tokenizer-type": "HFTokenizer",
}
"""


FILES = "train_data_paths: [a]\nvocab_file: t.model\ntokenizer_type: SPMTokenizer"


def converted(tmp_path: Path, text: str, *more: str) -> Any:
    (tmp_path / "pythia.yml").write_text(text)
    assert main([str(tmp_path / "pythia.yml"), "-o", str(tmp_path / "run.yml"), *more]) == 0
    return load_config([tmp_path / "run.yml"], [], model_type=ModelConfig, world_size=1)


def test_pythia_410m_has_the_projects_shape(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = converted(tmp_path, PYTHIA)
    ours = load_config(["configs/transformer_410m.yml"], [], model_type=ModelConfig, world_size=1).model
    assert count_parameters(config.model) == count_parameters(ours) == 405_334_016
    different = {
        key
        for key in vars(ours)
        if getattr(ours, key) != getattr(config.model, key) and key not in ("intermediate_size", "mixer_options")
    }
    assert not different
    assert config.model.options_of("attention") == ours.options_of("attention")
    assert config.model.mlp_width == ours.mlp_width
    assert (config.optimizer.lr, config.optimizer.betas, config.optimizer.weight_decay) == (3e-4, (0.9, 0.95), 0.1)
    assert (config.schedule.kind, config.schedule.train_steps, config.schedule.min_lr_ratio) == ("cosine", 143000, 0.1)
    assert config.precision.dtype == "fp16"
    assert config.precision.fp16.initial_scale_power == 12
    assert config.checkpoint.extra_steps == (1, 2, 4)
    assert config.parallel.activation_checkpointing.mode == "full"
    output = capsys.readouterr().err
    assert "model.vocab_size = 50304: GPT-NeoX-20B's tokenizer has 50277 entries, padded to a multiple of 128" in output
    assert "data.corpus = stdlib: the files name no data" in output
    important, harmless = output.split("ignored, with an effect on the run:")[1].split("ignored, without an effect: ")
    assert important.split()[0] == "bias-gelu-fusion"
    assert {"zero_optimization.cpu_offload", "zero_optimization.overlap_comm"} <= set(harmless.strip().split(", "))
    assert "\n" not in harmless.strip()


def test_several_files_are_merged(tmp_path: Path) -> None:
    more = """
pipe-parallel-size: 0
train_data_paths: [data/a_text_document, data/b_text_document]
train_data_weights: [1, 3]
valid_data_paths: [data/v_text_document]
vocab-file: data/20B_tokenizer.json
tokenizer-type: HFTokenizer
precision: bfloat16
"""
    (tmp_path / "more.yml").write_text(more)
    (tmp_path / "base.yml").write_text(PYTHIA)
    out = tmp_path / "run.yml"
    assert main([str(tmp_path / "base.yml"), str(tmp_path / "more.yml"), "-o", str(out)]) == 0
    tree = yaml.safe_load(out.read_text())
    assert tree["data"]["train"] == ["data/a_text_document", "data/b_text_document"]
    assert tree["data"]["blend"] == {"by": "weights", "weights": [1, 3]}
    assert tree["data"]["validation"] == "data/v_text_document"
    assert tree["data"]["tokenizer"] == {"path": "data/20B_tokenizer.json", "type": "hf"}
    assert tree["parallel"]["pipeline"] == 1
    assert tree["precision"]["dtype"] == "bf16"


SMALL = """
num_layers: 2
hidden_size: 64
num_attention_heads: 4
seq_length: 128
max_position_embeddings: 128
train_micro_batch_size_per_gpu: 4
gas: 1
optimizer: {type: Adam, params: {lr: 0.001}}
train_iters: 10
"""


def test_absent_keys_have_gpt_neox_defaults(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = converted(tmp_path, SMALL)
    assert config.model.positions == "learned"
    assert config.model.max_positions == 128
    assert config.model.options_of("attention").rotary_pct == 0
    assert config.model.tie_embeddings
    assert not config.model.parallel_residual
    assert config.optimizer.betas == (0.9, 0.999)
    assert config.schedule.kind == "linear"
    assert config.schedule.min_lr_ratio == 0
    assert (config.model.init_method, config.model.output_init_method) == ("normal", "scaled_normal")
    capsys.readouterr()
    assert converted(tmp_path, f"{SMALL}\ninit_method: orthogonal\n").model.init_method == "wang_init"
    assert "orthogonal does not exist here" in capsys.readouterr().err


def test_warmup_is_a_share_of_the_decay(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    more = "train_iters: 1000\nlr_decay_iters: 400\nwarmup: 0.1\nlr_decay_style: cosine\nmin_lr: 0.0001\n"
    config = converted(tmp_path, SMALL.replace("train_iters: 10\n", more))
    assert (config.schedule.warmup_steps, config.schedule.decay_steps, config.schedule.train_steps) == (40, 400, 1000)
    assert config.optimizer.no_weight_decay == ("norm", "bias", "decay")
    assumed = capsys.readouterr().err.split("assumed:")[1]
    assert "optimizer.no_weight_decay = [norm, bias, decay]: embeddings have weight decay in GPT-NeoX" in assumed
    assert "before, its rate of step n was max(peak / 2 (1 + cos(pi (n - w) / end)), min_lr)" in assumed
    assert (
        converted(
            tmp_path, SMALL.replace("train_iters: 10\n", more.replace("lr_decay_iters: 400\n", ""))
        ).schedule.warmup_steps
        == 100
    )


@pytest.mark.parametrize("given", ["[global, flash]", "[[[flash], 1], [[global], 1]]", "[[[flash], all]]"])
def test_attention_config_forms(given: str, tmp_path: Path) -> None:
    assert converted(tmp_path, f"{SMALL}attention_config: {given}\nmoe_num_experts: 1\n").model.mixers == ("attention",)


def test_llama_2_has_its_number_of_parameters(tmp_path: Path) -> None:
    llama = """
num_layers: 32
hidden_size: 4096
intermediate_size: 32768
mlp_multiple_of: 256
num_attention_heads: 32
seq_length: 4096
pos_emb: rotary
no_weight_tying: true
norm: rmsnorm
activation: swiglu
use_bias_in_norms: false
use_bias_in_attn_linear: false
use_bias_in_mlp: false
train_micro_batch_size_per_gpu: 4
optimizer: {type: Adam, params: {lr: 0.001}}
train_iters: 10
"""
    config = converted(tmp_path, llama, "--vocab-size", "32000").model
    assert config.mlp_width == 11008  # 2/3 of 32768 is the width of gate and input together, each padded to 256
    assert count_parameters(config) == 6_738_415_616
    # GPT-NeoX's default has as many parameters as a GELU of four times the width.
    small = converted(tmp_path, f"{SMALL}activation: swiglu\n").model
    assert small.mlp_width == 85
    assert converted(tmp_path, f"{SMALL}mlp_multiple_of: 96\n").model.mlp_width == 288
    assert converted(tmp_path, f"{SMALL}intermediate_size: 100\n").model.mlp_width == 100


@pytest.mark.parametrize(
    ("given", "sizes"),
    [
        ("train_micro_batch_size_per_gpu: 4", (4, 1)),  # as in GPT-NeoX's 125M.yml
        ("train_micro_batch_size_per_gpu: 4\ngradient_accumulation_steps: 2", (4, 2)),
        ("train_micro_batch_size_per_gpu: 4\ntrain_batch_size: 16", (4, 4)),
        ("train_batch_size: 16\ngas: 8", (2, 8)),
        ("train_batch_size: 16\ngas: null", (16, 1)),
    ],
)
def test_batch_sizes(given: str, sizes: tuple[int, int], tmp_path: Path) -> None:
    batch = converted(tmp_path, SMALL.replace("train_micro_batch_size_per_gpu: 4\ngas: 1", given)).batch
    assert (batch.micro_batch_size, batch.gradient_accumulation_steps) == sizes


def test_three_batch_sizes_give_the_number_of_data_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "neox.yml"
    path.write_text(SMALL.replace("gas: 1", "gas: 2\ntrain_batch_size: 64\nmodel_parallel_size: 2"))
    assert main([str(path), "-o", str(tmp_path / "run.yml")]) == 0
    batch = load_config([tmp_path / "run.yml"], [], model_type=ModelConfig, world_size=16).batch
    assert (batch.data_ranks, batch.global_batch_size) == (8, 64)
    path.write_text(path.read_text().replace("64\nmodel", "63\nmodel"))
    assert main([str(path)]) == 2
    assert "train_batch_size (here batch.global_batch_size) = 63 is not 4 x 2 x 7 = 56" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "dtype"),
    [
        ("", "fp32"),
        ("fp16: {enabled: false}", "fp32"),
        ("fp16: {enabled: true}", "fp16"),
        ("fp16: {enabled: true, type: bfloat16, loss_scale: 0}", "bf16"),  # earlier bf16_125M.yml
        ("bf16: {enabled: true}", "bf16"),
        ("precision: fp16\nfp16: {loss_scale_window: 7, auto_cast: true}", "fp16"),
    ],
)
def test_precision(given: str, dtype: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    precision = converted(tmp_path, f"{SMALL}{given}\n").precision
    assert precision.dtype == dtype
    if "window" in given:
        assert precision.fp16.scale_window == 7
        assert "fp16.auto_cast" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "interval", "log_spaced", "extra"),
    [
        ("checkpoint_scale: linear\ncheckpoint_factor: 2", 2, False, ()),
        ("checkpoint_scale: log\ncheckpoint_factor: 2", 0, True, ()),
        ("checkpoint_scale: log\ncheckpoint_factor: 3\nextra_save_iters: [0, 4]", 0, False, (1, 3, 4, 9)),
    ],
)
def test_checkpoints(given: str, interval: int, log_spaced: bool, extra: tuple[int, ...], tmp_path: Path) -> None:
    checkpoint = converted(tmp_path, f"{SMALL}{given}\n").checkpoint
    assert (checkpoint.interval, checkpoint.log_spaced, checkpoint.extra_steps) == (interval, log_spaced, extra)


@pytest.mark.parametrize(
    ("given", "key", "value"),
    [
        ("", "model.norm", "layernorm"),
        ("", "model.norm_eps", 1e-5),
        ("layernorm_epsilon: 1.0e-6\nrms_norm_epsilon: 1.0e-7", "model.norm_eps", 1e-6),
        ("norm: rmsnorm", "model.norm_eps", 1e-8),
        ("norm: rmsnorm\nlayernorm_epsilon: 1.0e-6\nrms_norm_epsilon: 1.0e-7", "model.norm_eps", 1e-7),
        ("", "model.mlp_bias", True),
        ("use_bias_in_mlp: false", "model.mlp_bias", False),
        ("max-position-embeddings: 256", "model.max_positions", 256),
        ("pos-emb: rotary\nrotary-emb-base: 500", "model.mixer_options.attention.rotary_base", 500),
        ("", "model.mixer_options.attention.bias", True),
        ("use_bias_in_attn_linear: false", "model.mixer_options.attention.bias", False),
        ("num-kv-heads: 2", "model.mixer_options.attention.num_kv_heads", 2),
        ("sliding-window-width: 8", "model.mixer_options.attention.window", 9),
        ("", "optimizer.weight_decay", 0.1),
        ("weight-decay: 0.2", "optimizer.weight_decay", 0.2),
        ("optimizer: {type: cpu_adam, params: {lr: 0.1, weight-decay: 0.3}}", "optimizer.weight_decay", 0.3),
        ("", "optimizer.gradient_clipping", 1.0),
        ("", "optimizer.eps", 1e-8),
        ("train_iters: 1000", "schedule.warmup_steps", 10),
        ("lr-decay-style: constant", "schedule.kind", "constant"),
        ("zero_optimization: {overlap_comm: true}", "parallel.zero_stage", 0),
        ("checkpoint-activations: false", "parallel.activation_checkpointing.mode", "none"),
        ("fp16: {enabled: true, hysteresis: 3, min_loss_scale: 4}", "precision.fp16.hysteresis", 3),
        ("fp16: {enabled: true, hysteresis: 3, min_loss_scale: 4}", "precision.fp16.min_scale", 4),
        ("tensorboard-dir: logs", "logging.tensorboard", True),
        ("use_wandb: true\nwandb_project: p\nwandb_team: t", "logging.wandb.entity", "t"),
        ("keep-last-n-checkpoints: 3", "checkpoint.keep_last", 3),
        ("eval-iters: 7", "evaluation.batches", 7),
        (f"{FILES}", "data.tokenizer.type", "sentencepiece"),
        (f"{FILES}\ntest_data_paths: [c]\nvalid_data_paths: [b]", "data.test", "c"),
        (f"{FILES}\neod_mask_loss: true", "data.mask_boundaries", True),
        ("data_path: a\nvocab_file: gpt2-vocab.json\nmerge_file: gpt2-merges.txt", "data.tokenizer.type", "gpt2"),
        ("warmup_iters: 3", "schedule.warmup_steps", 3),
        ("lr_decay_iters: 8\nlr_warmup_iters: 3", "schedule.warmup_steps", 3),
        ("decay_lr_to: 0.033", "schedule.min_lr_ratio", 0.033),
        ("clip_grad: 0.5", "optimizer.gradient_clipping", 0.5),
        ("zero_optimization: {stage: 1, offload_optimizer: {device: none}}", "parallel.zero_stage", 1),
        ("load: a\nsave: a\nfinetune: true", "checkpoint.directory", "a"),
    ],
)
def test_values(given: str, key: str, value: Any, tmp_path: Path) -> None:
    others = [line for line in SMALL.splitlines() if line.split(":")[0] not in given.replace("-", "_").split(":")[0]]
    # The files of tokenizers need not exist.
    node: Any = converted(tmp_path, "\n".join([*others, given, ""]), "--vocab-size", "8192")
    for name in key.split("."):
        node = node[name] if isinstance(node, dict) else getattr(node, name)
    assert node == value


def test_pipeline_layout_and_ignored_keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    more = "pipe_parallel_size: 2\ncheckpoint_activations: true\ncheckpoint_num_layers: 2\n"
    more += f"zero_optimization: {{stage: 1, {', '.join(f'z{letter}: 1' for letter in 'fdbace')}}}\n"
    (tmp_path / "neox.yml").write_text(f"{SMALL}{more}fp16: {{enabled: true, loss_scale: 128}}\n")
    assert main([str(tmp_path / "neox.yml"), "-o", str(tmp_path / "run.yml")]) == 0
    assert yaml.safe_load((tmp_path / "run.yml").read_text())["parallel"]["pipeline"] == 2
    output = capsys.readouterr().err
    assert "checkpoint_num_layers" in output
    assert re.findall(r"zero_optimization\.z(\w)", output) == list("fdbace"), "in the order of the file"
    assert "the loss scale is dynamic here" in output


def test_token_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = "vocab_file: 20B.json\ntokenizer_type: HFTokenizer\n"
    tokenizer += "make_vocab_size_divisible_by: 64\n"
    both = f"{SMALL}{tokenizer}train_data_paths: [a, b]\nvalid_data_paths: [v]\nvalid_data_weights: [1]\n"
    blend = converted(tmp_path, both).data.blend
    assert (blend.by, blend.weights) == ("weights", (1.0, 1.0))
    assert "first part of split" not in capsys.readouterr().err
    one = converted(tmp_path, both.replace("[a, b]", "[a]\ntrain_data_weights: [2]")).data
    assert (one.train, one.blend.by) == ("a", "tokens")
    capsys.readouterr()
    converted(tmp_path, f"{SMALL}{tokenizer}data_path: a\n")
    assert "GPT-NeoX trains on the documents of the first part of split" in capsys.readouterr().err


def test_only_the_first_validation_set_is_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for given, more in (("[data/v, data/w]", True), ("data/v", False)):
        (tmp_path / "neox.yml").write_text(
            f"{SMALL}data_path: data/t\nvalid_data_paths: {given}\nvocab_file: 20B.json\ntokenizer_type: HFTokenizer\n"
        )
        assert main([str(tmp_path / "neox.yml"), "-o", str(tmp_path / "run.yml")]) == 0
        assert yaml.safe_load((tmp_path / "run.yml").read_text())["data"]["validation"] == "data/v"
        output = capsys.readouterr().err
        assert ("valid_data_paths: data/w" in output) == more
        assert output.count("valid_data_paths") == more


def test_run_is_named_after_the_first_file_and_later_files_override(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "model.yml").write_text(SMALL)
    (tmp_path / "local.yml").write_text("train-iters: 20\nload: elsewhere\nsave: here\nexit_interval: 5\n")
    assert main([str(tmp_path / "model"), str(tmp_path / "local.yml")]) == 0
    out, error = capsys.readouterr()
    tree = yaml.safe_load(out)
    assert (tree["run"]["name"], tree["schedule"]["train_steps"]) == ("model", 20)
    assert f"train-iters = 20 of {tmp_path / 'local.yml'} replaces 10" in error
    assert error.index("load ") < error.index("exit_interval ")
