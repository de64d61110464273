"""Muon in one process: against a plain float64 reference, the stored state, changes of the optimizer, and what it refuses."""

from __future__ import annotations

from itertools import pairwise
from math import nan
from typing import Any

import pytest
import torch

from megatron_lite.checkpoint import reader as checkpoint
from megatron_lite.checkpoint.checkpointer import Checkpointer
from megatron_lite.config.optimizer_schema import MuonConfig
from megatron_lite.fault_tolerance.finite_check import state_not_finite
from megatron_lite.optim.muon import Muon, orthogonalize_by_shape
from megatron_lite.optim.param_groups import matrices_of
from megatron_lite.optim.whole_matrices import MatrixPiece, assign_owners, newton_schulz_cost
from megatron_lite.parallel.sharding_plan import Shard
from models.language_model import layer_specs
from models.mixers import MIXERS
from tests import oracle
from tests.megatron_lite.conftest import batches, model_config
from tests.parity import layouts

MUON = {"name": "muon"}
MATRIX, VECTOR = "blocks.0.mixer.v_proj.weight", "blocks.0.norm1.weight"


def train(engine: Any, steps: list[Any]) -> list[tuple[float, float]]:
    results = [engine.train_step(step, lr=3e-4) for step in steps]
    return [(result.loss, result.gradient_norm) for result in results]


def state_of(engine: Any) -> dict[str, dict[str, torch.Tensor]]:
    return {fragment.name: fragment.tensors for fragment in engine.optimizer_state.fragments()}


MODELS = {
    "rwkv7": {"mlp": "rwkv7", "num_layers": 2},
    "images_lion": {"num_layers": 2},
    "lion_bidirectional": {"head": "mlm", "num_layers": 2},
}


@pytest.mark.parametrize("model", MODELS)
def test_other_models_equal_the_reference(build, model):
    """Train low-rank pairs, images, and a masked model with the head of BERT. Embeddings and heads stay with AdamW."""
    config = layouts.model_config(model, **MODELS[model])
    steps = layouts.image_steps() if config.image_size else layouts.steps(masked="head" in MODELS[model])
    expected = oracle.train(config, steps[:3], seed=11, lr=3e-4, warmup=0, total=10**6, min_ratio=1.0, muon=True)
    engine = build(config, optimizer=MUON, accumulation=layouts.MICRO_BATCHES)
    assert all(name.startswith("blocks.") for name in engine.muon_parameters)
    for found, wanted in zip(train(engine, steps[:3]), expected, strict=True):
        assert found == pytest.approx(wanted, rel=1e-5)


def test_matrices_and_heads_of_every_mixer():
    """List the weights that AdamW updates although they are not vectors, and the projections with heads."""
    others, with_heads = {}, {}
    for mixer in MIXERS:
        config = model_config(
            (mixer,), num_layers=3, mixer_options={"lion": {"variant": "s"}} if mixer == "lion" else {}
        )
        with torch.device("meta"):
            block = layer_specs(config)[2].build()
        matrices = matrices_of(block)
        wide = {name for name, parameter in block.named_parameters() if parameter.ndim > 1}
        others[mixer] = {name.removeprefix("mixer.") for name in wide - set(matrices) if "conv" not in name}
        with_heads[mixer] = "".join(name[len("mixer.")] for name, heads in matrices.items() if heads)
        assert set(matrices) <= wide
    assert {mixer: names for mixer, names in others.items() if names} == {
        "lion": {"decay_weight"},
        "mamba": {"a_log", "dt_weight", "select_weight"},
        "rg_lru": {"decay_gate_weight", "input_gate_weight"},
    }
    assert {mixer for mixer, names in with_heads.items() if not names} == {
        *("hgrn", "mamba", "mamba2", "qlstm", "rg_lru", "rwkv4", "s5")
    }
    assert with_heads["rwkv7"] == "rkv"
    assert with_heads["metala"] == with_heads["hgrn2"] == with_heads["metala_bidirectional"] == "qv"
    assert with_heads["kda"] == with_heads["attention"] == "qkv"


@pytest.mark.parametrize(
    ("mixer", "options", "heads"),
    [
        ("attention", {"num_kv_heads": 2, "head_dim": 8}, (8, 2, 2)),
        ("kda", {"num_value_heads": 16}, (8, 8, 16)),
        ("gated_delta_net", {"num_heads": 2, "num_value_heads": 4, "head_dim": 16, "expand_v": 0.5}, (2, 2, 4)),
    ],
)
def test_queries_keys_and_values_have_their_own_heads(mixer, options, heads):
    config = model_config((mixer,), num_heads=8, mixer_options={mixer: options})
    with torch.device("meta"):
        matrices = matrices_of(layer_specs(config)[1].build())
    assert tuple(matrices[f"mixer.{name}_proj.weight"] for name in "qkv") == heads


@pytest.mark.parametrize("mixer", ["metala", "attention"])
def test_engine_equals_reference(build, mixer):
    config, steps = model_config((mixer,)), batches(4)
    options = {"seed": 11, "lr": 3e-4, "warmup": 0, "total": 10**6, "min_ratio": 1.0}
    losses = [oracle.train(config, steps, **options)[3][0]]  # AdamW's
    for settings in ({}, {"per_head": True}, {"momentum": 0.5}, {"nesterov": False}):
        expected = oracle.train(config, steps, muon=True, **settings, **options)
        actual = train(build(config, optimizer=MUON | {"muon": settings}), steps)
        for found, wanted in zip(actual, expected, strict=True):
            assert found == pytest.approx(wanted, rel=1e-6)
        losses.append(actual[3][0])
    losses.sort()
    assert all(second / first - 1 > 2e-6 for first, second in pairwise(losses)), losses


def test_heads_of_rwkv_equal_the_reference(build):
    """Test r_proj, the queries of RWKV. If all heads were one, a loss would differ by 3e-5."""
    config, steps = model_config(("rwkv7",)), batches(3)
    expected = oracle.train(
        config, steps, muon=True, per_head=True, seed=11, lr=3e-4, warmup=0, total=10**6, min_ratio=1.0
    )
    actual = train(build(config, optimizer=MUON | {"muon": {"per_head": True}}), steps)
    for (loss, norm), (wanted_loss, wanted_norm) in zip(actual, expected, strict=True):
        assert loss == pytest.approx(wanted_loss, rel=1e-6)
        assert norm == pytest.approx(wanted_norm, rel=1e-4)  # of a layer that amplifies rounding


def test_orthogonal_factor_of_tall_wide_and_zero_matrices():
    generator = torch.Generator().manual_seed(0)
    shapes = ((8, 20), (20, 8), (8, 8), (4, 4))
    matrices = [torch.randn(shape, generator=generator) * 1e-12 for shape in shapes[:3]] + [torch.zeros(4, 4)]
    orthogonalize_by_shape(matrices)
    for matrix in matrices[:3]:
        values = torch.linalg.svdvals(matrix) / max(matrix.shape) ** 0.5
        assert values.max() < 1.25
        assert values.median() > 0.65
    assert not matrices[3].any()


@pytest.mark.parametrize("size", [1e-18, 1e-22, 1e-30, 1e-42])
def test_tiny_matrices_get_a_bounded_update(size):
    """Orthogonalize matrices such as the decayed momentum of a matrix without gradients: squares of its elements underflow."""
    matrix = torch.randn(8, 20, generator=torch.Generator().manual_seed(0)) * size
    orthogonalize_by_shape([matrix])
    assert torch.linalg.svdvals(matrix).max() < 1.25 * 20**0.5


def test_every_head_is_orthogonalized_alone():
    matrix = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    groups = [{"params": [torch.nn.Parameter(matrix)], "muon": True}]
    muon = Muon(groups, MuonConfig(), torch.float32, lr=0.1, betas=(0.9, 0.95), eps=1e-8)
    muon.attach([MatrixPiece("a", (6, 4), Shard(), 0, 24, 0, heads=3)])
    flat, heads = matrix.flatten().clone(), list(matrix.clone().chunk(3))
    muon.orthogonalize(flat)
    orthogonalize_by_shape(heads)
    assert torch.equal(flat.view(6, 4), torch.cat(heads))
    assert flat.square().mean().sqrt().item() == pytest.approx(1, rel=0.2)  # times 0.2: the root mean square of AdamW


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_resume_is_bit_exact(build, tmp_path, dtype):
    steps = batches(4)
    settings = {"dtype": dtype, "optimizer": MUON | {"muon": {"momentum_dtype": dtype}}}
    engine = build(model_config(), **settings)
    train(engine, steps[:2])
    Checkpointer(engine, tmp_path).save(step=2, state={}, config_yaml="")
    rest = train(engine, steps[2:])
    other = build(model_config(), seed=99, **settings)
    Checkpointer(other, tmp_path).load()
    assert train(other, steps[2:]) == rest
    state = state_of(other)
    assert state[MATRIX]["exp_avg"].dtype == {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    assert set(state[MATRIX]) == {"weight", "exp_avg"}
    assert set(state[VECTOR]) == set(state["embedding.weight"]) == {"weight", "exp_avg", "exp_avg_sq"}
    assert not checkpoint.tensors_not_finite(checkpoint.resolve(tmp_path))


@pytest.mark.parametrize(("first", "second"), [("adamw", "muon"), ("muon", "adamw")])
def test_change_of_optimizer_reports_what_is_kept(build, tmp_path, capsys, first, second):
    steps = batches(3)
    engine = build(model_config(), optimizer={"name": first})
    train(engine, steps[:2])
    Checkpointer(engine, tmp_path).save(step=2, state={}, config_yaml="")
    saved = {name: {key: x.clone() for key, x in tensors.items()} for name, tensors in state_of(engine).items()}
    capsys.readouterr()
    other = build(model_config(), seed=99, optimizer={"name": second})
    Checkpointer(other, tmp_path).load()
    message, state = capsys.readouterr().out, state_of(other)
    assert torch.equal(state[MATRIX]["weight"], saved[MATRIX]["weight"])
    assert all(torch.equal(state[VECTOR][key], saved[VECTOR][key]) for key in saved[VECTOR])
    if second == "muon":
        assert "matrices change from AdamW to Muon: weights and first moments (as momentum) are kept" in message
        assert torch.equal(state[MATRIX]["exp_avg"], saved[MATRIX]["exp_avg"])
    else:
        assert "matrices change from Muon to AdamW: weights are kept, momentum is dropped" in message
        assert not any(state[MATRIX][key].any() for key in ("exp_avg", "exp_avg_sq"))
    previous = engine.train_step(steps[2], lr=0.0).loss
    assert other.train_step(steps[2], lr=3e-4).loss == pytest.approx(previous, rel=1e-6)
    assert other.train_step(steps[2], lr=3e-4).loss < previous


def test_matrices_are_assigned_by_cost():
    costs = {"a": newton_schulz_cost(64, 256), **dict.fromkeys("bcde", newton_schulz_cost(64, 64))}
    assert assign_owners(costs, 2) == {"a": 0, "b": 1, "c": 1, "d": 1, "e": 0}
    assert assign_owners({"a": 8}, 4) == {"a": 0}
    # Blocks of MetaLA 1.4B: every one of n processes has one n-th of the multiply-adds.
    block = [(2048, 2048)] * 3 + [(1024, 2048)] * 2 + [(5632, 2048)] * 2 + [(2048, 5632)]
    costs = {f"{layer}.{i}": newton_schulz_cost(*shape) for layer in range(24) for i, shape in enumerate(block)}
    for ranks in (2, 8):
        owners = assign_owners(costs, ranks)
        loads = [sum(costs[name] for name in owners if owners[name] == rank) for rank in range(ranks)]
        assert max(loads) < 1.01 * sum(loads) / ranks


def test_matrix_of_heads_costs_as_much_as_its_heads():
    one, four = (MatrixPiece("q", (64, 256), Shard(), 0, 64 * 256, 0, heads) for heads in (1, 4))
    assert one.cost == 64**2 * (2 * 256 + 64)
    assert four.cost == 4 * 16**2 * (2 * 256 + 16)


def test_zero_3_is_refused(build):
    with pytest.raises(ValueError, match=r"optimizer\.name = muon is not supported with parallel\.zero_stage = 3"):
        build(model_config(), optimizer=MUON, zero_stage=3)


def test_heads_of_a_mixer_without_them_are_refused(build):
    with pytest.raises(
        ValueError, match=r"optimizer\.muon\.per_head = true: no mixer of this model has projections q_proj"
    ):
        build(model_config(("mamba2",)), optimizer=MUON | {"muon": {"per_head": True}})


def test_blocks_without_matrices_are_refused(build, monkeypatch):
    monkeypatch.setattr("megatron_lite.engine.model_shard.matrices_of_model", lambda _: {})
    with pytest.raises(ValueError, match=r"optimizer\.name = muon: the blocks of this model have no matrices"):
        build(model_config(), optimizer=MUON)


@pytest.mark.parametrize(("dtype", "compute_dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_matrices_are_orthogonalized_in_the_number_format_of_the_run(build, monkeypatch, dtype, compute_dtype):
    dtypes = set()
    monkeypatch.setattr(
        "megatron_lite.optim.muon.orthogonalize_by_shape", lambda matrices: dtypes.update(m.dtype for m in matrices)
    )
    build(model_config(), optimizer=MUON, dtype=dtype).train_step(batches(1)[0], lr=1e-3)
    assert dtypes == {compute_dtype}


def test_momentum_that_is_not_finite_is_named(build):
    engine = build(model_config(), optimizer=MUON)
    assert not state_not_finite(engine.optimizer_state, engine.grid)
    state_of(engine)[MATRIX]["exp_avg"][3] = nan
    assert state_not_finite(engine.optimizer_state, engine.grid) == [f"exp_avg of {MATRIX} (rank 0)"]
