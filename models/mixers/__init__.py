"""The registry of token mixers: a new mixer is one file in this folder and one line in MIXERS.

A mixer is an `nn.Module` with
- Options                       frozen dataclass of its settings; each field is a `models.options.option`
- __init__(config, layer_index, options)                 config: a `models.options.ModelShape`
- forward(x, mask, cu_seqlens, state, return_state)      as in `models.block.Block.forward`;
                                  with cu_seqlens a state has one row per segment
- flops_per_token(length)       forward FLOPs per token, two per multiply-add
- state_size                    size of its decode state as text, for the documentation
- tensor_parallel_plan          sharding spec of every parameter or submodule
- parameter_kinds               optimizer kinds of parameters, see CONTRIBUTING.md
- fp8_projections               linears that may multiply in FP8: not those of decays and input gates (default: none)
and, where the default does not hold,
- check(config, options)        static: raises ValueError with the key if the shape cannot be built (default: no check)
- sharded_sizes(config, options)    static: sizes besides the heads that tensor parallelism splits, by config key
- causal                        False if a token sees later tokens; an option of that name takes precedence
- value_residual                whether it reads the values of the first layer of its kind (`models.block.Block`)
- supports_context_parallel     whether it runs on a local shard of a sequence (default: it does not)

The trainer reads the plan's sharding specs: "column" and "row" for linear layers, "heads" for a tensor cut with the columns,
"replicated", and "partial_grad" for a parameter used whole inside the parallel region. The region begins at the mixer's input
(with `project_inputs_is_entry = True` at its fused projections) and ends at its row output. Head counts therefore follow from
tensor shapes at run time.

A mixer file holds equations and calls operators (`models/operators/`). The operator chooses the kernel, and imports it on use.
"""

from __future__ import annotations

from typing import Any

from .attention import Attention
from .delta_net import DeltaNet
from .gated_delta_net import GatedDeltaNet
from .gdn2 import GDN2
from .gla import GLA
from .hgrn import HGRN
from .hgrn2 import HGRN2
from .kda import KDA
from .linear_attention import LinearAttention
from .lion import Lion
from .mamba import Mamba
from .mamba2 import Mamba2
from .metala import MetaLA
from .metala_bidirectional import MetaLABidirectional
from .normalised_attention import NormalisedAttention
from .qlstm import QLSTM
from .retnet import RetNet
from .rg_lru import RGLRU
from .rwkv4 import RWKV4
from .rwkv7 import RWKV7
from .s5 import S5
from .transnormer import TransNormer

MIXERS: dict[str, Any] = {
    "attention": Attention,
    "delta_net": DeltaNet,
    "gated_delta_net": GatedDeltaNet,
    "gdn2": GDN2,
    "gla": GLA,
    "hgrn": HGRN,
    "hgrn2": HGRN2,
    "kda": KDA,
    "linear_attention": LinearAttention,
    "lion": Lion,
    "mamba": Mamba,
    "mamba2": Mamba2,
    "metala": MetaLA,
    "metala_bidirectional": MetaLABidirectional,
    "normalised_attention": NormalisedAttention,
    "qlstm": QLSTM,
    "retnet": RetNet,
    "rg_lru": RGLRU,
    "rwkv4": RWKV4,
    "rwkv7": RWKV7,
    "s5": S5,
    "transnormer": TransNormer,
}
