"""State-space mixers and gated RNNs: each against its equations, token by token in float64, and its own edges.

What all mixers have in common is in test_mixers_family.py and test_mixers_cut.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from models.config import ModelConfig
from models.mixers import MIXERS

SIZE, HEADS, LAYERS = 16, 2, 3
# Longer than a chunk of the selective scan, so that states pass from one chunk to the next.
LONG = 150


def build(name: str, options: dict | None = None, layer_index: int = 1, seed: int = 0) -> torch.nn.Module:
    """Return a mixer whose parameters differ from their initial values, so that zeros and ones hide nothing."""
    config = ModelConfig(
        vocab_size=8,
        num_layers=LAYERS,
        hidden_size=SIZE,
        num_heads=HEADS,
        mixers=(name,),
        mixer_options={name: options} if options else {},
        init_method="normal",
        output_init_method="normal",
        init_std=0.3,
    )
    torch.manual_seed(seed)
    mixer = MIXERS[name](config, layer_index, config.options_of(name))
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return mixer


def tokens(batch: int, length: int, seed: int = 1) -> Tensor:
    return torch.randn(batch, length, SIZE, generator=torch.Generator().manual_seed(seed))


def conv(x: Tensor, weight: Tensor) -> Tensor:
    """x: [length, channels], weight: [channels, kernel]."""
    y = torch.zeros_like(x)
    kernel = weight.shape[1]
    for t in range(len(x)):
        for j in range(kernel):
            if t - kernel + 1 + j >= 0:
                y[t] += weight[:, j] * x[t - kernel + 1 + j]
    return y


def layer_norm(x: Tensor) -> Tensor:
    return (x - x.mean()) / (x.var(unbiased=False) + 1e-5).sqrt()


def mamba(p: dict[str, Tensor], x: Tensor, groups: int, states: int) -> Tensor:
    u = F.silu(conv(x @ p["x_proj.weight"].T, p["conv.weight"]))
    z = x @ p["gate_proj.weight"].T
    inner = u.shape[1]
    width = inner // groups
    rank = p["dt_weight"].shape[2]
    h = [torch.zeros(states, dtype=x.dtype)] * inner
    outputs = []
    for t in range(len(x)):
        y = []
        for channel in range(inner):
            g, c = divmod(channel, width)
            selected = p["select_weight"][g] @ u[t, g * width : (g + 1) * width]
            dt = F.softplus(p["dt_weight"][g, c] @ selected[:rank] + p["dt_bias"][channel])
            b, c_t = selected[rank : rank + states], selected[rank + states :]
            a = -p["a_log"][channel].exp()
            h[channel] = (dt * a).exp() * h[channel] + dt * b * u[t, channel]
            y.append(c_t @ h[channel] + p["skip"][channel] * u[t, channel])
        outputs.append(torch.stack(y))
    return (torch.stack(outputs) * F.silu(z)) @ p["out_proj.weight"].T


def mamba2(p: dict[str, Tensor], x: Tensor) -> Tensor:
    u = F.silu(conv(x @ p["x_proj.weight"].T, p["conv_x.weight"]))
    b = F.silu(conv(x @ p["b_proj.weight"].T, p["conv_b.weight"]))
    c = F.silu(conv(x @ p["c_proj.weight"].T, p["conv_c.weight"]))
    dt = F.softplus(x @ p["dt_proj.weight"].T + p["dt_bias"])
    z = x @ p["gate_proj.weight"].T
    width = u.shape[1] // HEADS
    o = torch.zeros_like(u)
    for head in range(HEADS):
        here = slice(head * width, (head + 1) * width)
        h = torch.zeros(b.shape[1], width, dtype=x.dtype)
        for t in range(len(x)):
            decay = (-dt[t, head] * p["a_log"][head].exp()).exp()
            h = decay * h + dt[t, head] * torch.outer(b[t], u[t, here])
            y = c[t] @ h + p["skip"][head] * u[t, here]
            y = y * F.silu(z[t, here])
            o[t, here] = y / ((y**2).mean() + 1e-5).sqrt() * p["norm_weight"][here]
    return o @ p["out_proj.weight"].T


def rwkv4(p: dict[str, Tensor], x: Tensor) -> Tensor:
    def mixed(name: str, t: int) -> Tensor:
        mix, before = p[f"mix_{name}"], x[t - 1] if t else torch.zeros_like(x[0])
        return p[f"{name}_proj.weight"] @ (mix * x[t] + (1 - mix) * before)

    r, k, v = (torch.stack([mixed(name, t) for t in range(len(x))]) for name in "rkv")
    w, u = p["decay"].exp(), p["bonus"]
    outputs = []
    for t in range(len(x)):
        now = (u + k[t]).exp()
        past = [(-(t - 1 - i) * w + k[i]).exp() for i in range(t)]
        numerator = now * v[t] + sum(e * v[i] for i, e in enumerate(past))
        outputs.append(r[t].sigmoid() * numerator / (now + sum(past)))
    return torch.stack(outputs) @ p["out_proj.weight"].T


def rg_lru(p: dict[str, Tensor], x: Tensor) -> Tensor:
    u = conv(x @ p["x_proj.weight"].T, p["conv.weight"])
    width = u.shape[1] // HEADS
    h = torch.zeros_like(u[0])
    outputs = []
    for t in range(len(x)):
        blocks = [u[t, n * width : (n + 1) * width] for n in range(HEADS)]
        gates = []
        for name in ("decay_gate", "input_gate"):
            mapped = torch.cat([weight @ part for weight, part in zip(p[f"{name}_weight"], blocks, strict=True)])
            gates.append((mapped + p[f"{name}_bias"]).sigmoid())
        a = (-8 * F.softplus(p["decay"]) * gates[0]).exp()
        h = a * h + (1 - a**2).sqrt() * gates[1] * u[t]
        outputs.append(F.gelu(p["gate_proj.weight"] @ x[t]) * h)
    return torch.stack(outputs) @ p["out_proj.weight"].T


def qlstm(p: dict[str, Tensor], x: Tensor) -> Tensor:
    h = torch.zeros(SIZE, dtype=x.dtype)
    outputs = []
    for x_t in x:
        logits = p["forget_proj.weight"] @ x_t
        alpha = (1 + logits.exp()) ** -p["log_exponent"].exp() if "log_exponent" in p else logits.sigmoid()
        h = alpha * h + (p["input_proj.weight"] @ x_t).sigmoid() * (p["update_proj.weight"] @ x_t)
        outputs.append((p["output_proj.weight"] @ x_t).sigmoid() * h)
    return torch.stack(outputs) @ p["out_proj.weight"].T


def s5(p: dict[str, Tensor], x: Tensor) -> Tensor:
    b = torch.complex(p["b_proj.weight"][0::2], p["b_proj.weight"][1::2])
    # Re(C h) = Re C Re h - Im C Im h.
    c = torch.complex(p["out_proj.weight"][:, 0::2], -p["out_proj.weight"][:, 1::2])
    eigenvalue = (-p["nu"].exp() + 1j * p["theta"].exp()).exp()
    h = torch.zeros(len(eigenvalue), dtype=torch.complex128)
    outputs = []
    for x_t in x:
        h = eigenvalue * h + p["log_gamma"].exp() * (b @ x_t.to(b.dtype))
        outputs.append((c @ h).real)
    return torch.stack(outputs)


def hgrn(p: dict[str, Tensor], x: Tensor) -> Tensor:
    gamma = 1 / LAYERS
    rotation = "theta" in p
    turn = (1j * p["theta"]).exp() if rotation else 1.0
    h = torch.zeros(SIZE, dtype=torch.complex128)
    outputs = []
    for x_t in x:
        f = gamma + (1 - gamma) * (p["forget_proj.weight"] @ x_t).sigmoid()
        gate = (p["input_proj.weight"] @ x_t).sigmoid() if "input_proj.weight" in p else 1 - f
        candidate = F.silu(p["candidate_proj.weight"] @ x_t)
        h = f * turn * h + gate * (torch.complex(candidate[0::2], candidate[1::2]) if rotation else candidate)
        o = torch.stack([h.real, h.imag], 1).flatten() if rotation else h.real
        o = torch.cat([layer_norm(part) for part in o.chunk(HEADS)])
        outputs.append(F.silu(p["gate_proj.weight"] @ x_t) * o)
    return torch.stack(outputs) @ p["out_proj.weight"].T


# name of the case: mixer, options, its equations
CASES: dict[str, tuple[str, dict, Callable[..., Tensor]]] = {
    "mamba": ("mamba", {"state_size": 4}, lambda p, x: mamba(p, x, 1, 4)),
    "mamba in groups": ("mamba", {"state_size": 3, "groups": 4, "dt_rank": 8}, lambda p, x: mamba(p, x, 4, 3)),
    "mamba2": ("mamba2", {"state_size": 8}, mamba2),
    "rwkv4": ("rwkv4", {}, rwkv4),
    "rg_lru": ("rg_lru", {"width": 24}, rg_lru),
    "qlstm": ("qlstm", {}, qlstm),
    "qlstm reversed": ("qlstm", {"forget_gate": "reversed"}, qlstm),
    "s5": ("s5", {"state_size": 10}, s5),
    "hgrn": ("hgrn", {}, hgrn),
    "hgrn free": ("hgrn", {"input_gate": "free"}, hgrn),
    "hgrn rotation": ("hgrn", {"rotation": True}, hgrn),
}
cases = pytest.mark.parametrize("case", CASES)


def built(case: str) -> torch.nn.Module:
    return build(*CASES[case][:2])


@cases
def test_equals_its_equations(case: str) -> None:
    mixer, equations = built(case), CASES[case][2]
    x = tokens(2, 23)
    parameters = {name: p.detach().double() for name, p in mixer.named_parameters()}
    with torch.no_grad():
        expected = torch.stack([equations(parameters, row) for row in x.double()])
        scale = expected.abs().max()
        assert (mixer(x) - expected).abs().max() <= 1e-5 * scale
        assert (mixer.double()(x.double()) - expected).abs().max() <= 1e-10 * scale


@cases
@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_batch_continues_from_a_state(case: str, side: str) -> None:
    mixer = built(case)
    lengths, width = (5, 11, 0), 11
    before, x, after = tokens(3, 6), tokens(3, width, seed=2), tokens(3, 2, seed=3)
    place = torch.arange(width)
    mask = torch.stack([place >= width - n if side == "left" else place < n for n in lengths])
    with torch.no_grad():
        _, state = mixer(before, return_state=True)
        y, state = mixer(x, mask=mask, state=state, return_state=True)
        end = mixer(after, state=state)
        for row, real in enumerate(mask):
            pieces = [before[row], x[row, real], after[row]]
            _, *expected = mixer(torch.cat(pieces)[None])[0].split([len(piece) for piece in pieces])
            torch.testing.assert_close(y[row, real], expected[0], rtol=0, atol=1e-5)
            torch.testing.assert_close(end[row], expected[1], rtol=0, atol=1e-5)


def test_states_pass_between_chunks_of_the_selective_scan() -> None:
    mixer = built("mamba")
    bounds = [0, 5, 5, 6, LONG, LONG + 20, LONG + 20]
    x = tokens(1, bounds[-1])
    with torch.no_grad():
        y, state = mixer(x, cu_seqlens=torch.tensor(bounds), return_state=True)
        for s, (start, end) in enumerate(pairwise(bounds)):
            h, steps = None, []
            for t in range(start, end):
                step, h = mixer(x[:, t : t + 1], state=h, return_state=True)
                steps.append(step)
            if steps:
                torch.testing.assert_close(y[:, start:end], torch.cat(steps, 1), rtol=0, atol=1e-5)
                torch.testing.assert_close(state["recurrent"][s : s + 1], h["recurrent"], rtol=1e-5, atol=1e-5)


def test_gradients_pass_between_chunks_of_the_selective_scan() -> None:
    mixer = built("mamba").double()
    x = tokens(1, 2 * LONG).double().requires_grad_()
    (whole,) = torch.autograd.grad(mixer(x).square().sum(), x)
    state, total = None, torch.zeros((), dtype=torch.float64)
    for start in range(0, 2 * LONG, 60):
        y, state = mixer(x[:, start : start + 60], state=state, return_state=True)
        total = total + y.square().sum()
    (parts,) = torch.autograd.grad(total, x)
    torch.testing.assert_close(whole, parts, rtol=1e-9, atol=1e-12)


def test_rwkv4_keys_of_any_size() -> None:
    """Test keys above 89, whose exp overflows float32, and an early maximum that decays below the smallest number."""
    mixer = build("rwkv4").double()
    with torch.no_grad():
        x = tokens(1, 60).double()
        # The naive sums of the equations hold this in float64 only.
        mixer.k_proj.weight.mul_(300 / mixer.k_proj(x).abs().max())
        expected = rwkv4({name: p.detach() for name, p in mixer.named_parameters()}, x[0])
        torch.testing.assert_close(mixer(x)[0], expected, rtol=1e-9, atol=1e-9)
        mixer.float()
        torch.testing.assert_close(mixer(x.float())[0].double(), expected, rtol=1e-3, atol=1e-3)
        mixer.k_proj.weight.mul_(100)
        assert mixer(x.float()).isfinite().all()
    mixer(x.float()).sum().backward()
    assert all(p.grad.isfinite().all() for p in mixer.parameters())


def test_rwkv4_segments_have_separate_maxima() -> None:
    """Weights relative to the large keys of the previous segment would all be 0."""
    mixer = build("rwkv4")
    with torch.no_grad():
        mixer.decay.fill_(-9.0)
        mixer.k_proj.weight.mul_(20)
        x = tokens(1, 40)
        x[:, :20] *= torch.where((mixer.k_proj(x[:, :20]) > 0).any(-1, keepdim=True), 50.0, 1.0)
        y, state = mixer(x, cu_seqlens=torch.tensor([0, 20, 40]), return_state=True)
        alone, alone_state = mixer(x[:, 20:], return_state=True)
    torch.testing.assert_close(y[:, 20:], alone, rtol=0, atol=1e-5)
    torch.testing.assert_close(state["recurrent"][1:], alone_state["recurrent"], rtol=1e-5, atol=1e-5)


def test_rg_lru_closed_gates_have_finite_gradients() -> None:
    """Test a_t = 1, where the slope of sqrt(1 - a^2) is infinite."""
    mixer = build("rg_lru")
    with torch.no_grad():
        mixer.decay_gate_bias.fill_(-200.0)
    x = tokens(1, 8)
    mixer(x).sum().backward()
    assert all(p.grad.isfinite().all() for p in mixer.parameters())


def test_hgrn_lower_bounds_grow_with_depth() -> None:
    """Lower bounds are 0 in the first layer, where closed gates must not become log 0, and layer / layers above."""
    for index in range(LAYERS):
        mixer = build("hgrn", layer_index=index)
        with torch.no_grad():
            mixer.forget_proj.weight.zero_()
            mixer.forget_proj.weight[:, 0] = -1e4
        x = torch.ones(1, 2, SIZE, requires_grad=True)
        y, state = mixer(x, return_state=True)
        y.sum().backward()
        assert mixer.forget_proj.weight.grad.isfinite().all()
        # Closed gates: f = bound, i = 1 - bound, so that two equal tokens leave c (1 - bound) (1 + bound).
        candidate = F.silu(mixer.candidate_proj(x[:, 0]))
        bound = index / LAYERS
        torch.testing.assert_close(state["recurrent"], candidate * (1 - bound) * (1 + bound))


def first(name: str, options: dict | None = None, **shape: Any) -> torch.nn.Module:
    """Return a mixer with initial parameters and enough channels to see their distribution."""
    shape = {"num_layers": 3, "hidden_size": 1024, "num_heads": 256, **shape}
    given = {name: options} if options else {}
    config = ModelConfig(
        vocab_size=8, mixers=(name,), mixer_options=given, init_method="normal", init_std=0.03, **shape
    )
    torch.manual_seed(3)
    return MIXERS[name](config, 1, config.options_of(name))


def assert_uniform(x: Tensor, low: float, high: float) -> None:
    """Within 5 standard errors of a uniform distribution's mean and near its ends."""
    width = high - low
    assert low - 1e-5 * width <= x.min() <= low + 10 * width / len(x)
    assert high - 10 * width / len(x) <= x.max() <= high + 1e-5 * width
    assert abs(x.mean() - (low + high) / 2) < 5 * width / math.sqrt(12 * len(x))


# Parameters for d = 16, added up from the shapes in the docstrings.
PARAMETERS = {
    # x, z, out: 3 * 16 * 32; conv 4 * 32; W (1 + 8) * 32; W_dt 32; b, D 2 * 32; A 32 * 4
    "mamba": 1536 + 128 + 288 + 32 + 64 + 128,
    # 4 groups of 8 channels, rank 2: W 4 * (2 + 6) * 8; W_dt 32 * 2; A 32 * 3
    "mamba in groups": 1536 + 128 + 256 + 64 + 64 + 96,
    # x, z, out; B, C 2 * 16 * 8; dt 16 * 2; conv 4 * (32 + 16); b, A, D 3 * 2; norm 32
    "mamba2": 1536 + 256 + 32 + 192 + 6 + 32,
    "rwkv4": 4 * 256 + 5 * 16,
    # x, gate, out 3 * 16 * 24; conv 4 * 24; gates 2 * (2 * 12 * 12 + 24); Lambda 24
    "rg_lru": 1152 + 96 + 624 + 24,
    "qlstm": 5 * 256,
    "qlstm reversed": 5 * 256 + 16,
    # B, C 2 * 16 * 20; nu, theta, gamma 3 * 10
    "s5": 640 + 30,
    "hgrn": 4 * 256,
    "hgrn free": 5 * 256,
    "hgrn rotation": 7 * 256 + 16,
}


@cases
def test_parameters_are_counted(case: str) -> None:
    assert sum(p.numel() for p in built(case).parameters()) == PARAMETERS[case]


@pytest.mark.parametrize(
    ("mixer", "options", "message"),
    [
        ("mamba", {"groups": 5}, r"mamba.groups = 5 does not divide .* 32; nearest that do: 4 or 8"),
        ("mamba", {"state_size": 0}, "mamba.state_size = 0"),
        ("mamba2", {"expand": 0}, "mamba2.expand = 0"),
        ("rg_lru", {"width": 25}, r"num_heads = 2 does not divide model.mixer_options.rg_lru.width = 25; .* 1 or 5"),
        ("rg_lru", {"exponent": 0.0}, "rg_lru.exponent = 0.0"),
        ("s5", {"state_size": 9}, r"num_heads = 2 does not divide model.mixer_options.s5.state_size = 9; .* 1 or 3"),
        ("s5", {"min_radius": 1.0}, "must be 0 < min < max < 1"),
        ("qlstm", {"forget_gate": "tanh"}, "allowed are sigmoid, reversed"),
        ("hgrn", {"input_gate": "none"}, "allowed are tied, free"),
    ],
)
def test_options_that_cannot_be_built_are_refused(mixer: str, options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(mixer, options)
