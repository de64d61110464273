"""The text of a comparison: held-out documents, token files and corpora that changed or are missing."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from data.atomic_io import write_text
from data.corpus.discovery import source_files
from data.preprocessing.encode import PreprocessingSettings
from data.preprocessing.pipeline import preprocess
from megatron_lite.config.data_schema import DataConfig
from tests.data.inline_pool import Inline
from tests.tools.compare.test_ladder import laddered
from tools import inspect_data
from tools.compare import held_out
from tools.compare.__main__ import prepare_runs
from tools.compare.held_out import check_held_out, compressors_of, training_tokens_of
from tools.compare.launcher import check_text, write_runs
from tools.compare.token_files import check_token_files, write_token_files
from tools.loading.token_data import prepared_data


@pytest.fixture
def text(tmp_path, monkeypatch) -> Any:
    """Return a function that writes training and validation text, and the runs of a ladder on it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("data.preprocessing.pipeline._pool", lambda settings, workers: Inline(settings))
    monkeypatch.setattr(Inline, "stop_at", None)

    def write(train: list[str], validation: list[str]) -> Any:
        data = {"corpus": None, "tokenizer": {"type": "bytes"}}
        for name, texts in (("train", train), ("validation", validation)):
            path = tmp_path / f"{name}.jsonl"
            path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
            preprocess(source_files(path), tmp_path / name, PreprocessingSettings("bytes"), progress=False)
            data[name] = str(tmp_path / f"{name}_text_document")
        config = SimpleNamespace(
            data=DataConfig.model_validate(data),
            model=SimpleNamespace(vocab_size=384),
            batch=SimpleNamespace(tokens_of=lambda steps: steps * 64, sequence_length=2),
            schedule=SimpleNamespace(train_steps=20),
            logging=SimpleNamespace(loss_by_source=True),
        )
        return [SimpleNamespace(name="metala-s-1x-seed1", config=config, causal=True)]

    return write


def test_held_out_text_that_training_holds_is_refused(text, monkeypatch, capsys) -> None:
    planned = laddered()
    ladder = planned.ladder
    runs = text(["a b c " * 100, "shared by both"], ["something else", "shared by both"])
    with pytest.raises(
        ValueError, match=r"shares 1 document with .*document 1 \(.*'shared by both'\): equals a training"
    ) as caught:
        check_held_out(planned, ladder, runs)
    command = shlex.split(str(caught.value).partition("To list all: python -m tools.inspect_data ")[2])
    capsys.readouterr()
    assert inspect_data.main(command) == 1
    assert "documents in the training text: 1 of 2, 1 equal and 0 with at least 90%" in capsys.readouterr().out
    runs = text(["a b c " * 100], ["something else " * 50])
    check_held_out(planned, ladder, runs)
    assert 0 < compressors_of(planned)["xz -9"] < 2
    assert training_tokens_of(planned) == 600
    monkeypatch.setattr(held_out, "shared_documents", lambda *_, **__: pytest.fail("the text has not changed"))
    check_held_out(planned, ladder, runs)
    with pytest.raises(pytest.fail.Exception, match="the text has not changed"):
        check_held_out(planned, ladder, text(["a b c " * 100], ["something new " * 50]))
    runs = text(["a b c " * 100], ["something else " * 50])
    runs[0].config.schedule.train_steps = 60
    with pytest.raises(
        ValueError, match=r"3,840 tokens / 600 training tokens = 6\.4 passes .*max_passes = 4 is allowed"
    ):
        check_held_out(planned, ladder, runs)
    runs[0].config.schedule.train_steps = 1
    with pytest.raises(ValueError, match=r"64 tokens / 600 training tokens = 0\.107 passes .*max_passes = 0\.1 is"):
        check_held_out(planned, ladder.model_copy(update={"max_passes": 0.1}), runs)


def test_token_files_that_changed_since_the_runs_began_are_refused(text, tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "tiny"

    def check(*validation: str) -> None:
        (run,) = text(["a b c " * 100], list(validation))
        run.folder, run.file, run.text = folder / run.name, folder / run.name / "run.yml", ""
        write_runs([run], check_text([run]))

    check("one")
    check("two")  # no run has begun
    write_text(folder / "metala-s-1x-seed1" / "metrics.jsonl", "")
    check("two")
    with pytest.raises(
        ValueError, match=r"validation_text_document has other content than when the runs in .*tiny began"
    ):
        check("one")
    assert set(json.loads((folder / "token_files.json").read_text())) == {
        str(tmp_path / f"{name}_text_document") for name in ("train", "validation")
    }
    check("two")
    # A folder of an earlier version, and token files of another project.
    (folder / "token_files.json").unlink()
    (tmp_path / "validation_text_document.json").unlink()
    (run,) = text(["a b c " * 100], ["two"])
    (tmp_path / "validation_text_document.json").unlink()
    texts = [prepared_data(run.config.data, run.config.model.vocab_size)]
    check_token_files(folder, texts)
    write_token_files(folder, texts)
    assert set(json.loads((folder / "token_files.json").read_text())) == {str(tmp_path / "train_text_document")}


def test_a_refused_text_leaves_no_file_of_a_run(text, monkeypatch, capsys) -> None:
    runs = text(["a b c " * 100, "shared by both"], ["something else", "shared by both"])
    planned = laddered()
    for run in runs:
        run.folder, run.file, run.text = planned.folder / run.name, planned.folder / run.name / "run.yml", ""
    with pytest.raises(ValueError, match="shares 1 document with the training text"):
        prepare_runs(planned, runs)
    assert not planned.folder.exists()


def test_missing_and_damaged_token_files_are_refused_before_the_training(text, tmp_path: Path) -> None:
    (run,) = text(["a b c " * 100], ["something else"])
    run.folder = tmp_path / "runs" / run.name
    name = run.config.data.validation
    for prefix in ("train", "validation"):
        (tmp_path / f"{prefix}.jsonl").write_text('{"text": "one", "meta": {"pile_set_name": "A"}}\n')
        file = source_files(tmp_path / f"{prefix}.jsonl")
        preprocess(file, tmp_path / prefix, PreprocessingSettings("bytes"), progress=False)
    assert check_text([run])[0].prefixes == [
        str(tmp_path / f"{side}_text_document") for side in ("train", "validation")
    ]
    Path(f"{name}.sources.npy").write_bytes(b"")
    with pytest.raises(ValueError, match=r"validation_text_document\.sources\.npy is empty: 0 bytes of 130"):
        check_text([run])
    run.config.batch.sequence_length, run.config.logging.loss_by_source = 100, False
    with pytest.raises(
        ValueError, match=r"batch\.sequence_length = 100: the token file .*train_text_document holds 3 tokens"
    ):
        check_text([run])
    run.config.batch.sequence_length = 2
    run.config.data = run.config.data.model_copy(update={"validation": "missing"})
    with pytest.raises(FileNotFoundError, match=r"missing\.idx does not exist"):
        check_text([run])


def test_positions_and_recall_are_not_measured_on_changed_text(text, tmp_path: Path) -> None:
    def runs(validation: str) -> Any:
        (run,) = text(["a b c " * 100], [validation])
        run.folder, run.measurable = tmp_path / "runs" / run.name, True
        run.file, run.text = run.folder / "run.yml", ""
        return [run]

    trained = runs("one")
    write_runs(trained, check_text(trained))
    write_text(trained[0].folder / "metrics.jsonl", "")
    changed = runs("two")
    for measure in (held_out.measure_positions, held_out.measure_recall):
        with pytest.raises(ValueError, match="has other content than when the runs in"):
            measure(changed, "cpu")


def test_a_corpus_that_changed_since_the_runs_began_is_refused(text, tmp_path: Path) -> None:
    (run,) = text(["a b c " * 100], ["one"])
    run.folder, run.file, run.text = tmp_path / "runs" / run.name, tmp_path / "runs" / run.name / "run.yml", ""
    run.config.logging.loss_by_source = False
    corpus = tmp_path / "corpus.jsonl"
    data = {"corpus": str(corpus), "tokenizer": {"type": "bytes"}, "cache_directory": str(tmp_path / "cache")}
    run.config.data = DataConfig.model_validate(data)

    def check(documents: int) -> None:
        corpus.write_text("".join(json.dumps({"text": f"document {n}"}) + "\n" for n in range(documents)))
        write_runs([run], check_text([run]))

    check(20)
    write_text(run.folder / "metrics.jsonl", "")
    check(20)  # written again with the same content
    with pytest.raises(
        ValueError, match=r'text_document of data\.corpus {"corpus":".*corpus\.jsonl",.* has other content than'
    ):
        check(30)
