"""Muon: matrices inside the blocks by orthogonalized momentum, all other parameters by AdamW.

Jordan et al. 2024 (https://kellerjordan.github.io/posts/muon). The root mean square of an update equals AdamW's, so that AdamW's
learning rate and weight decay carry over: Liu et al. 2025, arXiv 2502.16982, section 2.2.

The momentum is elementwise and stored like AdamW's first moment, cut by ZeRO 1 and 2 and by tensor parallelism. Only the
orthogonalization needs whole matrices: `whole_matrices.py` collects each one on one process.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from math import sqrt
from typing import Any

import torch
from torch import Tensor

from megatron_lite.config.optimizer_schema import MuonConfig
from megatron_lite.optim.whole_matrices import MatrixPiece, WholeMatrices

# The quintic polynomial of Jordan et al.: it maps singular values in (0, 1] close to 1 within five steps.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
STEPS = 5  # Newton-Schulz steps
BATCH = 1 << 27  # elements per batch of Newton-Schulz steps: enough for the device, few enough for its memory
_KERNEL_ROWS = 512  # on an H200 the kernel saves 7 % of the time of five steps for 512 rows, 19 to 26 % for 2048
_HAS_TRITON = find_spec("triton") is not None
_SMALLEST_NORM = 1e-15  # smaller matrices get a smaller update: the squares of their elements underflow in float32
ADAMW_RMS = 0.2  # root mean square of AdamW's updates, divided by the learning rate


class Muon(torch.optim.AdamW):
    """AdamW, except for the groups with `muon: True`, which Muon updates.

    DeepSpeed replaces the parameters of a group by one flat tensor. `attach` describes the matrices in it.

    Args:
        groups: parameter groups of `torch.optim.AdamW`, each with the key `muon`.
        settings: of Muon's update.
        compute_dtype: of the orthogonalization, and of the communication of matrices.
        lr, betas, eps: as `torch.optim.AdamW`. Muon reads `lr` of its groups.
    """

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        settings: MuonConfig,
        compute_dtype: torch.dtype,
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
    ) -> None:
        super().__init__(groups, lr=lr, betas=betas, eps=eps, fused=True)
        self.settings, self.compute_dtype = settings, compute_dtype
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
    def update(self, group: Mapping[str, Any], flat: Tensor, gradient: Tensor) -> None:
        """Apply one update to the flat master weights [elements] of a Muon group, for their gradient [elements]."""
        settings, state = self.settings, self.state[flat]
        gradient = gradient.float()
        # The mean (1 - mu) g + mu m instead of the sum g + mu m. The orthogonalization does not depend on the scale, and the
        # momentum is then AdamW's first moment.
        mu = settings.momentum
        momentum = torch.mul(state["exp_avg"].float(), mu).add_(gradient, alpha=1 - mu)
        update = torch.mul(momentum, mu).add_(gradient, alpha=1 - mu) if settings.nesterov else momentum
        update = update.to(self.compute_dtype)
        state["exp_avg"].copy_(momentum)
        del momentum, gradient  # their memory is free during the orthogonalization
        self.orthogonalize(update)
        weight = flat.float() * (1 - group["lr"] * group["weight_decay"])
        flat.copy_(weight.add_(update, alpha=-group["lr"] * ADAMW_RMS))
        state["step"] += 1

    def orthogonalize(self, flat: Tensor) -> None:
        """Replace every matrix M [m, n] in a flat tensor by sqrt(max(m, n)) U V^T, where M = U S V^T. Every process calls it.

        The root mean square of the result is about 1. A matrix of several heads is replaced head by head. Elements that belong
        to no matrix do not change.
        """
        assert self._matrices is not None, "attach was not called"
        matrices, heads = self._matrices.gather(flat), self._matrices.heads
        blocks = [block for name, matrix in matrices.items() for block in matrix.chunk(heads[name])]
        with torch.profiler.record_function("Muon.orthogonalize"):
            orthogonalize_by_shape(blocks)
        self._matrices.scatter(matrices, flat)


def orthogonalize_by_shape(matrices: Iterable[Tensor]) -> None:
    """Replace every matrix [m, n] by sqrt(max(m, n)) times its orthogonal factor. Matrices of one shape are one batch."""
    by_shape: dict[torch.Size, list[Tensor]] = defaultdict(list)
    for matrix in matrices:
        wide = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.mT
        by_shape[wide.shape].append(wide)
    for shape, every in by_shape.items():
        count = max(1, BATCH // shape.numel())
        for start in range(0, len(every), count):
            batch = every[start : start + count]
            for matrix, factor in zip(batch, orthogonalize(torch.stack(batch), scale=sqrt(shape[1])), strict=True):
                matrix.copy_(factor)


def orthogonalize(x: Tensor, *, scale: float = 1.0) -> Tensor:
    """Return `scale` times the approximate orthogonal factor U V^T of matrices U S V^T, computed in their dtype.

    Five Newton-Schulz steps (Jordan et al. 2024) bring every singular value into about [0.7, 1.2]. A zero matrix stays zero.

    Args:
        x: [batch, m, n] with m <= n. Its memory is reused.
    """
    a, b, c = COEFFICIENTS
    accumulation = torch.promote_types(x.dtype, torch.float32)
    norms = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True, dtype=accumulation)
    x = x.div_(norms.clamp_min(_SMALLEST_NORM).to(x.dtype))
    for factor in [1.0] * (STEPS - 1) + [scale]:
        gram = gram_matrices(x)
        # With a on the diagonal, X <- (a + b A + c A^2) X is one matmul that neither reads nor copies a second operand.
        x = polynomial(gram, a * factor, b * factor, c * factor) @ x
    return x


def gram_matrices(x: Tensor) -> Tensor:
    """Return X X^T of matrices [batch, m, n]."""
    return symmetric_matmul(x) if uses_kernel(x) else x @ x.mT


def polynomial(gram: Tensor, a: float, b: float, c: float) -> Tensor:
    """Return a I + b A + c A^2 of symmetric matrices A [batch, m, m]."""
    if uses_kernel(gram):
        return symmetric_matmul(gram, alpha=c, beta=b, diagonal=a)
    out = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
    out.diagonal(dim1=-2, dim2=-1).add_(a)
    return out


def symmetric_matmul(x: Tensor, **factors: float) -> Tensor:
    """Call the kernel, which imports Triton."""
    from megatron_lite.optim.symmetric_matmul import symmetric_matmul as kernel

    return kernel(x, **factors)


def uses_kernel(x: Tensor) -> bool:
    """Return whether `symmetric_matmul` is faster than a general matmul: for large bf16 matrices [batch, m, n] on CUDA."""
    return x.is_cuda and x.dtype == torch.bfloat16 and x.shape[1] >= _KERNEL_ROWS and _HAS_TRITON
