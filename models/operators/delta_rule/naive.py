"""Reference form of the delta rule: token by token."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from ...precision import without_autocast
from .select_kernel import Operands


def recurrent_form(x: Operands, state: Tensor, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return outputs and final states of the operator, one token after the other. state: [sequences, heads, dim_k, dim_v]."""
    with without_autocast(x.q):
        if cu_seqlens is None:
            return _run(x, state, 0, x.q.shape[1])
        bounds = pairwise(cu_seqlens.tolist())
        results = [_run(x, state[s : s + 1], start, end) for s, (start, end) in enumerate(bounds)]
    outputs, finals = zip(*results, strict=True)
    return torch.cat(outputs, 1), torch.cat(finals)


def _run(x: Operands, state: Tensor, start: int, end: int) -> tuple[Tensor, Tensor]:
    outputs = []
    for t in range(start, end):
        q, k, written, read, removal, log_decay = (tensor[:, t] for tensor in x.tensors().values())
        decayed = log_decay.exp().unsqueeze(-1) * state
        old = (read.unsqueeze(-2) @ (state if x.read_before_decay else decayed)).squeeze(-2)
        if x.removal is x.k:  # one pass over the state instead of two
            state = torch.addcmul(decayed, k.unsqueeze(-1), (written - old).unsqueeze(-2))
        else:
            state = decayed - removal.unsqueeze(-1) * old.unsqueeze(-2) + k.unsqueeze(-1) * written.unsqueeze(-2)
        outputs.append((q.unsqueeze(-2) @ state).squeeze(-2))
    return (torch.stack(outputs, 1) if outputs else x.written[:, start:end]), state
