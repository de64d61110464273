"""Layouts that cannot run are refused before the start; the message has the arithmetic and the nearest legal layouts."""

from __future__ import annotations

import pytest

from megatron_lite.config.files import CONFIGS
from megatron_lite.config.loader import ConfigError, load_config
from megatron_lite.parallel.layout import Layout, Limits, layout_problems, legal_layouts, nearest_layouts
from models.config import ModelConfig

MODEL = (
    "model.vocab_size=96",
    "model.hidden_size=64",
    "model.num_heads=4",
    "model.num_layers=4",
    "data.corpus=stdlib",
    "data.tokenizer.type=bytes",
    "batch.micro_batch_size=1",
    "batch.gradient_accumulation_steps=2",
    "batch.sequence_length=64",
    "optimizer.lr=3e-4",
    "schedule.train_steps=10",
)


EVEN = ("batch.micro_batch_size=2",)


def load(world_size: int, *overrides: str) -> object:
    return load_config([], [*MODEL, *overrides], model_type=ModelConfig, world_size=world_size)


def test_data_ranks_follow_from_the_model_ranks() -> None:
    config = load(8, "parallel.tensor=2", "parallel.pipeline=2")
    assert config.batch.data_ranks == 2
    assert config.batch.global_batch_size == 4


@pytest.mark.parametrize(
    ("world_size", "overrides", "text"),
    [
        (
            1,
            ["parallel.tensor=2"],
            r"parallel: tensor 2 = 2 processes.*WORLD_SIZE is 1; start it with torchrun --nproc-per-node",
        ),
        (6, ["parallel.tensor=4"], r"or take tensor 2 x pipeline 1 x context 1 or tensor 1 x pipeline 1 x context 1"),
        (6, ["parallel.tensor=2", "parallel.pipeline=2"], r"= 4 processes.*a multiple of 4, and WORLD_SIZE is 6"),
        (3, ["parallel.tensor=3"], r"parallel.tensor = 3 does not divide model.num_heads = 4"),
        (8, ["parallel.tensor=8"], r"num_heads = 4.*nearest legal layouts: tensor 4 x pipeline 1 x context 1"),
        (2, ["parallel.tensor=2", "model.vocab_size=97"], r"tensor = 2 does not divide model.vocab_size = 97"),
        (
            8,
            ["parallel.pipeline=8"],
            r"parallel.pipeline = 8: a stage needs a block; at most model.num_layers = 4 are allowed",
        ),
        (
            2,
            ["parallel.pipeline=2", "parallel.zero_stage=2"],
            r"zero_stage = 2 is not supported with parallel.pipeline = 2",
        ),
        (1, ["parallel.sequence_parallel=true"], r"sequence_parallel = true needs parallel.tensor > 1"),
        (1, ["parallel.tensor_overlap=true"], r"tensor_overlap = true is not supported with parallel.tensor = 1"),
        (2, ["parallel.tensor=2", "parallel.tensor_overlap=true"], r"batch.micro_batch_size = 1, which is odd"),
        (
            2,
            ["parallel.tensor=2", "parallel.tensor_overlap=true", *EVEN, "data.reset_at_documents=true"],
            r"tensor_overlap = true is not supported with data.reset_at_documents = true, which makes one row",
        ),
        (
            2,
            ["parallel.tensor=2", "parallel.tensor_overlap=true", *EVEN, "parallel.sequence_parallel=true"],
            r"is not supported with parallel.sequence_parallel = true: set it to false, or to null",
        ),
        (
            2,
            ["parallel.tensor=2", "parallel.tensor_overlap=true", *EVEN, "parallel.zero_stage=3"],
            r"is not supported with parallel.zero_stage = 3",
        ),
        (
            2,
            ["parallel.pipeline=2", "parallel.cuda_graph=true"],
            r"cuda_graph = true is not supported with parallel.pipeline = 2",
        ),
        (
            1,
            ["run.device=cpu", "parallel.cuda_graph=true"],
            r"cuda_graph = true is not supported with run.device = cpu",
        ),
        (
            1,
            ["parallel.cublaslt.version=1"],
            r"parallel.cublaslt was removed, because cuBLAS chooses the algorithm of every matmul; delete this section",
        ),
        (3, ["parallel.context=3"], r"3 parts: batch.sequence_length = 64 must be a multiple of 3"),
        (
            2,
            ["parallel.context=2", "model.mixers=[kda]", "model.mixer_options={kda: {conv_kernel: 34}}"],
            r"context = 2 splits .* = 64 into shards of 32 tokens, but .*kda.conv_kernel = 34 reads 33 tokens of .*; nearest",
        ),
        (
            2,
            ["parallel.tensor=2", "model.mixers=[mamba]"],
            r"does not divide model.mixer_options.mamba.groups = 1; nearest legal layouts: tensor 1 x pipeline 1",
        ),
        (
            4,
            ["parallel.tensor=4", "model.mixers=[attention]", "model.mixer_options={attention: {num_kv_heads: 2}}"],
            r"does not divide model.mixer_options.attention.num_kv_heads = 2",
        ),
    ],
)
def test_a_layout_that_cannot_run_is_refused(world_size: int, overrides: list[str], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        load(world_size, *overrides)


@pytest.mark.parametrize(
    ("overrides", "overlap"),
    [
        (["parallel.tensor=2"], False),
        (["parallel.tensor=2", *EVEN], True),
        (["parallel.tensor=2", "batch.micro_batch_size=null", "batch.global_batch_size=8"], True),
        (["parallel.tensor=2", *EVEN, "parallel.tensor_overlap=false"], False),
        (["parallel.tensor=2", *EVEN, "data.reset_at_documents=true"], False),
        (["parallel.tensor=2", *EVEN, "parallel.cuda_graph=false"], False),
        (["parallel.tensor=2", *EVEN, "parallel.sequence_parallel=true"], False),
        ([*EVEN], None),
    ],
)
def test_tensor_overlap_is_on_where_supported(overrides: list[str], overlap: bool | None) -> None:
    assert load(4, "parallel.cuda_graph=true", *overrides).parallel.tensor_overlap is overlap


def test_legal_layouts_divide_everything() -> None:
    limits = Limits({"model.num_heads": 4}, num_layers=3, sequence_length=64, context_parallel_error="")
    layouts = legal_layouts(12, limits)
    assert Layout(4, 3, 1) in layouts
    assert Layout(1, 1, 4) in layouts
    for layout in layouts:
        assert 12 % layout.model_ranks == 0
        assert not list(layout_problems(layout, limits))
    assert nearest_layouts(Layout(3, 1, 1), 12, limits)[0] in (Layout(2, 1, 1), Layout(4, 1, 1))
    refused = Limits({}, 3, 64, context_parallel_error="attention reads every token")
    assert {layout.context for layout in legal_layouts(4, refused)} == {1}


def test_shards_are_as_long_as_the_past_that_a_convolution_reads() -> None:
    """Split 12 tokens, of which a kernel of four tokens reads three of the previous shard, into four shards, but not into six."""
    limits = Limits({}, 1, 12, conv_kernels={"conv_kernel": 4})
    assert not list(layout_problems(Layout(context=4), limits))
    ((key, problem),) = layout_problems(Layout(context=6), limits)
    assert key == "context"
    assert "shards of 2 tokens, but conv_kernel = 4 reads 3 tokens" in problem


def test_sequence_parallelism_divides_the_shard_of_a_sequence() -> None:
    limits = Limits({}, 1, 12)
    assert not list(layout_problems(Layout(tensor=2, context=2, sequence_parallel=True), limits))
    ((key, problem),) = layout_problems(Layout(tensor=8, sequence_parallel=True), limits)
    assert key == "sequence_parallel"
    assert problem.startswith("splits every sequence into 8 parts")
    ((key, problem),) = layout_problems(Layout(tensor=4, context=2, sequence_parallel=True), limits)
    assert key == "context"
    assert problem.startswith("splits every sequence into 8 parts")


def test_nearest_layouts_have_the_nearest_ratios_of_sizes() -> None:
    limits = Limits({"heads": 14}, 1, 14, context_parallel_error="not supported")
    assert [layout.tensor for layout in nearest_layouts(Layout(tensor=4), 14, limits)] == [7, 2, 14]


def test_nearest_layouts_of_an_image_classifier_have_no_pipeline() -> None:
    with pytest.raises(
        ConfigError, match=r"num_heads = 3; nearest legal layouts: tensor 1 x pipeline 1 x context 1 \("
    ):
        load_config([CONFIGS / "cifar10_lion_s.yml"], ["parallel.tensor=2"], model_type=ModelConfig, world_size=2)
