"""The blocks of a training step as two CUDA graphs, one forward and one backward: the host starts a graph instead of thousands
of kernels.

What is recorded reads its input and the weights, and writes its output and the gradients, at the same addresses every time.
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
_EAGER = 2  # calls before the recording: kernels are compiled and chosen, communicators made


class GraphedBlocks:
    """`blocks`, (hidden, **context) -> hidden, recorded at the third training call and replayed from then on.

    Calls with a context, with another shape or dtype, or without gradients run `eager_fallback`. So do all calls if an
    operation of the blocks waits for a value of the device, which a graph cannot record; a warning says so.

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
        self._calls = 0  # of this shape and type
        self._record: _Record | None = None

    def __call__(self, hidden: Tensor, **context: Tensor) -> Tensor:
        if self._unsupported or context or not (torch.is_grad_enabled() and hidden.requires_grad):
            return self._eager_fallback(hidden, **context)
        record = self._record
        if record is not None and record.moved():
            record = self._record = None
        like = (hidden.shape, hidden.dtype)
        if record is None:
            self._calls = self._calls + 1 if like == self._like else 1
            self._like = like
            if self._calls <= _EAGER:
                return self._tried(hidden)
            record = self._record = self._recorded(hidden)
        if like != self._like:
            return self._eager_fallback(hidden)
        return _Replay.apply(record, self._keep_gradients, hidden, *record.parameters)

    def _recorded(self, hidden: Tensor) -> _Record:
        try:
            return _Record(self._blocks, self._layers, hidden)
        except RuntimeError as error:
            raise RuntimeError(
                "parallel.cuda_graph = true: the blocks could not be recorded (the cause is above); set it to false"
            ) from error

    def _tried(self, hidden: Tensor) -> Tensor:
        """The blocks, and whether they can be recorded."""
        before = torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                y = self._blocks(hidden)
            finally:
                torch.cuda.set_sync_debug_mode(before)
        waits = False
        for one in caught:
            waits |= "synchronizing CUDA operation" in str(one.message)
            if "ynchroniz" not in str(one.message):
                warnings.warn_explicit(one.message, one.category, one.filename, one.lineno)
        # The first call also compiles kernels, which may ask.
        if self._calls == _EAGER and waits:
            self._unsupported = True
            warnings.warn(
                "parallel.cuda_graph = true: a block waits for a number from the device, which a CUDA graph cannot; the blocks "
                "run without one. Set it to false (MetaLA waits in float32, not with precision.dtype = bf16)",
                stacklevel=2,
            )
        return y


class _Record:
    def __init__(self, blocks: Block, layers: Sequence[nn.Module], like: Tensor) -> None:
        self.x = like.detach().clone(memory_format=torch.contiguous_format).requires_grad_()
        self.forward, self.backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        pool = torch.cuda.graph_pool_handle()
        # Other threads, such as the one that watches NCCL, may ask the device things that a recording thread may not.
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

    def moved(self) -> bool:
        """Whether a parameter lies elsewhere than the recording reads it."""
        return self._addresses != [parameter.data_ptr() for parameter in self.parameters]


@contextmanager
def _aliased(layers: Sequence[nn.Module]) -> Iterator[list[tuple[nn.Parameter, Tensor]]]:
    """Have the modules read aliases of their parameters: gradients of parameters are accumulated on streams that are not being
    recorded."""
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
    def forward(ctx: Any, record: _Record, keep_gradients: bool, hidden: Tensor, *parameters: Tensor) -> Tensor:
        ctx.record, ctx.keep_gradients = record, keep_gradients
        record.x.detach().copy_(hidden)
        record.forward.replay()
        return record.y.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        record = ctx.record
        record.dy.copy_(gradient)
        record.backward.replay()
        first, *rest = record.gradients
        of_parameters = [None if g is None else g.clone() if ctx.keep_gradients else g.detach() for g in rest]
        return None, None, first.detach(), *of_parameters
