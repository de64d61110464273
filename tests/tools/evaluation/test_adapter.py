"""The adapter against the harness's own `hf` model on the exported checkpoint, and what it does with its requests."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lm_eval.api.instance import Instance

from tools.convert_hf import main as convert
from tools.evaluation.adapter import ProjectLM
from tools.evaluation.adapter import _settings as generation_settings
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
def ours(loaded: LoadedModel) -> ProjectLM:
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

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    return HFLM(str(exported), device="cpu", dtype="float32", batch_size=1, max_length=LENGTH, trust_remote_code=True)


def instances(kind: str, arguments: list[tuple]) -> list[Instance]:
    return [
        Instance(request_type=kind, doc={}, arguments=a, idx=i, metadata=("made up", i, 1))
        for i, a in enumerate(arguments)
    ]


@pytest.fixture(scope="module")
def prepared(eval_data: Path) -> Any:
    return prepare_tasks(TaskRequest(SUITES.suites, data_dir=eval_data))


@pytest.fixture(scope="module")
def both(ours: ProjectLM, theirs: Any, prepared: Any) -> tuple[dict, dict]:
    return evaluate(ours, prepared), evaluate(theirs, prepared)  # type: ignore[return-value]


def test_every_request_of_every_task_agrees_with_hf(both, ours):
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
    assert ours.counts.truncated["boolq"] > 0, "some requests were longer than the model sees"


def test_every_score_agrees_with_hf(both):
    for task, metrics in both[1]["results"].items():
        for key, value in metrics.items():
            found = both[0]["results"][task][key]
            assert found == (pytest.approx(value, rel=1e-5) if isinstance(value, float) else value), (task, key)


def test_rolling_agrees_with_hf(ours, theirs):
    texts = [("def alpha(beta, 値):\n    return beta\n" * n,) for n in (1, 3, 24)]
    requests = instances("loglikelihood_rolling", texts)
    got, want = ours.loglikelihood_rolling(requests), theirs.loglikelihood_rolling(requests)
    assert got == pytest.approx(want, abs=1e-3, rel=1e-5)
    assert len(ours.tok_encode(texts[-1][0])) > 1.5 * LENGTH, "some texts are longer than a window"


def test_an_export_is_read_at_the_trained_length_where_no_other_is_said(loaded, exported):
    """Windows, cut requests and the search for a batch size go by it."""
    from lm_eval.models.huggingface import HFLM

    theirs = HFLM(str(exported), device="cpu", dtype="float32", batch_size="auto", trust_remote_code=True)
    assert theirs.max_length == loaded.config["batch"]["sequence_length"]
    ours = ProjectLM(loaded.model, loaded.tokenizer, max_length=theirs.max_length, progress=False)
    theirs.max_batch_size = 4
    requests = instances("loglikelihood_rolling", [("def alpha(beta, 値):\n    return beta\n" * 9,)])
    assert ours.loglikelihood_rolling(requests) == pytest.approx(theirs.loglikelihood_rolling(requests), rel=1e-5)


@pytest.mark.parametrize("until", [["\n"], [], [")", "xyz"]])
def test_generation_agrees_with_hf(ours, theirs, until):
    prompts = ["def ", "def alpha(beta", "", "    größe = index + 1\n    return größe\n" * 12, "x"]
    assert len(ours.tok_encode(prompts[3])) > LENGTH, "a long prompt loses its beginning"
    settings = {"until": until, "max_gen_toks": 12, "do_sample": False}
    requests = instances("generate_until", [(prompt or "\n", settings) for prompt in prompts])
    before = ours.counts.truncated["made up"]
    assert ours.generate_until(requests) == theirs.generate_until(requests)
    assert ours.counts.truncated["made up"] - before == 1


def test_texts_of_different_settings_are_written_each_by_its_own(ours):
    settings = [{"until": until, "max_gen_toks": n} for until, n in (([], 12), ([], 5), (["a"], 12), (["e"], 12))]
    requests = instances("generate_until", [("def ", own) for own in settings])
    together = ours.generate_until(requests)
    assert together == [ours.generate_until([request])[0] for request in requests]
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


def test_a_generation_setting_that_is_not_known_is_refused():
    with pytest.raises(ValueError, match="does not generate with num_beams"):
        generation_settings({"num_beams": 4}, 256)


def test_a_continuation_longer_than_the_model_sees_is_refused(loaded, ours, theirs):
    """Its beginning would not be scored; the harness ends with an assertion."""
    text = loaded.tokenizer.decode(loaded.tokenizer.encode("größe = index + 1\n" * 40))
    with pytest.raises(
        ValueError, match=r"^made up: a continuation has \d+ tokens and the model sees 96 at once: .*--max-len"
    ):
        ours.loglikelihood(instances("loglikelihood", [("def ", text)]))
    before = ours.counts.truncated["made up"]
    for context, cut in ((1, 0), (2, 1)):  # the last token is not read
        ours._loglikelihood_tokens([(None, [5] * context, [7] * LENGTH)])
        assert ours.counts.truncated[""] == cut
    for lm in (ours, theirs):
        with pytest.raises((ValueError, AssertionError)):
            lm._loglikelihood_tokens([(("", ""), [5], [7] * (LENGTH + 1))])
    assert ours.counts.truncated["made up"] == before


@pytest.mark.parametrize("shots", [0, 2])
def test_examples_reach_the_prompt(shots, ours, eval_data):
    results = evaluate(ours, prepare_tasks(TaskRequest(tasks=("copa",), data_dir=eval_data, shots=shots)))
    assert results["n-shot"]["copa"] == shots
    contexts = [sample["arguments"][0][0] for sample in results["samples"]["copa"]]
    assert {context.count("\n\n") for context in contexts} == {shots}


def test_what_is_drawn_depends_on_the_request_alone(loaded, tmp_path, monkeypatch):
    """Whatever the batches, the processes and interruptions; repeats of a document differ."""

    def drawn(
        batch_tokens: int = 4096, seed: int = 1, cache: RequestCache | None = None, rank: int | None = None
    ) -> list:
        settings = {"until": [], "do_sample": True, "temperature": 1.0, "max_gen_toks": 6, "seed": seed}
        asked = instances("generate_until", [(text, settings) for text in ("def ", "def alpha(beta", "def ")])
        lm = ProjectLM(
            loaded.model,
            loaded.tokenizer,
            max_length=LENGTH,
            cache=cache,
            batch_tokens=batch_tokens,
            processes=None if rank is None else Processes(rank, 2),
            progress=False,
        )
        texts = lm.generate_until([request for request in asked for _ in range(4)])
        return [texts[4 * n : 4 * n + 4] for n in range(3)]

    expected = drawn()
    assert [len(set(texts)) for texts in expected] == [4, 4, 4]
    assert set(expected[0]) != set(expected[2]), "other documents of the same text draw anew"
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
    kept = RequestCache(tmp_path, "a", Processes())
    assert 1 < len(kept) < 12
    assert drawn(cache=kept) == expected
    parts: list[dict] = []
    monkeypatch.setattr(Processes, "gather", lambda self, value: parts.append(value[0]) or [(everyone, None)])
    everyone = dict.fromkeys(range(12), "")
    monkeypatch.setattr(Processes, "wait", lambda self: None)
    for rank in range(2):
        drawn(rank=rank)
    assert list(map(len, parts)) == [6, 6]
    merged = parts[0] | parts[1]
    assert [merged[i] for i in range(12)] == [text for texts in expected for text in texts]


def test_pairs_are_encoded_as_the_harness_does(loaded, ours):
    pairs = [
        ("def alpha", "(beta)"),
        ("def ", "alpha"),
        ("x  ", " y"),
        ("", "alpha beta"),
        ("", "\n"),
        ("größe = 値", " + 3"),
        ("a", "b"),
    ]
    for (context, continuation), got in zip(
        pairs, encode_pairs(loaded.tokenizer, pairs, ours.eot_token_id), strict=True
    ):
        if context:
            expected = ours._encode_pair(context, continuation)
        else:
            expected = ([ours.eot_token_id], ours.tok_encode(continuation))
        assert tuple(part.tolist() for part in got[:2]) == tuple(map(list, expected)), (context, continuation)


class Merging:
    """A tokenizer that makes one token of the whole text "ab" and one of each character otherwise."""

    def encode_batch(self, texts: list[str], threads: int = 1) -> list[list[int]]:
        return [[99] if text == "ab" else [ord(c) for c in text] for text in texts]


class Dropping:
    """A tokenizer without an entry for "!"."""

    def encode_batch(self, texts: list[str], threads: int = 1) -> list[list[int]]:
        return [[ord(c) for c in text if c != "!"] for text in texts]


def test_a_continuation_that_shares_the_contexts_last_token_is_encoded_apart():
    """Where the harness has no token left and ends with an assertion; other pairs are split as there, and counted."""
    (pair,) = encode_pairs(Merging(), [("a", "b")], 0)  # type: ignore[arg-type]
    assert (pair.context.tolist(), pair.target.tolist(), pair.apart) == ([ord("a")], [ord("b")], True)
    with pytest.raises(ValueError, match="the tokenizer has no token for the continuation '!'"):
        encode_pairs(Dropping(), [("xy", "!")], 0)  # type: ignore[arg-type]
    pairs = [split_pair(*ids, list, "c") for ids in (([1, 2], [1, 3, 4]), ([1, 2], [5, 6, 7]))]
    assert [(pair.context, pair.target, pair.recut) for pair in pairs] == [([1, 2], [4], False), ([1, 2], [7], True)]


def test_a_text_that_begins_as_documents_do_has_that_for_its_context():
    """Without a context, what stands before every document is not put there twice."""
    pairs = encode_pairs(Dropping(), [("", "ab"), ("", "a"), ("", "b")], ord("a"))  # type: ignore[arg-type]
    found = [tuple("".join(map(chr, part)) for part in pair[:2]) for pair in pairs]
    assert found == [("a", "b"), ("a", "a"), ("a", "b")]


@pytest.mark.parametrize("context", ["def alpha", ""])
def test_an_empty_continuation_is_certain(context, ours):
    answers = ours.loglikelihood(instances("loglikelihood", [(context, ""), (context, "beta")]))
    assert answers[0] == (0.0, True)
    assert answers[1][0] < 0


def test_processes_share_the_requests_and_agree(loaded, prepared, ours, monkeypatch):
    """Three processes one after the other, each seeing its own part: together they answer everything, each once."""
    request = instances("loglikelihood", [(f"def alpha{n % 5}(beta, gamma", f"{n})") for n in range(40)])
    expected = ours.loglikelihood(request)
    parts: list[dict] = []
    everyone = dict.fromkeys(range(40), (0.0, True))
    monkeypatch.setattr(Processes, "gather", lambda self, value: parts.append(value[0]) or [(everyone, None)])
    monkeypatch.setattr(Processes, "wait", lambda self: None)
    for rank in range(3):
        lm = ProjectLM(loaded.model, loaded.tokenizer, max_length=LENGTH, processes=Processes(rank, 3), progress=False)
        lm.loglikelihood(request)
    assert sum(map(len, parts)) == 40
    assert all(parts)
    merged = {number: answer for part in parts for number, answer in part.items()}
    assert [merged[i][0] for i in range(40)] == pytest.approx([value for value, _ in expected], abs=1e-5)


def test_an_error_of_one_process_is_everyones(monkeypatch):
    monkeypatch.setattr(Processes, "gather", lambda self, value: [({0: 1}, None), ({}, "OutOfMemoryError: full")])
    with pytest.raises(RuntimeError, match="another process: OutOfMemoryError: full"):
        Processes(0, 2).together(lambda: {0: 1})
    with pytest.raises(KeyError):
        Processes(1, 2).together(lambda: {}[0])


def test_an_answer_is_of_its_context_and_continuation():
    """The same tokens with another part of them asked are another question."""
    key = RequestCache(None, "a", Processes()).key
    asked = [("loglikelihood", [1, 2], [3]), ("loglikelihood", [1], [2, 3]), ("loglikelihood", [1], [3])]
    asked += [("rolling", [1, 2], [3]), ("generate", "ab", "c"), ("generate", "a", "bc")]
    assert len({key(kind, *map(ids_or_text, parts)) for kind, *parts in asked}) == len(asked)
    assert key("loglikelihood", np.array([1, 2], np.int32)) == key("loglikelihood", np.array([1, 2], np.int64))


def ids_or_text(part: list[int] | str) -> Any:
    return part if isinstance(part, str) else np.array(part)


def test_every_process_knows_what_all_answered(tmp_path, monkeypatch):
    monkeypatch.setattr(Processes, "wait", lambda self: None)
    for rank in range(2):
        RequestCache(tmp_path, "a", Processes(rank, 2)).add([(f"key {rank}", rank)])
    for rank in range(2):
        answers = RequestCache(tmp_path, "a", Processes(rank, 2))
        assert [answers.get(f"key {number}") for number in range(2)] == [0, 1]


def test_an_interrupted_evaluation_goes_on(loaded, ours, tmp_path, monkeypatch):
    request = instances("loglikelihood", [(f"def alpha{n}(", f"beta{n})") for n in range(30)])
    generation = instances("generate_until", [("def ", {"until": ["\n"], "max_gen_toks": 4})])
    expected = ours.loglikelihood(request), ours.generate_until(generation)
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
    assert third.scorer.read == 0, "everything was known"
    assert len(make(model="b").cache) == len(third.cache)
    other = make(model="b")
    other.loglikelihood(request)
    assert other.scorer.read > 0, "another model's answers are not taken"
    other.cache.remove()
    assert not folder.exists()
