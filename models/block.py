"""The pre-norm residual block."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .config import ModelConfig
from .layers.mlp import MLPS
from .layers.norm import Norm
from .mixers import MIXERS
from .operators.context_parallel import context_parallel_group, refuse_state


class Block(nn.Module):
    """Compute h = x + mixer(norm1(x)), y = h + mlp(norm2(h)).

    With `model.parallel_residual`: y = x + mixer(norm1(x)) + mlp(norm2(x)).

    Mixers with a value residual (RWKV-7) read the values of the first of them. From the first to the last of these layers
    the hidden state holds these values behind the channels of the residual stream, so that a pipeline sends one tensor.
    """

    def __init__(self, config: ModelConfig, layer_index: int) -> None:
        super().__init__()
        name = config.mixer_of(layer_index)
        self.norm1 = Norm(config)
        self.mixer = MIXERS[name](config, layer_index, config.options_of(name))
        self.norm2 = Norm(config)
        self.mlp = MLPS[config.mlp](config)
        self.parallel_residual = config.parallel_residual
        self._size = config.hidden_size
        self._mlp_shifts = getattr(self.mlp, "shifts_tokens", False)
        self._last_with_values = layer_index >= config.value_residual_layers()[-1]

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        state: dict[str, Tensor] | None = None,
        return_state: bool = False,
    ) -> Tensor | tuple[Tensor, dict[str, Tensor]]:
        """Return the output of x [batch, length, hidden_size], in the same shape, and with return_state the new state.

        mask: [batch, length] bool, True for real tokens. cu_seqlens: [segments + 1] int, with batch 1. state: that of the
        mixer and the MLP from an earlier call, or None.
        Between the layers of a value residual x and the output have the channels of these values too.
        Raises ValueError under context parallelism for a mixer that does not support it, and for a state.
        """
        parts = self.mix(x, mask=mask, cu_seqlens=cu_seqlens, state=state, return_state=return_state)
        if not return_state:
            return self.finish(*parts)
        x, (mixed, new_state), *rest = parts
        y, of_mlp = self._finish(x, mixed, *rest)
        return y, new_state | of_mlp

    def mix(self, x: Tensor, **context: Any) -> tuple[Any, ...]:
        """Run norm and mixer, the first part of `forward`, with its arguments. Return the arguments of `finish`."""
        if context_parallel_group() is not None:
            self._check_context_parallel(context.get("state") is not None or context.get("return_state", False))
        values = None
        if x.shape[-1] > self._size:
            values, x = x[..., self._size :], x[..., : self._size].contiguous()
        normed, x = self.norm1(x, return_sum=True)
        if getattr(self.mixer, "value_residual", False):
            mixed, values = self.mixer(normed, values=values, return_values=True, **context)
        else:
            mixed = self.run_mixer(normed, **context)
        return x, mixed, None if self._last_with_values else values, context if self._mlp_shifts else {}

    def run_mixer(self, normed: Tensor, **context: Any) -> Any:
        """Return the mixer's output for normed [batch, length, hidden_size], and its new state if requested."""
        return self.mixer(normed, **context)

    def finish(self, x: Tensor, mixed: Tensor, values: Tensor | None = None, context: Any = None) -> Tensor:
        """Run the rest of `forward`. x: the residual stream; mixed: the mixer's output, of the same shape."""
        return self._finish(x, mixed, values, context)[0]

    def _finish(
        self, x: Tensor, mixed: Tensor, values: Tensor | None = None, context: Any = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the output and the MLP's new state."""
        if self.parallel_residual:
            normed, hidden = self.norm2(x), x + mixed
        else:
            normed, hidden = self.norm2(x, mixed, return_sum=True)
        output, new_state = self.mlp(normed, **(context or {})), {}
        if isinstance(output, tuple):
            output, new_state = output
        y = hidden + output
        return y if values is None else torch.cat([y, values], -1), new_state

    def _check_context_parallel(self, with_state: bool) -> None:
        if not getattr(self.mixer, "supports_context_parallel", False):
            raise ValueError(
                f"mixer {type(self.mixer).__name__} does not support context parallelism: use another mixer, or one rank per "
                "sequence"
            )
        if with_state:
            refuse_state()

    def flops_per_token(self, length: int) -> int:
        """Return forward FLOPs per token at this sequence length, two per multiply-add."""
        return self.mixer.flops_per_token(length) + self.mlp.flops_per_token(length)
