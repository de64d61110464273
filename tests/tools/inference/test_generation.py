"""Decoding equals the full forward, batches equal single prompts, and text comes in whole characters."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from data.tokenizer import Tokenizer, load_tokenizer
from models.config import ModelConfig
from models.language_model import LanguageModel
from models.mixers import MIXERS
from tools.generate import main
from tools.inference import generation as decoding
from tools.inference.generation import TextStream, complete, generate, longest_continuation, prompt_ids, read_prefix
from tools.loading.model import load_model


def tiny(*mixers: str, **attention: object) -> LanguageModel:
    config = ModelConfig(
        vocab_size=64,
        num_layers=2,
        hidden_size=32,
        num_heads=2,
        mixers=mixers,
        mixer_options={"attention": attention} if attention else {},
        init_method="normal",
        init_std=0.2,
    )
    return LanguageModel(config, seed=3).eval()


WINDOW = {"window": 4, "num_kv_heads": 1, "output_gate": True, "yarn_factor": 2.0, "yarn_original_length": 16}


@pytest.mark.parametrize(
    ("mixers", "options"),
    [
        (("metala",), {}),
        (("attention",), {}),
        (("metala", "attention"), {}),
        (("gated_delta_net", "attention"), WINDOW),
    ],
)
def test_greedy_decoding_equals_the_full_forward(
    mixers: tuple[str, ...], options: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny(*mixers, **options)
    prompts = [[5, 9, 2, 33, 7, 1, 0, 61, 12], [17, 4], [8, 8, 8, 30]]
    seen: list[torch.Tensor] = []
    original = decoding._last_logits

    def recorded(*arguments: object) -> object:
        logits, state = original(*arguments)
        seen.append(logits.clone())
        return logits, state

    monkeypatch.setattr(decoding, "_last_logits", recorded)
    steps = list(generate(model, prompts, max_tokens=40, vocab_size=64, temperature=0.0))
    assert len(steps) == 40
    for row, prompt in enumerate(prompts):
        drawn = torch.tensor([step[row] for step in steps])
        whole = torch.cat([torch.tensor(prompt), drawn])[None]
        with torch.no_grad():
            logits = model(whole)[0, len(prompt) - 1 : -1]
        # The argmax of the full forward at every position, but for ties up to rounding.
        largest = logits.amax(-1, keepdim=True)
        torch.testing.assert_close(logits.gather(1, drawn[:, None]), largest, atol=1e-4, rtol=0)
        torch.testing.assert_close(torch.stack([s[row] for s in seen]), logits, atol=1e-4, rtol=0)


PREFIXED = [((name,), {}) for name in sorted(MIXERS.keys() - {"lion", "metala_bidirectional"})]


@pytest.mark.parametrize(("mixers", "options"), [*PREFIXED, (("metala", "attention"), WINDOW)])
def test_prompts_that_continue_a_prefix_equal_whole_prompts(
    mixers: tuple[str, ...], options: dict[str, object]
) -> None:
    model = tiny(*mixers, **options)
    prefix, rest = [5, 9, 2, 33, 7, 1, 0, 61, 12], [[17, 4, 1], [8], [3, 2]]
    state = read_prefix(model, prefix[4:], read_prefix(model, prefix[:4]))
    first = {"vocab_size": 64, "temperature": 0.0, "max_tokens": 12}
    whole = list(generate(model, [prefix + prompt for prompt in rest], **first))
    assert list(generate(model, rest, prefix=state, **first)) == whole
    assert list(generate(model, rest[:1], prefix=state, **first)) == [step[:1] for step in whole]


def test_the_state_keeps_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    original = decoding._last_logits

    def recorded(*arguments: object) -> object:
        logits, state = original(*arguments)
        sizes.append(sum(t.numel() for layer in state for t in layer.values()))
        return logits, state

    monkeypatch.setattr(decoding, "_last_logits", recorded)
    list(generate(tiny("metala"), [[1, 2, 3]], max_tokens=30, vocab_size=64))
    assert len(set(sizes)) == 1
    # A layer: heads x head_dim_k x head_dim_v, and kernel - 1 inputs of the convolution.
    assert sizes[0] == 2 * (2 * 8 * 16 + 3 * 32)


def test_batched_prompts_equal_single_prompts() -> None:
    model = tiny("metala", "attention")
    prompts = [[5, 9, 2, 33], [17, 4], [8]]
    together = list(generate(model, prompts, max_tokens=25, vocab_size=64, seed=7))
    for row, prompt in enumerate(prompts):
        alone = list(generate(model, [prompt], max_tokens=25, vocab_size=64, seed=7, first_row=row))
        assert [step[row] for step in together] == [step[0] for step in alone]
    other = list(generate(model, prompts, max_tokens=25, vocab_size=64, seed=8))
    assert other != together
    twice = list(generate(model, [[5, 9], [5, 9]], max_tokens=25, vocab_size=64, seed=7))
    assert [step[0] for step in twice] != [step[1] for step in twice], "each row has its own generator"


@pytest.mark.parametrize("options", [{"top_k": 1}, {"top_p": 1e-6}, {"temperature": 1e-4}])
def test_sampling_options_reach_the_draw(options: dict[str, float]) -> None:
    model = tiny("metala")

    def drawn(**given: float) -> list:
        return list(generate(model, [[5, 9], [17]], max_tokens=12, vocab_size=64, **given))

    greedy = drawn(temperature=0.0)
    assert drawn() != greedy
    assert drawn(**options) == greedy


@pytest.mark.parametrize("options", [{"temperature": -1.0}, {"top_k": -1}, {"top_p": 0.0}])
def test_sampling_options_out_of_range_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        next(generate(tiny("metala"), [[1]], max_tokens=1, vocab_size=64, **options))


def test_learned_positions_bound_a_text() -> None:
    config = ModelConfig(
        vocab_size=257,
        num_layers=1,
        hidden_size=32,
        num_heads=2,
        mixers=("attention",),
        positions="learned",
        max_positions=8,
    )
    model, tokenizer = LanguageModel(config, seed=3).eval(), load_tokenizer("bytes")
    assert longest_continuation(model, [1] * 3) == 6, "the last token is not read"
    assert longest_continuation(model, [1] * 12) == 0
    assert longest_continuation(tiny("metala"), [1] * 3) == float("inf")
    written = list(generate(model, [[1] * 3], max_tokens=6, vocab_size=257))
    assert len(written) == 6
    with pytest.raises(ValueError, match="max_positions = 8"):
        list(generate(model, [[1] * 3], max_tokens=7, vocab_size=257))
    assert complete(model, tokenizer, "abc", max_tokens=100) == complete(model, tokenizer, "abc", max_tokens=6)


def test_generation_ends_with_the_document_and_samples_ids_of_the_vocabulary() -> None:
    model = tiny("metala")
    prompts = [[3, 1], [9, 9, 9]]
    free = list(generate(model, prompts, max_tokens=60, vocab_size=50, seed=1))
    assert max(i for step in free for i in step) < 50
    stop = free[9][0]
    first = next(n for n, step in enumerate(free) if step[0] == stop)
    steps = list(generate(model, prompts, max_tokens=60, vocab_size=50, seed=1, stop_id=stop))
    assert [step[0] for step in steps[:first]] == [step[0] for step in free[:first]]
    assert all(step[0] is None for step in steps[first:])
    second = [step[1] for step in free]
    ends = second.index(stop) if stop in second else 60
    assert [step[1] for step in steps if step[1] is not None] == second[:ends]
    assert len(steps) == max(first, ends)


def test_prompts_without_tokens_are_refused() -> None:
    with pytest.raises(ValueError, match="a prompt has no tokens"):
        next(generate(tiny("metala"), [[1], []], max_tokens=1, vocab_size=64))


def streamed(tokenizer: Tokenizer, prompt: list[int], ids: list[int]) -> list[str]:
    stream = TextStream(tokenizer, prompt)
    return [*(stream.push(i) for i in ids), stream.finish()]


@pytest.mark.parametrize("kind", ["bytes", "sentencepiece"])
def test_only_whole_characters_are_streamed(kind: str, trained_run: Path) -> None:
    tokenizer = load_tokenizer("bytes") if kind == "bytes" else load_model(trained_run).tokenizer
    text = "größe = 値 + 🙂🙂\n    return naïve_値  # ▁ €uro"
    prompt = "def naïve(値): "
    ids = tokenizer.encode(text)
    pieces = streamed(tokenizer, tokenizer.encode(prompt), ids)
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)
    assert "" in pieces, "some tokens are parts of a character"


@settings(max_examples=100, deadline=None, derandomize=True)
@given(text=st.text(max_size=30), prompt=st.text(max_size=12))
def test_streamed_pieces_join_to_the_text(text: str, prompt: str) -> None:
    tokenizer = load_tokenizer("bytes")
    pieces = streamed(tokenizer, tokenizer.encode(prompt), tokenizer.encode(text))
    assert "".join(pieces) == text


def test_the_first_piece_is_decoded_as_one_that_follows_the_prompt(tmp_path: Path) -> None:
    """Decode with WordPiece, which puts a space between words and none before the first."""
    (tmp_path / "vocab.txt").write_text("\n".join(["[UNK]", "[SEP]", "[CLS]", "return", "value", "##s"]))
    tokenizer = load_tokenizer("wordpiece", tmp_path / "vocab.txt")
    assert streamed(tokenizer, [3], [4, 5, 3]) == [" value", "s", " return", ""]


def test_spaces_are_streamed_where_a_tokenizer_removes_them_at_the_start_of_a_text(tmp_path: Path) -> None:
    """Decode with SentencePiece, which removes all leading spaces, behind a space and behind a control token."""
    import sentencepiece

    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["the cat sat", "a cat", "the hat"] * 9), model_prefix=str(tmp_path / "m"), vocab_size=24,
        model_type="bpe", hard_vocab_limit=False, remove_extra_whitespaces=True, minloglevel=2,
    )  # fmt: skip
    tokenizer = load_tokenizer("sentencepiece", tmp_path / "m.model")
    space, cat = tokenizer.encode("x y")[0], [int(i) for i in tokenizer.encode("cat")]
    assert tokenizer.decode([space, *cat]) == "cat"
    prompt = [*cat, space]
    assert "".join(streamed(tokenizer, prompt, [*cat, space, space, *cat])) == " cat   cat"
    assert "".join(streamed(tokenizer, cat, [tokenizer.end_of_document_id, *cat])) == " cat"


def test_decoded_window_has_a_bounded_size(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, sizes = load_tokenizer("bytes"), []
    decode = tokenizer.decode
    monkeypatch.setattr(tokenizer, "decode", lambda ids: sizes.append(len(ids)) or decode(ids))
    text = "größe 🙂 " * 50
    assert "".join(streamed(tokenizer, tokenizer.encode("a long prompt"), tokenizer.encode(text))) == text
    assert max(sizes) <= 12


def test_incomplete_character_at_the_end_becomes_u_fffd() -> None:
    tokenizer = load_tokenizer("bytes")
    assert streamed(tokenizer, [], list("a🙂".encode())[:-1]) == ["a", "", "", "", "\ufffd"]


def test_complete(trained_run: Path) -> None:
    loaded = load_model(trained_run)
    text = complete(loaded.model, loaded.tokenizer, "def ", max_tokens=24, seed=2)
    assert text == complete(loaded.model, loaded.tokenizer, "def ", max_tokens=24, seed=2)
    assert text != complete(loaded.model, loaded.tokenizer, "def ", max_tokens=24, seed=3)
    assert prompt_ids(loaded.tokenizer, "") == [loaded.tokenizer.end_of_document_id]
    assert prompt_ids(load_tokenizer("bytes"), "") == [256]


def test_command(trained_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [str(trained_run), "--prompt", "def ", "--max-tokens", "20", "--device", "cpu"]
    assert main([*arguments, "--seed", "4"]) == 0
    shown = capsys.readouterr()
    loaded = load_model(trained_run)
    expected = complete(loaded.model, loaded.tokenizer, "def ", max_tokens=20, seed=4)
    assert shown.out == f"def {expected}\n"
    assert "tokens/s), step 30 of" in shown.err
    assert main([*arguments, "--greedy"]) == 0
    greedy = capsys.readouterr().out
    assert greedy != shown.out
    for options in (["--temperature", "0"], ["--top-k", "1"], ["--top-p", "1e-6"], ["--temperature", "1e-4"]):
        assert main([*arguments, *options]) == 0
        assert capsys.readouterr().out == greedy, options
    assert complete(loaded.model, loaded.tokenizer, "def ", max_tokens=20, top_k=1) == greedy[4:-1]
    assert main([*arguments, "--temperature", "2", "--top-p", "1"]) == 0
    hot = complete(loaded.model, loaded.tokenizer, "def ", max_tokens=20, temperature=2.0, top_p=1.0)
    assert capsys.readouterr().out == f"def {hot}\n"


def test_a_text_that_ends_within_a_character_shows_it(trained_run: Path, tmp_path: Path, capsys, monkeypatch) -> None:
    tokenizer = load_model(trained_run).tokenizer
    first, calls = tokenizer.encode("€")[:1], []
    monkeypatch.setattr(decoding, "generate", lambda *_, **given: calls.append(given) or iter([first]))
    assert main([str(trained_run), "--prompt", "def "]) == 0
    assert capsys.readouterr().out == "def \ufffd\n"
    (tmp_path / "prompts.txt").write_text("def \n")
    assert main([str(trained_run), "--prompts-file", str(tmp_path / "prompts.txt")]) == 0
    assert capsys.readouterr().out == "--- 1 of 1 ---\ndef \ufffd\n"
    assert {given["stop_id"] for given in calls} == {tokenizer.end_of_document_id}


def test_ctrl_c_ends_a_text_and_prints_its_number_of_tokens(trained_run: Path, capsys, monkeypatch) -> None:
    def two_tokens(*_: object, **__: object) -> Iterator[list[int]]:
        yield from ([70], [71])
        raise KeyboardInterrupt

    monkeypatch.setattr(decoding, "generate", two_tokens)
    assert main([str(trained_run), "--prompt", "def "]) == 130
    shown = capsys.readouterr()
    assert shown.out.startswith("def ")
    assert "2 tokens in" in shown.err


def test_command_with_a_file_of_prompts(trained_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = ["def ", "def alpha(beta, 値):\n".rstrip(), "    return", ""]
    # As Windows writes it: with a byte order mark and CRLF.
    (tmp_path / "prompts.txt").write_text("\n".join(prompts) + "\n", encoding="utf-8-sig", newline="\r\n")
    arguments = [str(trained_run), "--prompts-file", str(tmp_path / "prompts.txt"), "--max-tokens", "12"]
    texts = []
    for size in ("1", "3"):
        out = tmp_path / f"{size}.jsonl"
        assert main([*arguments, "--batch-size", size, "--out", str(out), "--device", "cpu"]) == 0
        texts.append([json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()])
    assert [line["prompt"] for line in texts[0]] == prompts
    assert texts[0] == texts[1], "the batch size changes nothing"
    assert f"--- 2 of 4 ---\n{prompts[1]}{texts[0][1]['text']}\n" in capsys.readouterr().out


@pytest.mark.parametrize(("batches", "prompts"), [(0, [None]), (2, ["a", "b"])])
def test_ctrl_c_replaces_the_output_file_only_with_texts(
    batches: int, prompts: list[str | None], trained_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "prompts.txt").write_text("a\nb\nc\n")
    out = tmp_path / "out.jsonl"
    out.write_text("{}\n")

    def interrupted(*_: object, first_row: int, **__: object) -> Iterator[list[int]]:
        assert out.read_text() == "{}\n", "the earlier file stays until the end"
        if first_row == batches:
            raise KeyboardInterrupt
        yield [70]

    monkeypatch.setattr(decoding, "generate", interrupted)
    words = ["--prompts-file", str(tmp_path / "prompts.txt"), "--batch-size", "1", "--out", str(out)]
    assert main([str(trained_run), *words]) == 130
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line.get("prompt") for line in lines] == prompts
    assert {path.name for path in tmp_path.iterdir()} == {"prompts.txt", "out.jsonl"}


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["{run}", "--top-p", "1.5"], "top_p = 1.5"),
        (["{run}", "--temperature", "-1"], "temperature = -1.0"),
        (["{tmp}/absent"], "does not exist"),
        (["{run}", "--prompts-file", "{tmp}/none.txt"], "none.txt: no such file; give a file with one prompt per line"),
        (["{tmp}/absent", "--prompts-file", "{tmp}/prompts.txt", "--out", "{tmp}/before.jsonl"], "does not exist"),
        (["{run}", "--prompts-file", "{tmp}/empty.txt"], "is empty: write one prompt per line"),
    ],
)
def test_bad_input(
    arguments: list[str], named: str, trained_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, text in (("empty.txt", ""), ("prompts.txt", "def "), ("before.jsonl", "{}")):
        (tmp_path / name).write_text(text)
    assert main([a.format(run=trained_run, tmp=tmp_path) for a in arguments]) == 2
    assert named in capsys.readouterr().err
    assert (tmp_path / "before.jsonl").read_text() == "{}", "what was there stays"
