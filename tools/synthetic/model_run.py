"""One run in training: its weights, optimizer and score stay on the device, so that no step waits for the host."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_lite.parallel.fused_projections import fuse_projections
from models.operators.cross_entropy import IGNORED_LABEL

from .classification import TASKS
from .classifier import Classifier
from .experiment import Run
from .network import Network

# Each parameter starts at a multiple of this many elements in the flat tensor: kernels need 16-byte aligned addresses.
_ALIGNED = 64


class FlatParameters:
    """Store parameters in one contiguous tensor, so that the optimizer needs one or two kernels for all of them.

    Attributes:
        master: float32 weights that the optimizer updates from `master.grad`.
        decay: weight decay of these parameters.
    """

    def __init__(self, parameters: list[torch.nn.Parameter], decay: float, dtype: torch.dtype) -> None:
        """Copy the values of float32 parameters and make the parameters views of one tensor of type `dtype`."""
        starts = [0]
        for p in parameters:
            starts.append(starts[-1] + -(-p.numel() // _ALIGNED) * _ALIGNED)
        slices = [slice(start, start + p.numel()) for start, p in zip(starts, parameters, strict=False)]
        device = parameters[0].device
        values = torch.zeros(starts[-1], device=device)
        for position, p in zip(slices, parameters, strict=True):
            values[position] = p.detach().flatten()
        self.decay = decay
        self.master = torch.nn.Parameter(values)
        self.master.grad = torch.zeros_like(values)
        self._start = values.clone()
        self._parameters = parameters
        self._weights, self._gradients = (torch.zeros_like(values, dtype=dtype) for _ in range(2))
        self._gradient_of = [
            self._gradients[position].view_as(p) for position, p in zip(slices, parameters, strict=True)
        ]
        for position, p in zip(slices, parameters, strict=True):
            p.data = self._weights[position].view_as(p)

    def __len__(self) -> int:
        return len(self._parameters)

    def clear_gradients(self) -> None:
        for p in self._parameters:
            p.grad = None

    def collect_gradients(self) -> None:
        """Copy the parameters' gradients to `master.grad`."""
        torch._foreach_copy_(self._gradient_of, [p.grad for p in self._parameters if p.grad is not None])
        assert self.master.grad is not None
        self.master.grad.copy_(self._gradients)

    def copy_to_parameters(self) -> None:
        """Copy the master weights to the parameters, rounded to their type."""
        self._weights.copy_(self.master)

    def reset(self) -> None:
        self.master.copy_(self._start)
        self.copy_to_parameters()


class ModelRun:
    """Hold a model with float32 master weights that computes in bf16 or float32, its optimizer and its score.

    With bf16 the network holds rounded copies of the master weights, as in the project's trainer. The layers compute gates,
    decays and norms in float32. On CUDA each model run has its own stream.

    Attributes:
        dropout_generator: random generator of the network's dropout, seeded by seed and epoch; None without dropout.
    """

    def __init__(self, run: Run, device: torch.device) -> None:
        self.run = run
        if run.classifies:
            task = TASKS[run.task]
            network: Network | Classifier = Classifier(run, task.classes, pairs=task.pairs, images=task.images)
        else:
            network = Network(run)
        self.network = network.to(device)
        self.dropout_generator: torch.Generator | None = None
        if network.embedding_dropout or network.attention_dropout or network.residual_dropout:
            self.dropout_generator = network.dropout_generator = torch.Generator(device)
        if run.compile:
            self.network.compile_blocks()
        elif device.type == "cuda":
            # Needs fewer kernels. On a CPU the result of larger matmuls would depend on the number of threads.
            fuse_projections(self.network, None)
        self.vocabulary = int(run.data["vocabulary"])
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        parameters = list(self.network.parameters())
        self.parameters = sum(p.numel() for p in parameters)
        decayed = [p for p in parameters if run.decayed == "all" or p.ndim > 1]
        rest = [p for p in parameters if run.decayed != "all" and p.ndim <= 1]
        dtype = torch.bfloat16 if run.precision == "bf16" else torch.float32
        self.flats = [
            FlatParameters(group, decay, dtype) for group, decay in ((decayed, run.weight_decay), (rest, 0.0)) if group
        ]
        self.network.to(dtype)
        self._buffers = dict(self.network.named_buffers())
        self._first_buffers = {name: value.clone() for name, value in self._buffers.items()}
        self.reset_weights()
        self._optimizer = _optimizer(run, self.flats, device)
        self.loss = torch.zeros((), device=device)
        # [correct, labelled, sum of perplexities, batches]. For MAD the first two are [sum of macro accuracies, batches].
        self._score = torch.zeros(4, device=device)

    @torch.no_grad()
    def reset_weights(self) -> None:
        for flat in self.flats:
            flat.reset()
        for name, value in self._buffers.items():
            value.copy_(self._first_buffers[name])

    @torch.no_grad()
    def reset(self) -> None:
        """Return to the state before the first step, in place, because captured graphs hold the addresses."""
        self.reset_weights()
        for state in self._optimizer.state.values():
            for value in state.values():
                value.zero_()
        self.loss.zero_()
        self._score.zero_()
        self._seed_dropout(0)

    def state(self) -> dict[str, Any]:
        """Return the master weights, the optimizer's moments and the buffers on the CPU. Call it between two steps."""
        moments = [
            {name: value.cpu() for name, value in self._optimizer.state[flat.master].items()} for flat in self.flats
        ]
        buffers = {name: value.cpu() for name, value in self._buffers.items()}
        return {"weights": [flat.master.detach().cpu() for flat in self.flats], "moments": moments, "buffers": buffers}

    @torch.no_grad()
    def load_state(self, state: dict[str, Any]) -> None:
        """Load what `state` returned, in place, because captured graphs hold the addresses."""
        for name, value in state["buffers"].items():
            self._buffers[name].copy_(value)
        for flat, weights, moments in zip(self.flats, state["weights"], state["moments"], strict=True):
            flat.master.copy_(weights)
            flat.copy_to_parameters()
            optimizer_state = self._optimizer.state[flat.master]
            for name, value in moments.items():
                if name in optimizer_state:
                    optimizer_state[name].copy_(value)
                else:
                    optimizer_state[name] = value.to(flat.master.device, copy=True)

    def begin_epoch(self, epoch: int) -> None:
        """Set the learning rate of epoch 0, 1, ...: lr, or a cosine to min_lr that changes once per epoch.

        The papers' code also changes the learning rate once per epoch.
        """
        run = self.run
        factor = (1 + math.cos(math.pi * epoch / run.epochs)) / 2 if run.schedule == "cosine" else 1.0
        self._rate = run.min_lr + (run.lr - run.min_lr) * factor
        self._set_rate(self._rate)
        self._seed_dropout(epoch)
        self.loss.zero_()

    def warm_up(self, step: int) -> None:
        """Set the learning rate before step 0, 1, ...: during the warmup it grows linearly to the epoch's rate."""
        warmup = self.run.warmup_steps
        if step <= warmup and warmup:
            self._set_rate(self._rate * min(1.0, (step + 1) / warmup))

    def train(self, tokens: Tensor, positions: Tensor | None, labels: Tensor) -> None:
        """Run one optimizer step on a batch."""
        for flat in self.flats:
            flat.clear_gradients()
        loss = self.network.loss(tokens, positions, labels)
        loss.backward()
        with torch.no_grad():
            self.loss += loss.detach()
            for flat in self.flats:
                flat.collect_gradients()
            self._optimizer.step()
            for flat in self.flats:
                flat.copy_to_parameters()

    @torch.no_grad()
    def test(self, tokens: Tensor, positions: Tensor | None, labels: Tensor) -> None:
        """Add a batch to the score."""
        logits = self.network.logits(tokens, positions)
        predictions = logits.argmax(-1)
        labelled = labels != IGNORED_LABEL
        correct = (predictions == labels) & labelled
        if self.run.suite == "mad":
            self._score[:2] += _macro_accuracy(predictions, labels, correct, labelled, self.vocabulary)
        else:
            self._score[:2] += torch.stack([correct.sum(), labelled.sum()])
        loss = F.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=IGNORED_LABEL)
        self._score[2:] += torch.stack([loss.exp(), torch.ones_like(loss)])

    def take_score(self) -> Tensor:
        """Return [accuracy, mean perplexity per batch] since the last call, on the device, and reset the score."""
        score = self._score[::2] / self._score[1::2]
        self._score.zero_()
        return score

    def _seed_dropout(self, epoch: int) -> None:
        if self.dropout_generator is not None:
            self.dropout_generator.manual_seed(1_000_003 * self.run.seed + epoch)

    def _set_rate(self, rate: float) -> None:
        for group in self._optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate


def _macro_accuracy(predictions: Tensor, labels: Tensor, correct: Tensor, labelled: Tensor, classes: int) -> Tensor:
    """Return [accuracy averaged over classes, 1]. Classes that are neither a label nor a prediction are left out."""

    def count(ids: Tensor, where: Tensor) -> Tensor:
        return correct.new_zeros(classes, dtype=torch.float32).index_add(
            0, ids.clamp_min(0).flatten(), where.float().flatten()
        )

    num_labels, num_correct = count(labels, labelled), count(labels, correct)
    present = num_labels + count(predictions, labelled) > 0
    mean = (num_correct / num_labels.clamp_min(1)).sum() / present.sum().clamp_min(1)
    return torch.stack([mean, num_correct.new_ones(())])


def _optimizer(run: Run, flats: list[FlatParameters], device: torch.device) -> torch.optim.Optimizer:
    groups: list[dict[str, Any]] = [{"params": [flat.master], "weight_decay": flat.decay} for flat in flats]
    if device.type == "cuda":
        # A tensor, because a captured step reads the learning rate again at each replay.
        return torch.optim.AdamW(groups, lr=torch.tensor(run.lr, device=device), fused=True, capturable=True)
    return torch.optim.AdamW(groups, lr=run.lr)
