"""Check that settings of GPT-NeoX that change the result are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tools.conversion.test_neox_config import SMALL
from tools.neox_config import main


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("pos_emb: alibi", "pos_emb = 'alibi'"),
        ("pos-emb: alibi", "pos-emb = 'alibi'"),
        ("optimizer: {type: Adam, params: {lr: 0}}", "optimizer.params.lr = 0: a rate above 0 is needed"),
        ("rotary-pct: all", "rotary-pct = 'all': a number of 0 or more is allowed"),
        ("min_lr: low", "min_lr = 'low': a number of 0 or more is allowed"),
        ("warmup: .nan", "warmup = nan: a number of 0 or more is allowed"),
        ("model_parallel_size: two", "model_parallel_size = 'two': a number of 0 or more is allowed"),
        ("pipe_parallel_size: -3", "pipe_parallel_size = -3: a number of 0 or more is allowed"),
        ("make_vocab_size_divisible_by: 0", "make_vocab_size_divisible_by = 0: a number of 1 or more is allowed"),
        ("mlp_multiple_of: 0", "mlp_multiple_of = 0: a number of 1 or more is allowed"),
        ("fp16: true", "fp16 = True: is not of GPT-NeoX's form"),
        ("activation: geglu", "activation = 'geglu'"),
        ("norm: scalenorm", "norm = 'scalenorm'"),
        ("attention_config: [[[local], 2]]", "attention_config names 'local'"),
        ("attention-config: [[[flash], 5]]", "attention-config = [[['flash'], 5]] is of 5 layers, and num_layers = 2"),
        ("attention_config: [[[flash], some]]", "is not of GPT-NeoX's form, such as"),
        ("attention_config: flash", "attention_config = 'flash' is not of GPT-NeoX's form"),
        ("gpt_j_tied: true", "gpt_j_tied"),
        ("moe_num_experts: 8", "moe_num_experts = 8: no counterpart, every block has one MLP"),
        ("use-mup: true", "use-mup = True: no counterpart"),
        ("use_qk_layernorm: true", "use_qk_layernorm = True: no counterpart"),
        ("sliding_window_width: -1", "sliding_window_width = -1: must be 0 or a larger whole number; remove it"),
        ("expansion_factor: 3", "expansion_factor = 3: no counterpart, give intermediate-size"),
        ("attention_config: [[[mamba], 2]]", "a block of mamba has no MLP there, every block has one here"),
        ("use_bias_in_norms: false", "use_bias_in_norms = False: no counterpart"),
        ("mlp_type: llama", "mlp_type = 'llama': no counterpart, the llama of an earlier GPT-NeoX is"),
        ("weight_by_num_documents: true", "give the shares as train-data-weights"),
        ("lr_decay_fraction: 0.5", "give lr-decay-iters"),
        ("tokenizer_type: CharLevelTokenizer", "tokenizer_type = 'CharLevelTokenizer': GPT2BPETokenizer, HFTokenizer"),
        (
            "data_path: a\nvocab_file: v/gpt2-vocab.json\nmerge_file: m.txt",
            "merge_file = 'm.txt': v/gpt2-merges.txt is",
        ),
        (
            "data_path: a\ntokenizer_type: SPMTokenizer\nvocab_file: t.model",
            "is needed: give the rows of the embedding",
        ),
        ("zero_optimization: {offload_optimizer: {device: cpu}}", "zero_optimization.offload_optimizer = {'device'"),
        ("zero_optimization: {cpu_offload: true}", "zero_optimization.cpu_offload = True"),
        ("optimizer: {type: OneBitAdam}", "optimizer.type = 'OneBitAdam'"),
        ("optimizer: {type: Muon}", "For Muon, convert with Adam and its learning rate, then set optimizer.name=muon"),
        ("num-attention-heads: 5", "num-attention-heads (here model.num_heads) = 5 does not divide"),
        ("hidden_dropout: 0.1", "hidden_dropout = 0.1: no counterpart, there is no dropout here; set it to 0"),
        ("train_impl: dpo", "train_impl = 'dpo': no counterpart, the objective must be language modelling"),
        ("train_label_data_paths: [a]", "supervised fine-tuning is not supported"),
        ("pos-train-data-paths: [a]", "pos-train-data-paths = ['a']: no counterpart, preferred and rejected answers"),
        ("train_reward_data_paths: [a]", "reinforcement learning is not supported"),
        ("pack_impl: unpacked", "documents are packed to whole samples"),
        ("use_bnb_optimizer: true", "the optimizer state has 32 or 16 bits"),
        ("load: a\nsave: b\nfinetune: true", "checkpoints of GPT-NeoX are not read, and finetune starts from this one"),
        ("hiden-size: 64", "hiden-size is no key of GPT-NeoX; the nearest is hidden-size"),
        ("seq_length:", "seq_length missing; name the file that describes the model too"),
    ],
)
def test_settings_that_change_the_result_are_refused(
    line: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    key = line.split(":")[0].replace("-", "_")
    text = "\n".join(old for old in SMALL.splitlines() if not old.startswith(f"{key}:"))
    (tmp_path / "neox.yml").write_text(f"{text}\n{line}\n")
    assert main([str(tmp_path / "neox.yml"), "-o", str(tmp_path / "run.yml")]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run.yml").exists()
