"""The adapter equals the harness's `hf` model on the exported checkpoint; batching, cache and processes."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lm_eval.api.instance import Instance

from tools.convert_hf import main as convert
from tools.evaluation.adapter import ProjectLM, generation_settings
from tools.evaluation.data_parallel import Processes
from tools.evaluation.harness import evaluate, prepare_tasks
from tools.evaluation.request import TaskRequest
from tools.evaluation.request_cache import RequestCache
from tools.evaluation.request_pairs import encode_pairs, split_pair
from tools.loading.model import LoadedModel, load_model

LENGTH = 96
SUITES = TaskRequest(suites=("superglue", "commonsense"))


@pytest.fixture(scope="module")
def loaded(trained_run: Path) -> LoadedModel:
    return load_model(trained_run, device="cpu")


@pytest.fixture(scope="module")
def lm(loaded: LoadedModel) -> ProjectLM:
    return ProjectLM(loaded.model, loaded.tokenizer, max_length=LENGTH, progress=False)


@pytest.fixture(scope="module")
def exported(trained_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("export") / "tiny"
    assert convert(["export", str(trained_run), str(folder)]) == 0
    return folder


@pytest.fixture(scope="module")
def theirs(exported: Path) -> Any:
    """lm-eval's `hf` model on the exported folder, one request at a time."""
    from lm_eval.models.huggingface import HFLM

    class IdsOfTheWhole(HFLM):  # type: ignore[misc]
        def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
            return with_ids_of_the_whole(self, super()._encode_pair(context, continuation), context + continuation)

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    return IdsOfTheWhole(
        str(exported), device="cpu", dtype="float32", batch_size=1, max_length=LENGTH, trust_remote_code=True
    )


def with_ids_of_the_whole(model: Any, pair: tuple[list[int], list[int]], text: str) -> tuple[list[int], list[int]]:
    """Return the harness's pair with the last id of its context as the whole text has it."""
    context, continuation = pair
    *begin, last = model.tok_encode(text)[: len(context)]
    return [*begin, last] if begin == list(context[:-1]) else context, continuation


def instances(kind: str, arguments: list[tuple]) -> list[Instance]:
    return [
        Instance(request_type=kind, doc={}, arguments=a, idx=i, metadata=("made up", i, 1))
        for i, a in enumerate(arguments)
    ]


@pytest.fixture(scope="module")
def prepared(eval_data: Path) -> Any:
    return prepare_tasks(TaskRequest(SUITES.suites, data_dir=eval_data))


@pytest.fixture(scope="module")
def both(lm: ProjectLM, theirs: Any, prepared: Any) -> tuple[dict, dict]:
    return evaluate(lm, prepared), evaluate(theirs, prepared)  # type: ignore[return-value]


def test_every_request_equals_hf(both, lm):
    samples, expected = both[0]["samples"], both[1]["samples"]
    assert len(samples) == 16
    for task, rows in samples.items():
        assert len(rows) == 8
        for got, want in zip(rows, expected[task], strict=True):
            assert got["arguments"] == want["arguments"]
            for (value, greedy), (other, other_greedy) in zip(
                got["filtered_resps"], want["filtered_resps"], strict=True
            ):
                assert value == pytest.approx(other, abs=1e-4), task
                assert greedy == other_greedy
    assert lm.counts.truncated["boolq"] > 0, "some requests exceed the model's length"


def test_every_score_equals_hf(both):
    for task, metrics in both[1]["results"].items():
        for key, value in metrics.items():
            actual = both[0]["results"][task][key]
            assert actual == (pytest.approx(value, rel=1e-5) if isinstance(value, float) else value), (task, key)


def test_rolling_equals_hf(lm, theirs):
    texts = [("def alpha(beta, 値):\n    return beta\n" * n,) for n in (1, 3, 24)]
    requests = instances("loglikelihood_rolling", texts)
    got, want = lm.loglikelihood_rolling(requests), theirs.loglikelihood_rolling(requests)
    assert got == pytest.approx(want, abs=1e-3, rel=1e-5)
    assert len(lm.tok_encode(texts[-1][0])) > 1.5 * LENGTH, "some texts are longer than a window"


def test_export_has_the_trained_length_by_default(loaded, exported):
    """Check the length of windows and truncated requests."""
    from lm_eval.models.huggingface import HFLM

    theirs = HFLM(str(exported), device="cpu", dtype="float32", batch_size="auto", trust_remote_code=True)
    assert theirs.max_length == loaded.config["batch"]["sequence_length"]
    lm = ProjectLM(loaded.model, loaded.tokenizer, max_length=theirs.max_length, progress=False)
    theirs.max_batch_size = 4
    requests = instances("loglikelihood_rolling", [("def alpha(beta, 値):\n    return beta\n" * 9,)])
    assert lm.loglikelihood_rolling(requests) == pytest.approx(theirs.loglikelihood_rolling(requests), rel=1e-5)


@pytest.mark.parametrize("until", [["\n"], [], [")", "xyz"]])
def test_generation_equals_hf(lm, theirs, until):
    prompts = ["def ", "def alpha(beta", "", "    größe = index + 1\n    return größe\n" * 12, "x"]
    assert len(lm.tok_encode(prompts[3])) > LENGTH, "a long prompt loses its beginning"
    settings = {"until": until, "max_gen_toks": 12, "do_sample": False}
    requests = instances("generate_until", [(prompt or "\n", settings) for prompt in prompts])
    before = lm.counts.truncated["made up"]
    assert lm.generate_until(requests) == theirs.generate_until(requests)
    assert lm.counts.truncated["made up"] - before == 1


def test_settings_of_one_request_do_not_change_another(lm):
    settings = [{"until": until, "max_gen_toks": n} for until, n in (([], 12), ([], 5), (["a"], 12), (["e"], 12))]
    requests = instances("generate_until", [("def ", values) for values in settings])
    together = lm.generate_until(requests)
    assert together == [lm.generate_until([request])[0] for request in requests]
    assert len(set(together)) > 2


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, (256, 0.0, 0, 1.0, 0)),
        ({"do_sample": True, "max_gen_toks": 9}, (9, 1.0, 0, 1.0, 0)),
        ({"temperature": 0.7, "top_k": 5, "top_p": 0.9, "seed": 3}, (256, 0.7, 5, 0.9, 3)),
        ({"temperature": 0.7, "top_k": 5, "do_sample": False}, (256, 0.0, 0, 1.0, 0)),
        ({"temperature": 0, "do_sample": True}, (256, 0.0, 0, 1.0, 0)),
    ],
)
def test_generation_settings_of_the_harness(given, expected):
    names = ("max_tokens", "temperature", "top_k", "top_p", "seed")
    settings = {"until": ["\n"], **given}
    assert generation_settings(settings, 256) == {"stops": ("\n",), **dict(zip(names, expected, strict=True))}


def test_unknown_generation_setting_is_refused():
    with pytest.raises(ValueError, match="does not generate with num_beams"):
        generation_settings({"num_beams": 4}, 256)


def test_continuation_longer_than_the_model_length_is_refused(loaded, lm, theirs):
    text = loaded.tokenizer.decode(loaded.tokenizer.encode("größe = index + 1\n" * 40))
    with pytest.raises(
        ValueError, match=r"^made up: a continuation has \d+ tokens and the model reads 96 at once: .*--max-len"
    ):
        lm.loglikelihood(instances("loglikelihood", [("def ", text)]))
    before = lm.counts.truncated["made up"]
    for context, cut in ((1, 0), (2, 1)):  # the last token is not read
        lm._loglikelihood_tokens([(None, [5] * context, [7] * LENGTH)])
        assert lm.counts.truncated[""] == cut
    for model in (lm, theirs):
        with pytest.raises((ValueError, AssertionError)):
            model._loglikelihood_tokens([(("", ""), [5], [7] * (LENGTH + 1))])
    assert lm.counts.truncated["made up"] == before


@pytest.mark.parametrize("tokens", [LENGTH, LENGTH + 1])
def test_generation_without_a_token_for_the_prompt_is_refused(lm, tokens):
    requests = instances("generate_until", [("def ", {"until": ["\n"], "max_gen_toks": tokens})])
    message = rf"^made up: max_gen_toks {tokens} leaves no token for a prompt; .* at most 95 is allowed\. Set a smaller"
    with pytest.raises(ValueError, match=message):
        lm.generate_until(requests)


@pytest.mark.parametrize("shots", [0, 2])
def test_prompt_contains_the_examples(shots, lm, eval_data):
    results = evaluate(lm, prepare_tasks(TaskRequest(tasks=("copa",), data_dir=eval_data, shots=shots)))
    assert results["n-shot"]["copa"] == shots
    contexts = [sample["arguments"][0][0] for sample in results["samples"]["copa"]]
    assert {context.count("\n\n") for context in contexts} == {shots}


def test_sampled_text_depends_on_its_request_only(loaded, tmp_path, monkeypatch):
    """Vary batches, processes and interruptions. Repeats of a document differ."""

    def drawn(
        batch_tokens: int = 4096, seed: int = 1, cache: RequestCache | None = None, rank: int | None = None
    ) -> list:
        settings = {"until": [], "do_sample": True, "temperature": 1.0, "max_gen_toks": 6, "seed": seed}
        requests = instances("generate_until", [(text, settings) for text in ("def ", "def alpha(beta", "def ")])
        lm = ProjectLM(
            loaded.model,
            loaded.tokenizer,
            max_length=LENGTH,
            cache=cache,
            batch_tokens=batch_tokens,
            processes=None if rank is None else Processes(rank, 2),
            progress=False,
        )
        texts = lm.generate_until([request for request in requests for _ in range(4)])
        return [texts[4 * n : 4 * n + 4] for n in range(3)]

    expected = drawn()
    assert [len(set(texts)) for texts in expected] == [4, 4, 4]
    assert set(expected[0]) != set(expected[2]), "another document with the same text has other samples"
    assert drawn(batch_tokens=1) == drawn(batch_tokens=24) == expected
    assert drawn(seed=2) != expected
    add = RequestCache.add

    def interrupted(self, answers):
        add(self, answers)
        raise KeyboardInterrupt

    monkeypatch.setattr(RequestCache, "add", interrupted)
    with pytest.raises(KeyboardInterrupt):
        drawn(batch_tokens=48, cache=RequestCache(tmp_path, "a", Processes()))
    monkeypatch.setattr(RequestCache, "add", add)
    cached = RequestCache(tmp_path, "a", Processes())
    assert 1 < len(cached) < 12
    assert drawn(cache=cached) == expected
    parts: list[dict] = []
    monkeypatch.setattr(Processes, "gather", lambda self, value: parts.append(value[0]) or [(everyone, None)])
    everyone = dict.fromkeys(range(12), "")
    monkeypatch.setattr(Processes, "barrier", lambda self: None)
    for rank in range(2):
        drawn(rank=rank)
    assert list(map(len, parts)) == [6, 6]
    merged = parts[0] | parts[1]
    assert [merged[i] for i in range(12)] == [text for texts in expected for text in texts]


def test_pairs_are_encoded_as_in_the_harness(loaded, lm):
    pairs = [
        ("def alpha", "(beta)"),
        ("def ", "alpha"),
        ("x  ", " y"),
        ("", "alpha beta"),
        ("", "\n"),
        ("größe = 値", " + 3"),
        ("a", "b"),
    ]
    for (context, continuation), got in zip(pairs, encode_pairs(loaded.tokenizer, pairs, lm.eot_token_id), strict=True):
        if context:
            expected = with_ids_of_the_whole(lm, lm._encode_pair(context, continuation), context + continuation)
        else:
            expected = ([lm.eot_token_id], lm.tok_encode(continuation))
        assert tuple(part.tolist() for part in got[:2]) == tuple(map(list, expected)), (context, continuation)


class Merging:
    """Encode the whole text "ab" as one token, any other text by characters."""

    def encode_batch(self, texts: list[str], threads: int = 1) -> list[list[int]]:
        return [[99] if text == "ab" else [ord(c) for c in text] for text in texts]


class Dropping:
    """Encode by characters, without a token for "!"."""

    def encode_batch(self, texts: list[str], threads: int = 1) -> list[list[int]]:
        return [[ord(c) for c in text if c != "!"] for text in texts]


def test_continuation_without_own_token_is_encoded_apart():
    (pair,) = encode_pairs(Merging(), [("a", "b")], 0)  # type: ignore[arg-type]
    assert (pair.context.tolist(), pair.target.tolist(), pair.apart) == ([ord("a")], [ord("b")], True)
    with pytest.raises(ValueError, match="the tokenizer has no token for the continuation '!'"):
        encode_pairs(Dropping(), [("xy", "!")], 0)  # type: ignore[arg-type]
    pairs = [split_pair(*ids, list, "c") for ids in (([1, 2], [1, 3, 4]), ([1, 2], [5, 6, 7]))]
    assert [(pair.context, pair.target, pair.recut) for pair in pairs] == [([1, 3], [4], False), ([1, 2], [7], True)]


def test_context_ends_with_the_id_that_the_text_has(loaded, lm):
    """Check that "alpha" has the id of the whole text, not the one that it has alone."""
    (pair,) = encode_pairs(loaded.tokenizer, [("def alpha", " beta")], lm.eot_token_id)
    assert [*pair.context, *pair.target] == loaded.tokenizer.encode("def alpha beta")
    assert not pair.recut


def test_text_that_begins_with_the_document_start_is_not_prefixed_again():
    pairs = encode_pairs(Dropping(), [("", "ab"), ("", "a"), ("", "b")], ord("a"))  # type: ignore[arg-type]
    actual = [tuple("".join(map(chr, part)) for part in pair[:2]) for pair in pairs]
    assert actual == [("a", "b"), ("a", "a"), ("a", "b")]


@pytest.mark.parametrize("context", ["def alpha", ""])
def test_empty_continuation_has_probability_one(context, lm):
    answers = lm.loglikelihood(instances("loglikelihood", [(context, ""), (context, "beta")]))
    assert answers[0] == (0.0, True)
    assert answers[1][0] < 0


def test_processes_share_the_requests(loaded, prepared, lm, monkeypatch):
    """Run three processes in turn: each request is answered by exactly one."""
    request = instances("loglikelihood", [(f"def alpha{n % 5}(beta, gamma", f"{n})") for n in range(40)])
    expected = lm.loglikelihood(request)
    parts: list[dict] = []
    everyone = dict.fromkeys(range(40), (0.0, True))
    monkeypatch.setattr(Processes, "gather", lambda self, value: parts.append(value[0]) or [(everyone, None)])
    monkeypatch.setattr(Processes, "barrier", lambda self: None)
    for rank in range(3):
        lm = ProjectLM(loaded.model, loaded.tokenizer, max_length=LENGTH, processes=Processes(rank, 3), progress=False)
        lm.loglikelihood(request)
    assert sum(map(len, parts)) == 40
    assert all(parts)
    merged = {number: answer for part in parts for number, answer in part.items()}
    assert [merged[i][0] for i in range(40)] == pytest.approx([value for value, _ in expected], abs=1e-5)


def test_error_of_one_process_is_raised_on_all(monkeypatch):
    monkeypatch.setattr(Processes, "gather", lambda self, value: [({0: 1}, None), ({}, "OutOfMemoryError: full")])
    with pytest.raises(RuntimeError, match="another process: OutOfMemoryError: full"):
        Processes(0, 2).compute_shared(lambda: {0: 1})
    with pytest.raises(KeyError):
        Processes(1, 2).compute_shared(lambda: {}[0])


def test_cache_key_contains_kind_context_and_continuation():
    key = RequestCache(None, "a", Processes()).key
    parts_of = [("loglikelihood", [1, 2], [3]), ("loglikelihood", [1], [2, 3]), ("loglikelihood", [1], [3])]
    parts_of += [("rolling", [1, 2], [3]), ("generate", "ab", "c"), ("generate", "a", "bc")]
    assert len({key(kind, *map(ids_or_text, parts)) for kind, *parts in parts_of}) == len(parts_of)
    assert key("loglikelihood", np.array([1, 2], np.int32)) == key("loglikelihood", np.array([1, 2], np.int64))


def ids_or_text(part: list[int] | str) -> Any:
    return part if isinstance(part, str) else np.array(part)


def test_every_process_reads_the_cache_of_all(tmp_path, monkeypatch):
    monkeypatch.setattr(Processes, "barrier", lambda self: None)
    for rank in range(2):
        RequestCache(tmp_path, "a", Processes(rank, 2)).add([(f"key {rank}", rank)])
    for rank in range(2):
        answers = RequestCache(tmp_path, "a", Processes(rank, 2))
        assert [answers.get(f"key {number}") for number in range(2)] == [0, 1]


def test_interrupted_evaluation_resumes(loaded, lm, tmp_path, monkeypatch):
    request = instances("loglikelihood", [(f"def alpha{n}(", f"beta{n})") for n in range(30)])
    generation = instances("generate_until", [("def ", {"until": ["\n"], "max_gen_toks": 4})])
    expected = lm.loglikelihood(request), lm.generate_until(generation)
    folder = tmp_path / "answers"

    def make(model: str = "a") -> ProjectLM:
        answers = RequestCache(folder, model, Processes())
        return ProjectLM(
            loaded.model, loaded.tokenizer, max_length=LENGTH, cache=answers, batch_tokens=64, progress=False
        )

    lm = make()
    add, batches = RequestCache.add, []

    def interrupted(self, answers):
        add(self, answers)
        batches.append(1)
        if len(batches) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(RequestCache, "add", interrupted)
    with pytest.raises(KeyboardInterrupt):
        lm.loglikelihood(request)
    monkeypatch.setattr(RequestCache, "add", add)
    with (folder / "answers-0.jsonl").open("a") as file:
        file.write('["cut off he')  # a kill in the middle of a line

    again = make()
    known = len(again.cache)
    assert 0 < known < 30
    values, greedy = zip(*again.loglikelihood(request), strict=True)
    assert values == pytest.approx([value for value, _ in expected[0]], abs=1e-5)
    assert list(greedy) == [hit for _, hit in expected[0]]
    assert again.generate_until(generation) == expected[1]
    read = again.scorer.read
    assert read > 0

    third = make()
    assert [v for v, _ in third.loglikelihood(request)] == list(values)
    assert third.generate_until(generation) == expected[1]
    assert third.scorer.read == 0, "all answers are cached"
    assert len(make(model="b").cache) == len(third.cache)
    other = make(model="b")
    other.loglikelihood(request)
    assert other.scorer.read > 0, "answers of another model are not used"
    other.cache.remove()
    assert not folder.exists()
