"""Evaluate Hugging Face causal language models through the harness's `hf` model."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

from megatron_lite.checkpoint.checksums import file_sha256
from megatron_lite.dtypes import DTYPES, torch_name
from tools.conversion.export_source import limit_progress_bars
from tools.evaluation.request_pairs import Pair, RequestCounts, refuse_longer, split_pair
from tools.evaluation.row_checks import first_line


class HuggingFaceLM(HFLM):
    """Extend the harness's model by counts of long requests and by clear errors.

    Args:
        name: folder or hub name. max_length: None for that of the model's configuration.

    Raises:
        ValueError: an unknown dtype, a tokenizer with more entries than the model has embeddings, or code that is not trusted.
        OSError: no such model.
    """

    score_name = "log-likelihood"

    def __init__(
        self,
        name: str,
        *,
        device: str,
        dtype: str = "auto",
        batch_size: int | str = "auto",
        max_length: int | None = None,
        trust_remote_code: bool = False,
        progress: bool = True,
    ) -> None:
        limit_progress_bars()
        dtype = torch_name(DTYPES[dtype]) if dtype in DTYPES else dtype
        if dtype != "auto" and not isinstance(getattr(torch, dtype, None), torch.dtype):
            raise ValueError(f"dtype = {dtype!r}: allowed are auto, {', '.join(DTYPES)}")
        _register_linear_attention(name)
        if device == "cpu" and batch_size == "auto":
            batch_size = 8  # measuring what fits takes longer than it saves
        try:
            super().__init__(
                pretrained=name,
                device=device,
                dtype=dtype,
                batch_size=batch_size,
                max_length=max_length,
                trust_remote_code=trust_remote_code,
            )
        except ValueError as error:
            if trust_remote_code or "trust_remote_code" not in str(error):
                raise
            raise ValueError(
                f"{name}: it contains Python code: read the code, then allow it with --trust-remote-code"
            ) from error
        except (KeyError, TypeError, AttributeError, ImportError) as error:
            raise ValueError(
                f"{name}: transformers cannot load it ({first_line(error)}): compare its config.json and files with the "
                "model's own"
            ) from error
        rows, entries = self.model.get_input_embeddings().weight.shape[0], len(self.tokenizer)
        if entries > rows:
            raise ValueError(
                f"{name}: its tokenizer has {entries:,} entries and the model {rows:,} rows: it is not the model's "
                "tokenizer; put the right one into the folder"
            )
        self.name, self.progress = name, progress
        self.counts = RequestCounts()
        self._pairs: dict[tuple[str, str], Pair] = {}

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        # Without a template, the harness's method ends in an error of transformers.
        return super().chat_template(chat_template) if self.tokenizer.chat_template else None

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Encode a pair as the harness does, or as `encode_pairs` where the harness has no ids for a part."""
        if self.backend != "causal":
            pair = Pair(*super()._encode_pair(context, continuation))
            self._pairs[context, continuation] = pair
            return pair.context, pair.target
        stripped = context.rstrip()
        rest = context[len(stripped) :] + continuation
        ids, whole = self.tok_encode(stripped), self.tok_encode(stripped + rest)
        pair = split_pair(ids, whole, lambda: self.tok_encode(rest, add_special_tokens=False), rest)
        if not ids:  # the context holds only spaces
            pair = Pair([self.prefix_token_id], whole)
        self._pairs[context, continuation] = pair
        return list(pair.context), list(pair.target)

    def count(self, requests: Iterable[Instance]) -> None:
        """Count the requests of an evaluation, also those that a cache answered."""
        for request in requests:
            if request.request_type != "loglikelihood":
                self.counts.requests[request.task_name or ""] += 1
                continue
            context, continuation = request.args
            if not context:
                pair = Pair([self.prefix_token_id], self.tok_encode(continuation))
            else:
                if (context, continuation) not in self._pairs:
                    self._encode_pair(context, continuation)
                pair = self._pairs[context, continuation]
            self.counts.add(request.task_name or "", pair, self.max_length + 1)
            self.counts.tokens += len(pair.context) + len(pair.target) - 1
        self._pairs.clear()

    def _loglikelihood_tokens(self, requests: Any, *args: Any, **kwargs: Any) -> Any:
        for _, _, continuation in requests:
            refuse_longer("", len(continuation), self.max_length)
        kwargs["disable_tqdm"] = kwargs.get("disable_tqdm", False) or not self.progress
        return super()._loglikelihood_tokens(requests, *args, **kwargs)


def folder_hash(name: str) -> str | None:
    """Return a SHA-256 over the weight files of a local folder, or None for a model of the hub."""
    files = sorted(p for p in Path(name).glob("*") if p.suffix in (".safetensors", ".bin"))
    if not files:
        return None
    digest = hashlib.sha256()
    for file in files:
        digest.update(bytes.fromhex(file_sha256(file)))
    return digest.hexdigest()


def _register_linear_attention(name: str) -> None:
    """Import flash-linear-attention, which registers RetNet, GLA, HGRN and others with transformers."""
    import json

    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    config = Path(name) / "config.json"
    kind = json.loads(config.read_text(encoding="utf-8")).get("model_type") if config.is_file() else None
    if kind is not None and kind in CONFIG_MAPPING_NAMES:
        return
    if kind is None and not any(word in name.lower() for word in ("fla-hub", "retnet", "gla", "hgrn", "rwkv")):
        return
    with suppress(ImportError):
        import fla.models  # noqa: F401
