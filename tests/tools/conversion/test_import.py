"""Check that imports of exports are bit-exact and that models of other codebases keep their logits."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from megatron_lite.checkpoint.reader import read_config_yaml, read_weights
from models.config import ModelConfig
from models.language_model import LanguageModel
from tools.conversion.foreign import metala as metala_mapping
from tools.conversion.foreign.metala_reference import _mix
from tools.conversion.foreign.registry import translate
from tools.convert_hf import main
from tools.loading.model import build_model, load_model, model_config


def error_of(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(arguments) == 2
    return capsys.readouterr().err


def translated(kind: str, **settings: Any) -> ModelConfig:
    return translate({"model_type": kind, **settings}).model


def difference(output: str) -> float:
    return float(output.split("largest difference to the original's ")[1].split()[0])


def test_import_of_an_export_is_bit_exact(
    trained_run: Path, exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["import", str(exported), str(tmp_path / "again")]) == 0
    assert difference(capsys.readouterr().out) <= 1e-5
    trained, imported = read_weights(trained_run), read_weights(tmp_path / "again")
    assert trained.keys() == imported.keys()
    assert all(torch.equal(trained[name], imported[name]) for name in trained)
    loaded = load_model(tmp_path / "again")
    assert loaded.tokenizer.hash == load_model(trained_run).tokenizer.hash


def tiny_gpt_neox(**more: Any) -> Any:
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    config = GPTNeoXConfig(
        vocab_size=97,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=96,
        max_position_embeddings=64,
        **more,
    )
    return GPTNeoXForCausalLM(config)


def tiny_llama(kind: str = "Llama", **more: Any) -> Any:
    import transformers

    config = getattr(transformers, f"{kind}Config")(
        **{
            "vocab_size": 97,
            "hidden_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "intermediate_size": 96,
            "max_position_embeddings": 64,
            **more,
        }
    )
    return getattr(transformers, f"{kind}ForCausalLM")(config)


METALA_SHAPE = {
    "vocab_size": 97,
    "decoder_embed_dim": 32,
    "decoder_layers": 2,
    "decoder_attention_heads": 2,
    "glu_dim": 96,
    "no_scale_embedding": True,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 8}
ORIGINALS = {
    "pythia": lambda: tiny_gpt_neox(),
    "gpt_neox-sequential-tied": lambda: tiny_gpt_neox(
        use_parallel_residual=False,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 0.5},
    ),
    "llama": lambda: tiny_llama(),
    "llama-tied-bias": lambda: tiny_llama(
        tie_word_embeddings=True,
        attention_bias=True,
        mlp_bias=True,
        num_key_value_heads=4,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
    ),
    "llama-yarn": lambda: tiny_llama(head_dim=16, rope_parameters={**YARN, "beta_fast": 8.0, "attention_factor": 1.5}),
    "mistral": lambda: tiny_llama("Mistral", sliding_window=3),
    "qwen3": lambda: tiny_llama("Qwen3", head_dim=16, rope_parameters=YARN),
    "qwen3-window": lambda: tiny_llama(
        "Qwen3", head_dim=8, num_hidden_layers=3, use_sliding_window=True, sliding_window=3, max_window_layers=1
    ),
}


@pytest.mark.parametrize("name", ORIGINALS)
def test_imported_transformers_models_keep_their_logits(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(0)
    model = ORIGINALS[name]().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(tmp_path / "original")
    assert main(["import", str(tmp_path / "original"), str(tmp_path / "run")]) == 0
    assert difference(capsys.readouterr().out) <= 2e-5


@pytest.mark.parametrize("name", ["gla", "retnet", "hgrn2", "delta_net", "gated_deltanet", "kda", "rwkv7"])
def test_imported_fla_models_keep_their_logits(name: str, tmp_path: Path) -> None:
    """Compare with logits of flash-linear-attention's kernels (golden/make_fla.py)."""
    folder = Path(__file__).parent / "golden" / name
    assert main(["import", str(folder), str(tmp_path / "run")]) == 0
    reference = load_file(folder / "reference.safetensors")
    logits = load_language_model(tmp_path / "run")(reference["ids"])
    assert (logits - reference["logits"]).abs().max() <= 5e-5
    # One wrong tensor changes the logits.
    weights = load_file(folder / "model.safetensors")
    shutil.copytree(folder, tmp_path / "broken")
    weights["model.layers.1.attn.o_proj.weight"][0] *= 1.1
    save_file(weights, tmp_path / "broken" / "model.safetensors", metadata={"format": "pt"})
    assert main(["import", str(tmp_path / "broken"), str(tmp_path / "run2")]) == 0
    assert (load_language_model(tmp_path / "run2")(reference["ids"]) - reference["logits"]).abs().max() > 1e-4


def test_heads_of_another_width_than_the_weights_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only the shape of r_k shows the number of RWKV-7's heads: the import would compute with another one."""
    folder = tmp_path / "rwkv7"
    shutil.copytree(Path(__file__).parent / "golden" / "rwkv7", folder)
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**settings, "head_dim": 32, "num_heads": 1}))
    message = error_of(["import", str(folder), str(tmp_path / "run")], capsys)
    assert "r_k has 16 channels per head, and config.json has head_dim = 32: correct head_dim and num_heads" in message


def test_published_rwkv7_settings_are_imported() -> None:
    """Published folders have norms that are not fused, 32 heads whatever their width, and no value_dim."""
    settings = json.loads((Path(__file__).parent / "golden" / "rwkv7" / "config.json").read_text())
    kind = settings.pop("model_type")
    published = {**settings, "fuse_norm": False, "num_heads": 32, "hidden_ratio": 4.0}
    del published["value_dim"]
    assert translated(kind, **published) == translated(kind, **settings)


def load_language_model(run: Path) -> LanguageModel:
    config = model_config(read_config_yaml(run))
    return build_model(config, read_weights(run)).eval().requires_grad_(False)


METALA_NAMES = {
    "q_proj": "q_proj",
    "a_proj": "k_gate",
    "v_proj": "v_proj",
    "gate_proj": "g_proj",
    "out_proj": "out_proj",
    "conv": "conv1d",
    "aug_weight": "aug_balance",
}


def as_released(name: str) -> str:
    """Return the name of a tensor in the published MetaLA checkpoints."""
    name = name.replace("embedding.weight", "model.embed_tokens.weight").replace("head.norm", "model.final_norm")
    name = name.replace("head.weight", "lm_head.weight").replace("blocks.", "model.layers.")
    for ours, theirs in (("norm1", "token_norm"), ("norm2", "channel_norm")):
        name = name.replace(f".{ours}.", f".{theirs}.")
    for ours, theirs in (("gate_proj", "l1"), ("up_proj", "l2"), ("down_proj", "l3")):
        name = name.replace(f"mlp.{ours}", f"channel_mixer.{theirs}")
    for ours, theirs in METALA_NAMES.items():
        name = name.replace(f"mixer.{ours}", f"token_mixer.{theirs}") if ".mixer." in name else name
    return name


# Their settings, and the equal configuration here.
RELEASED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": (
        {"norm_type": "layernorm", "glu_dim": 96, "tie_word_embeddings": False},
        {"norm": "layernorm", "tie_embeddings": False, "intermediate_size": 96},
    ),
    "scaled-tied": (
        {"no_scale_embedding": False, "glu_act": "none", "glu_dim": -1},
        {"embedding_scale": 32**0.5, "mlp": "bilinear", "intermediate_size": 32},
    ),
    "scaled-untied": (
        {"no_scale_embedding": False, "glu_act": "gelu", "glu_dim": 96, "no_tie_embed": True, "norm_eps": 1e-3},
        {
            "embedding_scale": 32**0.5,
            "mlp": "geglu",
            "intermediate_size": 96,
            "tie_embeddings": False,
            "norm_eps": 1e-3,
        },
    ),
    "rmsnorm-relu": (
        {"norm_type": "rmsnorm", "glu_act": "relu", "glu_dim": 96, "linear_use_lrpe_list": [], "attn_dropout": 0.1},
        {"norm_affine": True, "mlp": "reglu", "intermediate_size": 96},
    ),
    "sigmoid": ({"glu_act": "Sigmoid", "glu_dim": 96}, {"mlp": "glu", "intermediate_size": 96}),
}


def released_metala(folder: Path, theirs: dict[str, Any], ours: dict[str, Any]) -> LanguageModel:
    """Write a model with the published names, and return it."""
    shape = {"vocab_size": 61, "num_layers": 2, "hidden_size": 32, "num_heads": 2}
    simple = {"norm": "rmsnorm", "norm_affine": "norm" in ours, "norm_eps": 1e-5 if "norm" in ours else 1e-6}
    model = LanguageModel(ModelConfig(**shape | simple | ours), seed=0).eval()
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    folder.mkdir()
    tensors = {as_released(name): p.detach().clone() for name, p in model.named_parameters()}
    for name in [n for n in tensors if n.endswith("conv1d.weight")]:
        tensors[name] = tensors[name].unsqueeze(1)
    save_file(tensors, folder / "model.safetensors")
    settings = {"model_type": "metala", **METALA_SHAPE, "vocab_size": 61, "transformers_version": "4.30.2", **theirs}
    (folder / "config.json").write_text(json.dumps(settings))
    return model


@pytest.mark.parametrize("name", RELEASED)
def test_imported_metala_keeps_its_logits(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = released_metala(tmp_path / "released", *RELEASED[name])
    assert main(["import", str(tmp_path / "released"), str(tmp_path / "run")]) == 0
    output = capsys.readouterr().out
    assert float(output.split("those of MetaLA's equations, computed token by token ")[1].split()[0]) <= 2e-4
    ids = torch.arange(40)[None]
    assert torch.equal(load_language_model(tmp_path / "run")(ids), model(ids))


def test_misread_setting_of_metala_exits_with_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Compare with the reference, which reads only their tensors and their config.json."""
    released_metala(tmp_path / "released", *RELEASED["scaled-untied"])
    monkeypatch.setitem(metala_mapping._GATES, "gelu", "swiglu")
    assert main(["import", str(tmp_path / "released"), str(tmp_path / "run")]) == 1
    assert "over the tolerance" in capsys.readouterr().err


def test_equations_of_metala_give_the_golden_values(shared_golden: Path) -> None:
    values = {name: torch.tensor(value) for name, value in np.load(shared_golden / "metala_layer.npz").items()}
    names = {"conv1d": "conv", "q_proj": "q", "k_gate": "a", "v_proj": "v", "g_proj": "g", "out_proj": "o"}
    weights = {f"{theirs}.weight": values[f"w_{name}"] for theirs, name in names.items()}
    weights |= {"g_proj.bias": values["w_g_bias"], "aug_balance": values["w_aug"]}
    torch.testing.assert_close(_mix(values["x"], weights, 4), values["y_released"], rtol=0, atol=1e-10)


def test_printed_train_command_names_the_data_keys_of_the_configuration(
    exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["import", str(exported), str(tmp_path / "my runs" / "a")]) == 0
    assert f"python train.py '{tmp_path}/my runs/a/config.yml' data.corpus=...   continues" in capsys.readouterr().out
    copy = shutil.copytree(exported, tmp_path / "of token files", ignore=shutil.ignore_patterns("SHA256SUMS"))
    training = copy / "training" / "config.yml"
    config = yaml.safe_load(training.read_text())
    config["data"] |= {"corpus": None, "train": "corpora/a_text_document"}
    training.write_text(yaml.safe_dump(config))
    assert main(["import", str(copy), str(tmp_path / "again")]) == 0
    output = capsys.readouterr().out
    assert f"python train.py {tmp_path}/again/config.yml data.train=... data.validation=...   continues" in output
