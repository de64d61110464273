"""Map the keys of a GPT-NeoX configuration to the keys of this project.

An unknown key that GPT-NeoX has is reported with its name in this project. Keys are written with underscores;
GPT-NeoX allows dashes too. Source: the configuration files and argument reference of EleutherAI/gpt-neox.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Answer:
    """Hold the names in this project (`keys`, empty if there is no counterpart) and what differs (`note`)."""

    keys: tuple[str, ...] = ()
    note: str = ""


def _to(*keys: str, note: str = "") -> Answer:
    return Answer(keys, note)


NEOX_KEYS: dict[str, Answer] = {
    # model
    "num_layers": _to("model.num_layers"),
    "hidden_size": _to("model.hidden_size"),
    "num_attention_heads": _to("model.num_heads"),
    "num_kv_heads": _to("model.mixer_options.attention.num_kv_heads"),
    "sliding_window_width": _to("model.mixer_options.attention.window", note="one more: it counts the token itself"),
    "intermediate_size": _to("model.intermediate_size", note="with swiglu a third of it"),
    "norm": _to("model.norm"),
    "layernorm_epsilon": _to("model.norm_eps"),
    "rms_norm_epsilon": _to("model.norm_eps"),
    "activation": _to("model.mlp", note="gelu or swiglu"),
    "mlp_type": _to("model.mlp", note="gelu or swiglu"),
    "use_bias_in_mlp": _to("model.mlp_bias"),
    "pos_emb": _to(
        "model.positions",
        "model.mixer_options.attention.rotary_pct",
        note="learned is the model's; rotary the attention mixer's, 0 for no positions",
    ),
    "rotary_pct": _to("model.mixer_options.attention.rotary_pct"),
    "rotary_emb_base": _to("model.mixer_options.attention.rotary_base"),
    "attention_config": _to("model.mixers", note="a pattern such as [metala, attention], repeated over the layers"),
    "no_weight_tying": _to("model.tie_embeddings", note="the opposite: true becomes false"),
    "gpt_j_residual": _to("model.parallel_residual"),
    "init_method": _to("model.init_method"),
    "init_method_std": _to("model.init_std"),
    "output_layer_init_method": _to("model.output_init_method"),
    "hidden_dropout": _to(note="there is no dropout here: leave it out"),
    "attention_dropout": _to(note="there is no dropout here: leave it out"),
    "max_position_embeddings": _to("model.max_positions", note="with model.positions = learned only"),
    "make_vocab_size_divisible_by": _to("model.vocab_size", note="the padded size itself"),
    # batch and layout
    "seq_length": _to("batch.sequence_length"),
    "train_batch_size": _to("batch.global_batch_size"),
    "train_micro_batch_size_per_gpu": _to("batch.micro_batch_size"),
    "gas": _to("batch.gradient_accumulation_steps"),
    "gradient_accumulation_steps": _to("batch.gradient_accumulation_steps"),
    "pipe_parallel_size": _to("parallel.pipeline", note="at least 1"),
    "model_parallel_size": _to("parallel.tensor"),
    "sequence_parallel": _to("parallel.sequence_parallel"),
    "context_parallel_size": _to("parallel.context", note="for the mixers with a recurrent state"),
    "zero_optimization.stage": _to("parallel.zero_stage"),
    "zero_optimization": _to("parallel.zero_stage", note="only the stage is a setting"),
    "checkpoint_activations": _to("parallel.activation_checkpointing.mode", note="true becomes full"),
    "checkpoint_num_layers": _to(note="blocks are recomputed one by one: leave it out"),
    # optimizer and schedule
    "optimizer.type": _to("optimizer.name", note="Adam becomes adamw; muon takes AdamW's learning rate"),
    "optimizer.params.lr": _to("optimizer.lr"),
    "optimizer.params.betas": _to("optimizer.betas"),
    "optimizer.params.eps": _to("optimizer.eps"),
    "optimizer.params.weight_decay": _to("optimizer.weight_decay"),
    "weight_decay": _to("optimizer.weight_decay"),
    "gradient_clipping": _to("optimizer.gradient_clipping"),
    "min_lr": _to("schedule.min_lr_ratio", note="min_lr / lr"),
    "lr_decay_style": _to("schedule.kind"),
    "lr_decay_iters": _to("schedule.decay_steps"),
    "warmup": _to(
        "schedule.warmup_fraction",
        note="of schedule.train_steps; with lr_decay_iters, of those: then schedule.warmup_steps = warmup x lr_decay_iters",
    ),
    "warmup_iters": _to("schedule.warmup_steps"),
    "train_iters": _to("schedule.train_steps"),
    # data
    "data_path": _to("data.train", note="with data.validation beside it"),
    "train_data_paths": _to("data.train", note="a list of prefixes"),
    "valid_data_paths": _to("data.validation", note="one prefix"),
    "test_data_paths": _to("data.test", note="one prefix"),
    "train_data_weights": _to("data.blend.weights", note="with data.blend.by: weights"),
    "split": _to("data.validation_fraction", note="of a raw data.corpus; token files are split when they are made"),
    "tokenizer_type": _to(
        "data.tokenizer.type", note="HFTokenizer becomes hf, SPMTokenizer sentencepiece, GPT2BPETokenizer gpt2"
    ),
    "vocab_file": _to("data.tokenizer.path"),
    "merge_file": _to(note="the merges are the file beside the vocabulary, such as gpt2-merges.txt: leave it out"),
    "eod_mask_loss": _to("data.mask_boundaries"),
    "weight_by_num_documents": _to("data.blend.by", note="documents"),
    "reset_attention_mask": _to("data.reset_at_documents"),
    "seed": _to("run.seed"),
    # saving, logging, evaluation
    "save": _to("checkpoint.directory"),
    "load": _to("checkpoint.resume", note="auto finds the run's own latest checkpoint"),
    "checkpoint_factor": _to("checkpoint.interval", note="with checkpoint_scale = log 0"),
    "checkpoint_scale": _to("checkpoint.log_spaced", note="log becomes true, linear false"),
    "extra_save_iters": _to("checkpoint.extra_steps"),
    "keep_last_n_checkpoints": _to("checkpoint.keep_last"),
    "log_interval": _to("logging.interval"),
    "tensorboard_dir": _to("logging.tensorboard", note="true or false; files are in the run's folder"),
    "use_wandb": _to("logging.wandb.enabled"),
    "wandb_project": _to("logging.wandb.project"),
    "wandb_team": _to("logging.wandb.entity"),
    "eval_interval": _to("evaluation.interval"),
    "eval_iters": _to("evaluation.batches"),
    # precision
    "precision": _to("precision.dtype", note="fp16, fp32, or bf16 for bfloat16"),
    "fp16.enabled": _to("precision.dtype", note="fp16"),
    "fp16.fp16": _to("precision.dtype", note="fp16"),
    "fp16.loss_scale": _to(note="the loss scale is dynamic: leave it out"),
    "fp16.initial_scale_power": _to("precision.fp16.initial_scale_power"),
    "fp16.loss_scale_window": _to("precision.fp16.scale_window"),
    "fp16.hysteresis": _to("precision.fp16.hysteresis"),
    "fp16.min_loss_scale": _to("precision.fp16.min_scale"),
    "fp16": _to("precision.dtype", "precision.fp16"),
    "bf16.enabled": _to("precision.dtype", note="bf16"),
    "bf16": _to("precision.dtype", note="bf16"),
}


def neox_answer(path: tuple[str, ...]) -> str | None:
    """Return the message for an unknown key that GPT-NeoX has: its name here and what differs. None for other keys."""
    plain = tuple(name.replace("-", "_") for name in path)
    answer = NEOX_KEYS.get(".".join(plain)) or NEOX_KEYS.get(plain[-1])
    if answer is None and neox_has_keys_below(plain[:1]):
        answer = NEOX_KEYS.get(plain[0])
    if answer is None:
        return None
    if not answer.keys:
        return f"is a GPT-NeoX key without a counterpart: {answer.note}"
    note = f" ({answer.note})" if answer.note else ""
    return f"is a GPT-NeoX key; here it is {' and '.join(answer.keys)}{note}"


def neox_has_keys_below(path: tuple[str, ...]) -> bool:
    """Return whether GPT-NeoX has keys inside this mapping, so that each is reported by itself."""
    prefix = ".".join(name.replace("-", "_") for name in path) + "."
    return any(key.startswith(prefix) for key in NEOX_KEYS)
