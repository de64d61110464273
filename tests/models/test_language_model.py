"""The language model as a whole: shapes of the papers, seeds, initialisation, decoding, padding, packing."""

from __future__ import annotations

from itertools import pairwise
from math import sqrt

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from models.config import ModelConfig
from models.language_model import LanguageModel, count_parameters, layer_specs

PYTHIA = {
    "mixers": ("attention",),
    "mixer_options": {"attention": {"rotary_pct": 0.25, "bias": True}},
    "mlp": "gelu",
    "mlp_bias": True,
    "parallel_residual": True,
    "tie_embeddings": False,
}
PATTERNS = [("metala",), ("attention",), ("metala", "attention")]


def model(mixers=("metala",), seed: int = 3, **changes) -> LanguageModel:
    shape = {"vocab_size": 61, "num_layers": 3, "hidden_size": 32, "num_heads": 4, "mixers": mixers} | changes
    lm = LanguageModel(ModelConfig(**shape), seed=seed)
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        # Away from the special values of the start: zero augmentation, unit gains.
        for parameter in lm.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return lm


@pytest.mark.parametrize(
    ("shape", "parameters"),
    [
        ({"num_layers": 24, "hidden_size": 1024, "num_heads": 8}, 360.0e6),
        ({"num_layers": 24, "hidden_size": 2048, "num_heads": 16}, 1336.6e6),
        ({"num_layers": 24, "hidden_size": 2048, "num_heads": 16, "tie_embeddings": False}, 1439.6e6),
    ],
)
def test_parameters_of_the_papers(shape, parameters):
    assert round(count_parameters(ModelConfig(vocab_size=50304, **shape)) / 1e5) == round(parameters / 1e5)


def test_parameters_of_pythia_410m():
    config = ModelConfig(vocab_size=50304, num_layers=24, hidden_size=1024, num_heads=16, **PYTHIA)
    assert count_parameters(config) == 405_334_016


@pytest.mark.parametrize(("size", "width"), [(1024, 2816), (2048, 5632), (256, 768)])
def test_width_of_swiglu(size, width):
    assert ModelConfig(8, 2, size, 4).mlp_width == width
    assert ModelConfig(8, 2, size, 4, intermediate_size=width - 1).mlp_width == width - 1


def test_names_of_parameters():
    """Checkpoints and conversions use these names."""
    names = {name for name, _ in model().named_parameters()}
    assert {
        "embedding.weight",
        "blocks.0.norm1.weight",
        "blocks.2.mixer.q_proj.weight",
        "blocks.1.mixer.aug_weight",
        "blocks.0.mixer.conv.weight",
        "blocks.0.norm2.bias",
        "blocks.2.mlp.down_proj.weight",
        "head.norm.weight",
    } <= names
    assert "head.weight" not in names
    assert "head.weight" in {name for name, _ in model(tie_embeddings=False).named_parameters()}


@pytest.mark.parametrize("mixers", PATTERNS)
def test_every_parameter_has_a_sharding_spec_and_a_known_kind(mixers):
    lm = model(mixers, mlp="gelu", mlp_bias=True)
    kinds, missing = set(), []
    for name, _ in lm.named_parameters():
        path = name.split(".")
        owners = [lm.get_submodule(".".join(path[:i])) for i in range(len(path))]
        plans = [(getattr(o, "tensor_parallel_plan", {}), path[i]) for i, o in enumerate(owners)]
        if not any(key in plan for plan, key in plans):
            missing.append(name)
        kinds |= {getattr(o, "parameter_kinds", {}).get(path[-1]) for o in owners}
    assert missing == []
    assert kinds <= {None, "norm", "bias", "decay", "embedding"}


def test_layer_weights_do_not_depend_on_other_layers():
    """Weights of a layer depend on the seed and its index, not on the other layers that this process builds."""
    config = ModelConfig(vocab_size=61, num_layers=3, hidden_size=32, num_heads=4)
    whole = LanguageModel(config, seed=5)
    torch.manual_seed(77)
    before = torch.get_rng_state()
    specs = layer_specs(config)
    assert [spec.name for spec in specs] == ["embedding", "blocks.0", "blocks.1", "blocks.2", "head"]
    assert [spec.index for spec in specs] == [0, 1, 2, 3, 4]
    assert [spec.tied_to for spec in specs] == [None, None, None, None, "embedding"]
    for index in (3, 1):
        alone = specs[index].build(5)
        for name, value in alone.state_dict().items():
            assert torch.equal(value, whole.blocks[index - 1].state_dict()[name]), name
    assert torch.equal(torch.get_rng_state(), before)
    first, second = (whole.blocks[i].mixer.q_proj.weight for i in (0, 1))
    assert not torch.equal(first, second)
    other = specs[1].build(6)
    assert not torch.equal(other.mixer.q_proj.weight, first)


@pytest.mark.parametrize(
    ("method", "std"),
    [
        ("small_init", sqrt(2 / (5 * 256))),
        ("wang_init", 2 / (6 * sqrt(256))),
        ("normal", 0.05),
        ("scaled_normal", 0.05 / sqrt(12)),
    ],
)
def test_initialisation(method, std):
    config = ModelConfig(
        vocab_size=512,
        num_layers=6,
        hidden_size=256,
        num_heads=4,
        mixers=("metala", "attention"),
        init_method=method,
        output_init_method="normal",
        init_std=0.05,
        tie_embeddings=False,
    )
    lm = LanguageModel(config, seed=0)
    outputs = ("out_proj.weight", "down_proj.weight")
    for name, p in lm.named_parameters():
        if p.dim() == 2 and "conv" not in name:
            expected = 0.05 if name.endswith(outputs) else std
            assert abs(p.std().item() / expected - 1) < 0.03, name
            assert abs(p.mean().item()) < 0.01 * expected + 4 * expected / sqrt(p.numel()), name
        elif "bias" in name or "aug_weight" in name:
            assert torch.equal(p, torch.zeros_like(p)), name
        elif "norm" in name:
            assert torch.equal(p, torch.ones_like(p)), name


@pytest.mark.parametrize("mixers", PATTERNS)
def test_prefill_and_decode_equal_forward(mixers):
    lm = model(mixers)
    tokens = torch.randint(0, 61, (2, 40))
    expected = lm(tokens)
    logits, state = lm(tokens[:, :25], return_state=True)
    outputs = [logits]
    for t in range(25, 40):
        logits, state = lm(tokens[:, t : t + 1], state=state, return_state=True)
        outputs.append(logits)
    torch.testing.assert_close(torch.cat(outputs, 1), expected, rtol=1e-5, atol=1e-5)


def test_state_of_another_number_of_layers_is_refused():
    lm, tokens = model(PATTERNS[0]), torch.zeros(1, 1, dtype=torch.long)
    _, state = lm(tokens, return_state=True)
    with pytest.raises(
        ValueError, match=rf"state of {len(state) - 2} layers: the embedding and the blocks are \d+; give all"
    ):
        lm(tokens, state=state[1:])


@pytest.mark.parametrize("head", ["linear", "mlm"])
def test_loss_under_autocast(head):
    shape = {"vocab_size": 64, "num_layers": 2, "hidden_size": 32, "num_heads": 2, "mixers": ("attention",)}
    lm, tokens = LanguageModel(ModelConfig(**shape, head=head)), torch.arange(12)[None]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = lm(tokens, labels=tokens)
    torch.testing.assert_close(loss, lm(tokens, labels=tokens), rtol=0.01, atol=0)


@pytest.mark.parametrize("mask", [torch.ones(2, 1, dtype=torch.bool), torch.ones(2, 5)])
def test_mask_of_another_shape_or_dtype_is_refused(mask):
    with pytest.raises(ValueError, match=r"mask torch\.\w+ \[2, \d\]: expected torch.bool \[2, 5\], True for real"):
        model(PATTERNS[0])(torch.zeros(2, 5, dtype=torch.long), mask=mask)


@pytest.mark.parametrize("mixers", PATTERNS)
def test_left_padded_prompts_decode_as_single_prompts(mixers):
    """Left padding through the mask, then tokens one by one."""
    lm = model(mixers)
    prompts = [torch.randint(0, 61, (n,)) for n in (4, 17, 9)]
    more = torch.randint(0, 61, (3, 6))
    width = max(map(len, prompts))
    tokens, mask = torch.zeros(3, width, dtype=torch.long), torch.zeros(3, width, dtype=torch.bool)
    for i, prompt in enumerate(prompts):
        tokens[i, width - len(prompt) :], mask[i, width - len(prompt) :] = prompt, True
    logits, state = lm(tokens, mask=mask, return_state=True)
    outputs = [logits[:, -1:]]
    for t in range(6):
        logits, state = lm(more[:, t : t + 1], state=state, return_state=True)
        outputs.append(logits)
    together = torch.cat(outputs, 1)
    for i, prompt in enumerate(prompts):
        alone = lm(torch.cat([prompt, more[i]])[None])[:, len(prompt) - 1 :]
        torch.testing.assert_close(together[i : i + 1], alone, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mixers", PATTERNS)
def test_packed_documents_equal_separate_documents(mixers):
    lm = model(mixers)
    bounds = [0, 11, 11, 30, 41, 41]
    tokens = torch.randint(0, 61, (1, 41))
    packed = lm(tokens, cu_seqlens=torch.tensor(bounds))
    apart = [lm(tokens[:, a:b]) for a, b in pairwise(bounds) if a < b]
    torch.testing.assert_close(packed, torch.cat(apart, 1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mixers", PATTERNS)
def test_packed_segments_are_continued_without_a_new_state(mixers):
    """Continue segments of which one is empty, and read no state after them."""
    lm = model(mixers).double()
    tokens, more = torch.randint(0, 61, (1, 9)), torch.randint(0, 61, (1, 3))
    _, state = lm(tokens, cu_seqlens=torch.tensor([0, 4, 6, 9]), return_state=True)
    bounds = torch.tensor([0, 1, 1, 3])
    expected, _ = lm(more, cu_seqlens=bounds, state=state, return_state=True)
    torch.testing.assert_close(lm(more, cu_seqlens=bounds, state=state), expected)
    together = lm(torch.cat([tokens[:, 6:], more[:, 1:]], 1))
    torch.testing.assert_close(expected[:, 1:], together[:, 3:])


@pytest.mark.parametrize("mixers", PATTERNS)
def test_no_token_sees_a_later_one(mixers):
    lm = model(mixers)
    tokens = torch.randint(0, 61, (1, 30))
    changed = tokens.clone()
    changed[0, 20:] = torch.randint(0, 61, (10,))
    difference = (lm(tokens) - lm(changed)).abs()
    # Rounding only: where a chunk is anchored depends on its decays.
    assert difference[:, :20].max() < 1e-5
    assert difference[:, 20:].max() > 1e-1


@pytest.mark.parametrize("parallel", [False, True])
def test_residual_block(parallel):
    lm = model(("attention",), parallel_residual=parallel, mlp="gelu", mlp_bias=True)
    block, x = lm.blocks[0], torch.randn(2, 5, 32)
    mixed = block.mixer(block.norm1(x))
    second = x if parallel else x + mixed
    torch.testing.assert_close(block(x), x + mixed + block.mlp(block.norm2(second)))


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm"])
def test_norms(kind, affine):
    lm = model(norm=kind, norm_affine=affine, norm_eps=1e-3)
    norm, x = lm.blocks[0].norm1, torch.randn(2, 5, 32) * 3 + 1
    centred = x - x.mean(-1, keepdim=True) if kind == "layernorm" else x
    expected = centred / (centred.square().mean(-1, keepdim=True) + 1e-3).sqrt()
    if affine:
        expected = expected * norm.weight + (norm.bias if kind == "layernorm" else 0)
    assert len(list(norm.parameters())) == (0 if not affine else 2 if kind == "layernorm" else 1)
    torch.testing.assert_close(norm(x), expected)
    narrow = norm.bfloat16()(x.bfloat16())
    exact = norm.double()(x.bfloat16().double())
    assert (narrow - exact).norm() <= 2**-9 * exact.norm(), "rounded once"


def test_flops_per_token():
    """Twice the multiply-adds of every matrix, and the operators: attention's causal half, MetaLA's chunks."""
    shape = {"vocab_size": 61, "num_layers": 1, "hidden_size": 32, "num_heads": 4}
    matrices = 2 * (61 * 32 + 3 * 32 * 256)
    attention = LanguageModel(ModelConfig(**shape, mixers=("attention",)))
    assert attention.flops_per_token(100) == matrices + 2 * 4 * 32 * 32 + 2 * 32 * 100
    with_gelu = LanguageModel(ModelConfig(**shape, mixers=("attention",), mlp="gelu", intermediate_size=48))
    assert with_gelu.flops_per_token(100) == attention.flops_per_token(100) - 2 * 3 * 32 * 256 + 2 * 2 * 32 * 48
    metala = LanguageModel(ModelConfig(**shape))
    operator = 4 * (64 * (4 + 8) + 4 * 4 * 8)
    assert metala.flops_per_token(100) == matrices + 2 * 4 * 32 * 32 + 2 * 4 * 32 + operator
    assert metala.flops_per_token(10**6) == metala.flops_per_token(100)


def test_recomputed_block_has_the_same_gradients():
    lm = model()
    block, x = lm.blocks[0], torch.randn(2, 20, 32)
    gradients = []
    for run in (block, lambda x: checkpoint(block, x, use_reentrant=False)):
        leaf = x.clone().requires_grad_()
        gradients.append(torch.autograd.grad(run(leaf).square().sum(), [leaf, *block.parameters()]))
    for a, b in zip(*gradients, strict=True):
        assert torch.equal(a, b)


def test_sixteen_bit_model_follows_the_float32_one():
    """At the same weights; rounding the weights alone moves some gradients by more."""
    lm = LanguageModel(ModelConfig(vocab_size=61, num_layers=3, hidden_size=64, num_heads=4), seed=3).bfloat16()
    tokens, labels = torch.randint(0, 61, (2, 64)), torch.randint(0, 61, (2, 64))
    actual = lm(tokens, labels)
    actual.backward()
    gradients = {name: p.grad.float() for name, p in lm.named_parameters()}
    lm.zero_grad()
    expected = lm.float()(tokens, labels)
    expected.backward()
    assert actual.dtype == torch.float32
    assert abs(actual.item() / expected.item() - 1) < 2e-3
    for name, p in lm.named_parameters():
        assert ((gradients[name] - p.grad).norm() / p.grad.norm()).item() < 0.1, name


def test_meta_device_builds_without_memory():
    with torch.device("meta"):
        lm = LanguageModel(ModelConfig(vocab_size=50304, num_layers=2, hidden_size=1024, num_heads=8), seed=1)
    assert all(p.is_meta for p in lm.parameters())
