"""The C++ kernels for CPUs against plain PyTorch; missing and failing compilers; the cache of compiled kernels."""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.config import ModelConfig
from models.kernels.cpu import build
from models.kernels.cpu.causal_conv1d import causal_convolution, supports_convolution
from models.kernels.cpu.cross_entropy import supports_cross_entropy
from models.kernels.cpu.metala import metala_core, supports_metala_core
from models.kernels.cpu.swiglu import supports_swiglu
from models.kernels.cpu.swiglu import swiglu as native_swiglu
from models.layers.mlp import swiglu
from models.layers.short_convolution import _by_torch
from models.mixers.metala import MetaLA, MetaLAOptions
from models.operators.cross_entropy import cross_entropy_sum
from models.operators.gla.gated_linear_attention import gated_linear_attention
from models.operators.metala import _select_core, decay_and_key_reference
from models.operators.metala import epilogue_reference as epilogue

BOUNDS = {torch.float32: 2e-6, torch.bfloat16: 4e-3}
# The norm after the recurrence amplifies rounding errors if a head's outputs are near zero.
CORE_BOUNDS = {torch.float32: 5e-5, torch.bfloat16: 4e-3}
needs_compiler = pytest.mark.skipif(build._compiler() is None, reason="there is no C++ compiler")


@pytest.fixture
def new_build(monkeypatch: pytest.MonkeyPatch, tmp_path) -> Iterator[None]:
    """Clear the caches of compiled kernels and use an empty cache folder."""
    caches = build.shared_object, build._compiler, build._folder
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for cached in caches:
        cached.cache_clear()
    yield
    monkeypatch.undo()
    for cached in caches:
        cached.cache_clear()


def compared(
    kernel: Callable[..., Sequence[Tensor]],
    plain: Callable[..., Sequence[Tensor]],
    inputs: Sequence[Tensor],
    dtype: torch.dtype,
    bounds: dict[torch.dtype, float] = BOUNDS,
) -> None:
    """Compare results and gradients of the kernel, with inputs of this dtype, with plain PyTorch in float64."""
    generator = torch.Generator().manual_seed(1)
    narrow = [x.to(dtype) for x in inputs]
    results = []
    for function, of in ((kernel, dtype), (plain, torch.float64)):
        leaves = [x.detach().to(of).requires_grad_() for x in narrow]
        outputs = function(*leaves)
        if not results:
            weights = [torch.randn(y.shape, generator=generator, dtype=torch.float64).to(dtype) for y in outputs]
        loss = sum((y.double() * weight.double()).sum() for y, weight in zip(outputs, weights, strict=True))
        results.append([*outputs, *torch.autograd.grad(loss, leaves)])
    for place, (actual, expected) in enumerate(zip(*results, strict=True)):
        assert actual.isfinite().all(), place
        error = (actual.double() - expected).norm() / expected.norm().clamp_min(1e-12)
        assert error.item() < bounds[dtype], (place, error.item())


@needs_compiler
@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize(
    ("shape", "kind", "cu_seqlens"),
    [
        ((4, 65, 2, 16, 16), "mild", None),
        ((1, 1, 2, 32, 64), "mild", None),
        ((2, 32, 1, 48, 16), "open", None),
        ((1, 130, 2, 16, 48), "strong", None),
        ((1, 200, 2, 32, 32), "later", [0, 0, 1, 60, 188, 188, 200, 200]),
    ],
)
def test_metala_core(dtype, shape, kind, cu_seqlens):
    """Decay, recurrence and epilogue as one step, also with decays of almost 1 and almost 0."""
    batch, length, heads, keys, values = shape
    a = torch.randn(batch, length, heads, keys)
    if kind == "strong":
        a = a * 300
    if kind == "open":
        a = a + 12
    if kind == "later":
        a[:, length // 2 :] -= 60
    bounds = None if cu_seqlens is None else torch.tensor(cu_seqlens, dtype=torch.int32)
    sequences = batch if cu_seqlens is None else len(cu_seqlens) - 1
    q, v, gate = (
        torch.randn(*a.shape),
        torch.randn(batch, length, heads, values),
        torch.randn(batch, length, heads * values),
    )
    inputs = q, a, v, 0.3 * torch.randn(heads * keys), gate, torch.randn(sequences, heads, keys, values)

    def plain(q, a, v, weight, gate, state):
        g, k = decay_and_key_reference(a)
        o, final = gated_linear_attention(
            q, k, v, g, scale=0.3, initial_state=state, cu_seqlens=bounds, form="recurrent"
        )
        return epilogue(o, q, k, v, weight, gate), final

    def kernel(q, a, v, weight, gate, state):
        assert supports_metala_core(q, a, v, weight, gate)
        return metala_core(q, a, v, weight, gate, 0.3, state, bounds)

    compared(kernel, plain, inputs, dtype, CORE_BOUNDS)


@needs_compiler
def test_small_augmentation_of_the_core_keeps_its_digits():
    """Use decays of almost 1, which give outputs of about 1e-7 before the norm."""
    q, a, v = (torch.randn(1, 20, 2, 16) for _ in range(3))
    weight, gate = torch.ones(32), torch.randn(1, 20, 32)

    def plain(q, a, v, gate):
        g, k = decay_and_key_reference(a)
        o, _ = gated_linear_attention(q, k, v, g, form="recurrent")
        return (epilogue(o, q, k, v, weight.double(), gate),)

    def kernel(q, a, v, gate):
        return metala_core(q, a, v, weight, gate, 1.0, None, None)[:1]

    compared(kernel, plain, (q, a + 18, v, gate), torch.float32)


@needs_compiler
def test_gradients_of_the_core_are_adjacent_in_memory():
    """Gradients of q, a, v and gate, in this order, are one matrix for the matmuls with the weights."""
    leaves = [torch.randn(1, 20, 2, 16, requires_grad=True) for _ in range(3)]
    gate, weight = torch.randn(1, 20, 32, requires_grad=True), torch.randn(32)
    y, final = metala_core(*leaves, weight, gate, 1.0, None, None)
    assert final.shape == (1, 2, 16, 16)
    assert torch.equal(metala_core(*leaves, weight, gate, 1, None, None)[0], y), "a scale of type int"
    actual = torch.autograd.grad(y.sum(), [*leaves, gate])
    assert [x.storage_offset() for x in actual] == [0, 32, 64, 96]
    assert len({x.untyped_storage().data_ptr() for x in actual}) == 1


@needs_compiler
def test_metala_with_the_fused_core_equals_metala_without(new_build, monkeypatch):
    config = ModelConfig(vocab_size=32, num_layers=1, hidden_size=64, num_heads=2, mixers=("metala",))
    layer, x = MetaLA(config, 0, MetaLAOptions()), torch.randn(2, 40, 64)
    nn.init.normal_(layer.aug_weight, std=0.3)
    with_kernels = layer(x, return_state=True)
    assert {path.name.split("-")[0] for path in build._folder().iterdir()} == {"metala", "causal_conv1d"}
    monkeypatch.setenv("METALION_NATIVE", "0")
    build._compiler.cache_clear()
    build.shared_object.cache_clear()
    zeros = [torch.zeros(1, 1, 2, 16)] * 3
    assert _select_core(*zeros, layer.aug_weight, torch.zeros(1, 1, 32)) is None
    without = layer(x, return_state=True)
    torch.testing.assert_close(with_kernels, without, rtol=1e-4, atol=2e-5)


@needs_compiler
@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("silu", [False, True])
@pytest.mark.parametrize(("taps", "length", "channels"), [(4, 50, 64), (4, 2, 16), (2, 7, 96), (1, 3, 16)])
def test_convolution(dtype, silu, taps, length, channels):
    inputs = torch.randn(3, taps - 1, channels), torch.randn(3, length, channels), 0.5 * torch.randn(channels, taps)
    assert supports_convolution(*(x.to(dtype) for x in inputs[1:]))

    def kernel(before, x, weight):
        return (causal_convolution(before, x, weight, silu),)

    compared(kernel, lambda *of: (_by_torch(*of, silu),), inputs, dtype)


@needs_compiler
@pytest.mark.parametrize("dtype", BOUNDS)
def test_swiglu(dtype):
    gate, up = 4 * torch.randn(3, 5, 48), torch.randn(3, 5, 48)
    assert supports_swiglu(gate.to(dtype), up.to(dtype))
    compared(lambda *of: (native_swiglu(*of),), lambda gate, up: (F.silu(gate) * up,), (gate, up), dtype)
    leaves = [x.to(dtype).requires_grad_() for x in (gate, up)]
    actual = torch.autograd.grad(native_swiglu(*leaves).sum(), leaves)
    assert [x.storage_offset() for x in actual] == [0, 48]
    assert actual[0].stride(1) == 96


@needs_compiler
@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("with_bias", [False, True])
def test_cross_entropy(dtype, with_bias):
    hidden, weight, bias = torch.randn(50, 32), 0.5 * torch.randn(48, 32), torch.randn(48)
    labels, of_token = torch.randint(48, (50,)), torch.rand(50)
    labels[3], of_token[7] = -100, 0.0
    assert supports_cross_entropy(hidden.to(dtype), weight.to(dtype))
    num_correct = torch.zeros(())

    def kernel(hidden, weight, of_token, bias=None):
        return (cross_entropy_sum(hidden, weight, labels, of_token, bias=bias, num_correct=num_correct, chunk=16),)

    def plain(hidden, weight, of_token, bias=None):
        nll = F.cross_entropy(F.linear(hidden, weight, bias), labels, reduction="none", ignore_index=-100)
        return ((nll.masked_fill(of_token == 0, 0.0) * of_token).sum(),)

    inputs = hidden, weight, of_token, *([bias] if with_bias else [])
    compared(kernel, plain, inputs, dtype)
    logits = F.linear(hidden.to(dtype), weight.to(dtype)).float()
    best = (logits + bias.to(dtype) if with_bias else logits).argmax(-1)
    assert num_correct.item() == pytest.approx((of_token.to(dtype).float() * (best == labels)).sum().item())


def strided(x: Tensor) -> Tensor:
    """Return x as a view with other numbers between its elements along every axis."""
    exact = torch.full([2 * size for size in x.shape], 3.0).to(x.dtype)
    view = exact[(slice(None, None, 2),) * x.dim()]
    return view.copy_(x)


@needs_compiler
def test_strided_inputs_are_supported():
    """All arguments, and the gradients of the results, are strided views."""
    x = [torch.randn(1, 40, 2, 16) for _ in range(3)]
    gate, state, labels = torch.randn(1, 40, 32), torch.randn(3, 2, 16, 16), torch.randint(48, (20,))
    bounds = torch.tensor([0, 7, 7, 40])

    def core(bounds, *of):
        return metala_core(*of[:3], of[3], of[4], 0.3, of[5], bounds)

    def conv(*of):
        return (causal_convolution(*of, True),)

    def gated(*of):
        return (native_swiglu(*of),)

    def loss(labels, hidden, weight, of_token, bias):
        return (cross_entropy_sum(hidden, weight, labels, of_token, bias=bias, chunk=8),)

    cases = [
        (core, [bounds, *x, torch.randn(32), gate, state]),
        (core, [bounds.int(), *x, torch.randn(32), gate, state]),
        (conv, [torch.randn(2, 3, 32), torch.randn(2, 9, 32), torch.randn(32, 4)]),
        (gated, [torch.randn(3, 32), torch.randn(3, 32)]),
        (loss, [labels, torch.randn(20, 32), torch.randn(48, 32), torch.rand(20), torch.randn(48)]),
    ]
    for function, arguments in cases:
        results = []
        for change in (torch.clone, strided):
            leaves = [change(x).requires_grad_(x.is_floating_point()) for x in arguments]
            outputs = function(*leaves)
            generator = torch.Generator().manual_seed(2)
            d_outputs = [change(torch.randn(y.shape, generator=generator)) for y in outputs]
            wanted = [x for x in leaves if x.requires_grad]
            results.append([*outputs, *torch.autograd.grad(outputs, wanted, d_outputs)])
        for expected, actual in zip(*results, strict=True):
            torch.testing.assert_close(actual, expected)


@needs_compiler
@pytest.mark.parametrize("dtype", BOUNDS)
def test_exponentials_overflow_underflow_and_nan(dtype):
    """exp overflows or underflows, and nan stays nan: a gradient with nan must be detected."""
    gate = torch.tensor([-1e4, -88.0, -20.0, 0.0, 20.0, 88.0, 1e4, *[1.0] * 9], dtype=dtype)
    torch.testing.assert_close(swiglu(gate, torch.ones_like(gate)), F.silu(gate), rtol=1e-6, atol=1e-30)
    for bad in (float("nan"), float("inf")):
        leaves = [torch.randn(1, 40, 1, 16, dtype=dtype, requires_grad=True) for _ in range(3)]
        with torch.no_grad():
            leaves[2][0, 20, 0, 3] = bad
        gate, weight = torch.ones(1, 40, 16, dtype=dtype), torch.ones(16, dtype=dtype)
        y, _ = metala_core(*leaves, weight, gate, 1.0, None, None)
        assert y[:, :20].isfinite().all()
        assert not y[:, 20:].isfinite().all()
        assert not torch.autograd.grad(y.float().sum(), leaves)[0].isfinite().all()


@needs_compiler
def test_two_threads_equal_one_thread():
    x, weight = torch.randn(4, 33, 64).bfloat16(), torch.randn(64, 4).bfloat16()
    of_core = [torch.randn(4, 33, 2, 32).bfloat16() for _ in range(3)]
    gate, aug = torch.randn(4, 33, 64).bfloat16(), torch.randn(64).bfloat16()

    def results():
        leaves = [y.clone().requires_grad_() for y in (x, weight, *of_core, gate, aug)]
        y = causal_convolution(None, *leaves[:2], True)
        z, state = metala_core(*leaves[2:5], leaves[6], leaves[5], 0.3, None, None)
        return [y, z, state, *torch.autograd.grad((y * z).float().sum() + state.sum(), leaves)]

    before, actual = torch.get_num_threads(), []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            actual.append(results())
    finally:
        torch.set_num_threads(before)
    assert all(map(torch.equal, *actual))


def test_unsupported_inputs():
    gate = torch.randn(2, 32)
    assert not supports_swiglu(gate.double(), gate.double())
    assert not supports_swiglu(gate, gate.bfloat16())
    assert not supports_swiglu(gate[:, :20].contiguous(), gate[:, :20].contiguous())
    assert not supports_swiglu(gate.to("meta"), gate.to("meta"))
    assert not supports_swiglu(gate[:0], gate[:0])
    large = torch.randn(1, 2, 1, 128)
    assert not supports_metala_core(large, large, large, torch.ones(128), torch.ones(1, 2, 128))


@needs_compiler
def test_a_library_is_compiled_once(new_build, monkeypatch):
    assert build.shared_object("swiglu", torch.float32) is not None
    kept = sorted(build._folder().iterdir())
    assert [path.suffix for path in kept] == [".so"]
    build.shared_object.cache_clear()
    monkeypatch.setattr(build.subprocess, "run", lambda *_, **__: pytest.fail("compiled again"))
    assert build.shared_object("swiglu", torch.float32) is not None


def test_missing_compiler_falls_back_to_pytorch(new_build, monkeypatch):
    monkeypatch.setenv("CXX", "there-is-no-such-compiler")
    gate, up = torch.randn(2, 32), torch.randn(2, 32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not supports_swiglu(gate, up)
        torch.testing.assert_close(swiglu(gate, up), F.silu(gate) * up)


@pytest.mark.skipif(shutil.which("false") is None, reason="needs a command that fails")
def test_failing_compiler_warns_once(new_build, monkeypatch):
    monkeypatch.setenv("CXX", "false")
    with pytest.warns(UserWarning, match=r"swiglu\.cpp: .*false did not compile it, so PyTorch's slower operators"):
        assert not supports_swiglu(torch.ones(16), torch.ones(16))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not supports_swiglu(torch.ones(16), torch.ones(16))


def test_cache_folder_that_cannot_be_written(new_build, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert build._folder().is_dir()


@pytest.fixture
def compiled(new_build, monkeypatch) -> list[str]:
    """Replace the compiler: it writes a line of text, and loading returns the path. Return one entry per compilation."""
    calls: list[str] = []

    def compile_source(command: list[str], **_: object) -> None:
        calls.append(command[-1])
        Path(command[-1]).write_text("compiled here")

    monkeypatch.setattr(build, "_compiler", lambda: "c++")
    monkeypatch.setattr(build.subprocess, "run", compile_source)
    monkeypatch.setattr(build.ctypes, "CDLL", Path)
    return calls


@pytest.mark.parametrize("change", ["writable", "owner", "link"])
def test_kernel_that_others_can_have_written_is_not_loaded(compiled, monkeypatch, tmp_path, change):
    kept = build.shared_object("swiglu", torch.float32)
    assert (kept.stat().st_mode & 0o777, kept.parent.stat().st_mode & 0o777) == (0o700, 0o700)
    kept.unlink()
    planted = tmp_path / "planted" if change == "link" else kept
    planted.write_text("planted")
    planted.chmod(0o720 if change == "writable" else 0o700)
    if change == "link":
        kept.symlink_to(planted)
    if change == "owner":
        actual = list(kept.lstat())
        actual[4] += 1
        monkeypatch.setattr(Path, "lstat", lambda _: os.stat_result(actual))
    build.shared_object.cache_clear()
    with pytest.warns(UserWarning, match=r"swiglu-\w+\.so belongs to another user, or others can write it"):
        assert build.shared_object("swiglu", torch.float32).read_text() == "compiled here"
    assert len(compiled) == 2
    assert not kept.is_symlink()


def test_cache_folder_of_another_user_is_not_used(compiled, monkeypatch, tmp_path):
    (tmp_path / "metalion" / "native").mkdir(parents=True)
    other = os.geteuid() + 1
    monkeypatch.setattr(build.os, "geteuid", lambda: other)
    with pytest.warns(UserWarning, match="belongs to another user: every process compiles its kernels; set XDG"):
        assert not build._folder().is_relative_to(tmp_path)


def test_cache_folder_that_is_open_to_others_is_closed(new_build, tmp_path):
    folder = tmp_path / "metalion" / "native"
    folder.mkdir(parents=True)
    for path in (folder, folder.parent):
        path.chmod(0o777)
    assert build._folder() == folder
    assert [path.stat().st_mode & 0o777 for path in (folder, folder.parent)] == [0o700, 0o700]
