"""The runs of a sweep side by side: on CUDA one graph holds a step of all of them, each on a branch of its own.

Models of this size are so small that starting their kernels takes the host longer than running them. A graph is started
at once, and its branches share the device.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from tools.cli.devices import device_of

from .batches import Asked, batch_size, joined
from .experiment import Run
from .model_run import Lane
from .run_checkpoint import Evaluated, Keeper, TimeUpError, Unfinished

Progress = Callable[[int, str], None]


def train_together(
    runs: Sequence[Run],
    examples: tuple[Asked, ...],
    device: torch.device,
    *,
    graph: bool = True,
    progress: Progress = lambda steps, text: None,
    unfinished: Path | None = None,
    end: float = math.inf,
) -> list[dict[str, Any]]:
    """Trains the runs of one sweep, all on the same batches, until the last epoch or one of them reaches the target.

    unfinished: a folder where the state is kept about once a minute, and from where it goes on.
    end: of time.monotonic; TimeUpError, where an epoch ends after it that is not the last.
    examples: of `tools.synthetic.batches.prepare`; where there are three, the target and the history are the second's, the
    accuracy the third's.
    progress is told the optimizer steps since its last call, of all runs, and how far they are. Returns for every run
    what was found: `accuracy` and `perplexity` after `scored_epoch` (the last, or that of least perplexity, as the run says),
    `best_accuracy`, `history`, `loss` (mean of the last epoch), `epochs`, `steps`, `stopped` (why before the last epoch, or
    None), `graph` (True, or why not). Where a loss or perplexity is not finite it is None.
    """
    started = time.perf_counter()
    first = runs[0]
    steps = SideBySide(runs, examples, device, graph=graph)
    prepared = time.perf_counter()
    history: list[list[Evaluated]] = [[] for _ in runs]
    losses: list[float] = []
    before, epoch, stopped = 0, 0, ""
    keeper = Keeper(unfinished, runs)
    if kept := keeper.kept():
        before, history = kept.epoch, kept.history
        for lane, state in zip(steps.lanes, kept.lanes, strict=True):
            lane.go_on_from(state)
        prepared -= kept.seconds
        progress(before * first.steps_per_epoch * len(runs), f"{first.name} goes on after epoch {before}")
    for epoch in range(before + 1, first.epochs + 1):
        steps.train_epoch(epoch - 1)
        text = f"{first.name} epoch {epoch}"
        if epoch % first.evaluate_every == 0 or epoch == first.epochs:
            found, losses = steps.evaluate()
            for own, evaluated in zip(history, found, strict=True):
                own.append(evaluated)
            best = max(evaluated.accuracy for evaluated in found)
            text += f" {100 * best:.1f} %"
            if first.target is not None and best >= first.target:
                stopped = f"{100 * first.target:g} % was reached"
            elif not any(math.isfinite(loss) for loss in losses):
                stopped = "no loss was finite"
        progress(first.steps_per_epoch * len(runs), text)
        if stopped or epoch == first.epochs:
            break
        over = time.monotonic() >= end
        if over or keeper.due:
            lanes = [lane.state() for lane in steps.lanes]
            keeper.keep(Unfinished(epoch, time.perf_counter() - prepared, history, lanes))
        if over:
            raise TimeUpError
    seconds = time.perf_counter() - prepared
    taken = epoch * first.steps_per_epoch
    scored = [_scored(own, first.scored) for own in history]
    return [
        {
            "accuracy": own[place].tested,
            "perplexity": own[place].perplexity if math.isfinite(own[place].perplexity) else None,
            "scored_epoch": min((place + 1) * first.evaluate_every, epoch),
            "best_accuracy": max(evaluated.accuracy for evaluated in own),
            "history": [evaluated.accuracy for evaluated in own],
            "loss": loss if math.isfinite(loss) else None,
            "epochs": epoch,
            "steps": taken,
            "stopped": (stopped if epoch < first.epochs else None) or None,
            "graph": steps.graph,
            "parameters": lane.parameters,
            "side_by_side": len(runs),
            "seconds": round(seconds, 2),
            "preparation_seconds": round(prepared - started, 2),
            "steps_per_second": round(taken / seconds, 1),
        }
        for place, own, loss, lane in zip(scored, history, losses, steps.lanes, strict=True)
    ]


def _scored(history: list[Evaluated], which: str) -> int:
    """Which evaluation counts: the last, or the first one of least perplexity."""
    if which == "last":
        return len(history) - 1
    perplexities = [math.inf if math.isnan(evaluated.perplexity) else evaluated.perplexity for evaluated in history]
    return perplexities.index(min(perplexities))


class SideBySide:
    """Lanes that take the same batches, and their training and test steps, as CUDA graphs where that works.

    Attributes:
        lanes: of the runs.
        graph: True where steps are graphs, else why they are not.
    """

    def __init__(
        self, runs: Sequence[Run], examples: tuple[Asked, ...], device: torch.device, *, graph: bool = True
    ) -> None:
        first = runs[0]
        self._device = device
        self._seed = first.seed
        self._size = batch_size(first)
        self._train, *evaluated = examples
        self._ends = list(itertools.accumulate(len(part.tokens) // self._size for part in evaluated))
        self._test = joined(evaluated)
        self._batches = first.steps_per_epoch
        self._examples = int(first.data["train_examples"])
        self._order = torch.arange(self._batches * self._size, device=device).view(-1, self._size)
        self._test_order = torch.arange(len(self._test.tokens), device=device).view(-1, self._size)
        # Which batch is next: on the device, so that a graph moves it on by itself.
        self._place, self._test_place = (torch.zeros(1, dtype=torch.long, device=device) for _ in range(2))
        self.lanes = [Lane(run, device) for run in runs]
        self.graph: bool | str = "not asked for" if device.type == "cuda" else "CPU"
        if device.type == "cuda" and first.precision == "fp32":
            # The plain forms choose their chunks by reading decays back, and a capture that fails spoils later ones.
            self.graph = "float32"
        self._train_step: Callable[[], None] = self._train_all
        self._test_step: Callable[[], None] = self._test_all
        if device.type == "cuda" and graph and first.precision != "fp32":
            self._capture()

    def train_epoch(self, epoch: int) -> None:
        """All batches in a new order, which depends on the seed and the epoch alone."""
        generator = torch.Generator().manual_seed(1_000_003 * self._seed + epoch)
        order = torch.randperm(self._examples, generator=generator)
        taken = self._order.numel()
        # Rows without labels fill the last batch where none is dropped.
        order = torch.cat([order, torch.arange(self._examples, max(self._examples, taken))])[:taken]
        self._order.copy_(order.view_as(self._order))
        self._place.zero_()
        for lane in self.lanes:
            lane.begin_epoch(epoch)
        for step in range(epoch * self._batches, (epoch + 1) * self._batches):
            for lane in self.lanes:
                lane.warm_up(step)
            self._train_step()

    def evaluate(self) -> tuple[list[Evaluated], list[float]]:
        """What each lane does on the sets of examples that are not trained on, and its mean training loss since
        `train_epoch` began."""
        self._test_place.zero_()
        found = []
        for done in range(1, self._ends[-1] + 1):
            self._test_step()
            if done in self._ends:
                found.append(torch.stack([lane.take_score() for lane in self.lanes]))
        losses = torch.stack([lane.loss for lane in self.lanes]) / self._batches
        # [sets, lanes, 2]. Here the host waits for the device, and nowhere else.
        scores = torch.stack(found).tolist()
        return [Evaluated(*first, last[0]) for first, last in zip(scores[0], scores[-1], strict=True)], losses.tolist()

    def losses_of_steps(self, count: int) -> list[list[float]]:
        """For a check: the losses of the lanes in each of the first `count` steps from the start, to which it goes back.

        Batches are the examples in order where `train_epoch` was not called yet.
        """
        self._restart()
        found = []
        for _ in range(count):
            for lane in self.lanes:
                lane.loss.zero_()
            self._train_step()
            found.append(torch.stack([lane.loss for lane in self.lanes]).tolist())
        self._restart()
        return found

    def _train_all(self) -> None:
        batch = self._train.batch(self._order.index_select(0, self._place)[0])
        self._place += 1
        self._on_branches(lambda lane: lane.train(*batch))

    def _test_all(self) -> None:
        batch = self._test.batch(self._test_order.index_select(0, self._test_place)[0])
        self._test_place += 1
        self._on_branches(lambda lane: lane.test(*batch))

    def _on_branches(self, work: Callable[[Lane], None]) -> None:
        if self._device.type != "cuda":
            for lane in self.lanes:
                work(lane)
            return
        trunk = torch.cuda.current_stream()
        for lane in self.lanes:
            assert lane.stream is not None
            lane.stream.wait_stream(trunk)
            with torch.cuda.stream(lane.stream):
                work(lane)
        for lane in self.lanes:
            assert lane.stream is not None
            trunk.wait_stream(lane.stream)

    def _capture(self) -> None:
        """Steps as graphs; where one cannot be captured, as they are, and `graph` says why."""
        self._warm_up()
        try:
            dropped = [lane.dropped for lane in self.lanes if lane.dropped is not None]
            self._train_step, self._test_step = _graph(self._train_all, dropped), _graph(self._test_all)
            self.graph = True
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            torch.cuda.synchronize()
            self.graph = str(error).strip().split("\n")[0]
            for lane in self.lanes:
                lane.stream = torch.cuda.Stream(self._device)
        self._restart()

    def _warm_up(self) -> None:
        """Before a capture: kernels are compiled, the optimizer's state exists."""
        trunk = torch.cuda.current_stream()
        stream = torch.cuda.Stream()
        stream.wait_stream(trunk)
        with torch.cuda.stream(stream):
            for _ in range(3):
                self._place.zero_()
                self._train_all()
                self._test_place.zero_()
                self._test_all()
        trunk.wait_stream(stream)
        torch.cuda.synchronize()

    def _restart(self) -> None:
        for lane in self.lanes:
            lane.restart()
        self._place.zero_()
        self._test_place.zero_()


def _graph(step: Callable[[], None], generators: Sequence[torch.Generator] = ()) -> Callable[[], None]:
    """A step as a graph. generators: those that it draws from, beside the default one."""
    graph = torch.cuda.CUDAGraph()
    for generator in generators:
        graph.register_generator_state(generator)
    with torch.cuda.graph(graph):
        step()

    def replay() -> None:
        graph.replay()

    return replay


def training_device(name: str) -> torch.device:
    """A device by name, the current one from here on. Raises as `device_of`."""
    device = device_of(name)
    if device.type == "cuda":
        device = torch.device("cuda", device.index or 0)
        torch.cuda.set_device(device)
    return device
