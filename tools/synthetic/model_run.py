"""One run in training: its weights, optimizer and score on the device, and no reading of them back."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from data.synthetic.listops import CLASSES
from megatron_lite.parallel.fused_projections import fuse_projections
from models.operators.cross_entropy import IGNORED_LABEL

from .experiment import Run
from .network import Classifier, Network

# Elements that a parameter's place in a flat tensor is a multiple of: kernels want addresses of whole 16 bytes.
_ALIGNED = 64


class Flat:
    """Parameters in one piece of memory: what is done to all of them is a kernel or two, and not as many for each.

    Attributes:
        master: float32, what the optimizer moves; `grad` is what it reads.
        decay: weight decay of these parameters.
    """

    def __init__(self, parameters: list[torch.nn.Parameter], decay: float, dtype: torch.dtype) -> None:
        """Takes the values of float32 parameters, which from here on are views of memory in dtype."""
        starts = [0]
        for p in parameters:
            starts.append(starts[-1] + -(-p.numel() // _ALIGNED) * _ALIGNED)
        places = [slice(start, start + p.numel()) for start, p in zip(starts, parameters, strict=False)]
        device = parameters[0].device
        values = torch.zeros(starts[-1], device=device)
        for place, p in zip(places, parameters, strict=True):
            values[place] = p.detach().flatten()
        self.decay = decay
        self.master = torch.nn.Parameter(values)
        self.master.grad = torch.zeros_like(values)
        self._start = values.clone()
        self._parameters = parameters
        self._weights, self._gradients = (torch.zeros_like(values, dtype=dtype) for _ in range(2))
        self._gradient_of = [self._gradients[place].view_as(p) for place, p in zip(places, parameters, strict=True)]
        for place, p in zip(places, parameters, strict=True):
            p.data = self._weights[place].view_as(p)

    def __len__(self) -> int:
        return len(self._parameters)

    def forget_gradients(self) -> None:
        for p in self._parameters:
            p.grad = None

    def collect(self) -> None:
        """The parameters' gradients into the master's."""
        torch._foreach_copy_(self._gradient_of, [p.grad for p in self._parameters if p.grad is not None])
        assert self.master.grad is not None
        self.master.grad.copy_(self._gradients)

    def spread(self) -> None:
        """The master's values into the parameters."""
        self._weights.copy_(self.master)

    def restart(self) -> None:
        self.master.copy_(self._start)
        self.spread()


class Lane:
    """A model with float32 weights, computed in bf16 or float32.

    The network holds the weights as it computes with them; with bf16 these are rounded copies, as the project's trainer has
    them. Gates, decays and norms are computed in float32 by the layers. On CUDA every lane has a stream of its own.

    Attributes:
        dropped: what the network's dropout draws from, where it has one: numbers of the seed and the epoch.
    """

    def __init__(self, run: Run, device: torch.device) -> None:
        self.run = run
        network = Classifier(run, CLASSES) if run.suite == "listops" else Network(run)
        self.network: Network | Classifier = network.to(device)
        self.dropped: torch.Generator | None = None
        if network.embedding_dropout or network.attention_dropout:
            self.dropped = network.dropped = torch.Generator(device)
        if device.type == "cuda":
            # Fewer kernels. On a CPU the sums of larger products would depend on the number of threads.
            fuse_projections(self.network, None)
        self.vocabulary = int(run.data["vocabulary"])
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        parameters = list(self.network.parameters())
        self.parameters = sum(p.numel() for p in parameters)
        decayed = [p for p in parameters if run.decayed == "all" or p.ndim > 1]
        rest = [p for p in parameters if run.decayed != "all" and p.ndim <= 1]
        dtype = torch.bfloat16 if run.precision == "bf16" else torch.float32
        self.flats = [Flat(group, decay, dtype) for group, decay in ((decayed, run.weight_decay), (rest, 0.0)) if group]
        self.network.to(dtype)
        self.restart_weights()
        self._optimizer = _optimizer(run, self.flats, device)
        self.loss = torch.zeros((), device=device)
        # What was right, and of how much; in MAD sums over test batches. Perplexities of test batches, and how many.
        self._score = torch.zeros(4, device=device)

    @torch.no_grad()
    def restart_weights(self) -> None:
        for flat in self.flats:
            flat.restart()

    @torch.no_grad()
    def restart(self) -> None:
        """Back to the first step, in place."""
        self.restart_weights()
        for state in self._optimizer.state.values():
            for value in state.values():
                value.zero_()
        self.loss.zero_()
        self._score.zero_()
        self._draw_anew(0)

    def state(self) -> dict[str, Any]:
        """Weights and the optimizer's moments between two steps, on the CPU."""
        moments = [
            {name: value.cpu() for name, value in self._optimizer.state[flat.master].items()} for flat in self.flats
        ]
        return {"weights": [flat.master.detach().cpu() for flat in self.flats], "moments": moments}

    @torch.no_grad()
    def go_on_from(self, state: dict[str, Any]) -> None:
        """To where `state` was called, in place: a captured step goes on with what it finds."""
        for flat, weights, moments in zip(self.flats, state["weights"], state["moments"], strict=True):
            flat.master.copy_(weights)
            flat.spread()
            own = self._optimizer.state[flat.master]
            for name, value in moments.items():
                if name in own:
                    own[name].copy_(value)
                else:
                    own[name] = value.clone()

    def begin_epoch(self, epoch: int) -> None:
        """The learning rate of epoch 0, 1, ...: of a cosine to min_lr a step an epoch, as in the papers' code, or lr."""
        run = self.run
        height = (1 + math.cos(math.pi * epoch / run.epochs)) / 2 if run.schedule == "cosine" else 1.0
        self._rate = run.min_lr + (run.lr - run.min_lr) * height
        self._set_rate(self._rate)
        self._draw_anew(epoch)
        self.loss.zero_()

    def warm_up(self, step: int) -> None:
        """Before step 0, 1, ...: while the warmup lasts, the learning rate grows linearly to what the epoch gives."""
        warmup = self.run.warmup_steps
        if step <= warmup and warmup:
            self._set_rate(self._rate * min(1.0, (step + 1) / warmup))

    def train(self, tokens: Tensor, positions: Tensor | None, labels: Tensor) -> None:
        """One optimizer step on a batch."""
        for flat in self.flats:
            flat.forget_gradients()
        loss = self.network.loss(tokens, positions, labels)
        loss.backward()
        with torch.no_grad():
            self.loss += loss.detach()
            for flat in self.flats:
                flat.collect()
            self._optimizer.step()
            for flat in self.flats:
                flat.spread()

    @torch.no_grad()
    def test(self, tokens: Tensor, positions: Tensor | None, labels: Tensor) -> None:
        """Adds a batch to the score."""
        logits = self.network.logits(tokens, positions)
        answers = logits.argmax(-1)
        counted = labels != IGNORED_LABEL
        right = (answers == labels) & counted
        if self.run.suite == "mad":
            self._score[:2] += _macro(answers, labels, right, counted, self.vocabulary)
        else:
            self._score[:2] += torch.stack([right.sum(), counted.sum()])
        loss = F.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=IGNORED_LABEL)
        self._score[2:] += torch.stack([loss.exp(), torch.ones_like(loss)])

    def take_score(self) -> Tensor:
        """[accuracy, mean perplexity of a batch] since the last call, on the device."""
        found = self._score[::2] / self._score[1::2]
        self._score.zero_()
        return found

    def _draw_anew(self, epoch: int) -> None:
        if self.dropped is not None:
            self.dropped.manual_seed(1_000_003 * self.run.seed + epoch)

    def _set_rate(self, rate: float) -> None:
        for group in self._optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate


def _macro(answers: Tensor, labels: Tensor, right: Tensor, counted: Tensor, classes: int) -> Tensor:
    """[mean over classes of a class's accuracy, 1]: the classes are those that were asked for or answered."""

    def count(ids: Tensor, where: Tensor) -> Tensor:
        return right.new_zeros(classes, dtype=torch.float32).index_add(
            0, ids.clamp_min(0).flatten(), where.float().flatten()
        )

    asked, found = count(labels, counted), count(labels, right)
    seen = asked + count(answers, counted) > 0
    return torch.stack([(found / asked.clamp_min(1)).sum() / seen.sum().clamp_min(1), found.new_ones(())])


def _optimizer(run: Run, flats: list[Flat], device: torch.device) -> torch.optim.Optimizer:
    groups: list[dict[str, Any]] = [{"params": [flat.master], "weight_decay": flat.decay} for flat in flats]
    if device.type == "cuda":
        # A rate that a captured step reads anew at every replay.
        return torch.optim.AdamW(groups, lr=torch.tensor(run.lr, device=device), fused=True, capturable=True)
    return torch.optim.AdamW(groups, lr=run.lr)
