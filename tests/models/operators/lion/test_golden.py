"""LION's operator: outputs and gradients equal the golden values."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from models.operators.lion.bidirectional_attention import bidirectional_linear_attention as attend
from models.operators.lion.check import CONVENTIONS

from .test_bidirectional_attention import PLAIN


@pytest.fixture(scope="module")
def golden(shared_golden: Path) -> dict[str, Tensor]:
    return {name: torch.tensor(array) for name, array in np.load(shared_golden / "lion_operator.npz").items()}


@pytest.mark.parametrize("variant", ["lit", "d", "s"])
@pytest.mark.parametrize("convention", CONVENTIONS)
@pytest.mark.parametrize("normalized", [True, False])
@pytest.mark.parametrize("form", PLAIN)
def test_golden_outputs(golden: dict[str, Tensor], variant: str, convention: str, normalized: bool, form: str) -> None:
    gate = {"lit": None, "d": golden["a_h"].expand(2, 41, 3), "s": golden["gate"]}[variant]
    q, k, v = golden["q"], golden["k"], golden["v"]
    y = attend(q, k, v, decay_logits=gate, normalized=normalized, mask_convention=convention, form=form)
    expected = golden[f"y_{variant}_{convention}_{'scaled' if normalized else 'unscaled'}"]
    torch.testing.assert_close(y, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("form", PLAIN)
def test_golden_gradients(golden: dict[str, Tensor], form: str) -> None:
    gate = golden["gate"][:1, :, :1]
    decay = F.logsigmoid(gate)
    q, k, v, g = (x.clone().requires_grad_() for x in (*(golden[n][:1, :, :1] for n in "qkv"), decay))
    (attend(q, k, v, g, form=form)[0, :, 0] * golden["grad_weight"]).sum().backward()
    for name, x in (("q", q), ("k", k), ("v", v)):
        at = golden[f"grad_{name}_index"]
        expected = golden[f"grad_{name}"][at[:, 0], at[:, 1]]
        torch.testing.assert_close(x.grad[0, at[:, 0], 0, at[:, 1]], expected, rtol=1e-7, atol=1e-7)
    torch.testing.assert_close(g.grad[0, :, 0], golden["grad_g"], rtol=1e-7, atol=1e-7)
