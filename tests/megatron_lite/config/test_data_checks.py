"""Keys of the sections data, batch and model that conflict are refused."""

from __future__ import annotations

import pytest

from megatron_lite.config.files import CONFIGS
from megatron_lite.config.loader import ConfigError, load_config
from models.config import ModelConfig

FILES = ("data.corpus=null", "data.train=[a, b]", "data.tokenizer.type=bytes")
LION = ("model.mixers=[lion]", "model.mixer_options={lion: {causal: false}}")
MASKED = (*LION, "data.objective=masked")
BATCH = ("batch.micro_batch_size=4", "batch.global_batch_size=32")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            (*FILES, "data.blend.by=weights"),
            "data.blend.weights is missing: data.blend.by = weights needs one for each",
        ),
        (
            (*FILES, "data.source_key=domain"),
            'data.source_key = "domain" requires data.corpus instead of data.train; set it, or remove this key',
        ),
        (
            (*FILES, "data.blend.weights=[1, 2]"),
            "data.blend.weights requires data.blend.by = weights, but it is tokens",
        ),
        (
            (*FILES, "data.blend={by: weights, weights: [1]}"),
            "data.blend.weights = [1.0]: one weight per file of data.train is required, 2 in all",
        ),
        (
            (*FILES, *MASKED),
            "data.train = ['a', 'b']: one file is allowed with data.objective = masked; preprocess the files together into one",
        ),
        (
            ("data.images.flip=0.1",),
            "data.images.flip = 0.1 requires data.objective = classification; set it, or remove",
        ),
        (("classification.label_smoothing=0.1",), "classification.label_smoothing = 0.1 requires data.objective = cl"),
        (
            ("data.masked={rate: 0.15, layout: packed}",),
            'data.masked.layout = "packed" requires data.objective = masked; set it, or remove this key',
        ),
        (
            ("precision.fp8.num_layers_at_start_in_bf16=2",),
            "precision.fp8.num_layers_at_start_in_bf16 = 2 requires precision.fp8.recipe = rowwise; set it, or remove this key",
        ),
        (
            (*MASKED, "evaluation.prompt=The "),
            'evaluation.prompt = "The " requires data.objective = causal; set it, or remove this key',
        ),
        (LION, "data.objective = causal: lion sees the token that is to be predicted; set masked"),
        (
            ("data.objective=masked",),
            "data.objective = masked: metala is causal and does not see the tokens after a masked token; set causal",
        ),
        (
            (*MASKED, "data.reset_at_documents=true"),
            "data.reset_at_documents = true: padded rows hold one document each; set it to false, or data.masked.layout = packed",
        ),
        (
            (*FILES, "data.blend.min_tokens=[4096]"),
            "data.blend.min_tokens = [4096]: one number per file of data.train is required, 2 in all",
        ),
        (("data.packing=best_fit",), "data.order = neox with data.packing = best_fit: reshuffle is allowed; set"),
        (
            (*MASKED, "data.packing=best_fit"),
            "data.packing = best_fit requires data.objective = causal; set it to stream",
        ),
        ((*MASKED, "data.mask_boundaries=true"), "data.mask_boundaries = true requires data.objective = causal"),
        (
            (*BATCH, "batch.ramp={start: 6, increment: 4, samples: 9}"),
            "batch.ramp.start = 6 is no multiple of batch.micro_batch_size x data ranks = 4; nearest: 4 or 8",
        ),
        (
            (*BATCH, "batch.ramp={start: 64, increment: 4, samples: 9}"),
            "batch.ramp.start = 64: at most batch.global_batch_size = 32 is allowed",
        ),
        (
            (*BATCH, "batch.ramp={start: 4, increment: 8, samples: 9}"),
            "batch.ramp.increment = 8 does not divide batch.global_batch_size - batch.ramp.start = 28",
        ),
        (("data.blend.temperature=3",), "data.blend.temperature = 3.0 requires two or more files in data.train"),
        ((*BATCH, "batch.ramp.samples=9"), "batch.ramp.start is missing: the size of the first batches"),
        (
            (*BATCH, "batch.ramp={start: 4, increment: 4}"),
            "batch.ramp.samples is missing: the samples over which the batch grows",
        ),
    ],
)
def test_conflicting_values_are_refused(overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config([CONFIGS / "default.yml"], list(overrides), model_type=ModelConfig, world_size=1)
    assert [line for line in caught.value.problems if line.startswith(message)], caught.value.problems


def test_contradicting_batch_sizes_are_refused_with_a_ramp() -> None:
    sizes = ("batch.micro_batch_size=8", "batch.gradient_accumulation_steps=2", "batch.global_batch_size=8")
    with pytest.raises(ConfigError) as caught:
        load_config(
            [CONFIGS / "default.yml"],
            [*sizes, "batch.ramp={start: 8, increment: 8, samples: 9}"],
            model_type=ModelConfig,
            world_size=1,
        )
    (line,) = caught.value.problems
    assert line.startswith("batch.global_batch_size = 8 is not 8 x 2 x 1 = 16")


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("data.text_key=body", '"body"'),
        ("data.validation_fraction=0.1", "0.1"),
        ("data.reset_at_documents=true", "true"),
        ("data.blend.weights=[1]", "[1.0]"),
        ("data.masked.rate=0.5", "0.5"),
        ("data.tokenizer.type=bytes", '"bytes"'),
    ],
)
def test_keys_of_text_are_refused_for_images(override: str, value: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config([CONFIGS / "cifar10_lion_s.yml"], [override], model_type=ModelConfig, world_size=1)
    (line,) = caught.value.problems
    assert line.startswith(
        f"{override.partition('=')[0]} = {value} is for text, and data.objective = classification reads"
    )


def test_valid_combinations() -> None:
    packed = ("data.masked.layout=packed", "data.reset_at_documents=true")
    ramp = (*BATCH, "batch.ramp={start: 4, increment: 4, samples: 90}")
    for overrides in ((*MASKED, *packed), ramp, (*FILES, "data.blend={by: documents, temperature: 3.0}")):
        load_config([CONFIGS / "default.yml"], list(overrides), model_type=ModelConfig, world_size=1)
