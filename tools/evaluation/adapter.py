"""Adapt a model of this project to the lm-evaluation-harness."""

from __future__ import annotations

import hashlib
import itertools
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from data.progress import ProgressBar
from data.tokenizer import Tokenizer
from models.language_model import LanguageModel
from tools.evaluation.chat import chat_template_of, render_chat
from tools.evaluation.data_parallel import Processes
from tools.evaluation.prefix_tree import Ids, shared_order
from tools.evaluation.pseudo_likelihood import PseudoScorer
from tools.evaluation.request_cache import RequestCache
from tools.evaluation.request_pairs import Pair, RequestCounts, encode_pairs, encode_texts, refuse_longer
from tools.evaluation.results_file import number_format
from tools.evaluation.scoring import Scorer
from tools.inference.generation import State, generate, read_prefix

# Tokens at the end of a text that are searched for a stop string.
_STOP_WINDOW = 48


class ProjectLM(TemplateLM):
    """Answer the harness's requests with a `LanguageModel`.

    The harness sees one process. The requests are divided among `processes` here, so that the result does not depend on
    their number.

    Args:
        model: in evaluation mode. Masked models answer with pseudo-log-likelihoods.
        tokenizer: of the model's training.
        max_length: tokens that the model reads at once. Longer requests lose their beginning and are counted in `counts`.
        name: the model's name in results.
        cache: cached answers of an interrupted evaluation.
        batch_tokens, state_bytes: as `Scorer`.

    Raises ValueError for a masked model without a row for its tokenizer's mask.
    """

    def __init__(
        self,
        model: LanguageModel,
        tokenizer: Tokenizer,
        *,
        max_length: int,
        name: str = "model",
        processes: Processes | None = None,
        cache: RequestCache | None = None,
        batch_tokens: int = 0,
        state_bytes: int = 0,
        progress: bool = True,
    ) -> None:
        super().__init__()
        self.model, self.name, self.max_length, self.progress = model, name, max_length, progress
        self.processes = processes or Processes()
        self.cache = RequestCache(None, "", self.processes) if cache is None else cache
        self._tokenizer = tokenizer
        self.masked = bool(model.config.bidirectional_mixers())
        self.scorer: Scorer | PseudoScorer
        if self.masked:
            prefix = () if tokenizer.begin_id is None else (tokenizer.begin_id,)
            suffix = (tokenizer.end_of_document_id,)
            self.scorer = PseudoScorer(model, checked_mask_id(model, tokenizer), prefix, suffix, batch_tokens)
        else:
            self.scorer = Scorer(model, batch_tokens, state_bytes)
        # Most tokens of context and continuation: a causal model does not read the last one.
        self._request_limit = max_length - len(prefix) - len(suffix) if self.masked else max_length + 1
        self._device = next(model.parameters()).device
        self._terminal = sys.stderr  # stderr is redirected during the harness's call
        self.counts = RequestCounts()

    @property
    def eot_token_id(self) -> int:
        return self._tokenizer.end_of_document_id

    @property
    def max_gen_toks(self) -> int:
        return 256

    @property
    def tokenizer_name(self) -> str:
        return f"{self._tokenizer.type}-{self._tokenizer.hash}"

    @property
    def score_name(self) -> str:
        """Return the name of the scores in tables and messages."""
        return "pseudo-log-likelihood" if self.masked else "log-likelihood"

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        return chat_template_of(self._tokenizer) if chat_template else None

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        template = chat_template_of(self._tokenizer)
        assert template is not None, "`check_chat_template` precedes"
        return render_chat(template, chat_history, add_generation_prompt=add_generation_prompt)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        return [int(i) for i in self._tokenizer.encode(string)]

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        # The sequences of a masked model begin as in training, without the end of an earlier document.
        prefix = None if self.masked else self.prefix_token_id
        pairs = encode_pairs(self._tokenizer, [request.args for request in requests], prefix)
        names = [request.task_name or "" for request in requests]
        return self._score("loglikelihood", *self._windows(pairs, names))

    def _loglikelihood_tokens(self, requests: list[Any], **kwargs: Any) -> list[tuple[float, bool]]:
        pairs = [Pair(np.asarray(context, np.int64), np.asarray(target, np.int64)) for _, context, target in requests]
        return self._score("loglikelihood", *self._windows(pairs, [""] * len(pairs)))

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        pairs: list[tuple[Ids, Ids]] = []
        owners: list[int] = []
        for number, ids in enumerate(encode_texts(self._tokenizer, [request.args[0] for request in requests])):
            windows = get_rolling_token_windows(
                ids.tolist(), self.prefix_token_id, self._request_limit - 1, context_len=1
            )
            for place, (context, target) in enumerate(map(make_disjoint_window, windows)):
                context = [] if self.masked and place == 0 else context  # as in `loglikelihood`
                pairs.append((np.asarray(context, np.int64), np.asarray(target, np.int64)))
                owners.append(number)
            self.counts.requests[requests[number].task_name or ""] += 1
        totals = [0.0] * len(requests)
        contexts, targets = [list(part) for part in zip(*pairs, strict=True)] if pairs else ([], [])
        for owner, (value, _) in zip(owners, self._score("rolling", contexts, targets), strict=True):
            totals[owner] += value
        return totals

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        if self.masked:
            raise ValueError(
                f"{self.name} sees both directions and cannot continue a text: leave out the tasks that generate "
                f"({', '.join(sorted({r.task_name or '?' for r in requests}))})"
            )
        settings = [generation_settings(request.args[1], self.max_gen_toks) for request in requests]
        prompt_limits = [self.max_length - values["max_tokens"] for values in settings]
        for request, limit in zip(requests, prompt_limits, strict=True):
            if limit < 1:
                raise ValueError(
                    f"{request.task_name or 'a request'}: max_gen_toks {self.max_length - limit} leaves no token for a prompt; "
                    f"the model reads {self.max_length} at once, so at most {self.max_length - 1} is allowed. Set a smaller "
                    "max_gen_toks in the task or with --gen-kwargs, or give a larger --max-length"
                )
        identities = _generation_identities(requests, settings)
        keys = [self.cache.key("generate", *identity) for identity in identities]
        texts = {i: value for i, key in enumerate(keys) if (value := self.cache.get(key)) is not None}
        prompts = encode_texts(self._tokenizer, [request.args[0] for request in requests])
        # Masked models, whose scorer has no states, generate nothing.
        assert isinstance(self.scorer, Scorer)
        ends = [
            ids[-limit:] if len(ids) else np.array([self.eot_token_id])
            for ids, limit in zip(prompts, prompt_limits, strict=True)
        ]
        same_settings: dict[str, list[int]] = {}
        for i in range(len(requests)):
            if i not in texts:
                same_settings.setdefault(repr(settings[i]), []).append(i)
        ordered: list[tuple[int, int]] = []
        for group in same_settings.values():
            ordered += [(group[i], length) for i, length in zip(*shared_order([ends[i] for i in group]), strict=True)]

        def generate_share() -> dict[int, str]:
            generated: dict[int, str] = {}
            share = ordered[self.processes.rank :: self.processes.size]
            with self._bar(len(share), "texts") as bar:
                for _, group in itertools.groupby(share, lambda item: repr(settings[item[0]])):
                    for batch, prefix, state in self._prefix_batches(list(group), ends, settings):
                        prompts = [ends[i][prefix:].tolist() for i in batch]
                        seeds = [_seed(identities[i]) for i in batch]
                        new = self._continue(prompts, prefix=state, **{**settings[batch[0]], "seed": seeds})
                        generated.update(zip(batch, new, strict=True))
                        self.cache.add((keys[i], generated[i]) for i in batch)
                        bar.update(len(batch))
            return generated

        texts.update(self.processes.compute_shared(generate_share))
        for prompt, request, limit in zip(prompts, requests, prompt_limits, strict=True):
            name = request.task_name or ""
            self.counts.truncated[name] += len(prompt) > limit
            self.counts.requests[name] += 1
        return [texts[i] for i in range(len(requests))]

    def get_model_info(self) -> dict[str, Any]:
        """Return the description of the model in `results.json`."""
        return {
            "model_num_parameters": sum(p.numel() for p in self.model.parameters()),
            "model_dtype": number_format(self.model),
            "max_length": self.max_length,
            "score": self.score_name,
        }

    def _windows(self, pairs: Sequence[Pair], names: Sequence[str]) -> tuple[list[Ids], list[Ids]]:
        """Return the last `_request_limit` ids of every request. Raises as `refuse_longer`."""
        limit = self._request_limit
        contexts, targets = [], []
        for pair, name in zip(pairs, names, strict=True):
            refuse_longer(name, len(pair.target), limit - 1, self.max_length - (limit - 1))
            self.counts.add(name, pair, limit)
            ids = np.concatenate([pair.context, pair.target])[-limit:]
            first = len(ids) - len(pair.target)
            contexts.append(ids[:first])
            targets.append(ids[first:])
        return contexts, targets

    def _score(self, kind: str, contexts: list[Ids], targets: list[Ids]) -> list[tuple[float, bool]]:
        keys = [self.cache.key(kind, *pair) for pair in zip(contexts, targets, strict=True)]
        self.counts.tokens += sum(map(len, contexts)) + sum(map(len, targets)) - len(targets)
        answers: dict[int, tuple[float, bool]] = {}
        for number, key in enumerate(keys):
            if not len(targets[number]):
                answers[number] = (0.0, True)  # an empty continuation is certain
            elif (value := self.cache.get(key)) is not None:
                answers[number] = (value[0], value[1])
        missing = [number for number in range(len(keys)) if number not in answers]
        units: Any = self.scorer.units([contexts[i] for i in missing], [targets[i] for i in missing])
        share = units[self.processes.rank :: self.processes.size]
        description = f"{self.score_name}s" + (f" ({len(answers)} cached)" if answers else "")

        def compute() -> dict[int, tuple[float, bool]]:
            computed: dict[int, tuple[float, bool]] = {}
            with self._bar(len(missing) // self.processes.size, description) as bar:

                def done(scores: list[tuple[int, tuple[float, bool]]]) -> None:
                    numbered = [(missing[i], score) for i, score in scores]
                    computed.update(numbered)
                    self.cache.add((keys[i], score) for i, score in numbered)
                    bar.update(len(scores))

                self.scorer.score_units(share, len(missing), done=done)
            return computed

        answers.update(self.processes.compute_shared(compute))
        return [answers[number] for number in range(len(keys))]

    def _prefix_batches(
        self, remaining: list[tuple[int, int]], prompts: Sequence[Ids], settings: Sequence[dict[str, Any]]
    ) -> Iterator[tuple[list[int], int, State | None]]:
        """Yield batches of requests, the number of prompt tokens that are already read, and the state after these tokens.

        remaining: (request, number of tokens that its prompt shares with all later ones), of equal settings. Shared tokens are
        read once.
        """
        assert isinstance(self.scorer, Scorer)
        read, state = 0, None
        while remaining:
            length, longest, size = remaining[0][1], 0, 0
            for i, _ in remaining:
                longest = max(longest, len(prompts[i]) - length + settings[i]["max_tokens"])
                rows = min(self.scorer.batch_tokens // longest, self.scorer.state_rows(length + longest, longest))
                if size and size >= rows:
                    break
                size += 1
            batch, remaining = [i for i, _ in remaining[:size]], remaining[size:]
            if read < length and (remaining or size > 1):
                state = read_prefix(self.model, prompts[batch[0]][read:length].tolist(), state)
                read = length
            yield batch, read, state

    def _continue(
        self, prompts: list[list[int]], *, stops: tuple[str, ...], max_tokens: int, **sampling: Any
    ) -> list[str]:
        generated: list[list[int]] = [[] for _ in prompts]
        unfinished = set(range(len(prompts)))
        steps = generate(
            self.model,
            prompts,
            max_tokens=max_tokens,
            vocab_size=self._tokenizer.vocab_size,
            stop_id=self.eot_token_id,
            **sampling,
        )
        for step in steps:
            for row in list(unfinished):
                token = step[row]
                if token is not None:
                    generated[row].append(token)
                    tail = self._tokenizer.decode(generated[row][-_STOP_WINDOW:])
                if token is None or any(stop in tail for stop in stops):
                    unfinished.discard(row)
            if not unfinished:
                break
        texts = [self._tokenizer.decode(ids) for ids in generated]
        return [_until_first_stop(text, stops) for text in texts]

    def _bar(self, total: int, description: str) -> ProgressBar:
        return ProgressBar(
            total=total,
            desc=description,
            unit="request",
            disable=not (self.progress and self.processes.is_main),
            dynamic_ncols=True,
            file=self._terminal,
        )


def checked_mask_id(model: LanguageModel, tokenizer: Tokenizer) -> int:
    """Return the id of the mask token. Raises ValueError if the model has no row for it."""
    if tokenizer.mask_id >= model.config.vocab_size:
        raise ValueError(
            f"the mask token of {tokenizer.path or tokenizer.type} has id {tokenizer.mask_id}, and the model has "
            f"{model.config.vocab_size} rows: a masked model is scored by masking; evaluate one that was trained with the mask "
            "of this tokenizer"
        )
    return tokenizer.mask_id


def generation_settings(requested: dict[str, Any], max_tokens: int) -> dict[str, Any]:
    """Return the harness's generation settings as arguments of `tools.inference.generation.generate`.

    Raises ValueError for unknown settings.
    """
    settings = normalize_gen_kwargs(requested, max_tokens)
    sampled, temperature = settings["do_sample"], settings.get("temperature")
    if unknown := sorted(
        settings.keys() - {"do_sample", "until", "max_gen_toks", "temperature", "top_k", "top_p", "seed"}
    ):
        raise ValueError(f"this model does not generate with {unknown[0]}: allowed are temperature, top_k and top_p")
    return {
        "stops": tuple(settings["until"]),
        "max_tokens": settings["max_gen_toks"],
        "temperature": 0.0 if not sampled else 1.0 if temperature is None else float(temperature),
        "top_k": int(settings.get("top_k") or 0) if sampled else 0,
        "top_p": float(settings.get("top_p") or 1.0) if sampled else 1.0,
        "seed": int(settings.get("seed") or 0) if sampled else 0,
    }


def _generation_identities(requests: Sequence[Instance], settings: Sequence[dict[str, Any]]) -> list[tuple[str, ...]]:
    """Return the texts that identify each continuation: prompt and settings.

    A sampled continuation also has its document and the number of its repeat.
    """
    repeats: Counter[tuple[str, ...]] = Counter()
    identities = []
    for request, values in zip(requests, settings, strict=True):
        identity = (request.args[0], repr(sorted(values.items())))
        if values["temperature"]:
            identity += (f"{request.task_name} {request.doc_id} {request.idx}",)
            repeats[identity] += 1
            identity += (str(repeats[identity]),)
        identities.append(identity)
    return identities


def _seed(identity: Sequence[str]) -> int:
    """Return the seed of a request, so that a sampled text does not depend on other requests or the batch size."""
    return int.from_bytes(hashlib.blake2b("\0".join(identity).encode(), digest_size=7).digest(), "little")


def _until_first_stop(text: str, stops: Sequence[str]) -> str:
    for stop in filter(None, stops):
        text = text.split(stop)[0]
    return text
