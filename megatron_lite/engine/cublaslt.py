"""Matrix products by an algorithm of cuBLASLt that the caller names; the library is the one that PyTorch has loaded.

Definitions: NVIDIA, cuBLAS library reference, "Using the cublasLt API"; numbers of its enumerations are from cublasLt.h.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from ctypes import c_float, c_int, c_int32, c_int64, c_size_t, c_uint16, c_uint32, c_uint64, c_void_p
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

_TYPES = {torch.float16: 2, torch.bfloat16: 14}
_COMPUTE_FLOAT32, _FLOAT32 = 68, 0
_TRANSPOSE_A, _TRANSPOSE_B, _EPILOGUE, _BIAS_POINTER, _BIAS_TYPE = 3, 4, 7, 8, 26
_EPILOGUE_BIAS = 4
_MOST_WORKSPACE = 1
# Of an algorithm: its tile of the result, its thread blocks that work together (clusters of 1, 2 and 4), a variant of its own;
# and which tiles and how many variants there are.
TILE, CLUSTER, CUSTOM = 1, 8, 5
_CLUSTERS = (2, 3, 4, 5, 6, 8)
_TILES, _MOST_CUSTOM = 6, 7
# Bytes of scratch memory; the algorithms that are asked for need no more. And what addresses are multiples of.
_WORKSPACE, ALIGNMENT = 1 << 20, 256


@dataclass(frozen=True)
class Product:
    """y = a b, and with them + bias or + addend, of one 16-bit dtype, rows one after the other.

    a: [m, k], b: [k, n]; `of_transposed`: whether a, b are the transposes of such. bias: [n], addend: [m, n].
    """

    m: int
    k: int
    n: int
    of_transposed: tuple[bool, bool]
    dtype: torch.dtype
    bias: bool = False
    addend: bool = False

    @classmethod
    def of(
        cls, a: Tensor, b: Tensor, bias: Tensor | None = None, addend: Tensor | None = None, out: Tensor | None = None
    ) -> Product | None:
        """None for tensors that lie otherwise; out: [m, n], where y goes."""
        transposed = not a.is_contiguous(), not b.is_contiguous()
        more = [x for x in (bias, addend, out) if x is not None]
        lying = [a.t() if transposed[0] else a, b.t() if transposed[1] else b, *more]
        if not all(x.is_contiguous() and x.data_ptr() % ALIGNMENT == 0 and x.dtype == a.dtype for x in lying):
            return None
        if a.dtype not in _TYPES:
            return None
        return cls(a.shape[0], a.shape[1], b.shape[1], transposed, a.dtype, bias is not None, addend is not None)

    @property
    def name(self) -> str:
        """As in `parallel.cublaslt.algorithms`: "16384x2048x5632 nt bfloat16 bias"; n: a or b as it is, t: of a transpose;
        sum: with an addend."""
        letters = "".join("nt"[x] for x in self.of_transposed)
        more = " bias" * self.bias + " sum" * self.addend
        return f"{self.m}x{self.k}x{self.n} {letters} {str(self.dtype)[6:]}{more}"


class _Found(ctypes.Structure):
    _fields_ = (
        ("algorithm", c_uint64 * 8),
        ("workspace", c_size_t),
        ("state", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    )


class CublasLt:
    """The library, and how it is to compute one product after another on the current device.

    Raises OSError where it is not there, RuntimeError for a call that it refuses.
    """

    def __init__(self) -> None:
        major = (torch.version.cuda or "13").split(".")[0]
        self._library = ctypes.CDLL(f"libcublasLt.so.{major}")
        self._library.cublasLtGetVersion.restype = c_size_t
        self.version = int(self._library.cublasLtGetVersion())
        pointer = c_void_p
        self._library.cublasLtMatmul.argtypes = [*[pointer] * 14, c_size_t, pointer]
        self._handle = self._made("cublasLtCreate")
        self._one, self._zero = c_float(1.0), c_float(0.0)
        self._workspaces: dict[torch.device, Tensor] = {}
        self._described: dict[Product, tuple[c_void_p, list[c_void_p]]] = {}

    def algorithms(self, product: Product, count: int) -> list[bytes]:
        """Those that the library's heuristics think the fastest, the first the fastest; at most count."""
        description, (a, b, y) = self._description(product)
        preference = self._made("cublasLtMatmulPreferenceCreate")
        most = c_uint64(_WORKSPACE)
        self._call("cublasLtMatmulPreferenceSetAttribute", preference, _MOST_WORKSPACE, ctypes.byref(most), c_size_t(8))
        found, number = (_Found * count)(), c_int()
        self._call(
            "cublasLtMatmulAlgoGetHeuristic", self._handle, description, b, a, y, y, preference, count, found,
            ctypes.byref(number),
        )  # fmt: skip
        self._call("cublasLtMatmulPreferenceDestroy", preference)
        return [bytes(one.algorithm) for one in found[: number.value] if one.state == 0]

    def varied(self, product: Product, algorithm: bytes, *attributes: int) -> list[bytes]:
        """The algorithm with every value of TILE, CLUSTER or CUSTOM with which the library takes the product: far more than
        the heuristics name, and a faster one among them, now and then."""
        values: dict[int, list[c_uint16] | list[c_uint32]] = {
            TILE: [c_uint32(tile) for tile in self._capability(algorithm, _TILES)],
            CLUSTER: [c_uint16(cluster) for cluster in _CLUSTERS],
            CUSTOM: [c_uint32(custom) for custom in range(self._capability(algorithm, _MOST_CUSTOM)[0] + 1)],
        }
        found = [algorithm]
        for attribute in attributes:
            found = [
                other for one in found for value in values[attribute] for other in self._with(one, attribute, value)
            ]
        return [one for one in found if self._takes(product, one)]

    def _with(self, algorithm: bytes, attribute: int, value: c_uint16 | c_uint32) -> Iterator[bytes]:
        """The algorithm with this value, or nothing where it has no such."""
        changed = ctypes.create_string_buffer(algorithm, len(algorithm))
        set_to, size = self._library.cublasLtMatmulAlgoConfigSetAttribute, c_size_t(ctypes.sizeof(value))
        if set_to(changed, attribute, ctypes.byref(value), size) == 0:
            yield changed.raw

    def _capability(self, algorithm: bytes, attribute: int) -> list[int]:
        size = c_size_t()
        self._call("cublasLtMatmulAlgoCapGetAttribute", algorithm, attribute, None, c_size_t(0), ctypes.byref(size))
        values = (c_int32 * (size.value // 4))()
        self._call("cublasLtMatmulAlgoCapGetAttribute", algorithm, attribute, values, size, ctypes.byref(size))
        return list(values)

    def _takes(self, product: Product, algorithm: bytes) -> bool:
        description, (a, b, y) = self._description(product)
        found, check = _Found(), self._library.cublasLtMatmulAlgoCheck
        refused = check(self._handle, description, b, a, y, y, algorithm, ctypes.byref(found))
        return not refused and found.state == 0 and found.workspace <= _WORKSPACE

    def __call__(
        self,
        product: Product,
        algorithm: bytes,
        a: Tensor,
        b: Tensor,
        bias: Tensor | None = None,
        addend: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """y [m, n], or out with it, on the current stream; no other stream may be computing products here."""
        description, (a_layout, b_layout, y_layout) = self._description(product)
        if bias is not None:
            self._set(description, _BIAS_POINTER, c_void_p(bias.data_ptr()))
        y = a.new_empty(product.m, product.n) if out is None else out
        workspace = self._workspaces.get(a.device)
        if workspace is None:
            workspace = self._workspaces[a.device] = torch.empty(_WORKSPACE, dtype=torch.uint8, device=a.device)
        one, beta = ctypes.addressof(self._one), ctypes.addressof(self._zero if addend is None else self._one)
        added = y if addend is None else addend
        # The library's matrices go down their columns: it computes the transpose of y, of b and a.
        self._call(
            "cublasLtMatmul", self._handle, description, one, b.data_ptr(), b_layout, a.data_ptr(), a_layout, beta,
            added.data_ptr(), y_layout, y.data_ptr(), y_layout, algorithm, workspace.data_ptr(), _WORKSPACE,
            torch.cuda.current_stream(a.device).cuda_stream,
        )  # fmt: skip
        return y

    def _description(self, product: Product) -> tuple[c_void_p, list[c_void_p]]:
        if product not in self._described:
            made = self._made("cublasLtMatmulDescCreate", _COMPUTE_FLOAT32, _FLOAT32)
            for attribute, transposed in zip((_TRANSPOSE_B, _TRANSPOSE_A), product.of_transposed, strict=True):
                self._set(made, attribute, c_int32(transposed))
            kind = _TYPES[product.dtype]
            if product.bias:
                self._set(made, _EPILOGUE, c_int32(_EPILOGUE_BIAS))
                self._set(made, _BIAS_TYPE, c_int32(kind))
            shapes = ((product.m, product.k), (product.k, product.n), (product.m, product.n))
            layouts = []
            for (rows, columns), transposed in zip(shapes, (*product.of_transposed, False), strict=True):
                if transposed:
                    rows, columns = columns, rows
                size = c_uint64(columns), c_uint64(rows), c_int64(columns)
                layouts.append(self._made("cublasLtMatrixLayoutCreate", kind, *size))
            self._described[product] = made, layouts
        return self._described[product]

    def _set(self, description: c_void_p, attribute: int, value: c_int32 | c_void_p) -> None:
        size = c_size_t(ctypes.sizeof(value))
        self._call("cublasLtMatmulDescSetAttribute", description, attribute, ctypes.byref(value), size)

    def _made(self, function: str, *arguments: object) -> c_void_p:
        made = c_void_p()
        self._call(function, ctypes.byref(made), *arguments)
        return made

    def _call(self, function: str, *arguments: object) -> None:
        status = getattr(self._library, function)(*arguments)
        if status != 0:
            raise RuntimeError(f"{function} failed with status {status} (cublasStatus_t)")


@cache
def library() -> CublasLt:
    """One for the process. Raises OSError where PyTorch has no cuBLASLt."""
    return CublasLt()
