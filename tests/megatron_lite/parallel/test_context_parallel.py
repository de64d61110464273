"""Local shards of a batch with packed documents: together they have the loss and gradients of the whole row."""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from megatron_lite.parallel.context_parallel import local_shard
from models.config import ModelConfig
from models.language_model import LanguageModel
from tests.models.rank_threads import Meeting, Threads, over_ranks


def test_local_shards_of_a_packed_row_have_its_loss_and_gradients() -> None:
    shape = {"vocab_size": 31, "num_layers": 2, "hidden_size": 32, "num_heads": 4, "mixers": ("metala", "rg_lru")}
    lm = LanguageModel(ModelConfig(**shape), seed=5).double()
    tokens = torch.randint(0, 31, (1, 24), generator=torch.Generator().manual_seed(3))
    bounds = torch.tensor([0, 5, 8, 15, 24, 24], dtype=torch.int32)
    batch = {"tokens": tokens, "labels": tokens.roll(-1, 1), "cu_seqlens": bounds}
    expected = lm(tokens, batch["labels"], cu_seqlens=bounds)
    expected.backward()
    copies = [copy.deepcopy(lm) for _ in range(3)]

    def work(index: int) -> Tensor:
        shard = local_shard(batch, Threads(index, 3, Meeting(3)))  # type: ignore[arg-type]  its group is not used
        copies[index].zero_grad()
        loss = copies[index](shard["tokens"], shard["labels"], cu_seqlens=shard["cu_seqlens"])
        loss.backward()
        return loss.detach()

    torch.testing.assert_close(sum(over_ranks(3, work)), expected.detach(), rtol=1e-12, atol=0)
    for name, parameter in lm.named_parameters():
        total = sum(dict(piece.named_parameters())[name].grad for piece in copies)
        torch.testing.assert_close(total, parameter.grad, rtol=1e-9, atol=1e-12)
