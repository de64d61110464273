"""Compare the logits of an export with the trainer's on real text.

A new export is loaded with its own source, as users load it. The trainer's logits are computed layer by layer from the
checkpoint, so that memory holds the export and one more layer.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from data.corpus.discovery import source_files
from data.corpus.readers import read_documents
from data.indexed import IndexedTokens
from data.tokenizer import Tokenizer
from megatron_lite.checkpoint.reader import Weights
from models.config import ModelConfig
from models.language_model import LanguageModel, layer_specs
from tools.conversion.export_source import model_class
from tools.conversion.foreign.mapping import make
from tools.conversion.foreign.registry import translate
from tools.conversion.hf_folder import Tensors, read_config
from tools.loading.token_data import data_config

# Longer than a chunk of the recurrence, short enough for a large model on a CPU.
LENGTH = 128
_CHARACTERS = 100_000
_FEWEST = 32


@dataclass(frozen=True)
class Comparison:
    """Hold the largest differences of logits.

    Attributes:
        converted: of the export from the trainer's model with the stored weights, both in float32. It must be small.
        rounded: of the export from the trainer's model with its float32 weights: the effect of storing 16 bits.
        largest: the largest logit, for comparison.
        count: what was compared, as "256 tokens".
    """

    converted: float
    rounded: float
    largest: float
    count: str


def compare_logits(
    weights: Weights, config: ModelConfig, folder: Path, tokens: Tensor, dtype: torch.dtype
) -> Comparison:
    """Compare logits on `tokens` [batch, length]. dtype: of the stored weights."""
    theirs = exported_logits(folder, tokens, config, trust_remote_code=True)  # as users load what was just written
    ours = trainer_logits(weights, config, tokens, dtype, progress=True)
    exact = ours if dtype == torch.float32 else trainer_logits(weights, config, tokens, torch.float32, progress=True)
    return Comparison(
        converted=(theirs - ours).abs().max().item(),
        rounded=(theirs - exact).abs().max().item(),
        largest=exact.abs().max().item(),
        count=count_of(tokens),
    )


@torch.no_grad()
def exported_logits(folder: Path, tokens: Tensor, config: ModelConfig, *, trust_remote_code: bool) -> Tensor:
    """Return the logits of an export in float32. One block at a time is converted to float32.

    A folder in another codebase's format is read back as an import reads it.
    """
    settings = read_config(folder)
    if settings["model_type"] != "metalion":
        foreign, tensors = translate(settings), Tensors(folder)
        with torch.device("meta"):
            shapes = {name: tuple(p.shape) for name, p in LanguageModel(foreign.model).named_parameters()}
        weights = {name: make(foreign, name, tensors, shape) for name, shape in shapes.items()}
        return trainer_logits(weights, foreign.model, tokens, torch.float32)
    model = load_export(folder, causal=not config.bidirectional_mixers(), trust_remote_code=trust_remote_code)
    for layer in (model.embedding, *model.blocks, model.head):
        _float32_while_running(layer)
    if config.image_size is not None:
        return model(pixel_values=tokens).logits.float()
    return model(input_ids=tokens, use_cache=False).logits.float()


def load_export(folder: Path, *, causal: bool, trust_remote_code: bool = False, **options: Any) -> Any:
    """Return the exported model in evaluation mode, on the CPU, without progress output.

    Its class is the project's, or the folder's with `trust_remote_code`. Raises ValueError as `check_source`.
    """
    from transformers.utils import logging

    if trust_remote_code:
        options["trust_remote_code"] = True
    bar = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        images = read_config(folder).get("image_size") is not None
        task = "ImageClassification" if images else "CausalLM" if causal else "MaskedLM"
        kind = model_class(folder, task, trust_remote_code=trust_remote_code)
        return kind.from_pretrained(folder, dtype="auto", **options).eval()
    except ImportError as error:  # of the installed transformers
        raise ValueError(f"{folder}: {error}") from error
    finally:
        if bar:
            logging.enable_progress_bar()


@torch.no_grad()
def trainer_logits(
    weights: Mapping[str, Tensor], config: ModelConfig, tokens: Tensor, dtype: torch.dtype, *, progress: bool = False
) -> Tensor:
    """Return float32 logits of the trainer's layers with weights rounded to `dtype`, one layer in memory at a time."""
    from data.progress import ProgressBar

    hidden = tokens
    for spec in ProgressBar(layer_specs(config), desc="comparing logits", unit=" layers", disable=not progress):
        with torch.device("meta"):
            layer = spec.build()
        names = [name for name, _ in layer.named_parameters()]
        stored_names = {name: _stored_name(f"{spec.name}.{name}", spec.tied_to) for name in names}
        state = {name: weights[stored].to(dtype).float() for name, stored in stored_names.items()}
        layer.load_state_dict(state, strict=False, assign=True)
        hidden = layer.eval()(hidden)
    return hidden


def _stored_name(name: str, tied_to: str | None) -> str:
    layer, _, parameter = name.partition(".")
    return f"{tied_to}.weight" if tied_to is not None and parameter == "weight" and layer == "head" else name


def _float32_while_running(layer: nn.Module) -> None:
    narrow = next(layer.parameters()).dtype
    if narrow == torch.float32:
        return
    layer.register_forward_pre_hook(lambda module, _: module.float() and None)
    layer.register_forward_hook(lambda module, *_: module.to(narrow) and None)


def real_text(config: Mapping[str, Any], tokenizer: Tokenizer, given: Path | None = None) -> tuple[str, str]:
    """Return about 100 kB of text and its origin: the given file, the run's data, or a module of Python.

    Raises FileNotFoundError if the given file is missing, ValueError if it is too short.
    """
    if given is not None:
        text = given.read_text(encoding="utf-8", errors="replace")[:_CHARACTERS]
        if len(tokenizer.encode(text)) < _FEWEST:
            raise ValueError(f"{given}: {len(text)} characters are too few to compare logits on; give a longer text")
        return text, str(given)
    for find in (_corpus_text, _token_file_text):
        try:
            text, name = find(config, tokenizer)
        except (OSError, ValueError, LookupError):  # the run names no text, or its data is on another machine
            continue
        if len(tokenizer.encode(text)) >= _FEWEST:
            return text, name
    module = Path(sysconfig.get_paths()["stdlib"]) / "textwrap.py"
    return module.read_text(encoding="utf-8"), str(module)


def count_of(inputs: Tensor) -> str:
    """Return the number of tokens, or of images, in the inputs of a model: "256 tokens"."""
    return f"{len(inputs)} images" if inputs.dim() == 4 else f"{inputs.numel()} tokens"


def rows_without_tokenizer(config: ModelConfig) -> tuple[Tensor, str]:
    """Return token ids [1, up to 256], or for an image classifier pixels [4, 3, size, size], and their name."""
    if config.image_size is not None:
        pixels = torch.randn(4, 3, config.image_size, config.image_size, generator=torch.Generator().manual_seed(0))
        return pixels, "random pixels"
    ids = (torch.arange(min(256, config.max_positions or 256)) % config.vocab_size)[None]
    return ids, "consecutive ids"


def rows_of(text: str, tokenizer: Tokenizer, config: ModelConfig) -> Tensor:
    """Return the first tokens of a text as [2, length], with at most LENGTH and the model's positions per row."""
    ids = [int(i) for i in tokenizer.encode(text[: 64 * LENGTH])][: 2 * min(LENGTH, config.max_positions or LENGTH)]
    half = len(ids) // 2
    return torch.tensor([ids[:half], ids[half : 2 * half]])


def _corpus_text(config: Mapping[str, Any], tokenizer: Tokenizer) -> tuple[str, str]:
    data = data_config(dict(config))
    corpus = (data.corpus,) if isinstance(data.corpus, str) else data.corpus or ()
    parts: list[str] = []
    size = 0
    for document in read_documents(source_files(corpus), data.text_key):
        parts.append(document.text)
        size += len(document.text)
        if size >= _CHARACTERS:
            break
    return "\n".join(parts)[:_CHARACTERS], ", ".join(corpus)


def _token_file_text(config: Mapping[str, Any], tokenizer: Tokenizer) -> tuple[str, str]:
    data = data_config(dict(config))
    prefix = data.validation or data.train_files[0]
    file = IndexedTokens(prefix)
    ids: list[int] = []
    for sequence in range(len(file)):
        ids += file[sequence].tolist()
        if len(ids) >= 4 * LENGTH:
            break
    return tokenizer.decode(ids[: 4 * LENGTH]), prefix
