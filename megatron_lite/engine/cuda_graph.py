"""The blocks of a training step as two CUDA graphs, one forward and one backward, instead of thousands of kernel launches.

A graph reads its input and the weights, and writes its output and the gradients, at fixed addresses.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

Block = Callable[..., Tensor]
_EAGER = 2  # calls before the capture: they compile and select kernels and create communicators


class GraphedBlocks:
    """`blocks`, (hidden, **context) -> hidden, captured at the third training call and replayed afterwards.

    Calls with a context, with another shape or dtype, or without gradients run `eager_fallback`. All calls do so, with a
    warning, if an operation of the blocks synchronises with the host, which a graph cannot capture.

    Args:
        eager_fallback: the same function, with every kernel launched by the host.
        layers: the modules whose parameters `blocks` reads.
        keep_gradients: gradients outlive the next call, so they are copied out of the graph's memory.
    """

    def __init__(
        self, blocks: Block, eager_fallback: Block, layers: Sequence[nn.Module], *, keep_gradients: bool = True
    ) -> None:
        self._blocks, self._eager_fallback = blocks, eager_fallback
        self._layers, self._keep_gradients = list(layers), keep_gradients
        self._unsupported = False
        self._like: tuple[torch.Size, torch.dtype] | None = None
        self._calls = 0  # with this shape and dtype
        self._graphs: _Graphs | None = None

    def __call__(self, hidden: Tensor, **context: Tensor) -> Tensor:
        if self._unsupported or context or not (torch.is_grad_enabled() and hidden.requires_grad):
            return self._eager_fallback(hidden, **context)
        graphs = self._graphs
        if graphs is not None and graphs.has_moved_parameters():
            graphs = self._graphs = None
        like = (hidden.shape, hidden.dtype)
        if graphs is None:
            self._calls = self._calls + 1 if like == self._like else 1
            self._like = like
            if self._calls <= _EAGER:
                return self._warm_up(hidden)
            graphs = self._graphs = self._capture(hidden)
        if like != self._like:
            return self._eager_fallback(hidden)
        return _Replay.apply(graphs, self._keep_gradients, hidden, *graphs.parameters)

    def _capture(self, hidden: Tensor) -> _Graphs:
        try:
            return _Graphs(self._blocks, self._layers, hidden)
        except RuntimeError as error:
            raise RuntimeError(
                "parallel.cuda_graph = true: the blocks could not be captured (the cause is above); set it to false"
            ) from error

    def _warm_up(self, hidden: Tensor) -> Tensor:
        """Run the blocks eagerly and detect synchronisation with the host."""
        previous = torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                y = self._blocks(hidden)
            finally:
                torch.cuda.set_sync_debug_mode(previous)
        waits = False
        for warning in caught:
            waits |= "synchronizing CUDA operation" in str(warning.message)
            if "ynchroniz" not in str(warning.message):
                warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
        # The first call also compiles kernels, which may synchronise.
        if self._calls == _EAGER and waits:
            self._unsupported = True
            warnings.warn(
                "parallel.cuda_graph = true: a block synchronises with the host, which a CUDA graph cannot capture; the blocks "
                "run without graphs. Set it to false (MetaLA synchronises in float32, not with precision.dtype = bf16)",
                stacklevel=2,
            )
        return y


class _Graphs:
    """The captured forward and backward graph with their input, output and gradients."""

    def __init__(self, blocks: Block, layers: Sequence[nn.Module], like: Tensor) -> None:
        self.x = like.detach().clone(memory_format=torch.contiguous_format).requires_grad_()
        self.forward, self.backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        pool = torch.cuda.graph_pool_handle()
        # Other threads, such as NCCL's watchdog, may use calls that the capturing thread may not.
        options: dict[str, Any] = {"pool": pool, "capture_error_mode": "thread_local"}
        with _aliased(layers) as pairs:
            self.parameters = [parameter for parameter, _ in pairs]
            with torch.cuda.graph(self.forward, **options):
                y = blocks(self.x)
            self.dy = torch.empty_like(y)
            inputs = [self.x, *(alias for _, alias in pairs)]
            with torch.cuda.graph(self.backward, **options):
                self.gradients = torch.autograd.grad(y, inputs, self.dy, allow_unused=True)
        self.y = y.detach()
        self._addresses = [parameter.data_ptr() for parameter in self.parameters]

    def has_moved_parameters(self) -> bool:
        """Return whether a parameter is at another address than at the capture."""
        return self._addresses != [parameter.data_ptr() for parameter in self.parameters]


@contextmanager
def _aliased(layers: Sequence[nn.Module]) -> Iterator[list[tuple[nn.Parameter, Tensor]]]:
    """Let the modules read aliases of their parameters: gradients of parameters accumulate on streams outside the capture."""
    aliases: dict[int, Tensor] = {}
    pairs: list[tuple[nn.Parameter, Tensor]] = []
    changed: list[tuple[nn.Module, str, nn.Parameter]] = []
    for module in (module for layer in layers for module in layer.modules()):
        for name, parameter in module._parameters.items():
            if parameter is None or not parameter.requires_grad:
                continue
            if id(parameter) not in aliases:
                aliases[id(parameter)] = parameter.detach().requires_grad_()
                pairs.append((parameter, aliases[id(parameter)]))
            changed.append((module, name, parameter))
    try:
        for module, name, parameter in changed:
            module._parameters[name] = aliases[id(parameter)]  # type: ignore[assignment]
        yield pairs
    finally:
        for module, name, parameter in changed:
            module._parameters[name] = parameter


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, graphs: _Graphs, keep_gradients: bool, hidden: Tensor, *parameters: Tensor) -> Tensor:
        ctx.graphs, ctx.keep_gradients = graphs, keep_gradients
        graphs.x.detach().copy_(hidden)
        graphs.forward.replay()
        return graphs.y.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        graphs = ctx.graphs
        graphs.dy.copy_(gradient)
        graphs.backward.replay()
        first, *rest = graphs.gradients
        of_parameters = [None if g is None else g.clone() if ctx.keep_gradients else g.detach() for g in rest]
        return None, None, first.detach(), *of_parameters
