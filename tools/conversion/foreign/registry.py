"""List the formats of other codebases that can be imported."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tools.conversion.foreign.fla import gla, hgrn2, retnet
from tools.conversion.foreign.fla_delta import delta_rule, rwkv7
from tools.conversion.foreign.mapping import Foreign
from tools.conversion.foreign.metala import metala
from tools.conversion.foreign.transformers import gpt_neox, llama, metalion

Format = Callable[[Mapping[str, Any]], Foreign]

# Formats of flash-linear-attention, whose own models run on a GPU only.
OF_FLA: dict[str, Format] = {
    "gla": gla,
    "retnet": retnet,
    "hgrn2": hgrn2,
    "delta_net": delta_rule,
    "gated_deltanet": delta_rule,
    "kda": delta_rule,
    "rwkv7": rwkv7,
}


def translate(config: Mapping[str, Any]) -> Foreign:
    """Describe a model by its config.json. Raises ValueError for a `model_type` or setting without a counterpart here."""
    formats: dict[str, Format] = {
        "metalion": metalion,
        "metala": metala,
        "gpt_neox": gpt_neox,
        "llama": llama,
        "mistral": llama,
        "qwen3": llama,
        **OF_FLA,
    }
    kind = str(config["model_type"])
    if kind not in formats:
        raise ValueError(f"model_type {kind!r} cannot be imported; allowed are {', '.join(formats)}")
    return formats[kind](config)
