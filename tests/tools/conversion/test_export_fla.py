"""Exports in flash-linear-attention's format: they come back bit for bit, and what the format cannot hold is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megatron_lite.checkpoint.reader import read_weights
from models.config import ModelConfig
from tests.tools.conversion.conftest import write_run
from tests.tools.conversion.test_import import error_of
from tools.conversion.foreign.fla_delta import fla_config
from tools.convert_hf import main

SIZES = ["data.corpus=stdlib", "data.tokenizer.type=bytes", "model.tie_embeddings=false"]


@pytest.mark.parametrize("mixer", ["delta_net", "gated_delta_net", "kda", "rwkv7"])
def test_exports_come_back_bit_for_bit(mixer: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["model.mlp=rwkv7"] if mixer == "rwkv7" else [f"model.mixer_options.{mixer}.conv_kernel=3"]
    if mixer in ("gated_delta_net", "kda"):
        options += [f"model.mixer_options.{mixer}.{key}" for key in ("num_value_heads=8", "head_dim=8", "expand_v=1.5")]
    write_run(tmp_path / "run", SIZES + options, [f"configs/model/{mixer}_tiny.yml"])
    folder = tmp_path / "exported"
    assert main(["export", str(tmp_path / "run"), str(folder), "--format", "fla"]) == 0
    assert "largest difference to the trainer's 0.00e+00" in capsys.readouterr().out
    assert not list(folder.glob("*.py"))
    shapes = {name: list(tensor.shape) for name, tensor in load_file(folder / "model.safetensors").items()}
    name, shape = ("x_r", [1, 1, 64])
    if mixer != "rwkv7":
        name, shape = "k_conv1d.weight", [shapes["model.layers.0.attn.k_proj.weight"][0], 1, 3]
    assert shapes[f"model.layers.0.attn.{name}"] == shape
    settings = json.loads((folder / "config.json").read_text())
    kind = "gated_deltanet" if mixer == "gated_delta_net" else mixer
    assert (settings["model_type"], settings.get("conv_size", 3)) == (kind, 3)
    assert main(["import", str(folder), str(tmp_path / "again")]) == 0
    before, after = read_weights(tmp_path / "run"), read_weights(tmp_path / "again")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize(
    ("mixer", "head_dim", "expand_v", "value_dim"), [("kda", 45, 1.4, 63), ("delta_net", 5, 3.0, 15)]
)
def test_widths_survive_their_fractions(mixer: str, head_dim: int, expand_v: float, value_dim: int) -> None:
    """Check int(width * fraction), which that format takes: 45 x 1.4 and 22 x (15 / 22) are below whole numbers."""
    options = {mixer: {"num_heads": 1, "head_dim": head_dim, "expand_v": expand_v}}
    sizes = {"vocab_size": 8, "num_layers": 1, "hidden_size": 22, "num_heads": 1}
    config = fla_config(ModelConfig(**sizes, mixers=(mixer,), mixer_options=options, norm="rmsnorm", mlp="swiglu"))
    assert int(config.get("head_dim", 22) * config["expand_v"]) == value_dim


@pytest.mark.parametrize(
    ("config", "overrides", "says"),
    [
        (
            "metala_tiny",
            [],
            r"model.mixers = ['metala'] has no counterpart in flash-linear-attention's format; allowed is",
        ),
        ("kda_tiny", ["model.norm=layernorm"], "cannot hold model.norm = layernorm (allowed is rmsnorm)"),
        ("kda_tiny", ["model.norm_eps=1e-3"], "model.mixer_options.kda.norm_eps = 1e-05 (allowed is 0.001)"),
    ],
)
def test_models_that_the_format_cannot_hold_are_refused(
    config: str, overrides: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path / "run", [*SIZES, *overrides], [f"configs/model/{config}.yml"])
    message = error_of(["export", str(tmp_path / "run"), str(tmp_path / "exported"), "--format", "fla"], capsys)
    assert says in message
    assert not (tmp_path / "exported").exists()
