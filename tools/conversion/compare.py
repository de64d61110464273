"""Logits of an export beside the trainer's, on real text.

The export is loaded as its users load it. The trainer's side is computed layer by layer straight from the checkpoint, so
that memory holds the export and one layer more.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from data.tokenizer import Tokenizer
from megatron_lite.checkpoint import Weights
from models.config import ModelConfig
from models.lm import layer_specs

TOLERANCE = 1e-4
LENGTH = 256


@dataclass(frozen=True)
class Comparison:
    """Largest differences of logits.

    Attributes:
        converted: export against the trainer's model with the stored weights; both in float32. It must be small.
        rounded: export against the trainer's float32 weights: what storing in 16 bits changes. 0 extra for float32.
        largest: largest logit, to see the differences beside.
        tokens: tokens compared.
    """

    converted: float
    rounded: float
    largest: float
    tokens: int


def compare_logits(
    weights: Weights, config: ModelConfig, folder: Path, tokens: Tensor, dtype: torch.dtype
) -> Comparison:
    """Compare on `tokens` [batch, length]; `dtype` is that of the stored weights."""
    theirs = exported_logits(folder, tokens, config)
    ours = trainer_logits(weights, config, tokens, dtype)
    exact = ours if dtype == torch.float32 else trainer_logits(weights, config, tokens, torch.float32)
    return Comparison(
        converted=(theirs - ours).abs().max().item(),
        rounded=(theirs - exact).abs().max().item(),
        largest=exact.abs().max().item(),
        tokens=tokens.numel(),
    )


@torch.no_grad()
def exported_logits(folder: Path, tokens: Tensor, config: ModelConfig) -> Tensor:
    """Logits of the export, loaded with its own source, float32. Blocks are widened one at a time."""
    from models.hf_config import is_causal

    model = load_export(folder, causal=is_causal(config))
    for layer in (model.embedding, *model.blocks, model.head):
        _widen_while_running(layer)
    return model(input_ids=tokens, use_cache=False).logits.float()


def load_export(folder: Path, *, causal: bool, **options: Any) -> Any:
    """The exported model through its auto class, in evaluation mode, on the CPU, without a word on the screen."""
    from transformers import AutoModelForCausalLM, AutoModelForMaskedLM
    from transformers.utils import logging

    bar = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        auto = AutoModelForCausalLM if causal else AutoModelForMaskedLM
        return auto.from_pretrained(folder, trust_remote_code=True, dtype="auto", **options).eval()
    finally:
        if bar:
            logging.enable_progress_bar()


@torch.no_grad()
def trainer_logits(weights: Weights, config: ModelConfig, tokens: Tensor, dtype: torch.dtype) -> Tensor:
    """Logits of the trainer's layers in float32, their weights rounded to `dtype`; one layer in memory at a time."""
    hidden = tokens
    for spec in layer_specs(config):
        with torch.device("meta"):
            layer = spec.build()
        names = [name for name, _ in layer.named_parameters()]
        own = {name: _stored_name(f"{spec.name}.{name}", spec.tied_to) for name in names}
        state = {name: weights[stored].to(dtype).float() for name, stored in own.items()}
        layer.load_state_dict(state, strict=False, assign=True)
        hidden = layer.eval()(hidden)
    return hidden


def _stored_name(name: str, tied_to: str | None) -> str:
    layer, _, parameter = name.partition(".")
    return f"{tied_to}.weight" if tied_to is not None and parameter == "weight" and layer == "head" else name


def _widen_while_running(layer: nn.Module) -> None:
    narrow = next(layer.parameters()).dtype
    if narrow == torch.float32:
        return
    layer.register_forward_pre_hook(lambda module, _: module.float() and None)
    layer.register_forward_hook(lambda module, *_: module.to(narrow) and None)


def real_text(run_texts: Iterable[Path | None], tokenizer: Tokenizer, length: int = LENGTH) -> tuple[Tensor, str]:
    """Tokens [2, length] of the first text that is there, and its name.

    Args:
        run_texts: files to look at first, the run's validation text say. Without any it is a module of Python's own.
    """
    candidates = [path for path in run_texts if path is not None and path.is_file()]
    candidates.append(Path(sysconfig.get_paths()["stdlib"]) / "textwrap.py")
    for path in candidates:
        with open(path, encoding="utf-8", errors="replace") as file:
            text = file.read(64 * length)
        ids = [int(i) for i in tokenizer.encode(text)][: 2 * length]
        if len(ids) >= 32:
            half = len(ids) // 2
            return torch.tensor([ids[:half], ids[half : 2 * half]]), str(path)
    raise FileNotFoundError(f"no text to compare logits on: {', '.join(map(str, candidates))}")
