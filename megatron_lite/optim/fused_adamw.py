"""AdamW as one Triton kernel per parameter group, with kernels for gradient accumulation, norm and Muon's elementwise steps.

They run on CUDA and in Triton's interpreter. Master weights and moments of a group are flat. Its gradients are segments in the
same order at any address: one 16-bit segment per parameter from the backward pass, or a single flat float32 segment. Separate
passes that copy, clip and round would move two and a half times the bytes, with one launch per parameter.
"""

# Kernels take pointers and scalars that have no Python type.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt

import torch
import triton
import triton.language as tl
from torch import Tensor

_CHUNK = 4096  # elements per program: enough to pay for its lookup of the segment, few enough to balance the device
_VECTOR = 8  # 16-bit elements per vector load


@dataclass(frozen=True)
class GradientPointers:
    """Addresses of gradients, in the order of their `FlatSegments`.

    Attributes:
        addresses: int64 [segments], 0 for a missing gradient, which counts as zeros.
        float32: the gradients are float32, not bfloat16.
        aligned: addresses, sizes and offsets allow vector loads.
        gradients: a reference that keeps their memory alive.
    """

    addresses: Tensor
    float32: bool
    aligned: bool
    gradients: Sequence[Tensor | None]


class FlatSegments:
    """Divides a flat tensor into segments.

    Args:
        sizes: elements of every segment, in order and without gaps from the beginning of the flat tensor.
        counted: whether `squares` counts each segment; None: all.
    """

    def __init__(self, sizes: Sequence[int], device: torch.device, counted: Sequence[bool] | None = None) -> None:
        size = torch.tensor(sizes, dtype=torch.int64)
        programs = (size + _CHUNK - 1) // _CHUNK
        first, offset = programs.cumsum(0) - programs, size.cumsum(0) - size
        limit = size if counted is None else size * torch.tensor(counted)
        self.programs = int(programs.sum())
        self._device, self._aligned = device, all(size % _VECTOR == 0 for size in sizes)
        self._owner = torch.repeat_interleave(torch.arange(len(sizes), dtype=torch.int32), programs).to(device)
        self._table = torch.stack([first, size, offset, limit], dim=1).to(device)

    def pointers(self, gradients: Sequence[Tensor | None]) -> GradientPointers:
        """Return the addresses of the segments' gradients, contiguous, on the device, all float32 or all bfloat16."""
        addresses = [0 if gradient is None else gradient.data_ptr() for gradient in gradients]
        present = [gradient for gradient in gradients if gradient is not None]
        host = torch.tensor(addresses, dtype=torch.int64, pin_memory=self._device.type == "cuda")
        float32 = bool(present) and present[0].dtype == torch.float32
        aligned = self._aligned and not any(address % 16 for address in addresses)
        return GradientPointers(host.to(self._device, non_blocking=True), float32, aligned, gradients)

    def squares(self, gradients: GradientPointers, out: Tensor) -> None:
        """Write the sum of squares of the counted gradients per program to `out`, float32 [programs]."""
        self._run(_squares, gradients, out, BLOCK=512, warps=4)

    def add(self, gradients: GradientPointers, total: Tensor, fresh: bool) -> None:
        """Add the gradients to `total`, float32 [elements]; write them if `fresh`."""
        self._run(_add, gradients, total, fresh, aligned=total.data_ptr() % 16 == 0, BLOCK=1024, warps=8)

    def adamw(
        self,
        gradients: GradientPointers,
        master: Tensor,
        exp_avg: Tensor,
        exp_avg_sq: Tensor,
        weight: Tensor,
        factor: Tensor,
        *,
        step: int,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
    ) -> None:
        """Apply the update of `torch.optim.AdamW` in place, computed in float32.

        Args:
            master, exp_avg, exp_avg_sq: [elements] each, of any floating dtype.
            weight: [elements], to which the new master weights are rounded.
            factor: float32 scalar that multiplies the gradients; NaN changes nothing.
            step: number of this update, from 1.
        """
        beta1, beta2 = betas
        flats = master, exp_avg, exp_avg_sq, weight
        self._run(
            _adamw,
            gradients,
            *flats,
            factor,
            lr * weight_decay,
            1 - beta1,
            1 - beta2,
            lr / (1 - beta1**step),
            1 / sqrt(1 - beta2**step),
            eps,
            aligned=all(flat.data_ptr() % 16 == 0 for flat in flats),
            BLOCK=2048,
            # One vector load per thread is 16 bytes of master weights or moments.
            warps=16 if master.dtype == torch.float32 else 8,
        )

    def momentum(
        self, gradients: GradientPointers, exp_avg: Tensor, direction: Tensor, factor: Tensor, mu: float, nesterov: bool
    ) -> None:
        """Update Muon's momentum in place and write the direction, both [elements] of any floating dtype.

        factor: float32 scalar that multiplies the gradients; NaN changes nothing.
        """
        aligned = exp_avg.data_ptr() % 16 == direction.data_ptr() % 16 == 0
        arguments = exp_avg, direction, factor, 1 - mu, nesterov
        self._run(_momentum, gradients, *arguments, aligned=aligned, BLOCK=2048, warps=8)

    def decay_and_add(
        self, update: GradientPointers, master: Tensor, weight: Tensor, factor: Tensor, decay: float, rate: float
    ) -> None:
        """Set master weights w [elements] to (1 - decay) w - rate update, and round them to `weight`.

        factor: float32 scalar; NaN changes nothing.
        """
        aligned = master.data_ptr() % 16 == weight.data_ptr() % 16 == 0
        arguments = master, weight, factor, decay, rate
        self._run(_decay_and_add, update, *arguments, aligned=aligned, BLOCK=2048, warps=8)

    def _run(
        self,
        kernel: triton.JITFunction,
        gradients: GradientPointers,
        *arguments: Tensor | float,
        aligned: bool = True,
        BLOCK: int,
        warps: int,
    ) -> None:
        if self.programs:
            kernel[(self.programs,)](
                self._owner,
                self._table,
                gradients.addresses,
                *arguments,
                FLOAT32=gradients.float32,
                ALIGNED=gradients.aligned and aligned,
                CHUNK=_CHUNK,
                BLOCK=BLOCK,
                num_warps=warps,
            )


@triton.jit
def _segment(owner, table, addresses, ALIGNED: tl.constexpr, CHUNK: tl.constexpr):
    """Return the program's start in its segment, and the segment's size, offset, address and counted elements."""
    program = tl.program_id(0)
    segment = tl.load(owner + program)
    row = table + segment * 4
    first, size, offset, limit = tl.load(row), tl.load(row + 1), tl.load(row + 2), tl.load(row + 3)
    start = (program - first) * CHUNK
    address = tl.load(addresses + segment)
    if ALIGNED:
        size, offset, limit = tl.multiple_of(size, 8), tl.multiple_of(offset, 8), tl.multiple_of(limit, 8)
        address = tl.multiple_of(address, 16)
    return start, size, offset, address, limit


@triton.jit
def _gradient(address, index, size, FLOAT32: tl.constexpr, ALIGNED: tl.constexpr):
    """Return elements of a segment in float32; zeros beyond its size and for a missing segment."""
    present = (index < size) & (address != 0)
    if FLOAT32:
        pointer = address.to(tl.pointer_type(tl.float32))
    else:
        pointer = address.to(tl.pointer_type(tl.bfloat16))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return tl.load(pointer + index, mask=present, other=0.0).to(tl.float32)


@triton.jit
def _squares(
    owner,
    table,
    addresses,
    out,
    FLOAT32: tl.constexpr,
    ALIGNED: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    start, _, _, address, limit = _segment(owner, table, addresses, ALIGNED, CHUNK)
    total = tl.zeros([BLOCK], tl.float32)
    for block in range(CHUNK // BLOCK):
        index = start + block * BLOCK + tl.arange(0, BLOCK)
        gradient = _gradient(address, index, limit, FLOAT32, ALIGNED)
        total += gradient * gradient
    tl.store(out + tl.program_id(0), tl.sum(total, axis=0))


@triton.jit
def _add(
    owner,
    table,
    addresses,
    total,
    FRESH: tl.constexpr,
    FLOAT32: tl.constexpr,
    ALIGNED: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    start, size, offset, address, _ = _segment(owner, table, addresses, ALIGNED, CHUNK)
    for block in range(CHUNK // BLOCK):
        index = start + block * BLOCK + tl.arange(0, BLOCK)
        sums = total + (offset + index)
        value = _gradient(address, index, size, FLOAT32, ALIGNED)
        if not FRESH:
            value += tl.load(sums, mask=index < size, other=0.0)
        tl.store(sums, value, mask=index < size)


@triton.jit
def _adamw(
    owner,
    table,
    addresses,
    master,
    exp_avg,
    exp_avg_sq,
    weight,
    factor,
    decay,
    rest1,
    rest2,
    rate,
    root,
    eps,
    FLOAT32: tl.constexpr,
    ALIGNED: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    start, size, offset, address, _ = _segment(owner, table, addresses, ALIGNED, CHUNK)
    scale = tl.load(factor)
    if scale == scale:
        for block in range(CHUNK // BLOCK):
            index = start + block * BLOCK + tl.arange(0, BLOCK)
            inside = index < size
            flat = offset + index
            gradient = _gradient(address, index, size, FLOAT32, ALIGNED) * scale
            first = tl.load(exp_avg + flat, mask=inside, other=0.0).to(tl.float32)
            second = tl.load(exp_avg_sq + flat, mask=inside, other=0.0).to(tl.float32)
            parameter = tl.load(master + flat, mask=inside, other=0.0).to(tl.float32)
            # In float32, beta and 1 - beta do not add up to 1. The moments would accumulate that error.
            first += rest1 * (gradient - first)
            second += rest2 * (gradient * gradient - second)
            parameter -= decay * parameter
            parameter -= rate * tl.div_rn(first, tl.sqrt_rn(second) * root + eps)
            tl.store(exp_avg + flat, first.to(exp_avg.dtype.element_ty), mask=inside)
            tl.store(exp_avg_sq + flat, second.to(exp_avg_sq.dtype.element_ty), mask=inside)
            tl.store(master + flat, parameter.to(master.dtype.element_ty), mask=inside)
            tl.store(weight + flat, parameter.to(weight.dtype.element_ty), mask=inside)


@triton.jit
def _momentum(
    owner,
    table,
    addresses,
    exp_avg,
    direction,
    factor,
    rest,
    NESTEROV: tl.constexpr,
    FLOAT32: tl.constexpr,
    ALIGNED: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    start, size, offset, address, _ = _segment(owner, table, addresses, ALIGNED, CHUNK)
    scale = tl.load(factor)
    if scale == scale:
        for block in range(CHUNK // BLOCK):
            index = start + block * BLOCK + tl.arange(0, BLOCK)
            inside = index < size
            flat = offset + index
            gradient = _gradient(address, index, size, FLOAT32, ALIGNED) * scale
            average = tl.load(exp_avg + flat, mask=inside, other=0.0).to(tl.float32)
            average += rest * (gradient - average)
            tl.store(exp_avg + flat, average.to(exp_avg.dtype.element_ty), mask=inside)
            if NESTEROV:
                average += rest * (gradient - average)
            tl.store(direction + flat, average.to(direction.dtype.element_ty), mask=inside)


@triton.jit
def _decay_and_add(
    owner,
    table,
    addresses,
    master,
    weight,
    factor,
    decay,
    rate,
    FLOAT32: tl.constexpr,
    ALIGNED: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    start, size, offset, address, _ = _segment(owner, table, addresses, ALIGNED, CHUNK)
    scale = tl.load(factor)
    if scale == scale:
        for block in range(CHUNK // BLOCK):
            index = start + block * BLOCK + tl.arange(0, BLOCK)
            inside = index < size
            flat = offset + index
            update = _gradient(address, index, size, FLOAT32, ALIGNED)
            parameter = tl.load(master + flat, mask=inside, other=0.0).to(tl.float32)
            parameter -= decay * parameter + rate * update
            tl.store(master + flat, parameter.to(master.dtype.element_ty), mask=inside)
            tl.store(weight + flat, parameter.to(weight.dtype.element_ty), mask=inside)
