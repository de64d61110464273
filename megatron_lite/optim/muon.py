"""Muon: matrices inside the blocks by orthogonalized momentum, all other parameters by AdamW.

Jordan et al. 2024 (https://kellerjordan.github.io/posts/muon). The root mean square of an update equals AdamW's, so that AdamW's
learning rate and weight decay carry over: Liu et al. 2025, arXiv 2502.16982, section 2.2.

The momentum is elementwise and stored like AdamW's first moment, cut by ZeRO 1 and 2 and by tensor parallelism. Only the
orthogonalization needs whole matrices: `whole_matrices.py` collects each one on one process.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Any

import torch
from torch import Tensor

from megatron_lite.optim.whole_matrices import MatrixPiece, WholeMatrices

# The quintic polynomial of Jordan et al.: it maps singular values in (0, 1] close to 1 within five steps.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
STEPS = 5
ADAMW_RMS = 0.2  # root mean square of AdamW's updates, divided by the learning rate


@dataclass(frozen=True)
class MuonOptions:
    """Settings of Muon.

    Attributes:
        momentum: decay rate of the momentum.
        nesterov: use Nesterov momentum.
        momentum_dtype: of the stored momentum.
        compute_dtype: of the orthogonalization, and of the communication of matrices.
    """

    momentum: float = 0.95
    nesterov: bool = True
    momentum_dtype: torch.dtype = torch.float32
    compute_dtype: torch.dtype = torch.float32


class Muon(torch.optim.AdamW):
    """AdamW, except for the groups with `muon: True`, which Muon updates.

    DeepSpeed replaces the parameters of a group by one flat tensor. `attach` describes the matrices in it.
    """

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        options: MuonOptions,
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
    ) -> None:
        super().__init__(groups, lr=lr, betas=betas, eps=eps, fused=True)
        self.options = options
        self._matrices: WholeMatrices | None = None

    def attach(self, pieces: Sequence[MatrixPiece], group: Any = None) -> None:
        """Register the matrices of the Muon group; every process of the group calls it.

        Args:
            pieces: the ranges of matrices in this process's flat tensor.
            group: the processes that together hold the matrices; None: this process alone.
        """
        self._matrices = WholeMatrices(pieces, group)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update all groups with the gradients in `grad`."""
        groups = self.param_groups
        for group in groups:
            if group["muon"]:
                for flat in group["params"]:
                    self.update(group, flat, flat.grad)
        self.param_groups = [group for group in groups if not group["muon"]]
        try:
            super().step(closure)
        finally:
            self.param_groups = groups

    @torch.no_grad()
    def update(self, group: Mapping[str, Any], flat: Tensor, gradient: Tensor, factor: Tensor | None = None) -> None:
        """Apply one update to the flat master weights of a Muon group.

        Args:
            flat, gradient: [elements].
            factor: float32 scalar that multiplies the gradient; NaN changes nothing. It does not synchronise with the device.
        """
        assert self._matrices is not None, "attach was not called"
        options, state = self.options, self.state[flat]
        gradient = gradient.float() if factor is None else gradient.float() * factor
        applied = None if factor is None else factor.isfinite()
        # The mean (1 - mu) g + mu m instead of the sum g + mu m. The orthogonalization does not depend on the scale, and the
        # momentum is then AdamW's first moment.
        mu = options.momentum
        momentum = torch.mul(state["exp_avg"].float(), mu).add_(gradient, alpha=1 - mu)
        direction = torch.mul(momentum, mu).add_(gradient, alpha=1 - mu) if options.nesterov else momentum
        direction = direction.to(options.compute_dtype)
        matrices = self._matrices.gather(direction)
        updates = self._matrices.scatter(orthogonal_factors(matrices), direction)
        _copy_if(applied, momentum, state["exp_avg"])
        for piece, update in zip(self._matrices.pieces, updates, strict=True):
            weight = flat.narrow(0, piece.offset, piece.numel)
            updated = weight.float() * (1 - group["lr"] * group["weight_decay"])
            updated.add_(update, alpha=-group["lr"] * ADAMW_RMS * sqrt(max(piece.shape)))
            _copy_if(applied, updated, weight)
        if factor is None:
            state["step"] += 1


def _copy_if(applied: Tensor | None, source: Tensor, target: Tensor) -> None:
    """Copy `source` to `target` if the scalar `applied` holds, without waiting for its value; None: always."""
    target.copy_(source if applied is None else torch.where(applied, source, target))


def orthogonal_factors(matrices: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return `orthogonalize` of every matrix [m, n]. Matrices of one shape are one batch."""
    by_shape: dict[torch.Size, list[str]] = defaultdict(list)
    for name, matrix in matrices.items():
        by_shape[matrix.shape].append(name)
    factors: dict[str, Tensor] = {}
    for names in by_shape.values():
        factors.update(zip(names, orthogonalize(torch.stack([matrices[name] for name in names])), strict=True))
    return factors


def orthogonalize(matrices: Tensor) -> Tensor:
    """Return the approximate orthogonal factor U V^T of matrices U S V^T, [batch, m, n], computed in their dtype.

    Five Newton-Schulz steps (Jordan et al. 2024) bring every singular value into about [0.7, 1.2]. A zero matrix stays zero.
    """
    a, b, c = COEFFICIENTS
    norms = torch.linalg.vector_norm(matrices, dim=(-2, -1), keepdim=True, dtype=torch.float32)
    wide = matrices.shape[-2] <= matrices.shape[-1]
    x = (matrices / norms.clamp_min(torch.finfo(torch.float32).tiny)).to(matrices.dtype)
    x = x if wide else x.mT.contiguous()
    for _ in range(STEPS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x if wide else x.mT
