"""Train the runs of a sweep together: on CUDA one graph holds one step of all runs, one parallel branch per run.

The models are so small that launching their kernels takes longer than running them. A graph needs one launch.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from .batches import DeviceExamples, batch_size, concatenate
from .experiment import Run
from .model_run import ModelRun
from .run_checkpoint import CheckpointStore, Evaluation, GroupState, TimeUpError

Progress = Callable[[int, str], None]


def train_together(
    runs: Sequence[Run],
    examples: tuple[DeviceExamples, ...],
    device: torch.device,
    *,
    graph: bool = True,
    progress: Progress = lambda steps, text: None,
    checkpoint_folder: Path | None = None,
    end: float = math.inf,
) -> list[dict[str, Any]]:
    """Train the runs of one sweep on the same batches until the last epoch, or until one run reaches the target.

    Args:
        examples: from `tools.synthetic.batches.prepare`. With three sets, the second gives the target and the history, and
            the third gives the accuracy.
        graph: whether to use CUDA graphs.
        progress: called with the optimizer steps of all runs since the last call, and a status text.
        checkpoint_folder: where the state is saved about once per minute and loaded at the start.
        end: time limit as a value of time.monotonic.

    Returns:
        One dictionary per run. `accuracy` and `perplexity` are those after `scored_epoch` (see `Run.scored`). `loss` is the
        mean of the last epoch. `stopped` is the reason for an early end, or None. `graph` is True, or the reason for no
        graph. Times are in seconds. A loss or perplexity that is not finite is None.

    Raises:
        TimeUpError: the time limit has passed at the end of an epoch that is not the last.
    """
    started = time.perf_counter()
    first = runs[0]
    steps = SideBySide(runs, examples, device, graph=graph)
    prepared = time.perf_counter()
    history: list[list[Evaluation]] = [[] for _ in runs]
    losses: list[float] = []
    epochs_done, epoch, earlier_seconds = 0, 0, 0.0
    stopped: str | None = None
    store = CheckpointStore(checkpoint_folder, runs)
    if saved := store.load():
        epochs_done, history, earlier_seconds = saved.epoch, saved.history, saved.seconds
        for model_run, state in zip(steps.model_runs, saved.model_runs, strict=True):
            model_run.load_state(state)
        progress(epochs_done * first.steps_per_epoch * len(runs), f"{first.name} resumes after epoch {epochs_done}")
    for epoch in range(epochs_done + 1, first.epochs + 1):
        steps.train_epoch(epoch - 1)
        text = f"{first.name} epoch {epoch}"
        if epoch % first.evaluate_every == 0 or epoch == first.epochs:
            evaluations, losses = steps.evaluate()
            for run_history, evaluation in zip(history, evaluations, strict=True):
                run_history.append(evaluation)
            best = max(evaluation.accuracy for evaluation in evaluations)
            text += f" {100 * best:.1f} %"
            if first.target is not None and best >= first.target:
                stopped = f"{100 * first.target:g} % was reached"
            elif not any(math.isfinite(loss) for loss in losses):
                stopped = "no loss was finite"
        progress(first.steps_per_epoch * len(runs), text)
        if stopped or epoch == first.epochs:
            break
        time_up = time.monotonic() >= end
        if time_up or store.due:
            model_runs = [model_run.state() for model_run in steps.model_runs]
            seconds = earlier_seconds + time.perf_counter() - prepared
            store.save(GroupState(epoch, seconds, history, model_runs))
        if time_up:
            raise TimeUpError(
                f"{first.name}: saved after epoch {epoch} of {first.epochs}" + _accuracies(first, history)
            )
    seconds = earlier_seconds + time.perf_counter() - prepared
    steps_done = epoch * first.steps_per_epoch
    scored = [_scored(run_history, first.scored) for run_history in history]
    return [
        {
            "accuracy": evaluations[index].test_accuracy,
            "perplexity": evaluations[index].perplexity if math.isfinite(evaluations[index].perplexity) else None,
            "scored_epoch": min((index + 1) * first.evaluate_every, epoch),
            "best_accuracy": max(evaluation.accuracy for evaluation in evaluations),
            "history": [evaluation.accuracy for evaluation in evaluations],
            "loss": loss if math.isfinite(loss) else None,
            "epochs": epoch,
            "steps": steps_done,
            "stopped": stopped if epoch < first.epochs else None,
            "graph": steps.graph,
            "parameters": model_run.parameters,
            "side_by_side": len(runs),
            "seconds": round(seconds, 2),
            "preparation_seconds": round(prepared - started, 2),
            "steps_per_second": round(steps_done / seconds, 1),
        }
        for index, evaluations, loss, model_run in zip(scored, history, losses, steps.model_runs, strict=True)
    ]


def _accuracies(first: Run, history: list[list[Evaluation]]) -> str:
    """Return the last and the best accuracy of the run that is best so far; empty before the first evaluation."""
    best = max(history, key=lambda evaluations: max((x.accuracy for x in evaluations), default=0.0))
    if not best:
        return ""
    highest = _scored(best, "best_validation")
    return (
        f"; accuracy {100 * best[-1].accuracy:.1f} %, highest {100 * best[highest].accuracy:.1f} % after epoch "
        f"{(highest + 1) * first.evaluate_every}"
    )


def _scored(history: list[Evaluation], which: str) -> int:
    """Return the index of the evaluation that counts: the last, or the first with the best value."""
    if which == "last":
        return len(history) - 1
    if which == "best_validation":
        accuracies = [evaluation.accuracy for evaluation in history]
        return accuracies.index(max(accuracies))
    perplexities = [math.inf if math.isnan(evaluation.perplexity) else evaluation.perplexity for evaluation in history]
    return perplexities.index(min(perplexities))


class SideBySide:
    """Run the training and test steps of several models on the same batches, as CUDA graphs if possible.

    Attributes:
        model_runs: one `ModelRun` per run.
        graph: True if the steps are CUDA graphs, else the reason why not.
    """

    def __init__(
        self, runs: Sequence[Run], examples: tuple[DeviceExamples, ...], device: torch.device, *, graph: bool = True
    ) -> None:
        first = runs[0]
        self._device = device
        self._seed = first.seed
        self._size = batch_size(first)
        self._train, *evaluation_sets = examples
        self._ends = list(itertools.accumulate(len(part.tokens) // self._size for part in evaluation_sets))
        self._test = concatenate(evaluation_sets)
        self._batches = first.steps_per_epoch
        self._epochs_per_pass = first.steps_per_pass // self._batches
        self._examples = int(first.data["train_examples"])
        self._order = torch.arange(self._batches * self._size, device=device).view(-1, self._size)
        self._test_order = torch.arange(len(self._test.tokens), device=device).view(-1, self._size)
        # Index of the next batch, on the device, so that a replayed graph advances it.
        self._batch_index, self._test_batch_index = (torch.zeros(1, dtype=torch.long, device=device) for _ in range(2))
        self.model_runs = [ModelRun(run, device) for run in runs]
        self.graph: bool | str = "disabled" if device.type == "cuda" else "CPU"
        if device.type == "cuda" and first.precision == "fp32":
            # The plain PyTorch operators read decays on the host to choose chunks, and a failed capture spoils later ones.
            self.graph = "float32"
        self._train_step: Callable[[], None] = self._train_all
        self._test_step: Callable[[], None] = self._test_all
        if device.type == "cuda" and graph and first.precision != "fp32":
            self._capture_graphs()

    def train_epoch(self, epoch: int) -> None:
        """Train one epoch on its batches, in an order that depends only on the seed and the epoch."""
        whole_pass, part = divmod(epoch, self._epochs_per_pass)
        generator = torch.Generator().manual_seed(1_000_003 * self._seed + whole_pass)
        order = torch.randperm(self._examples, generator=generator)
        # Without drop_last, rows without labels fill the last batch.
        order = torch.cat([order, torch.arange(self._examples, len(self._train.tokens))])
        rows = self._order.numel()
        self._order.copy_(order[part * rows : (part + 1) * rows].view_as(self._order))
        self._batch_index.zero_()
        for model_run in self.model_runs:
            model_run.begin_epoch(epoch)
        for step in range(epoch * self._batches, (epoch + 1) * self._batches):
            for model_run in self.model_runs:
                model_run.warm_up(step)
            self._train_step()

    def evaluate(self) -> tuple[list[Evaluation], list[float]]:
        """Return per run the scores on the evaluation sets and the mean training loss of the last epoch."""
        self._test_batch_index.zero_()
        scores_of_sets = []
        for done in range(1, self._ends[-1] + 1):
            self._test_step()
            if done in self._ends:
                scores_of_sets.append(torch.stack([model_run.take_score() for model_run in self.model_runs]))
        losses = torch.stack([model_run.loss for model_run in self.model_runs]) / self._batches
        # [sets, model_runs, 2]. This is the only place where the host waits for the device.
        scores = torch.stack(scores_of_sets).tolist()
        return [Evaluation(*first, last[0]) for first, last in zip(scores[0], scores[-1], strict=True)], losses.tolist()

    def losses_of_steps(self, count: int) -> list[list[float]]:
        """Return the losses of all runs in each of the first `count` steps; reset before and after. For `--check`.

        Before the first `train_epoch` the batches are the examples in their order.
        """
        self._reset()
        losses = []
        for _ in range(count):
            for model_run in self.model_runs:
                model_run.loss.zero_()
            self._train_step()
            losses.append(torch.stack([model_run.loss for model_run in self.model_runs]).tolist())
        self._reset()
        return losses

    def _train_all(self) -> None:
        batch = self._train.batch(self._order.index_select(0, self._batch_index)[0])
        self._batch_index += 1
        self._on_branches(lambda model_run: model_run.train(*batch))

    def _test_all(self) -> None:
        batch = self._test.batch(self._test_order.index_select(0, self._test_batch_index)[0])
        self._test_batch_index += 1
        self._on_branches(lambda model_run: model_run.test(*batch))

    def _on_branches(self, work: Callable[[ModelRun], None]) -> None:
        if self._device.type != "cuda":
            for model_run in self.model_runs:
                work(model_run)
            return
        main_stream = torch.cuda.current_stream()
        for model_run in self.model_runs:
            assert model_run.stream is not None
            model_run.stream.wait_stream(main_stream)
            with torch.cuda.stream(model_run.stream):
                work(model_run)
        for model_run in self.model_runs:
            assert model_run.stream is not None
            main_stream.wait_stream(model_run.stream)

    def _capture_graphs(self) -> None:
        """Capture the steps as CUDA graphs. If a capture fails, run eagerly and set `graph` to the reason."""
        self._warm_up()
        try:
            generators = [m.dropout_generator for m in self.model_runs if m.dropout_generator is not None]
            self._train_step, self._test_step = _graph(self._train_all, generators), _graph(self._test_all)
            self.graph = True
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            torch.cuda.synchronize()
            self.graph = str(error).strip().split("\n")[0]
            for model_run in self.model_runs:
                model_run.stream = torch.cuda.Stream(self._device)
        self._reset()

    def _warm_up(self) -> None:
        """Run three steps before a capture, so that kernels are compiled and the optimizer's state exists."""
        main_stream = torch.cuda.current_stream()
        stream = torch.cuda.Stream()
        stream.wait_stream(main_stream)
        with torch.cuda.stream(stream):
            for _ in range(3):
                self._batch_index.zero_()
                self._train_all()
                self._test_batch_index.zero_()
                self._test_all()
        main_stream.wait_stream(stream)
        torch.cuda.synchronize()

    def _reset(self) -> None:
        for model_run in self.model_runs:
            model_run.reset()
        self._batch_index.zero_()
        self._test_batch_index.zero_()


def _graph(step: Callable[[], None], generators: Sequence[torch.Generator] = ()) -> Callable[[], None]:
    """Capture a step as a CUDA graph and return its replay. generators: random generators of the step except the default."""
    graph = torch.cuda.CUDAGraph()
    for generator in generators:
        graph.register_generator_state(generator)
    with torch.cuda.graph(graph):
        step()
    return graph.replay
