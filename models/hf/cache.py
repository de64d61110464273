"""What generation carries from token to token: the layers' recurrent states, of constant size."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from transformers import Cache


class RecurrentCache(Cache):
    """The states of all layers after `seen` positions, padding included.

    `states` holds one dict a layer, the batch first in every tensor; empty before the first forward pass. A state cannot
    go back to an earlier position, so assisted generation is refused.
    """

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.states: list[dict[str, Tensor]] = []
        self.seen = 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Positions that the states have seen."""
        return self.seen

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """No largest length."""
        return -1

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Whether something was seen."""
        return self.seen > 0

    def reset(self) -> None:
        """Forget everything."""
        self.states, self.seen = [], 0

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row b goes on from what row beam_idx[b] has seen."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows, in this order."""
        self._each(lambda state: state.index_select(0, indices.to(state.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row `repeats` times."""
        self._each(lambda state: state.repeat_interleave(repeats, 0))

    def crop(self, tokens_to_remove: int) -> None:
        """ValueError: what a recurrent state has seen cannot be taken out of it."""
        raise ValueError(
            f"cannot take {tokens_to_remove} tokens out of a recurrent state; generate from the prompt again"
        )

    @property
    def batch_size(self) -> int:
        """Rows, -1 before the first forward pass."""
        return next((len(tensor) for state in self.states for tensor in state.values()), -1)

    @property
    def is_compileable(self) -> bool:
        """False: generation does not compile the forward pass of itself."""
        return False

    @property
    def is_croppable(self) -> bool:
        """False."""
        return False

    def nbytes(self) -> int:
        """Memory of the states in bytes."""
        return sum(tensor.nbytes for state in self.states for tensor in state.values())

    def __len__(self) -> int:
        return len(self.states)

    def __repr__(self) -> str:
        return f"RecurrentCache(seen={self.seen}, layers={len(self.states)}, batch_size={self.batch_size})"

    def _each(self, change: Callable[[Tensor], Tensor]) -> None:
        with torch.no_grad():
            self.states = [{name: change(tensor) for name, tensor in state.items()} for state in self.states]
