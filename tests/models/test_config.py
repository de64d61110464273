"""The model configuration: invalid values and their messages, defaults, documentation of its keys."""

from __future__ import annotations

import subprocess
import sys

import pytest

from models.config import ModelConfig

SHAPE = {"vocab_size": 61, "num_layers": 3, "hidden_size": 48, "num_heads": 4}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vocab_size": 0}, "model.vocab_size = 0: must be at least 1"),
        ({"num_layers": -1}, "model.num_layers = -1: must be at least 1"),
        ({"num_layers": "two"}, "model.num_layers = 'two': allowed are whole numbers$"),
        ({"intermediate_size": 2.5}, "model.intermediate_size = 2.5: allowed are whole numbers, null"),
        ({"norm_eps": "small"}, "model.norm_eps = 'small': allowed are numbers"),
        ({"tie_embeddings": 3}, "model.tie_embeddings = 3: allowed are true, false"),
        ({"mixers": 5}, "model.mixers = 5: allowed are lists of text"),
        ({"mixers": "metala"}, "model.mixers = 'metala': allowed are lists of text"),
        ({"mixer_options": {"metala": 3}}, "model.mixer_options = {'metala': 3}: allowed are mappings of mappings"),
        ({"intermediate_size": 0}, "model.intermediate_size = 0: must be at least 1"),
        ({"norm_eps": 0.0}, "model.norm_eps = 0.0: must be greater than 0"),
        ({"init_std": float("nan")}, "model.init_std = nan: must be greater than 0"),
        ({"num_heads": 5}, "model.num_heads = 5 does not divide model.hidden_size = 48; nearest .* 4 or 6"),
        ({"hidden_size": 10**29, "num_heads": 7}, "model.num_heads = 7 does not .* = 1e.29; nearest .* 5 or 8"),
        ({"num_heads": 100}, "model.num_heads = 100 does not divide .* 48$"),
        ({"num_heads": 16}, "num_heads = 16 does not divide key_dim of metala, .* = 24; nearest .* 12 or 24"),
        ({"hidden_size": 49, "num_heads": 7}, "key_dim of metala"),
        ({"mlp": "relu"}, "model.mlp = 'relu': allowed are swiglu, gelu"),
        ({"norm": "batchnorm"}, "model.norm = 'batchnorm': allowed are layernorm, rmsnorm"),
        ({"positions": "rotary"}, "model.positions = 'rotary': allowed are none, learned"),
        (
            {"positions": "learned"},
            "model.max_positions = None with positions = learned: set it to the longest sequence",
        ),
        (
            {"max_positions": 128},
            "model.max_positions = 128 with positions = none: leave it out, or set model.positions = learned",
        ),
        ({"positions": "learned", "max_positions": 0}, "model.max_positions = 0: must be at least 1"),
        (
            {"init_method": "xavier"},
            "model.init_method = 'xavier': allowed are normal, scaled_normal, small_init, wang_init",
        ),
        ({"output_init_method": "zero"}, "model.output_init_method = 'zero': allowed are"),
        ({"mixers": ()}, "model.mixers is empty"),
        ({"mixers": ("metla",)}, "model.mixers: unknown mixer 'metla'; did you mean metala"),
        ({"mixers": ("zzzz",)}, "model.mixers: unknown mixer 'zzzz'; allowed are attention, "),
        ({"mixer_options": {"atention": {}}}, "model.mixer_options: unknown mixer 'atention'; did you mean attention"),
        (
            {"mixer_options": {"attention": {}}},
            "attention is set, but model.mixers = .'metala'.*remove its options: model.mixer_options.attention=null",
        ),
        ({"mixer_options": {"metala": {"preste": "x"}}}, "metala.preste: unknown option; did you mean preset"),
        ({"mixer_options": {"metala": {"preset": "x"}}}, "metala.preset = 'x': allowed are released, paper"),
        (
            {"mixer_options": {"metala": {"conv_kernel": "abc"}}},
            "metala.conv_kernel = 'abc': allowed are whole numbers",
        ),
        ({"mixer_options": {"metala": {"conv_kernel": 2.5}}}, "metala.conv_kernel = 2.5: allowed are whole numbers"),
        ({"mixer_options": {"metala": {"conv_kernel": True}}}, "metala.conv_kernel = True: allowed are whole numbers"),
        (
            {"mixer_options": {"metala": {"self_augmentation": "yes"}}},
            "metala.self_augmentation = 'yes': allowed are true",
        ),
    ],
)
def test_invalid_values_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig(**SHAPE | change)


def test_pattern_repeats_over_the_layers():
    config = ModelConfig(**SHAPE | {"mixers": ["metala", "attention"]})
    assert [config.mixer_of(i) for i in range(3)] == ["metala", "attention", "metala"]
    assert config.mixers == ("metala", "attention")


def test_empty_mixer_options_mean_defaults():
    config = ModelConfig(**SHAPE | {"mixer_options": {"metala": None}})
    assert config.options_of("metala").preset == "released"


def test_every_field_is_documented():
    from dataclasses import fields

    from models.mixers import MIXERS

    for declared in (ModelConfig, *(mixer.Options for mixer in MIXERS.values())):
        for field in fields(declared):
            assert field.metadata.get("doc", "").endswith((".", "null.", ")")), (declared, field.name)


def test_file_imports_without_torch():
    code = "import sys; sys.modules['torch'] = None; import models.config"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_one_is_enough():
    def config(**options: float) -> ModelConfig:
        return ModelConfig(
            1, 1, 1, 1, mixers=("attention",), intermediate_size=1, positions="learned", max_positions=1,
            mixer_options={"attention": options},
        )  # fmt: skip

    assert config(rotary_pct=0.0).mlp_width == 1
    with pytest.raises(ValueError, match=r"rotates no pair of the 1 channels of a head: allowed is 0 for no rotary"):
        config()
