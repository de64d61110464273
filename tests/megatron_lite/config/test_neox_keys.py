"""A GPT-NeoX key is answered with its name here, and the names exist."""

from __future__ import annotations

import pytest

from megatron_lite.config.describe import keys_of, leaves
from megatron_lite.config.loader import Config, ConfigError, load_config
from megatron_lite.config.neox_hints import NEOX_KEYS
from models.config import ModelConfig
from models.mixers import MIXERS

from .stand_in import REQUIRED, StandIn

# The keys that users of GPT-NeoX know.
KNOWN = [
    *("pipe_parallel_size", "model_parallel_size", "num_layers", "hidden_size", "num_attention_heads", "seq_length"),
    *("norm", "pos_emb", "rotary_pct", "no_weight_tying", "intermediate_size", "gpt_j_residual"),
    *("init_method", "output_layer_init_method", "checkpoint_activations", "precision"),
    *("optimizer.type", "optimizer.params.lr", "optimizer.params.betas", "optimizer.params.eps", "weight_decay"),
    *("min_lr", "lr_decay_style", "lr_decay_iters", "warmup", "gradient_clipping", "train_iters"),
    *("zero_optimization.stage", "fp16", "fp16.enabled", "bf16", "bf16.enabled"),
    *("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gas"),
    *("data_path", "train_data_paths", "train_data_weights", "split", "tokenizer_type", "vocab_file", "eod_mask_loss"),
    *("eval_interval", "eval_iters", "log_interval", "save", "load", "checkpoint_factor", "checkpoint_scale"),
    *("extra_save_iters", "keep_last_n_checkpoints"),
]


def answer(override: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config([], [*REQUIRED, override], model_type=StandIn, world_size=1)
    (line,) = caught.value.problems
    return line


@pytest.mark.parametrize("key", KNOWN)
def test_every_known_key_is_answered(key: str) -> None:
    assert "is a GPT-NeoX key" in answer(f"{key}=1")


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("seq_length=2048", "seq_length is a GPT-NeoX key; here it is batch.sequence_length"),
        ("seq-length=2048", "seq-length is a GPT-NeoX key; here it is batch.sequence_length"),
        ("batch.seq_length=2048", "batch.seq_length is a GPT-NeoX key; here it is batch.sequence_length"),
        ("optimizer.params.lr=1", "optimizer.params.lr is a GPT-NeoX key; here it is optimizer.lr"),
        ("optimizer.params={lr: 1}", "optimizer.params.lr is a GPT-NeoX key; here it is optimizer.lr"),
        ("zero_optimization={stage: 1}", "zero_optimization.stage is a GPT-NeoX key; here it is parallel.zero_stage"),
        ("zero_optimization={overlap_comm: true}",
         "zero_optimization.overlap_comm is a GPT-NeoX key; here it is parallel.zero_stage "
         "(only the stage is a setting)"),
        ("fp16={loss_scale_window: 5}",
         "fp16.loss_scale_window is a GPT-NeoX key; here it is precision.fp16.scale_window"),
        ("no_weight_tying=true",
         "no_weight_tying is a GPT-NeoX key; here it is model.tie_embeddings (the opposite: true becomes false)"),
        ("checkpoint_num_layers=2",
         "checkpoint_num_layers is a GPT-NeoX key without a counterpart: blocks are recomputed one by one: leave it out"),
        ("hidden-dropout=0",
         "hidden-dropout is a GPT-NeoX key without a counterpart: there is no dropout here: leave it out"),
    ],
)  # fmt: skip
def test_the_answer_is_the_new_name(override: str, expected: str) -> None:
    assert answer(override) == f"{expected} (override {override})"


def test_every_name_in_the_table_exists() -> None:
    names = {".".join(path) for path, _ in leaves(Config[ModelConfig])}
    names |= {"precision.fp16"}
    names |= {f"model.mixer_options.{mixer}.{option}" for mixer in MIXERS for option in keys_of(MIXERS[mixer].Options)}
    assert {name for reply in NEOX_KEYS.values() for name in reply.keys} <= names


def test_a_name_that_both_projects_use_is_answered_where_the_meaning_differs() -> None:
    """Only `precision` is a key there and a section here."""
    assert [key for key in NEOX_KEYS if key in keys_of(Config[ModelConfig])] == ["precision"]
    assert answer("precision=fp16").startswith("precision is a GPT-NeoX key; here it is precision.dtype")
    assert answer("precision.dtpye=bf16").startswith("precision.dtpye is an unknown key; nearest: precision.dtype")
