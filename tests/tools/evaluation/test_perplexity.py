"""Perplexity equals a naive sum over positions, on every kind of text; results file of eval.py."""

import itertools
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import eval as evaluation
from data.indexed import IndexedTokens, IndexedWriter
from data.tokenizer import load_tokenizer
from megatron_lite.metrics.logger import read_metrics
from models.language_model import LanguageModel
from tests.tools.conftest import write_corpus
from tools.evaluation import loss_by_position as positions
from tools.evaluation.huggingface_text import HuggingFaceText, SummedLoss
from tools.evaluation.perplexity import cached, perplexity, raw_text, token_file_text, validation_text
from tools.evaluation.texts import open_cache, weights_of
from tools.loading.model import LoadedModel, load_model

LENGTH = 32


@pytest.fixture(scope="module")
def loaded(trained_run: Path) -> LoadedModel:
    return load_model(trained_run, device="cpu")


def naive(loaded: LoadedModel, stream: list[int], length: int = LENGTH) -> float:
    """Return the total nll of a stream, piece by piece, from log-softmax of the full logits."""
    total = 0.0
    tokens = [loaded.tokenizer.end_of_document_id, *stream]
    for start in range(0, len(stream), length):
        piece = tokens[start : start + length + 1]
        with torch.no_grad():
            logits = loaded.model(torch.tensor([piece[:-1]]))[0].double()
        scores = logits.log_softmax(-1)
        total -= sum(scores[i, token].item() for i, token in enumerate(piece[1:]))
    return total


def documents_of(prefix: Path) -> list[list[int]]:
    file = IndexedTokens(prefix)
    return [file[i].tolist() for i in range(len(file))]


def test_validation_set_of_the_run(loaded: LoadedModel) -> None:
    text = validation_text(loaded)
    documents = documents_of(text.prefix)
    stream = [token for document in documents for token in document]
    result = perplexity(loaded, text, progress=False)
    nll = naive(loaded, stream)
    assert result["tokens"] == len(stream)
    assert result["documents"] == len(documents)
    assert result["bytes"] == sum(len(loaded.tokenizer.decode(d[:-1]).encode()) for d in documents)
    assert result["loss"] == pytest.approx(nll / len(stream), rel=1e-5)
    assert result["perplexity"] == pytest.approx(math.exp(nll / len(stream)), rel=1e-4)
    assert result["bits_per_byte"] == pytest.approx(nll / math.log(2) / result["bytes"], rel=1e-5)
    assert result["loss"] < 0.8 * math.log(loaded.model.config.vocab_size), "the model has learned"


def test_loss_equals_the_reported_validation_loss(loaded: LoadedModel) -> None:
    reported = [line for line in read_metrics(loaded.run) if line["kind"] == "validation"][-1]
    result = perplexity(loaded, validation_text(loaded), progress=False)
    assert result["loss"] == pytest.approx(reported["loss"], rel=1e-6)


def test_documents_are_separate_with_reset_at_documents(loaded: LoadedModel) -> None:
    text = validation_text(loaded)
    documents = documents_of(text.prefix)
    stream = [loaded.tokenizer.end_of_document_id, *(token for document in documents for token in document)]
    starts = {1, *(1 + np.cumsum([len(document) for document in documents])).tolist()}
    bounds = sorted(starts | set(range(0, len(stream) - 1, LENGTH)))
    nll = 0.0
    for begin, end in itertools.pairwise([*(bound for bound in bounds if bound < len(stream) - 1), len(stream) - 1]):
        with torch.no_grad():
            scores = loaded.model(torch.tensor([stream[begin:end]]))[0].double().log_softmax(-1)
        nll -= sum(scores[i, token].item() for i, token in enumerate(stream[begin + 1 : end + 1]))
    data = {**loaded.config["data"], "reset_at_documents": True}
    apart = replace(loaded, config={**loaded.config, "data": data})
    result = perplexity(apart, text, batch_size=3, progress=False)
    assert result["loss"] == pytest.approx(nll / (len(stream) - 1), rel=1e-5)
    assert result["loss"] != pytest.approx(perplexity(loaded, text, progress=False)["loss"], rel=1e-3)


def test_batch_size_changes_nothing_and_length_is_the_context(loaded: LoadedModel) -> None:
    text = validation_text(loaded)
    one = perplexity(loaded, text, batch_size=1, progress=False)
    assert perplexity(loaded, text, batch_size=7, progress=False)["loss"] == pytest.approx(one["loss"], rel=1e-6)
    short = perplexity(loaded, text, sequence_length=5, progress=False)
    stream = [token for document in documents_of(text.prefix) for token in document]
    assert short["loss"] == pytest.approx(naive(loaded, stream, 5) / len(stream), rel=1e-5)
    assert short["tokens"] == one["tokens"]


@pytest.mark.parametrize(("length", "stride"), [(8, 3), (8, 8), (16, 1), (5000, 7)])
def test_stride_scores_every_token_once_with_more_context(loaded: LoadedModel, length: int, stride: int) -> None:
    text = validation_text(loaded)
    stream = [token for document in documents_of(text.prefix) for token in document][:60]
    with IndexedWriter(text.prefix.with_name(f"short_{length}_{stride}"), np.dtype("<u2")) as writer:
        writer.add_document(np.array(stream))
    short = replace(text, prefix=text.prefix.with_name(f"short_{length}_{stride}"))
    result = perplexity(loaded, short, sequence_length=length, stride=stride, progress=False)
    tokens, nll, scored = [loaded.tokenizer.end_of_document_id, *stream], 0.0, 0
    for begin in range(0, len(stream), stride):
        end = min(begin + length, len(stream))
        with torch.no_grad():
            scores = loaded.model(torch.tensor([tokens[begin:end]]))[0].double().log_softmax(-1)
        nll -= sum(scores[i - begin, tokens[i + 1]].item() for i in range(scored, end))
        scored = end
        if end == len(stream):
            break
    assert result["tokens"] == len(stream)
    assert result["stride"] == stride
    assert result["loss"] == pytest.approx(nll / len(stream), rel=1e-5)


def test_huggingface_folder_has_the_loss_of_its_run(trained_run: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    from tools.conversion.export_hf import export

    export(trained_run, tmp_path / "export")
    (tmp_path / "note.txt").write_text("def alpha(beta, gamma):\n    größe = alpha + 3\n" * 9, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    words = ["--data", "note.txt", "--device", "cpu", "--sequence-length", "24", "--stride", "10"]
    assert evaluation.main([str(trained_run), *words, "--out", "run.json"]) == 0
    assert evaluation.main(["export", *words, "--trust-remote-code"]) == 0
    assert "runs/evaluation/export/perplexity.json" in capsys.readouterr().out
    files = (Path("run.json"), Path("runs/evaluation/export/perplexity.json"))
    run, export_ = (json.loads(file.read_text())["results"]["perplexity"]["note.txt"] for file in files)
    assert export_["loss"] == pytest.approx(run["loss"], abs=1e-5)
    for key in ("tokens", "bytes", "documents", "sequence_length", "stride"):
        assert export_[key] == run[key]
    # Other weights in the same folder.
    export(trained_run / "checkpoints" / "step_00000010", tmp_path / "export", overwrite=True)
    (tmp_path / "more.txt").write_text("def beta")
    assert evaluation.main(["export", "--data", "more.txt", "--device", "cpu", "--trust-remote-code"]) == 0
    assert json.loads(files[1].read_text())["results"]["perplexity"].keys() == {"more.txt"}


def test_batches_of_a_hub_model_are_kept_by_name_and_commit(tmp_path: Path, capsys) -> None:
    batch = {"tokens": torch.arange(8).view(1, 8)}

    def measure(name: str, commit: str | None, value: float) -> float:
        """Return the value of the batch for a model, computed as `value` if the cache lacks it."""
        config = {"batch": {"sequence_length": 8}}
        text = HuggingFaceText(name, SummedLoss(torch.nn.Linear(1, 1)), None, torch.device("cpu"), config, 2, commit)
        return cached(open_cache(text, tmp_path / "results.json", weights_of(text)), "nll", batch, lambda: value)

    assert measure("org/tiny", "c0ffee", 1.5) == 1.5
    assert capsys.readouterr().err == ""
    assert measure("org/tiny", "c0ffee", 2.5) == 1.5
    assert "resuming with 1 batch of an interrupted evaluation" in capsys.readouterr().err
    assert measure("org/tiny", "facade", 3.5) == 3.5
    assert measure("org/other", "facade", 4.5) == 4.5
    assert measure("org/tiny", None, 5.5) == 5.5
    assert measure("org/tiny", None, 6.5) == 6.5


def test_raw_files(loaded: LoadedModel, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("def größe(値, total):\n    return 値\n", encoding="utf-8")
    text = raw_text(str(tmp_path / "a.txt"), loaded.tokenizer, tmp_path)
    result = perplexity(loaded, text, progress=False)
    stream = [
        *loaded.tokenizer.encode((tmp_path / "a.txt").read_text(encoding="utf-8")),
        loaded.tokenizer.end_of_document_id,
    ]
    assert (result["bytes"], result["documents"]) == ((tmp_path / "a.txt").stat().st_size, 1)
    assert result["loss"] == pytest.approx(naive(loaded, stream) / len(stream), rel=1e-5)
    write_corpus(tmp_path / "b.jsonl", documents=5)
    assert raw_text(str(tmp_path / "b.jsonl"), loaded.tokenizer, tmp_path).documents == 5


def test_token_files_without_a_manifest_count_bytes_by_decoding(loaded: LoadedModel, tmp_path: Path) -> None:
    texts = ["def alpha(beta):\n", "    return 🙂\n", "naïve"]
    end = loaded.tokenizer.end_of_document_id
    with IndexedWriter(tmp_path / "x_text_document", np.dtype("<u2")) as writer:
        for text in texts:
            writer.add_document(np.array([*loaded.tokenizer.encode(text), end]))
    read = token_file_text(tmp_path / "x_text_document", loaded.tokenizer)
    assert (read.bytes, read.documents) == (len("".join(texts).encode()), 3)


def test_token_file_of_document_ends_alone_is_refused(loaded: LoadedModel, tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "empty", np.dtype("<u2")) as writer:
        writer.add_document(np.array([loaded.tokenizer.end_of_document_id]))
    with pytest.raises(ValueError, match="empty holds no text: name another with --data"):
        token_file_text(tmp_path / "empty", loaded.tokenizer)


def test_ends_of_documents_have_no_bytes(tmp_path: Path) -> None:
    class Spelled:
        """Decode the end of a document as its name, like Hugging Face tokenizers."""

        type, path, vocab_size, end_of_document_id, hash = "hf", None, 3, 2, ""

        def decode(self, ids: list[int]) -> str:
            return "".join(["a", "é", "<|endoftext|>"][i] for i in ids)

    with IndexedWriter(tmp_path / "x", np.dtype("<u2")) as writer:
        writer.add_document(np.array([0, 1, 2]))
    assert token_file_text(tmp_path / "x", Spelled()).bytes == 3


def test_token_files_of_another_tokenizer_are_refused(loaded: LoadedModel, tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "other", np.dtype("<u2")) as writer:
        writer.add_document(np.array([1, 399, 4321]))
    with pytest.raises(ValueError, match="holds token 4321 and the checkpoint's tokenizer has 400 entries"):
        token_file_text(tmp_path / "other", loaded.tokenizer)
    with pytest.raises(ValueError, match="another tokenizer"):
        token_file_text(validation_text(loaded).prefix, load_tokenizer("bytes"))


def test_command_writes_and_extends_results(
    trained_run: Path, loaded: LoadedModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "results.json"
    assert evaluation.main([str(trained_run), "--out", str(out), "--device", "cpu"]) == 0
    shown = capsys.readouterr().out
    expected = perplexity(loaded, validation_text(loaded), progress=False)
    assert f"{expected['loss']:.4f}" in shown
    assert f"{expected['bits_per_byte']:.4f}" in shown
    first = json.loads(out.read_text())
    assert first["results"]["perplexity"]["validation"]["loss"] == pytest.approx(expected["loss"])
    assert first["results"]["perplexity"]["validation"]["dtype"] == "float32"
    assert (first["step"], first["checkpoint"]) == (30, str(loaded.checkpoint))

    note = tmp_path / "note.md"
    note.write_text("def alpha(beta, gamma):\n")
    words = ["--data", str(note), "--out", str(out), "--device", "cpu", "--dtype", "bf16"]
    assert evaluation.main([str(trained_run), *words]) == 0
    both = json.loads(out.read_text())["results"]["perplexity"]
    assert {name: row["dtype"] for name, row in both.items()} == {"validation": "float32", str(note): "bfloat16"}

    earlier = trained_run / "checkpoints" / "step_00000010"
    assert evaluation.main([str(earlier), "--data", str(note), "--out", str(out), "--device", "cpu"]) == 0
    other = json.loads(out.read_text())
    assert other["step"] == 10
    assert set(other["results"]["perplexity"]) == {str(note)}, "scores of another checkpoint are dropped"
    assert other["results"]["perplexity"][str(note)]["loss"] > both[str(note)]["loss"]
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


@pytest.mark.parametrize(
    ("options", "owner", "name"),
    [([], LanguageModel, "forward"), (["--by-position", "--sequence-length", "64"], positions, "token_nll")],
)
def test_interrupted_measurement_resumes(
    trained_run: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    options,
    owner,
    name,
) -> None:
    def measure(folder: str, stop_after: int | None = None) -> tuple[int, int]:
        """Return the exit status and the number of batches that the model has read."""
        calls = 0
        forward = getattr(owner, name)

        def counted(*arguments, **settings):
            nonlocal calls
            if calls == stop_after:
                raise KeyboardInterrupt
            calls += 1
            return forward(*arguments, **settings)

        with monkeypatch.context() as patch:
            patch.setattr(owner, name, counted)
            out = ["--out", str(tmp_path / folder / "results.json"), "--device", "cpu"]
            return evaluation.main([str(trained_run), *out, *options]), calls

    status, batches = measure("whole")
    assert status == 0
    assert batches >= 2
    assert measure("cut", stop_after=1) == (130, 1)
    assert "interrupted: the same command resumes" in capsys.readouterr().err
    assert measure("cut") == (0, batches - 1)
    assert "resuming with 1 batch of an interrupted evaluation" in capsys.readouterr().err
    whole, cut = (json.loads((tmp_path / folder / "results.json").read_text()) for folder in ("whole", "cut"))
    assert without_times(cut) == without_times(whole)
    assert not (tmp_path / "cut" / "perplexity_batches").exists()


def test_cached_batches_of_another_length_are_not_used(loaded: LoadedModel, tmp_path: Path) -> None:
    # 8 pieces of 32 tokens and 4 of 64 are the same tokens in the same order.
    text, settings = validation_text(loaded), {"sequence_length": 2 * LENGTH, "batch_size": 4, "progress": False}
    expected = perplexity(loaded, text, **settings)
    out = tmp_path / "results.json"
    perplexity(loaded, text, progress=False, cache=open_cache(loaded, out, weights_of(loaded)))
    measured = perplexity(loaded, text, **settings, cache=open_cache(loaded, out, weights_of(loaded)))
    assert measured["loss"] == expected["loss"]


@pytest.mark.parametrize("words", [[], ["--by-position"]])
def test_progress_bar_is_hidden_on_request(trained_run: Path, tmp_path: Path, monkeypatch, words: list[str]) -> None:
    hidden: list[bool] = []

    def bar(steps: Any, *, disable: bool, **_: Any) -> Any:
        hidden.append(disable)
        return steps

    monkeypatch.setattr("tools.evaluation.perplexity.ProgressBar", bar)
    out = ["--out", str(tmp_path / "results.json"), "--device", "cpu"]
    for more in ([], ["--no-progress"]):
        assert evaluation.main([str(trained_run), *out, *words, *more]) == 0
    assert hidden == [False, True]


def without_times(content: Any) -> Any:
    if not isinstance(content, dict):
        return content
    return {key: without_times(value) for key, value in content.items() if key not in ("seconds", "date")}


def test_results_file_is_in_the_run_folder(trained_run: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("total = count")
    assert evaluation.main([str(trained_run), "--data", str(tmp_path / "a.txt"), "--device", "cpu"]) == 0
    assert (trained_run / "results.json").is_file()
    (trained_run / "results.json").unlink()


def test_several_processes_are_refused_before_weights_are_loaded(trained_run: Path, monkeypatch, capsys) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr("tools.evaluation.texts.load_located", lambda _: pytest.fail("weights are loaded"))
    assert evaluation.main([str(trained_run), "--device", "cpu"]) == 2
    message = "WORLD_SIZE = 2: the perplexity of texts is measured by one process; start it without torchrun"
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["{tmp}/absent"], "does not exist"),
        (["{run}", "--data", "{tmp}/none.txt"], "none.txt does not exist"),
        (["{run}", "--data", "{tmp}/empty.txt"], "holds no text"),
        (["{run}", "--data", "{tmp}/rows.jsonl", "--text-key", "content"], "no key 'content'"),
        (["{run}", "--data", "{tmp}/half"], "half.idx does not exist"),
        (["{tmp}/hub"], "hub is a Hugging Face model and has no validation set: name a text with --data"),
        (["{tmp}/hub", "--data", "{tmp}/half"], "half: token files have another tokenizer than"),
        (["{tmp}/hub", "--data", "{tmp}/empty.txt", "--by-position"], "hub: --by-position needs a run"),
        (["{run}", "--stride", "8", "--by-position"], "--stride and --by-position cannot be combined"),
        (["{run}", "--stride", "33"], "--stride 33: allowed are 1 to 32, the tokens per piece"),
    ],
)
def test_bad_input(
    arguments: list[str], named: str, trained_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "half.bin").write_bytes(b"1234")
    (tmp_path / "hub").mkdir()
    (tmp_path / "hub" / "config.json").write_text("{}")
    assert evaluation.main([a.format(run=trained_run, tmp=tmp_path) for a in arguments]) == 2
    assert named in capsys.readouterr().err
