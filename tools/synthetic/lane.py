"""One run in training: its weights, optimizer and score on the device, and no reading of them back."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from models.head import IGNORED_LABEL

from .experiment import Run
from .network import Network


class Lane:
    """A model with float32 weights, computed in bf16 or float32.

    With bf16 the network holds rounded copies, as the project's trainer has it; gates, decays and norms are computed in
    float32 by the layers. On CUDA every lane has a stream of its own.
    """

    def __init__(self, run: Run, device: torch.device) -> None:
        self.run = run
        self.network = Network(run).to(device)
        self.vocabulary = int(run.data["vocabulary"])
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.masters: list[Tensor] = [torch.nn.Parameter(p.detach().clone()) for p in self.network.parameters()]
        if run.precision == "bf16":
            self.network.bfloat16()
        self.weights: list[Tensor] = list(self.network.parameters())
        self._start = [p.detach().clone() for p in self.masters]
        for master in self.masters:
            master.grad = torch.zeros_like(master)
        self._gradients = [master.grad for master in self.masters if master.grad is not None]
        self._optimizer = _optimizer(run, self.masters, device)
        self.loss = torch.zeros((), device=device)
        # What was right, and of how much; in MAD sums over test batches.
        self._score = torch.zeros(2, device=device)

    @property
    def parameters(self) -> int:
        return sum(p.numel() for p in self.masters)

    def restart(self) -> None:
        """Back to the first step, in place."""
        with torch.no_grad():
            torch._foreach_copy_(self.masters, self._start)
            torch._foreach_copy_(self.weights, self.masters)
            for state in self._optimizer.state.values():
                for value in state.values():
                    value.zero_()
        self.loss.zero_()
        self._score.zero_()

    def begin_epoch(self, epoch: int) -> None:
        """The learning rate of epoch 0, 1, ...: a cosine to min_lr, constant over an epoch as in the papers' code."""
        run = self.run
        rate = run.min_lr + (run.lr - run.min_lr) * (1 + math.cos(math.pi * epoch / run.epochs)) / 2
        for group in self._optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        self.loss.zero_()

    def train(self, tokens: Tensor, positions: Tensor | None, labels: Tensor) -> None:
        """One optimizer step on a batch."""
        for weight in self.weights:
            weight.grad = None
        loss = self.network.loss(tokens, positions, labels)
        loss.backward()
        with torch.no_grad():
            self.loss += loss.detach()
            torch._foreach_copy_(self._gradients, [weight.grad for weight in self.weights if weight.grad is not None])
            self._optimizer.step()
            torch._foreach_copy_(self.weights, self.masters)

    @torch.no_grad()
    def test(self, tokens: Tensor, positions: Tensor | None, labels: Tensor) -> None:
        """Adds a batch to the score."""
        answers = self.network.answers(tokens, positions)
        counted = labels != IGNORED_LABEL
        right = (answers == labels) & counted
        if self.run.suite == "mqar":
            self._score += torch.stack([right.sum(), counted.sum()])
        else:
            self._score += _macro(answers, labels, right, counted, self.vocabulary)

    def take_score(self) -> Tensor:
        """Accuracy since the last call, a scalar on the device."""
        accuracy = self._score[0] / self._score[1]
        self._score.zero_()
        return accuracy


def _macro(answers: Tensor, labels: Tensor, right: Tensor, counted: Tensor, classes: int) -> Tensor:
    """[mean over classes of a class's accuracy, 1]: the classes are those that were asked for or answered."""

    def count(ids: Tensor, where: Tensor) -> Tensor:
        return right.new_zeros(classes, dtype=torch.float32).index_add(
            0, ids.clamp_min(0).flatten(), where.float().flatten()
        )

    asked, found = count(labels, counted), count(labels, right)
    seen = asked + count(answers, counted) > 0
    return torch.stack([(found / asked.clamp_min(1)).sum() / seen.sum().clamp_min(1), found.new_ones(())])


def _optimizer(run: Run, parameters: list[Tensor], device: torch.device) -> torch.optim.Optimizer:
    decayed = [p for p in parameters if run.decayed == "all" or p.ndim > 1]
    rest = [p for p in parameters if run.decayed != "all" and p.ndim <= 1]
    groups: list[dict[str, Any]] = [{"params": decayed, "weight_decay": run.weight_decay}]
    if rest:
        groups.append({"params": rest, "weight_decay": 0.0})
    if device.type == "cuda":
        # A rate that a captured step reads anew at every replay.
        return torch.optim.AdamW(groups, lr=torch.tensor(run.lr, device=device), fused=True, capturable=True)
    return torch.optim.AdamW(groups, lr=run.lr)
