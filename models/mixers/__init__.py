"""The token mixers by name. A new mixer is one file here and one line in MIXERS.

A mixer is an `nn.Module` with
  Options                       frozen dataclass of its settings, each field with metadata {"doc": ...}
  __init__(config, layer_index, options)
  forward(x, mask, cu_seqlens, state, return_state)      as in `models.block.Block.forward`
  flops_per_token(length)       forward FLOPs, two a multiply-add
  state_size                    its decode state in words, for the documentation
  tensor_parallel_plan, parameter_kinds
and where there is something to say
  check(config, options)        static: ValueError naming the key when the shape cannot be built (left out: all can)
  cut_sizes(config, options)    static: what tensor parallelism cuts beside heads, by the key that sets it
  causal                        False where a token sees later ones; an option of that name goes before it
  supports_context_parallel     whether it runs on a local shard of a sequence, under context parallelism (left out: it does not)
The trainer reads the plan's sharding specs: "column" and "row" for linear layers, "heads" for a vector cut with the columns,
"replicated", and "partial_grad" for what is used whole inside the parallel region. The region begins
once, at the mixer's input (with `fan_out_is_entry = True` at that of its fan-out), and ends at its row output. Head
counts therefore follow from tensor shapes at run time.
"""

from __future__ import annotations

from typing import Any

from .attention import Attention
from .gla import GLA
from .hgrn import HGRN
from .hgrn2 import HGRN2
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
from .s5 import S5
from .transnormer import TransNormer

MIXERS: dict[str, Any] = {
    "attention": Attention,
    "gla": GLA,
    "hgrn": HGRN,
    "hgrn2": HGRN2,
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
    "s5": S5,
    "transnormer": TransNormer,
}
