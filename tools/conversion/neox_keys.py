"""Which GPT-NeoX keys are the same here, which defaults differ, and which keys are ignored or refused."""

from __future__ import annotations

from typing import Any

# Same meaning, same value: GPT-NeoX's key and the key here, which is the one that its users are told.
SAME = (
    *("num_layers", "hidden_size", "num_attention_heads", "num_kv_heads", "use_bias_in_mlp"),
    *("gpt_j_residual", "init_method_std", "seq_length", "train_batch_size", "train_micro_batch_size_per_gpu", "gas"),
    *(
        "gradient_accumulation_steps",
        "sequence_parallel",
        "gradient_clipping",
        "weight_decay",
        "lr_decay_iters",
    ),
    *("train_iters", "seed", "save", "checkpoint_factor", "keep_last_n_checkpoints", "log_interval", "eval_interval"),
    *("eval_iters", "use_wandb", "wandb_project", "wandb_team", "eod_mask_loss", "reset_attention_mask", "vocab_file"),
    *("train_data_weights", "rotary_emb_base"),
)
# What GPT-NeoX does where a key is left out, as far as it is not what happens here.
DEFAULTS: dict[str, Any] = {
    "pos_emb": "learned",
    "no_weight_tying": False,
    "norm": "layernorm",
    "activation": "gelu",
    "use_bias_in_mlp": True,
    "use_bias_in_attn_linear": True,
    "init_method": "normal",
    "output_layer_init_method": "scaled_normal",
    "lr_decay_style": "linear",
    "warmup": 0.01,
    "weight_decay": 0.1,
    "gradient_clipping": 1.0,
    "min_lr": 0.0,
}
IGNORED = {
    "bias_gelu_fusion": "a kernel of GPT-NeoX with the tanh approximation of GELU; here it is exact, as in Hugging Face's Pythia",
    "scaled_upper_triang_masked_softmax_fusion": "a kernel of GPT-NeoX: attention is PyTorch's here",
    "scaled_masked_softmax_fusion": "a kernel of GPT-NeoX: attention is PyTorch's here",
    "output_layer_parallelism": "the output projection is cut by the vocabulary here",
    "data_impl": "token files are always memory-mapped",
    "num_workers": "samples are read ahead by one thread",
    "partition_activations": "activations kept for recomputation are not cut here",
    "synchronize_each_layer": "a debugging aid of GPT-NeoX",
    "distributed_backend": "follows from the device: nccl on cuda, gloo on cpu",
    "steps_per_print": "logging.interval is the one setting",
    "wall_clock_breakdown": "metrics.jsonl has the times of every step",
    "hidden_dropout": "there is no dropout here",
    "attention_dropout": "there is no dropout here",
    "attention_softmax_in_fp32": "PyTorch's attention keeps its sums in float32",
    "make_vocab_size_divisible_by": "model.vocab_size is the padded size itself (--vocab-size)",
    "hysteresis": "part of fp16",
    "tensorboard_dir": "files lie in the run's folder",
    "load": "a run goes on from its own newest checkpoint",
    "merge_file": "tokenizer.json holds the merges",
    "valid_data_weights": "data.validation is one pair of token files",
    "test_data_weights": "data.test is one pair of token files",
    "launcher": "torchrun, or tools/slurm",
    "deepspeed_mpi": "torchrun, or tools/slurm",
    "finetune": "checkpoint.resume names a run to start from",
    "split": "token files are split when they are made",
    "include": "a list of files for this command instead",
}


# What changes the model where it has another value than these: (values, what is here).
REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "gpt_j_tied": ((None, False), "the two norms of a block have weights of their own"),
    "moe_num_experts": ((None, 0, 1), "every block has one MLP"),
    "use_mup": ((None, False), "there is no muP"),
    "use_qk_layernorm": ((None, False), "queries and keys have no norm"),
    "sliding_window_width": ((None,), "attention sees the whole sequence"),
    "soft_prompt_tuning": ((None, {}), "there are no soft prompts"),
    "expansion_factor": ((None,), "give intermediate-size, this times hidden-size"),
    "mlp_type": (
        (None, "regular"),
        "the llama of an earlier GPT-NeoX is activation: swiglu, with three times its width as intermediate-size",
    ),
    "num_unique_layers": ((None,), "every block has weights of its own"),
    "weight_by_num_documents": ((None, False), "give the shares as train-data-weights"),
    "lr_decay_fraction": ((None,), "give lr-decay-iters, this times train-iters"),
}
