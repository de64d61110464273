"""A model of this project as the lm-evaluation-harness sees it."""

from __future__ import annotations

import hashlib
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

from data.tokenizer import Tokenizer
from models.language_model import LanguageModel
from tools.evaluation.data_parallel import Processes
from tools.evaluation.prefix_tree import Ids
from tools.evaluation.pseudo_likelihood import PseudoScorer
from tools.evaluation.request_cache import RequestCache
from tools.evaluation.request_pairs import Pair, RequestCounts, encode_pairs, encode_texts, refuse_longer
from tools.evaluation.results_file import number_format
from tools.evaluation.scoring import Scorer
from tools.inference.generation import generate


class ProjectLM(TemplateLM):
    """Answers the harness's requests with a `LanguageModel`.

    The harness calls it in one process's terms: requests are shared out over `processes` in here, so that the result
    does not depend on their number.

    Args:
        model: in evaluation mode. Masked models answer with pseudo-log-likelihoods.
        tokenizer: the one that the model was trained with.
        max_length: tokens that the model sees at once; longer requests lose their beginning, which `counts` has.
        name: what the results call it.
        cache: the file of answers while the evaluation runs.
        batch_tokens: tokens of a batch; 0 measures what fits.
        state_bytes: what the states of a batch may take; 0 takes an eighth of the memory.

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
            before = () if tokenizer.begin_id is None else (tokenizer.begin_id,)
            after = (tokenizer.end_of_document_id,)
            self.scorer = PseudoScorer(model, checked_mask_id(model, tokenizer), before, after, batch_tokens)
        else:
            self.scorer = Scorer(model, batch_tokens, state_bytes)
        # Tokens of context and continuation that fit: a causal model does not read the last one.
        self._room = max_length - len(before) - len(after) if self.masked else max_length + 1
        self._device = next(model.parameters()).device
        self._terminal = sys.stderr  # the harness's own bars are kept off it
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
        """Return the name of the scores."""
        return "pseudo-log-likelihood" if self.masked else "log-likelihood"

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        return [int(i) for i in self._tokenizer.encode(string)]

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        pairs = encode_pairs(self._tokenizer, [request.args for request in requests], self.prefix_token_id)
        names = [request.task_name or "" for request in requests]
        return self._score("loglikelihood", *self._windows(pairs, names))

    def _loglikelihood_tokens(self, requests: list[Any], **kwargs: Any) -> list[tuple[float, bool]]:
        pairs = [Pair(np.asarray(context, np.int64), np.asarray(target, np.int64)) for _, context, target in requests]
        return self._score("loglikelihood", *self._windows(pairs, [""] * len(pairs)))

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        pairs: list[tuple[Ids, Ids]] = []
        owners: list[int] = []
        for number, ids in enumerate(encode_texts(self._tokenizer, [request.args[0] for request in requests])):
            windows = get_rolling_token_windows(ids.tolist(), self.prefix_token_id, self._room - 1, context_len=1)
            for context, target in map(make_disjoint_window, windows):
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
        asked = [(request.args[0], _settings(request.args[1], self.max_gen_toks)) for request in requests]
        words = _generation_words(requests, asked)
        keys = [self.cache.key("generate", *own) for own in words]
        found = {i: value for i, key in enumerate(keys) if (value := self.cache.get(key)) is not None}
        prompts = encode_texts(self._tokenizer, [text for text, _ in asked])
        # Equal settings and about equal lengths go side by side.
        rest = sorted(set(range(len(asked))) - found.keys(), key=lambda i: (repr(asked[i][1]), -len(prompts[i])))
        mine = rest[self.processes.rank :: self.processes.size]

        def write() -> dict[int, str]:
            written: dict[int, str] = {}
            left = mine
            with self._bar(len(left), "texts") as bar:
                while left:
                    settings = asked[left[0]][1]
                    rows = max(1, self.scorer.batch_tokens // (len(prompts[left[0]]) + settings["max_tokens"]))
                    batch = [i for i in left[:rows] if asked[i][1] == settings]
                    left = left[len(batch) :]
                    room = max(1, self.max_length - settings["max_tokens"])
                    seeds = [_seed(words[i]) for i in batch]
                    texts = self._continue([prompts[i][-room:].tolist() for i in batch], **{**settings, "seed": seeds})
                    written.update(zip(batch, texts, strict=True))
                    self.cache.add((keys[i], written[i]) for i in batch)
                    bar.update(len(batch))
            return written

        found.update(self.processes.together(write))
        for i, request in enumerate(requests):
            cut = len(prompts[i]) > self.max_length - asked[i][1]["max_tokens"]
            self.counts.truncated[request.task_name or ""] += cut
        self.counts.requests.update(request.task_name or "" for request in requests)
        return [found[i] for i in range(len(requests))]

    def get_model_info(self) -> dict[str, Any]:
        """Return the description of the model in `results.json`."""
        return {
            "model_num_parameters": sum(p.numel() for p in self.model.parameters()),
            "model_dtype": number_format(self.model),
            "max_length": self.max_length,
            "score": self.score_name,
        }

    def _windows(self, pairs: Sequence[Pair], names: Sequence[str]) -> tuple[list[Ids], list[Ids]]:
        """Return the end of every request, as long as the model reads. Raises as `refuse_longer`."""
        room = self._room
        contexts, targets = [], []
        for pair, name in zip(pairs, names, strict=True):
            refuse_longer(name, len(pair.target), room - 1)
            self.counts.add(name, pair, room)
            seen = np.concatenate([pair.context, pair.target])[-room:]
            first = len(seen) - len(pair.target)
            contexts.append(seen[:first])
            targets.append(seen[first:])
        return contexts, targets

    def _score(self, kind: str, contexts: list[Ids], targets: list[Ids]) -> list[tuple[float, bool]]:
        keys = [self.cache.key(kind, *pair) for pair in zip(contexts, targets, strict=True)]
        self.counts.asked_tokens += sum(map(len, contexts)) + sum(map(len, targets)) - len(targets)
        answers_by_number: dict[int, tuple[float, bool]] = {}
        for number, key in enumerate(keys):
            if not len(targets[number]):
                answers_by_number[number] = (0.0, True)  # an empty continuation is certain
            elif (value := self.cache.get(key)) is not None:
                answers_by_number[number] = (value[0], value[1])
        rest = [number for number in range(len(keys)) if number not in answers_by_number]
        units: Any = self.scorer.units([contexts[i] for i in rest], [targets[i] for i in rest])
        mine = units[self.processes.rank :: self.processes.size]
        share = len(rest) if self.processes.size == 1 else len(rest) // self.processes.size
        description = f"{self.score_name}s" + (
            f" ({len(answers_by_number)} known from before)" if answers_by_number else ""
        )

        def compute() -> dict[int, tuple[float, bool]]:
            computed: dict[int, tuple[float, bool]] = {}
            with self._bar(share, description) as bar:

                def done(answers: list[tuple[int, tuple[float, bool]]]) -> None:
                    numbered = [(rest[i], answer) for i, answer in answers]
                    computed.update(numbered)
                    self.cache.add((keys[i], answer) for i, answer in numbered)
                    bar.update(len(answers))

                self.scorer.score_units(mine, len(rest), done=done)
            return computed

        answers_by_number.update(self.processes.together(compute))
        return [answers_by_number[number] for number in range(len(keys))]

    def _continue(
        self, prompts: list[list[int]], *, stops: tuple[str, ...], max_tokens: int, **sampling: Any
    ) -> list[str]:
        prompts = [prompt or [self.eot_token_id] for prompt in prompts]
        written: list[list[int]] = [[] for _ in prompts]
        open_rows = set(range(len(prompts)))
        steps = generate(
            self.model,
            prompts,
            max_tokens=max_tokens,
            vocab_size=self._tokenizer.vocab_size,
            stop_id=self.eot_token_id,
            **sampling,
        )
        for step in steps:
            for row in list(open_rows):
                token = step[row]
                if token is not None:
                    written[row].append(token)
                    tail = self._tokenizer.decode(written[row][-_STOP_WINDOW:])
                if token is None or any(stop in tail for stop in stops):
                    open_rows.discard(row)
            if not open_rows:
                break
        texts = [self._tokenizer.decode(ids) for ids in written]
        return [_cut(text, stops) for text in texts]

    def _bar(self, total: int, description: str) -> tqdm:
        shown = self.progress and self.processes.is_main
        return tqdm(
            total=total,
            desc=description,
            unit="request",
            disable=not shown,
            dynamic_ncols=True,
            file=self._terminal,
        )


# Tokens at the end of a text in which a stop string is looked for.
_STOP_WINDOW = 48


def checked_mask_id(model: LanguageModel, tokenizer: Tokenizer) -> int:
    """Return the id of the mask token. Raises ValueError if the model has no row for it."""
    if tokenizer.mask_id >= model.config.vocab_size:
        raise ValueError(
            f"the model is scored by masking, but the mask of its tokenizer ({tokenizer.path or tokenizer.type}), "
            f"{tokenizer.mask_id}, is not among its {model.config.vocab_size} rows: it was not trained with this tokenizer "
            "as a masked language model"
        )
    return tokenizer.mask_id


def _settings(given: dict[str, Any], max_tokens: int) -> dict[str, Any]:
    """Return the harness's generation settings as arguments of `tools.inference.generation.generate`.

    Raises ValueError for unknown settings.
    """
    settings = normalize_gen_kwargs(given, max_tokens)
    sampled, temperature = settings["do_sample"], settings.get("temperature")
    if unknown := sorted(
        settings.keys() - {"do_sample", "until", "max_gen_toks", "temperature", "top_k", "top_p", "seed"}
    ):
        raise ValueError(f"this model does not generate with {unknown[0]}: temperature, top_k and top_p are known")
    return {
        "stops": tuple(settings["until"]),
        "max_tokens": settings["max_gen_toks"],
        "temperature": 0.0 if not sampled else 1.0 if temperature is None else float(temperature),
        "top_k": int(settings.get("top_k") or 0) if sampled else 0,
        "top_p": float(settings.get("top_p") or 1.0) if sampled else 1.0,
        "seed": int(settings.get("seed") or 0) if sampled else 0,
    }


def _generation_words(
    requests: Sequence[Instance], asked: Sequence[tuple[str, dict[str, Any]]]
) -> list[tuple[str, ...]]:
    """Return what a continuation depends on beside the model: text and settings.

    A sampled continuation also depends on the document and the number of its repeat.
    """
    repeats: Counter[tuple[str, ...]] = Counter()
    every = []
    for request, (text, settings) in zip(requests, asked, strict=True):
        words = (text, repr(sorted(settings.items())))
        if settings["temperature"]:
            words += (f"{request.task_name} {request.doc_id} {request.idx}",)
            repeats[words] += 1
            words += (str(repeats[words]),)
        every.append(words)
    return every


def _seed(words: Sequence[str]) -> int:
    """Return the seed of a request. A sampled text depends on no other request and on no batch size."""
    return int.from_bytes(hashlib.blake2b("\0".join(words).encode(), digest_size=7).digest(), "little")


def _cut(text: str, stops: Sequence[str]) -> str:
    for stop in stops:
        if stop:
            text = text.split(stop)[0]
    return text
