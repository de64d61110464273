"""`python eval.py` with suites: results, tables, Hugging Face models and refused input."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from argparse import Namespace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import eval as command
from tests.parity.launch import launch_forked
from tools import convert_hf
from tools.evaluation import run_results
from tools.evaluation.harness import prepare_tasks
from tools.evaluation.open_model import checkpoint_hash, locate_model, open_model
from tools.evaluation.options import evaluation_parser
from tools.evaluation.report import latex
from tools.evaluation.request import EvaluationRequest, TaskRequest
from tools.evaluation.results_file import read_results
from tools.evaluation.run_results import add_to_run
from tools.evaluation.suites import read_suite, task_suite
from tools.evaluation.tables import suite_table
from tools.loading.model import load_model
from tools.reporting.tables import plain_table

BOTH = ["--suite", "superglue,commonsense", "--device", "cpu", "--max-length", "96"]


@pytest.fixture(scope="module")
def evaluated(trained_run: Path, eval_data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Return the results file of both suites, and the output."""
    import contextlib
    import io

    out, printed = tmp_path_factory.mktemp("evaluated") / "results.json", io.StringIO()
    with contextlib.redirect_stdout(printed):
        arguments = [str(trained_run), *BOTH, "--data-dir", str(eval_data), "--out", str(out), "--samples"]
        assert command.main(arguments) == 0
    return out, printed.getvalue()


def test_results_have_the_harness_format(evaluated, trained_run):
    content = read_results(evaluated[0])
    assert {"results", "configs", "versions", "n-shot", "n-samples", "higher_is_better", "config"} <= content.keys()
    assert {"git_hash", "date", "lm_eval_version", "task_hashes", "group_subtasks"} <= content.keys()
    assert content["results"]["boolq"]["acc,none"] == pytest.approx(np.mean(values(content, "boolq", "acc")))
    assert content["results"]["boolq"]["acc_stderr,none"] > 0
    assert content["n-samples"]["piqa"] == {"original": 8, "effective": 8}
    assert content["n-shot"]["piqa"] == 0
    assert content["config"]["limit"] is None
    section = content["metalion"]
    assert section["model"]["sha256"] == checkpoint_hash(load_model(trained_run, device="cpu").checkpoint)
    assert all(len(digest) == 64 for files in section["data"].values() for digest in files.values())
    assert section["truncated"]["boolq"] > 0
    assert section["longest_request"] > section["max_length"] == 96
    assert section["tokens_read"] < section["tokens_asked"]
    assert section["chance"]["hellaswag"] == 0.25
    assert len(section["documents"]["multirc"]["exact_match"]["ids"]) == 3
    (samples,) = evaluated[0].parent.glob("samples_copa_*.jsonl")
    assert len(samples.read_text().splitlines()) == 8
    assert not (evaluated[0].parent / "answers").exists()


def values(content: dict[str, Any], task: str, metric: str) -> list[float]:
    return content["metalion"]["documents"][task][metric]["values"]


def test_tables_contain_the_published_rows(evaluated):
    out, printed = evaluated
    for text in (printed, out.with_suffix(".md").read_text(), out.with_suffix(".tex").read_text()):
        assert "MetaLA 360M (paper), 15B tokens" in text
        assert "44.05" in text
        assert "42.52" in text
        assert "prompt and answer together were longer than 96 tokens" in text
        assert "Average: the mean of the seven columns" in text
    assert "acc (harness)" in printed
    assert re.search(r"multirc .* exact_match", printed)
    assert out.with_suffix(".png").stat().st_size > 20_000
    tex = out.with_suffix(".tex").read_text()
    assert tex.count(r"\begin{tabular}") == tex.count(r"\end{tabular}") == 2
    assert r"acc\_norm" in tex
    for columns, body in re.findall(r"\\begin\{tabular\}\{(lr*)\}(.*?)\\end\{tabular\}", tex, re.DOTALL):
        rows = [line for line in body.splitlines() if line.endswith(r" \\")]
        assert len(rows) >= 5
        assert {len(re.findall(r"(?<!\\)&", row)) for row in rows} == {len(columns) - 1}
    bare = re.sub(r"\\[{}]", "", tex)
    assert bare.count("{") == bare.count("}")
    comments = [line for line in tex.splitlines() if re.search(r"(?<!\\)%.", line)]
    assert {line.startswith("% needs") for line in comments} == {True}, "an unescaped % hides the rest of its line"


def test_averages_are_means_of_their_columns(evaluated):
    content = read_results(evaluated[0])
    table = suite_table(read_suite("superglue"), [("m", content)])
    cells = table.rows[0].cells
    mean = np.mean([cells[label][0] for label in ("WSC", "WiC", "RTE", "CB", "MultiRC", "BoolQ", "COPA")])
    assert table.average_of(table.rows[0]) == pytest.approx(mean)
    assert table.chance["COPA"] == table.chance["BoolQ"] == 50
    assert not table.chance.keys() & {"CB", "MultiRC"}, "F1 and exact match have no chance level"
    commonsense = suite_table(read_suite("commonsense"), [("m", content)])
    assert "LAMBADA" not in commonsense.average
    cells = commonsense.rows[0].cells
    assert cells.keys() > set(commonsense.average)
    mean = np.mean([cells[label][0] for label in commonsense.average])
    assert commonsense.average_of(commonsense.rows[0]) == pytest.approx(mean)
    assert commonsense.rows[0].cells["LAMBADA ppl"][0] == content["results"]["lambada_openai"]["perplexity,none"]
    assert commonsense.rows[0].cells["ARC-c"][0] == 100 * content["results"]["arc_challenge"]["acc_norm,none"]
    latex([table, commonsense])
    plain_table(*table.text_rows())


def test_excluded_task_has_an_empty_cell_and_no_average(trained_run, eval_data, tmp_path, capsys):
    arguments = [str(trained_run), "--suite", "superglue", "--without", "wic,multirc,boolq", "--device", "cpu"]
    assert command.main([*arguments, "--data-dir", str(eval_data), "--out", str(tmp_path / "r.json")]) == 0
    row = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("tiny, step 30"))
    assert row.split()[4] == "-"
    assert row.split()[-1] == "-"


def test_scores_of_named_filters_are_added_to_the_run(trained_run, tmp_path):
    from tools.evaluation.command import _add_to_run

    filtered = {"alias": "gsm8k", "exact_match,strict-match": 0.25, "exact_match_stderr,strict-match": "N/A"}
    results = {"results": {"gsm8k": {**filtered, "exact_match,flexible-extract": 0.5}}, "metalion": {}}
    loaded = dataclasses.replace(load_model(trained_run, device="cpu"), run=tmp_path)
    _add_to_run(loaded, results, Namespace(suites=[task_suite(["gsm8k"])]))
    assert json.loads((tmp_path / "results.json").read_text())["results"]["tasks"] == {
        "gsm8k": {"exact_match,strict-match": 0.25, "exact_match,flexible-extract": 0.5}
    }


def test_scores_of_another_checkpoint_are_replaced(trained_run, tmp_path):
    scores = {"copa": {"acc": 0.5}}
    for step, suite in (("step_00000010", "one"), ("step_00000030", "two"), ("step_00000030", "three")):
        loaded = load_model(trained_run / "checkpoints" / step, device="cpu")
        add_to_run(dataclasses.replace(loaded, run=tmp_path), {suite: scores}, {suite: scores})
    content = json.loads((tmp_path / "results.json").read_text())
    assert content["step"] == 30
    assert content["results"].keys() == content["details"].keys() == {"two", "three"}


def test_scores_of_other_weights_are_replaced(trained_run, tmp_path, monkeypatch):
    scores = {"copa": {"acc": 0.5}}
    loaded = dataclasses.replace(load_model(trained_run, device="cpu"), run=tmp_path)
    for weights, suite in (("a", "one"), ("b", "two"), ("b", "three")):
        monkeypatch.setattr(run_results, "checkpoint_hash", lambda _, weights=weights: weights)
        add_to_run(loaded, {suite: scores}, {suite: scores})
    content = json.loads((tmp_path / "results.json").read_text())
    assert content["weights"] == "b"
    assert content["results"].keys() == content["details"].keys() == {"two", "three"}


def test_results_are_written_before_the_run_results(trained_run, eval_data, tmp_path, monkeypatch, capsys):
    from tools.evaluation import command as suites

    monkeypatch.setattr(suites, "_add_to_run", lambda *_: (_ for _ in ()).throw(ValueError("a damaged summary")))
    words = [str(trained_run), "--tasks", "copa", "--device", "cpu", "--data-dir", str(eval_data)]
    assert command.main([*words, "--out", str(tmp_path / "r.json")]) == 2
    assert "a damaged summary" in capsys.readouterr().err
    assert values(read_results(tmp_path / "r.json"), "copa", "acc")
    assert (tmp_path / "r.md").is_file()


def tiny_huggingface(folder: Path, kind: str, tokenizer: Path) -> Path:
    """Write a random Hugging Face model of a few thousand weights, and its tokenizer."""
    from transformers import (
        GPTNeoXConfig,
        GPTNeoXForCausalLM,
        LlamaConfig,
        LlamaForCausalLM,
        MambaConfig,
        MambaForCausalLM,
        PreTrainedTokenizerFast,
    )

    size = {"vocab_size": 500, "hidden_size": 16, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "intermediate_size": 32, "max_position_embeddings": 128}
    torch.manual_seed(0)
    model: Any = {
        "gpt_neox": lambda: GPTNeoXForCausalLM(GPTNeoXConfig(**size, **heads)),
        "llama": lambda: LlamaForCausalLM(LlamaConfig(**size, **heads)),
        "mamba": lambda: MambaForCausalLM(MambaConfig(**size, state_size=4)),
    }[kind]()
    model.save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_file=str(tokenizer), eos_token="<|endoftext|>").save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import tokenizers

    model = tokenizers.ByteLevelBPETokenizer()
    model.train_from_iterator(["alpha beta gamma state decay"] * 20, vocab_size=300, special_tokens=["<|endoftext|>"])
    path = tmp_path_factory.mktemp("bpe") / "tokenizer.json"
    model.save(str(path))
    return path


MAMBA = pytest.param(
    "mamba",
    marks=pytest.mark.skipif(
        find_spec("triton") is not None,
        reason="where there is Triton, transformers' Mamba takes a kernel that needs a GPU",
    ),
)


@pytest.mark.parametrize("kind", ["gpt_neox", "llama", MAMBA])
def test_huggingface_model_is_in_the_same_table(kind, bpe, eval_data, evaluated, tmp_path, capsys):
    folder = tiny_huggingface(tmp_path / kind, kind, bpe)
    out = tmp_path / "out" / "results.json"
    arguments = [str(folder), "--suite", "superglue", "--device", "cpu", "--max-length", "128"]
    assert command.main([*arguments, "--data-dir", str(eval_data), "--out", str(out)]) == 0
    assert command.main(["table", str(evaluated[0]), str(out), "--out", str(tmp_path / "both.md")]) == 0
    printed = capsys.readouterr().out
    assert re.search(rf"^tiny, step 30 .*\n± .*\n{kind} .*\n± .*\nMetaLA 360M", printed, flags=re.M)
    assert (tmp_path / "both.png").is_file()
    assert len(read_results(out)["metalion"]["model"]["sha256"]) == 64
    assert command.main(["compare", str(evaluated[0]), str(out)]) == 0
    assert re.search(r"copa +acc ↑ +8 ", capsys.readouterr().out)


def test_code_of_a_model_runs_only_with_the_flag(trained_run, eval_data, tmp_path, capsys):
    assert convert_hf.main(["export", str(trained_run), str(tmp_path / "exported")]) == 0
    folder = (tmp_path / "exported").rename(tmp_path / "brought")
    (folder / "SHA256SUMS").unlink()
    with (folder / "modeling_metalion.py").open("a") as source:
        source.write(f"\nopen({str(tmp_path / 'ran')!r}, 'w').close()\n")
    words = [str(folder), "--tasks", "copa", "--device", "cpu", "--data-dir", str(eval_data), "--no-progress"]
    assert command.main(words) == 2
    assert not (tmp_path / "ran").exists()
    assert f"error: {folder}: it contains Python code" in (printed := capsys.readouterr().err)
    assert "--trust-remote-code" in printed
    assert command.main([*words, "--trust-remote-code", "--out", str(tmp_path / "results.json")]) == 0
    assert (tmp_path / "ran").exists()
    assert "Running loglikelihood" not in capsys.readouterr().err


def test_cache_of_a_model_is_not_used_for_another_of_its_name(bpe, eval_data, tmp_path, monkeypatch):
    """Also count truncated requests that were answered before the interruption."""
    from tools.evaluation import command as suites
    from tools.evaluation.huggingface import HuggingFaceLM

    calls: list[int] = []
    score = HuggingFaceLM._loglikelihood_tokens
    monkeypatch.setattr(
        HuggingFaceLM, "_loglikelihood_tokens", lambda *a, **k: calls.append(len(a[1])) or score(*a, **k)
    )
    monkeypatch.chdir(tmp_path)  # no --out: both are runs/evaluation/exported
    words = ["--tasks", "copa", "--device", "cpu", "--data-dir", str(eval_data), "--max-length", "48"]
    one, two = (str(tiny_huggingface(tmp_path / kind / "exported", kind, bpe)) for kind in ("llama", "gpt_neox"))
    with monkeypatch.context() as stopped:
        stopped.setattr(suites, "write_json", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        assert command.main([one, *words]) == 130
        assert command.main([one, *words, "--max-length", "64"]) == 130
    assert calls == [16, 16]
    assert command.main([two, *words, "--out", "runs/evaluation/exported/two.json"]) == 0
    assert calls == [16, 16, 16]
    assert command.main([one, *words]) == 0
    assert calls == [16, 16, 16], "its own answers are cached"
    section = read_results(Path("runs/evaluation/exported"))["metalion"]
    assert section["requests"] == {"copa": 16}
    assert 0 < section["truncated"]["copa"] <= 16
    assert section["longest_request"] > 49


def test_cache_depends_on_weights_number_format_and_length(trained_run, tmp_path):
    earlier = trained_run / "checkpoints" / "step_00000010"
    keys = []
    for model, *more in (
        [trained_run],
        [earlier],
        [trained_run, "--dtype", "bf16"],
        [trained_run, "--max-length", "16", "--name", "short"],
    ):
        words = [str(model), "--tasks", "copa", "--device", "cpu", "--out", str(tmp_path / "results.json"), *more]
        request = EvaluationRequest.from_options(evaluation_parser().parse_args(words))
        opened = open_model(request, locate_model(request), "suites")
        keys.append(opened.lm.cache.key("generate", "def "))
        opened.finish()
    assert len(set(keys)) == 4
    assert opened.name == opened.lm.name == "short"


def test_too_large_tokenizer_is_refused(bpe, eval_data, tmp_path, capsys):
    import tokenizers

    folder = tiny_huggingface(tmp_path / "model", "llama", bpe)
    model = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    model.add_tokens([f"<extra{i}>" for i in range(300)])
    model.save(str(folder / "tokenizer.json"))
    arguments = [str(folder), "--suite", "superglue", "--device", "cpu", "--data-dir", str(eval_data)]
    assert command.main(arguments) == 2
    assert "it is not the model's tokenizer" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--suite", "superglu"], r"there is no suite 'superglu' \(a .yml file .*\); did you mean superglue\?\n"),
        (["--suite", "nedle"], r"there is no suite 'nedle' .*; did you mean needle\?\n"),
        (["--suite", "own.yml"], r"the suite own.yml does not exist; give the path of a .yml file"),
        (
            ["--tasks", "copa", "--data-dir", "{tmp}"],
            r"copa: the data folder lacks its file, .*super_glue/copa/validation",
        ),
        (
            ["--suite", "superglue", "--hub", "--data-dir", "{tmp}/nope"],
            r"--data-dir .*/nope: no such folder. Name a folder with the data sets .* leave --data-dir out: .* from the hub",
        ),
        (
            ["--suite", "superglue", "--without", "copaa"],
            r"--without copaa: it is none of the requested tasks; did you mean copa\?",
        ),
        (["--tasks", "logiqa"], "logiqa: its data set on the hub is a script"),
        (["--suite", "superglue", "--without", "wsc,wic,sglue_rte,cb,multirc,boolq,copa"], "nothing to evaluate"),
    ],
)
def test_bad_input(trained_run, tmp_path, arguments, message, capsys):
    words = [word.format(tmp=tmp_path) for word in arguments]
    assert command.main([str(trained_run), "--device", "cpu", *words]) == 2
    assert re.search(message, capsys.readouterr().err)


def test_tilde_of_the_data_folder_is_the_home_folder(eval_data, monkeypatch):
    monkeypatch.setenv("HOME", str(eval_data.parent))
    prepared = prepare_tasks(TaskRequest(tasks=("copa",), data_dir=Path("~", eval_data.name)))
    assert prepared.request.data_dir == eval_data
    with pytest.raises(FileNotFoundError, match=rf"--data-dir {eval_data.parent}/nope: no such folder"):
        prepare_tasks(TaskRequest(tasks=("copa",), data_dir=Path("~/nope")))


def test_a_changed_tokenizer_is_refused(trained_run, tmp_path, eval_data, capsys):
    copy = tmp_path / "run"
    shutil.copytree(trained_run, copy)
    description = json.loads((copy / "tokenizer/description.json").read_text())
    (copy / "tokenizer/description.json").write_text(json.dumps({**description, "hash": "0" * 32}))
    (copy / "tokenizer/SHA256SUMS").unlink()  # as earlier versions wrote it
    assert command.main([str(copy), "--tasks", "copa", "--data-dir", str(eval_data), "--device", "cpu"]) == 2
    assert "was changed after training" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["{}", "[1]", "not json"])
def test_a_file_that_is_no_result(tmp_path, text, capsys):
    (tmp_path / "a.json").write_text(text)
    assert command.main(["compare", str(tmp_path / "a.json"), str(tmp_path / "a.json")]) == 2
    assert str(tmp_path / "a.json") in capsys.readouterr().err
    assert command.main(["table", str(tmp_path / "b.json")]) == 2


def test_two_processes_write_what_one_writes(trained_run, eval_data, evaluated, tmp_path):
    out = tmp_path / "results.json"
    words = [str(trained_run), *BOTH, "--data-dir", str(eval_data), "--out", str(out)]
    output = launch_forked("eval", 2, *words)
    one, two = read_results(evaluated[0]), read_results(out)
    for task, metrics in one["results"].items():
        for key, value in metrics.items():
            actual = two["results"][task][key]
            assert actual == (pytest.approx(value, rel=1e-5) if isinstance(value, float) else value), (task, key)
    assert one["task_hashes"] == two["task_hashes"]
    assert output.count("SuperGLUE") == 1
    assert not (tmp_path / "answers").exists()
