"""Writes golden/NAME: tiny models of flash-linear-attention with their own logits.

    python tests/tools/conversion/golden/make_fla.py [NAME ...]

torch, triton, flash-linear-attention 0.6.0 and a numpy that Triton's interpreter supports (3.6: below 2.3) must be installed.
Its kernels run on a GPU only; here they run through Triton's interpreter, in float32, and its autotuner takes the first
configuration instead of measuring all.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"

import torch
from fla.models import (
    DeltaNetConfig,
    DeltaNetForCausalLM,
    GatedDeltaNetConfig,
    GatedDeltaNetForCausalLM,
    GLAConfig,
    GLAForCausalLM,
    HGRN2Config,
    HGRN2ForCausalLM,
    KDAConfig,
    KDAForCausalLM,
    RetNetConfig,
    RetNetForCausalLM,
    RWKV7Config,
    RWKV7ForCausalLM,
)
from safetensors.torch import save_file
from triton.runtime.autotuner import Autotuner

HERE = Path(__file__).parent
SHAPE = {
    "vocab_size": 31,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "intermediate_size": 32,
    "max_position_embeddings": 64,
    "fuse_cross_entropy": False,
}
MODELS = {
    "gla": (GLAForCausalLM, GLAConfig(**SHAPE, num_heads=2)),
    "retnet": (RetNetForCausalLM, RetNetConfig(**SHAPE, num_heads=2)),
    "hgrn2": (HGRN2ForCausalLM, HGRN2Config(**SHAPE, expand_ratio=16)),
    "delta_net": (DeltaNetForCausalLM, DeltaNetConfig(**SHAPE, num_heads=2, allow_neg_eigval=True)),
    "gated_deltanet": (
        GatedDeltaNetForCausalLM,
        GatedDeltaNetConfig(**SHAPE, num_heads=1, num_v_heads=2, head_dim=16, expand_v=1.0),
    ),
    "rwkv7": (
        RWKV7ForCausalLM,
        RWKV7Config(
            **SHAPE,
            head_dim=16,
            decay_low_rank_dim=4,
            gate_low_rank_dim=8,
            a_low_rank_dim=4,
            v_low_rank_dim=4,
            fuse_linear_cross_entropy=False,
        ),
    ),
    "kda": (KDAForCausalLM, KDAConfig(**SHAPE, num_heads=2, head_dim=16, tie_word_embeddings=True)),
}


@torch.no_grad()
def main() -> None:
    Autotuner.prune_configs = lambda self, kwargs, **more: self.configs[:1]
    Autotuner._bench = lambda self, *args, **kwargs: [1.0, 1.0, 1.0]
    for name in sys.argv[1:] or MODELS:
        build, config = MODELS[name]
        torch.manual_seed(0)
        model = build(config).eval()
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
        ids = torch.randint(0, 31, (2, 40), generator=torch.Generator().manual_seed(1))
        model.save_pretrained(HERE / name)
        (HERE / name / "generation_config.json").unlink()
        save_file({"ids": ids, "logits": model(ids).logits}, HERE / name / "reference.safetensors")
        print(name, model(ids).logits.abs().max().item())


if __name__ == "__main__":
    main()
