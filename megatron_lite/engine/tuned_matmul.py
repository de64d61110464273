"""Products of linears and of the loss by the cuBLASLt algorithms that a configuration names for them (`parallel.cublaslt`).

cuBLAS takes the first algorithm that its heuristics name; of some shapes another is up to 9 % faster, most where the device's
power is at its cap. The choice is written down once (`python -m tools.benchmark matmul`) instead of made at every start,
so that a run which is resumed computes the same bits.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from megatron_lite.config.schema import CublasLtConfig
from megatron_lite.engine.cublaslt import CublasLt, Product, library


class Products:
    """`torch.mm` and `F.linear`. Products that the configuration does not name, and all of them on another device or with
    another version of the library than it was made for, are PyTorch's; of the latter a warning tells."""

    def __init__(self, config: CublasLtConfig) -> None:
        self._config = config
        self._algorithms = {name: bytes.fromhex(text) for name, text in config.algorithms.items()}
        self._library: CublasLt | None = None

    def mm(
        self,
        a: Tensor,
        b: Tensor,
        bias: Tensor | None = None,
        addend: Tensor | None = None,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """a b + bias + addend. a: [m, k], b: [k, n], bias: [n] or None, addend: [m, n] or None -> [m, n], in `out` if given."""
        product = Product.of(a, b, bias, addend, out)
        algorithm = None if product is None else self._algorithm(product, a)
        if product is None or algorithm is None:
            y = torch.mm(a, b, out=out) if bias is None else torch.addmm(bias, a, b, out=out)
            return y if addend is None else y.add_(addend)
        assert self._library is not None
        try:
            return self._library(product, algorithm, a, b, bias, addend, out)
        except RuntimeError as error:
            raise RuntimeError(
                f"parallel.cublaslt.algorithms: {product.name}: {error}; python -m tools.benchmark matmul writes them anew"
            ) from error

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None, addend: Tensor | None = None) -> Tensor:
        """x: [..., in], weight: [out, in], bias: [out] or None, addend: [..., out] or None -> [..., out]."""
        rows = None if addend is None else addend.reshape(-1, len(weight))
        return self.mm(x.reshape(-1, x.shape[-1]), weight.t(), bias, rows).view(*x.shape[:-1], len(weight))

    def _algorithm(self, product: Product, a: Tensor) -> bytes | None:
        """For this product, whose first matrix is a; None leaves it to PyTorch."""
        algorithm = self._algorithms.get(product.name) if a.is_cuda else None
        return algorithm if algorithm is not None and self._ready(a.device) else None

    def _ready(self, device: torch.device) -> bool:
        if self._library is None:
            found = torch.cuda.get_device_name(device), library().version
            made_for = self._config.device, self._config.version
            if found != made_for:
                warnings.warn(
                    f"parallel.cublaslt was made for {made_for[0]} with cuBLASLt {made_for[1]}, this is {found[0]} with "
                    f"{found[1]}: cuBLAS chooses by itself; python -m tools.benchmark matmul writes the file for here",
                    stacklevel=2,
                )
                self._algorithms = {}
                return False
            self._library = library()
        return True
