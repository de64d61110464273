"""The oracle: training in one process with PyTorch alone, as the reference of the trainer.

It uses the project's model and FP8 matmuls, but no DeepSpeed and no engine or schedule of the project.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_lite.parallel.fp8_projections import select_projections, use_fp8
from models.config import ModelConfig
from models.language_model import LanguageModel

Steps = Sequence[Sequence[dict[str, Tensor]]]  # steps of micro-batches


def train(
    config: ModelConfig,
    steps: Steps,
    *,
    seed: int,
    lr: float,
    warmup: int,
    total: int,
    weight_decay: float = 0.1,
    clip: float = 1.0,
    min_ratio: float = 0.1,
    device: str = "cpu",
    accuracies: list[float] | None = None,
    fp8: bool = False,
    muon: bool = False,
    per_head: bool = False,
    momentum: float = 0.95,
    nesterov: bool = True,
) -> list[tuple[float, float]]:
    """Return (loss, gradient norm before clipping) of every step.

    The learning rate has a linear warmup, then a cosine decay to min_ratio * lr at step `total`.

    accuracies: receives per step the share of the loss weight on correctly predicted tokens.
    fp8: in the blocks' projections that allow it.
    muon: the matrices of the blocks' linear layers by Muon, in float64.
    per_head, momentum, nesterov: of Muon; per_head treats queries, keys and values head by head.
    """
    with torch.device(device):
        model = LanguageModel(config, seed=seed)
    if fp8:
        use_fp8(model, select_projections(model, 1)[0])
    decay, exempt, matrices = [], [], []
    linears = {id(module.weight) for module in model.blocks.modules() if isinstance(module, torch.nn.Linear)}
    for name, parameter in model.named_parameters():
        if muon and id(parameter) in linears:
            in_heads = per_head and name.split(".")[-2] in ("q_proj", "r_proj", "k_proj", "v_proj")
            matrices.append((parameter, config.num_heads if in_heads else 1))
            continue
        embedding = name.startswith("embedding") and "projection" not in name
        no_decay = parameter.ndim < 2 or "norm" in name or "decay" in name.rpartition(".")[2] or embedding
        (exempt if no_decay else decay).append(parameter)
    optimizer = torch.optim.AdamW(
        [{"params": decay, "weight_decay": weight_decay}, {"params": exempt, "weight_decay": 0.0}],
        lr=lr,
        betas=(0.9, 0.95),
        eps=1e-8,
        fused=True,
    )
    momenta = [torch.zeros_like(matrix, dtype=torch.float64) for matrix, _ in matrices]
    history = []
    for step, micro_batches in enumerate(steps):
        progress = min(1.0, max(0.0, (step - warmup) / max(1, total - warmup)))
        cosine = min_ratio + (1 - min_ratio) * (1 + math.cos(math.pi * progress)) / 2
        rate = lr * (step + 1) / warmup if step < warmup else lr * cosine
        for group in optimizer.param_groups:
            group["lr"] = rate
        weight = sum(batch["loss_weight"].sum().item() for batch in micro_batches)
        loss = accuracy = 0.0
        for batch in ({key: value.to(device) for key, value in batch.items()} for batch in micro_batches):
            logits = model(batch["tokens"], mask=batch.get("mask"), cu_seqlens=batch.get("cu_seqlens")).float()
            nll = torch.nn.functional.cross_entropy(logits.flatten(0, -2), batch["labels"].flatten(), reduction="none")
            part = (nll * batch["loss_weight"].flatten()).sum() / weight
            part.backward()
            loss += part.item()
            accuracy += ((logits.argmax(-1) == batch["labels"]) * batch["loss_weight"]).sum().item() / weight
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip if clip else math.inf)
        optimizer.step()
        for (matrix, heads), average in zip(matrices, momenta, strict=True):
            muon_update(matrix, average, rate, weight_decay, heads, momentum, nesterov)
        model.zero_grad()
        history.append((loss, norm.item()))
        if accuracies is not None:
            accuracies.append(accuracy)
    return history


@torch.no_grad()
def muon_update(
    matrix: Tensor, average: Tensor, lr: float, weight_decay: float, heads: int, mu: float, nesterov: bool
) -> None:
    """Update a matrix by Muon in the form of its authors, with AdamW's root mean square. average: its momentum."""
    gradient = matrix.grad.double()
    average.mul_(mu).add_(gradient)
    updates = []
    for direction in (gradient + mu * average if nesterov else average).chunk(heads):
        x = direction / direction.norm().clamp_min(1e-30)
        for _ in range(5):
            gram = x @ x.T
            x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
        updates.append(lr * 0.2 * max(x.shape) ** 0.5 * x)
    matrix.mul_(1 - lr * weight_decay).sub_(torch.cat(updates).to(matrix.dtype))
