"""List the keys of GPT-NeoX by what happens to them: same meaning, other defaults, refused, ignored with or without effect.

Source: the argument reference of EleutherAI/gpt-neox (megatron/neox_arguments) and its configuration files.
"""

from __future__ import annotations

from typing import Any

# Keys with the same meaning and value here.
SAME = (
    *("num_layers", "hidden_size", "num_attention_heads", "num_kv_heads", "use_bias_in_mlp", "rotary_emb_base"),
    *("gpt_j_residual", "init_method_std", "seq_length", "train_batch_size", "train_micro_batch_size_per_gpu", "gas"),
    *("gradient_accumulation_steps", "sequence_parallel", "gradient_clipping", "weight_decay", "lr_decay_iters"),
    *("train_iters", "seed", "save", "checkpoint_factor", "keep_last_n_checkpoints", "log_interval", "eval_interval"),
    *("eval_iters", "use_wandb", "wandb_project", "wandb_team", "eod_mask_loss", "reset_attention_mask", "vocab_file"),
    *("train_data_weights",),
)
# Other names of earlier versions and of Megatron-LM -> the key of GPT-NeoX.
ALIASES = {
    "warmup_iters": "warmup_iters",
    "lr_warmup_iters": "warmup_iters",
    "lr_warmup_fraction": "warmup",
    "clip_grad": "gradient_clipping",
}
# Numbers that the translation computes with -> the smallest that is allowed.
SMALLEST = {
    **dict.fromkeys(("hidden_size", "intermediate_size", "mlp_multiple_of", "make_vocab_size_divisible_by"), 1),
    **dict.fromkeys(("pipe_parallel_size", "model_parallel_size", "rotary_pct", "min_lr", "decay_lr_to"), 0),
    **dict.fromkeys(("warmup", "warmup_iters", "train_iters", "lr_decay_iters", "checkpoint_factor"), 0),
}
# GPT-NeoX's defaults that differ from those here.
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
# Ignored keys that can change the course of a run, most important first.
IMPORTANT = {
    "load": "checkpoints of GPT-NeoX are not read; a run resumes from its own newest checkpoint",
    "finetune": "without load the model starts from random weights, as in GPT-NeoX",
    "split": "token files are split when they are written: tools.preprocess_data --split",
    "valid_data_weights": "data.validation is one pair of token files",
    "test_data_weights": "data.test is one pair of token files",
    "exit_interval": "a run ends at train_iters, or after schedule.time_budget_minutes",
    "fp16_lm_cross_entropy": "the loss is computed in float32",
    "te_mha": "attention is PyTorch's and has no FP8",
    "te_layernorm_mlp": "the MLP is PyTorch's and has no FP8",
    "bias_gelu_fusion": "GPT-NeoX's kernel approximates GELU with tanh; here GELU is exact, as in Hugging Face's Pythia",
    "deepspeed_extra_args": "DeepSpeed's settings are fixed here",
    "checkpoint_validation_with_forward_pass": "tools.convert_hf verify checks a checkpoint",
    "prescale_gradients": "gradients are scaled by the number of predicted tokens",
}
# Ignored keys without an effect on the result: kernels, memory, processes, logging, text generation, internal values.
_HARMLESS = (
    # kernels and memory
    "layernorm_fusion rmsnorm_fusion rope_fusion bias_dropout_fusion scaled_upper_triang_masked_softmax_fusion "
    "scaled_masked_softmax_fusion use_flashattn_swiglu fused_kernels_build_path attention_softmax_in_fp32 "
    "apply_query_key_layer_scaling rotary_save_freqs_buffer mamba_selective_scan_fusion mamba_causal_conv_fusion "
    "mamba_inner_func_fusion mamba_selective_fp32_params mamba_use_bias_in_conv mamba_use_bias_in_linears "
    "output_layer_parallelism te_columnparallel te_rowparallel te_fp8_format te_fp8_wgrad te_fp8_amax_history_len "
    "te_fp8_amax_compute_algo te_fp8_margin te_fp8_mha partition_activations contiguous_checkpointing checkpoint_in_cpu "
    "synchronize_each_layer profile_backward deepspeed_activation_checkpointing activation_checkpointing use_cpu_initialization "
    "fp32_allreduce data_types communication_data_type gradient_predivide_factor sparse_gradients "
    # processes
    "deepspeed hostfile include exclude num_nodes num_gpus master_port master_addr launcher force_multi autotuning "
    "autotuning_run no_ssh_check comment account pipe_partition_method world_size is_pipe_parallel distributed_backend "
    "local_rank rank lazy_mpu_init deepspeed_mpi deepspeed_slurm user_script global_num_gpus adlr_autoresume "
    "adlr_autoresume_interval deepscale deepscale_config elasticity detect_nvlink_pairs "
    # logging
    "steps_per_print wall_clock_breakdown dump_state flops_profiler tensorboard wandb csv_monitor comms_logger wandb_group "
    "wandb_run_name wandb_host wandb_init_all_ranks git_hash log_dir use_comet comet_workspace comet_project "
    "comet_experiment_name comet_tags comet_others comet_experiment peak_theoretical_tflops log_grad_pct_zeros log_param_norm "
    "log_grad_norm log_optimizer_states log_gradient_noise_scale gradient_noise_scale_n_batches "
    "gradient_noise_scale_cpu_offload memory_profiling memory_profiling_path profile profile_step_start profile_step_stop "
    "char_level_ppl "
    # data and checkpoints
    "data_impl mmap_warmup use_shared_fs num_workers short_seq_prob s3_path s3_chunk_size checkpoint no_save_optim no_save_rng "
    "no_load_optim no_load_rng weighted_sampler_alpha onnx_safe train_data_paths valid_data_paths test_data_paths data_path "
    # schedule of a resumed run, and values that GPT-NeoX derives
    "override_lr_scheduler use_checkpoint_lr_scheduler iteration do_train do_valid do_test batch_size optimizer_type "
    "zero_stage zero_reduce_scatter zero_contiguous_gradients zero_reduce_bucket_size zero_allgather_bucket_size lr "
    "dynamic_loss_scale loss_scale hysteresis loss_scale_window min_scale padded_vocab_size config_files "
    "make_vocab_size_divisible_by merge_file model_parallel_size max_position_embeddings "
    # settings of other positions, norms, layers and objectives, which are refused by their own keys
    "rpe_num_buckets rpe_max_distance scalenorm_epsilon gmlp_attn_dim sparsity_config sparse_attention param_sharing_style "
    "dim_att head_size ffn_dim moe_expert_interval moe_top_k moe_router_type moe_lbl_in_fp32 moe_jitter_eps dpo_fp32 "
    "dpo_reference_free dpo_beta kto_fp32 kto_desirable_weight kto_undesirable_weight kto_beta fp32_reinforce kl_impl "
    "kl_div_beta reinforce_leave_one_out allow_chopped curriculum_seqlen coord_check save_base_shapes base_shapes_file "
    "mup_init_scale mup_attn_temp mup_output_temp mup_embedding_mult mup_rp_embedding_mult mup_width_scale "
    # text generation
    "text_gen_type precompute_model_name temperature top_p top_k return_logits maximum_tokens prompt_end sample_input_file "
    "sample_output_file num_samples recompute eval_results_prefix eval_tasks serve_model_weights weight_server_port "
    "online_dataserver_ips online_dataserver_ports"
)
HARMLESS = frozenset(_HARMLESS.split())

_OFF = (None, False, 0, {}, [])
_LABELS = "labels that mask the loss have no counterpart: supervised fine-tuning is not supported"
_PAIRS = "preferred and rejected answers have no counterpart: preference training is not supported"
_REWARDS = "rewards have no counterpart: reinforcement learning is not supported"
# Keys that change the result: (values without an effect, reason).
REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "train_impl": ((None, "normal"), "the objective must be language modelling (normal)"),
    "dataset_impl": ((None, "gpt2"), "only token files of documents (gpt2) are supported"),
    "pack_impl": ((None, "packed"), "documents are packed to whole samples (packed)"),
    **{f"{part}_label_data_paths": (_OFF, _LABELS) for part in ("train", "valid", "test")},
    **{f"{part}_reward_data_paths": (_OFF, _REWARDS) for part in ("train", "valid", "test")},
    **{
        f"{kind}_{part}_{label}data_paths": (_OFF, _PAIRS)
        for kind in ("pos", "neg")
        for part in ("train", "valid", "test")
        for label in ("", "label_")
    },
    "hidden_dropout": (_OFF, "there is no dropout here; set it to 0"),
    "attention_dropout": (_OFF, "there is no dropout here; set it to 0"),
    "z_loss": (_OFF, "the loss has no such term"),
    "gpt_j_tied": (_OFF, "the two norms of a block have weights of their own"),
    "moe_num_experts": ((None, 0, 1), "every block has one MLP"),
    "use_mup": (_OFF, "there is no muP"),
    "use_qk_layernorm": (_OFF, "queries and keys have no norm"),
    "opt_pos_emb_offset": (_OFF, "learned positions start at 0"),
    "soft_prompt_tuning": (_OFF, "there are no soft prompts"),
    "expansion_factor": (_OFF, "give intermediate-size, this times hidden-size"),
    "mlp_type": (
        (None, "regular"),
        "the llama of an earlier GPT-NeoX is activation: swiglu, with three times its width as intermediate-size",
    ),
    "num_unique_layers": (_OFF, "every block has weights of its own"),
    "use_bnb_optimizer": (_OFF, "the optimizer state has 32 or 16 bits (precision.optimizer_state), not 8"),
    "weight_by_num_documents": (_OFF, "give the shares as train-data-weights"),
    "lr_decay_fraction": (_OFF, "give lr-decay-iters, this times train-iters"),
    "train_epochs": (_OFF, "give train-iters"),
    "scheduler": (_OFF, "give lr-decay-style, lr-decay-iters, warmup and min-lr"),
    "curriculum_learning": (_OFF, "the sequence length is constant"),
    "data_efficiency": (_OFF, "samples are neither sorted nor shortened"),
    "compression_training": (_OFF, "weights are neither quantized nor pruned in training"),
    "amp": (_OFF, "give fp16, bf16 or precision"),
}
OFFLOAD = ("cpu_offload", "cpu_offload_params", "cpu_offload_use_pin_memory", "offload_optimizer", "offload_param")
# Keys that the translation reads by name.
_READ = (
    "pos_emb rotary_pct norm use_bias_in_norms layernorm_epsilon rms_norm_epsilon activation intermediate_size mlp_multiple_of "
    "init_method output_layer_init_method optimizer lr_decay_style warmup warmup_iters decay_lr_to min_lr zero_optimization "
    "pipe_parallel_size checkpoint_activations checkpoint_num_layers fp16 bf16 precision extra_save_iters checkpoint_scale "
    "tokenizer_type tensorboard_dir no_weight_tying attention_config use_bias_in_attn_linear sliding_window_width"
)
KNOWN = HARMLESS | {*_READ.split()} | {*SAME, *ALIASES, *IMPORTANT, *REFUSED}
