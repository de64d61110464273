"""Selection of the kernel of gated linear attention by device, dtype, shape and decay. CUDA is mocked."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

from models import backend as kernels
from models.operators.delta_rule import select_kernel as delta_rule
from models.operators.gla import gated_linear_attention as module
from models.operators.gla.gated_linear_attention import gated_linear_attention
from models.operators.gla.select_kernel import select_kernel, supports_triton


class ChosenError(Exception):
    """Hold the form that was called, and the width of its keys and of its decay."""


def chosen(name: str) -> Callable[..., Any]:
    def form(*tensors: Any, **named: Any) -> Any:
        q, _, _, *decay = tensors[0] if len(tensors) == 1 else tensors
        given = decay[0] if decay else named.get("gk", named.get("g", named.get("g_gamma")))
        raise ChosenError(name, q.shape[-1], 1 if given.dim() < 4 else given.shape[-1])

    return form


@pytest.fixture
def forms(monkeypatch: pytest.MonkeyPatch) -> None:
    packages = {
        "fla": (),
        "fla.ops": (),
        "fla.ops.gla": ("chunk_gla", "fused_recurrent_gla"),
        "fla.ops.gla.chunk": ("chunk_gla_fwd",),
        "fla.ops.simple_gla": ("chunk_simple_gla", "fused_recurrent_simple_gla"),
        "fla.ops.simple_gla.chunk": ("chunk_simple_gla_fwd",),
    }
    for name, functions in packages.items():
        package = ModuleType(name)
        for function in functions:
            setattr(package, function, chosen(function))
        monkeypatch.setitem(sys.modules, name, package)
    monkeypatch.setattr(kernels, "_installed", lambda: True)
    for name, attribute in (("project", "triton_form"), ("chunked", "chunk_form"), ("recurrent", "recurrent_form")):
        monkeypatch.setattr(module, attribute, chosen(name))


def form_of(
    monkeypatch: pytest.MonkeyPatch,
    *,
    cuda: bool = True,
    dtype: torch.dtype = torch.bfloat16,
    length: int = 64,
    keys: int = 16,
    values: int = 32,
    decay: str = "channel",
    matmul: bool = False,
    gradient: bool = False,
    hopper: bool = False,
    packed: bool = False,
) -> tuple[str, int, int]:
    """Return the name of the form, and the widths of its keys and its decay. hopper: FLA has no gradient of scalar decays."""
    q = torch.zeros(1, length, 2, keys, dtype=dtype, requires_grad=gradient)
    k, v = torch.zeros_like(q), torch.zeros(1, length, 2, values, dtype=dtype)
    log_decay = {
        "channel": lambda: torch.zeros(1, length, 2, keys),
        "scalar": lambda: torch.zeros(1, length, 2, 1),
        "fixed": lambda: torch.zeros(2)[:, None].expand(1, length, 2, 1),
    }[decay]()
    monkeypatch.setattr("models.operators.gla.select_kernel.fla_refuses_scalar_gradient", lambda: hopper)
    decisions = []
    monkeypatch.setattr(
        module, "select_kernel", lambda *x, **y: decisions.append(select_kernel(*x, **y)) or decisions[-1]
    )
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "is_cuda", property(lambda x: cuda))
        bounds = torch.tensor([0, length]) if packed else None
        with pytest.raises(ChosenError) as called:
            gated_linear_attention(q, k, v, log_decay, cu_seqlens=bounds, fits_matmul_form=matmul)
    assert len(decisions) == 1
    return called.value.args


HALF, WHOLE, DOUBLE = torch.float16, torch.float32, torch.float64

TABLE = [
    # Off CUDA, and there in float32 and float64, plain PyTorch.
    ({"cuda": False}, ("chunked", 16, 16)),
    ({"cuda": False, "matmul": True}, ("chunked", 16, 16)),
    ({"cuda": False, "length": 1}, ("recurrent", 16, 16)),
    ({"cuda": False, "length": 1, "packed": True}, ("chunked", 16, 16)),
    ({"cuda": False, "dtype": WHOLE, "decay": "scalar"}, ("chunked", 16, 1)),
    ({"dtype": WHOLE, "matmul": True}, ("chunked", 16, 16)),
    ({"dtype": WHOLE, "length": 1}, ("recurrent", 16, 16)),
    ({"dtype": DOUBLE}, ("chunked", 16, 16)),
    # One decay per channel that fits the matmul form: the project's kernels, in the sizes in which they were measured.
    ({"matmul": True}, ("project", 16, 16)),
    ({"matmul": True, "dtype": HALF}, ("project", 16, 16)),
    ({"matmul": True, "keys": 8}, ("project", 8, 8)),
    ({"matmul": True, "gradient": True}, ("project", 16, 16)),
    ({"matmul": True, "length": 16, "gradient": True}, ("project", 16, 16)),
    ({"matmul": True, "packed": True}, ("project", 16, 16)),
    ({"matmul": True, "keys": 64, "values": 128}, ("project", 64, 64)),
    ({"matmul": True, "keys": 128, "values": 128}, ("project", 128, 128)),
    ({"matmul": True, "keys": 256}, ("chunk_gla_fwd", 256, 256)),
    ({"matmul": True, "keys": 128, "values": 256}, ("chunk_gla_fwd", 128, 128)),
    ({"matmul": True, "values": 256, "gradient": True}, ("chunk_gla", 16, 16)),
    ({"matmul": True, "length": 16}, ("fused_recurrent_gla", 16, 16)),
    ({"matmul": True, "decay": "scalar"}, ("chunk_simple_gla_fwd", 16, 1)),
    # Any decay per channel: flash-linear-attention's.
    ({}, ("chunk_gla_fwd", 16, 16)),
    ({"gradient": True}, ("chunk_gla", 16, 16)),
    ({"gradient": True, "hopper": True}, ("chunk_gla", 16, 16)),
    ({"gradient": True, "length": 16}, ("chunk_gla", 16, 16)),
    ({"packed": True}, ("chunk_gla", 16, 16)),
    ({"length": 16}, ("fused_recurrent_gla", 16, 16)),
    ({"keys": 8}, ("chunk_gla_fwd", 16, 16)),
    # One per head.
    ({"decay": "scalar"}, ("chunk_simple_gla_fwd", 16, 1)),
    ({"decay": "scalar", "hopper": True}, ("chunk_simple_gla_fwd", 16, 1)),
    ({"decay": "scalar", "packed": True, "hopper": True}, ("chunk_simple_gla", 16, 1)),
    ({"decay": "scalar", "length": 16}, ("fused_recurrent_simple_gla", 16, 1)),
    ({"decay": "scalar", "gradient": True}, ("chunk_simple_gla", 16, 1)),
    # ... whose gradient it refuses on some machines.
    ({"decay": "scalar", "gradient": True, "hopper": True}, ("project", 16, 16)),
    ({"decay": "scalar", "gradient": True, "hopper": True, "matmul": True}, ("project", 16, 16)),
    ({"decay": "scalar", "gradient": True, "hopper": True, "length": 8}, ("project", 16, 16)),
    ({"decay": "scalar", "gradient": True, "hopper": True, "packed": True}, ("project", 16, 16)),
    ({"decay": "scalar", "gradient": True, "hopper": True, "keys": 128}, ("chunk_gla", 128, 128)),
    # One fixed number per head, without a gradient.
    ({"decay": "fixed"}, ("chunk_simple_gla", 16, 1)),
    ({"decay": "fixed", "length": 16}, ("fused_recurrent_simple_gla", 16, 1)),
    ({"decay": "fixed", "gradient": True, "hopper": True}, ("chunk_simple_gla", 16, 1)),
]


@pytest.mark.parametrize(
    ("case", "form"), TABLE, ids=[" ".join(f"{k}={v}" for k, v in case.items()) or "plain" for case, _ in TABLE]
)
def test_selected_kernel(forms, monkeypatch, case, form):
    assert form_of(monkeypatch, **case) == form


@pytest.mark.parametrize(("length", "fits"), [(131_072, True), (262_144, False)])
def test_rows_beyond_addresses_of_32_bits_are_not_for_the_kernels(length: int, fits: bool) -> None:
    """Test 32 heads of 64 and 128 channels: the gradients of a MetaLA layer have 12,288 numbers per token."""
    q = torch.empty(1, length, 32, 64, device="meta", dtype=torch.bfloat16)
    v = torch.empty(1, length, 32, 128, device="meta", dtype=torch.bfloat16)
    with kernels.cuda_on_meta({}):
        assert supports_triton(q, q, v, q, fits_matmul_form=True) is fits
        wide = v.repeat(1, 3, 1, 1)
        selected = delta_rule.select_kernel(q, q, wide, wide[..., 0], None, None, None)
        assert (selected is delta_rule.Kernel.TRITON) is fits
