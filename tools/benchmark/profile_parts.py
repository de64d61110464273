"""Assign a kernel to a part of the training step by its name, the operators that launched it and its module."""

from __future__ import annotations

import re
from collections.abc import Sequence

# Tried in this order: matmuls inside the recurrence count as recurrence, those of the output projection as matmuls.
_BY_NAME: tuple[tuple[str, str], ...] = (
    ("communication", r"c10d|nccl|gloo|all_?reduce|all_?gather|reduce_?scatter"),
    (
        "recurrence",
        r"_MatmulForm|StateScan|_Scan|_Lion|_GLA|_MetaLACore|[Rr]ecurren|ChunkGLA|SimpleGLA|chunk_gla|chunk_simple|^chunk_|FusedRecurrent",
    ),
    ("convolution", r"_Convol|causal_conv|conv1d"),
    ("epilogue", r"[Ee]pilogue"),
    ("optimizer", r"Optimizer\.step|_fused_adam|FusedAdam|^_adamw$|^_momentum$|^_decay_and_add$|Muon"),
    ("matmuls", r"^aten::(add|badd)?b?mm_?$|gemm|cutlass|cublas|nvjet|xmma|splitK"),
    ("attention", r"scaled_dot_product|flash|fmha"),
    ("cross entropy", r"[Cc]ross_?[Ee]ntropy|nll_loss|log_softmax"),
    ("norms", r"[Ll]ayer_?[Nn]orm|_AddNorm|[Rr][Mm][Ss]_?[Nn]orm"),
    ("gradients gathered", r"AccumulateGrad"),
)
_COPY = re.compile(
    r"aten::(copy_|_to_copy|to|clone|contiguous|fill_|zero_|cat)$|Memcpy|Memset|^direct_copy|FillFunctor"
)

PARTS = (
    *(part for part, _ in _BY_NAME),
    "copies and casts",
    "mixer, elementwise",
    "MLP, elementwise",
    "embedding",
    "fused by torch.compile",
    "around the model",
    "other",
)


def part_of(kernel: str, operators: Sequence[str], module: str) -> str:
    """Return the part of `PARTS` that a kernel belongs to.

    kernel: its name, on a CPU the operator's name. operators: the enclosing operators, innermost first. module: such as
    "block.mixer.conv", or "" outside the model's forward and backward pass.
    """
    names = (kernel, *operators)
    for part, pattern in _COMPILED:
        if any(pattern.search(name) for name in names):
            return part
    if kernel.startswith("triton_"):
        return "fused by torch.compile"
    if not module and not any(name.startswith("autograd::") for name in operators):
        return "around the model"
    if module.rpartition(".")[2].startswith("norm"):
        return "norms"
    if _COPY.search(kernel) or (operators and _COPY.search(operators[0])):
        return "copies and casts"
    for word, part in (("mixer", "mixer, elementwise"), ("mlp", "MLP, elementwise"), ("embedding", "embedding")):
        if word in module.split("."):
            return part
    return "other"


_COMPILED = tuple((part, re.compile(pattern)) for part, pattern in _BY_NAME)
