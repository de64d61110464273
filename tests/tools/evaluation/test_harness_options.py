"""Options of the harness: limit, groups, tags, own tasks, chat template, system instruction, seeds, generation arguments."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from lm_eval.utils import get_file_task_name, get_results_filenames, get_sample_results_filenames

import eval as command
from data.tokenizer import load_tokenizer
from tests.tools.evaluation.conftest import write_rows
from tools.conversion.model_card import _evaluation
from tools.evaluation.adapter import ProjectLM
from tools.evaluation.chat import check_chat_template
from tools.evaluation.harness import evaluate, prepare_tasks
from tools.evaluation.options import evaluation_parser
from tools.evaluation.request import EvaluationRequest, TaskRequest
from tools.evaluation.results_file import read_results
from tools.evaluation.task_factory import LocalDataFactory
from tools.evaluation.tasks import task_manager
from tools.loading.model import LoadedModel, load_model

CHOICE = """
task: written_choice
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_target: label
doc_to_choice: [alpha, beta, gamma]
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""
WRITING = """
task: written_generation
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{label}}"
generation_kwargs: {until: ["!!"], max_gen_toks: 4}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
"""
GROUP = """
group: written_group
task: [written_choice, copa]
aggregate_metric_list: [{metric: acc, weight_by_size: true}]
"""


@pytest.fixture(scope="module")
def task_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a choice task of 12 rows, a generation task and a group."""
    folder = tmp_path_factory.mktemp("task_folder")
    rows = [{"question": f"def alpha{n} ", "label": 0 if n % 4 else 2} for n in range(12)]
    write_rows(folder / "rows.jsonl", rows)
    for name, text in (("choice", CHOICE), ("writing", WRITING), ("group", GROUP)):
        (folder / f"{name}.yaml").write_text(text.replace("DATA", str(folder / "rows.jsonl")))
    return folder


@pytest.fixture(scope="module")
def loaded(trained_run: Path) -> LoadedModel:
    return load_model(trained_run, device="cpu")


@pytest.fixture(scope="module")
def limited(trained_run: Path, eval_data: Path, task_folder: Path, tmp_path_factory) -> tuple[Path, str]:
    """Return the results file of a group and a tag with --limit 6, and the output."""
    import contextlib
    import io

    out, printed = tmp_path_factory.mktemp("limited") / "results.json", io.StringIO()
    words = ["--tasks", "written_group,ai2_arc", "--include_path", str(task_folder), "--limit", "6", "--log_samples"]
    place = ["--device", "cpu", "--data-dir", str(eval_data), "--max-length", "96", "--out", str(out)]
    with contextlib.redirect_stdout(printed):
        assert command.main([str(trained_run), *words, *place]) == 0
    return out, printed.getvalue()


def test_limit_is_in_every_output(limited: tuple[Path, str]) -> None:
    out, printed = limited
    words = "only the first 6 documents per task"
    for text in (printed, out.with_suffix(".md").read_text(), out.with_suffix(".tex").read_text()):
        assert f"Tasks, zero-shot, {words}" in text
        assert f"{words} (--limit): no score of the whole sets" in text
        assert "6 of 12" in text
        assert "fewer than 50 documents" in text
    content = read_results(out)
    assert content["config"]["limit"] == content["metalion"]["limit"] == 6
    assert content["n-samples"]["written_choice"] == {"original": 12, "effective": 6}


def test_group_has_the_harness_score_and_a_tag_its_tasks(limited: tuple[Path, str]) -> None:
    out, printed = limited
    content = read_results(out)
    scores = [content["results"][task]["acc,none"] for task in ("written_choice", "copa")]
    assert content["groups"]["written_group"]["acc,none"] == pytest.approx(sum(scores) / 2)
    header = next(line for line in printed.splitlines() if line.startswith("model "))
    assert [" ".join(words.split()) for words in header.split("  ") if words] == [
        *("model", "written_group acc"),
        *(f"{task} {metric}" for task in ("arc_challenge", "arc_easy") for metric in ("acc", "acc_norm")),
    ]
    row = next(line for line in printed.splitlines() if line.startswith("tiny, step 30"))
    assert f"{100 * content['groups']['written_group']['acc,none']:.2f}" in row


def test_table_of_a_file_has_the_group_and_not_its_tasks(limited: tuple[Path, str], tmp_path: Path, capsys) -> None:
    assert command.main(["table", str(limited[0]), "--out", str(tmp_path / "table.md")]) == 0
    header = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("model "))
    assert "written_group acc" in header
    assert "arc_easy acc_norm" in header
    assert "written_choice" not in header


def test_majority_class_and_standard_errors_are_rows(limited: tuple[Path, str]) -> None:
    out, printed = limited
    # Labels 2 0 0 0 2 0 of the first six rows.
    assert read_results(out)["metalion"]["majority"]["written_choice"]["acc"] == pytest.approx(4 / 6)
    lines = [line.split("  ")[0] for line in printed.splitlines()]
    assert lines.index("± standard error") == lines.index("tiny, step 30") + 1
    assert "majority class" in lines
    assert "chance" in lines
    tex = out.with_suffix(".tex").read_text()
    assert r"\resizebox{\ifdim\width>\linewidth" in tex
    assert r"$\pm$ standard error" in tex


def test_files_have_the_harness_names_and_format(limited: tuple[Path, str]) -> None:
    names = [str(path) for path in limited[0].parent.iterdir()]
    (results,) = get_results_filenames(names)
    content = json.loads(Path(results).read_text())
    assert "metalion" not in content
    assert {"results", "groups", "model_name_sanitized", "total_evaluation_time_seconds"} <= content.keys()
    samples = get_sample_results_filenames(names)
    assert {get_file_task_name(Path(name).name) for name in samples} == {
        *("written_choice", "copa", "arc_easy", "arc_challenge")
    }
    row = json.loads(Path(next(name for name in samples if "written_choice" in name)).read_text().splitlines()[0])
    assert row["arguments"]["gen_args_1"]["arg_1"] == " beta"
    assert isinstance(row["resps"][0][0][0], str)


def test_other_limit_is_not_merged(limited: tuple[Path, str], trained_run: Path, eval_data: Path, capsys) -> None:
    words = ["--tasks", "copa", "--device", "cpu", "--data-dir", str(eval_data), "--max-length", "96"]
    assert command.main([str(trained_run), *words, "--out", str(limited[0])]) == 2
    assert "holds results of limit (--limit) 6, now not set: name another file" in capsys.readouterr().err


def test_run_and_card_have_documents_error_and_chance(trained_run: Path, eval_data: Path, tmp_path: Path) -> None:
    place = ["--device", "cpu", "--data-dir", str(eval_data), "--max-length", "96"]
    assert command.main([str(trained_run), "--tasks", "copa", *place, "--out", str(tmp_path / "r.json")]) == 0
    assert command.main([str(trained_run), "--device", "cpu"]) == 0
    trial = ["--limit", "2", "--out", str(tmp_path / "trial.json")]
    assert command.main([str(trained_run), "--tasks", "copa", *place, *trial]) == 0
    content = json.loads((trained_run / "results.json").read_text())
    detail = content["details"]["tasks"]["copa"]["acc"]
    assert (detail["documents"], detail["whole"], detail["chance"]) == (8, 100, 0.5)
    assert detail["stderr"] == pytest.approx(read_results(tmp_path / "r.json")["results"]["copa"]["acc_stderr,none"])
    card = _evaluation(trained_run, trained_run / "checkpoints" / "step_00000030")
    (trained_run / "results.json").unlink()
    assert f"| {detail['stderr']:,.4g} | 0.5 | 8 of 100 |" in card
    assert "Scores on fewer than 50 documents show only that the task runs." in card
    assert "| perplexity | validation | bits_per_byte |" in card
    assert "| seconds |" not in card
    assert "| documents | " not in card.split("\n", 2)[2]


def prompts(
    lm: ProjectLM, task_folder: Path, eval_data: Path, task: str = "written_choice", **settings: Any
) -> list[str]:
    request = TaskRequest(tasks=(task,), include_path=task_folder, data_dir=eval_data, limit=3, **settings)
    results = evaluate(lm, prepare_tasks(request))
    assert results is not None
    return [sample["arguments"][0][0] for sample in results["samples"][task]]


def test_prompts_follow_the_options(
    loaded: LoadedModel, task_folder: Path, eval_data: Path, tmp_path: Path, monkeypatch
) -> None:
    lm = ProjectLM(loaded.model, loaded.tokenizer, max_length=96, progress=False)
    assert prompts(lm, task_folder, eval_data)[0] == "def alpha0 "
    assert prompts(lm, task_folder, eval_data, system_instruction="Be brief.")[0].startswith("Be brief.")
    seeded = [prompts(lm, task_folder, eval_data, shots=2, seed=(0, 1, 1, seed)) for seed in (1, 1, 2)]
    assert seeded[0] == seeded[1] != seeded[2]
    with pytest.raises(ValueError, match=r"^--apply-chat-template: the tokenizer of tiny has no chat template"):
        check_chat_template(lm, "tiny")
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    template += "{% if add_generation_prompt %}<assistant>{% endif %}"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    tokenizer = load_tokenizer("bytes")
    monkeypatch.setattr(tokenizer, "path", str(tmp_path / "tokenizer.json"), raising=False)
    lm._tokenizer = tokenizer
    check_chat_template(lm, "tiny")
    chat = prompts(lm, task_folder, eval_data, apply_chat_template=True, system_instruction="Be brief.")
    assert chat[0] == "<system>Be brief.<user>def alpha0 <assistant>"


def test_generation_arguments_reach_the_model(loaded: LoadedModel, task_folder: Path, eval_data: Path) -> None:
    lm = ProjectLM(loaded.model, loaded.tokenizer, max_length=96, progress=False)
    lengths = []
    for settings in (None, {"max_gen_toks": 9}):
        request = TaskRequest(tasks=("written_generation",), include_path=task_folder, limit=2, gen_kwargs=settings)
        results = evaluate(lm, prepare_tasks(request))
        assert results is not None
        lengths.append(len(loaded.tokenizer.encode(results["samples"]["written_generation"][0]["resps"][0][0])))
    assert lengths[0] < lengths[1] <= 9


def test_generation_arguments_are_parsed_as_in_the_harness() -> None:
    words = ["model", "--gen_kwargs", "temperature=0.8", "do_sample=True", "until=['a']"]
    request = EvaluationRequest.from_options(evaluation_parser().parse_args([*words, "--tasks", "gsm8k"]))
    assert request.tasks is not None
    assert request.tasks.gen_kwargs == {"temperature": 0.8, "do_sample": True, "until": ["a"]}


def test_groups_and_tags_list_their_tasks() -> None:
    folders = ["super_glue", "arc"]
    manager = task_manager(["ai2_arc", "super-glue-lm-eval-v1"], folders)
    factory = LocalDataFactory(manager, TaskRequest(), {}, ())
    assert factory.task_names("ai2_arc") == ["arc_challenge", "arc_easy"]
    assert {"boolq", "copa", "cb"} <= set(factory.task_names("super-glue-lm-eval-v1"))
    assert not factory.loaded


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--limit", "5"],
            "--limit 5: it counts documents of tasks, and no task is named; name --suite ruler or --tasks",
        ),
        (
            ["--lengths", "64"],
            "--lengths: no requested evaluation has this option; add --suite needle or --suite ruler, or",
        ),
        (
            ["--tasks", "copa", "--stride", "8"],
            "--stride: no requested evaluation has this option; add --data, or leave",
        ),
        (
            ["--suite", "needle", "--hub"],
            "--hub: no requested evaluation has this option; add --tasks, or leave it out",
        ),
        (["--max-length", "8"], "--max-length 8: it is the length of tasks; give --sequence-length"),
        (["--tasks", "copa", "--limit", "0"], "--limit: 0: a whole number of documents, or a share between 0 and 1"),
        (["--tasks", "copa", "--limit", "inf"], "--limit: inf: a whole number of documents, or a share between 0"),
        (["--tasks", "copa", "--seed", "1,2"], "--seed: 1,2: one integer, or four"),
        (["--tasks", "copa", "--fewshot-as-multiturn"], "--fewshot-as-multiturn needs --apply-chat-template"),
        (["--tasks", "copa", "--include-path", "nowhere"], "--include-path nowhere: it is no folder"),
        (["--tasks", "copa", "boolq"], "boolq: one checkpoint is allowed; separate the names after --suite, --tasks"),
        (["--tasks", "copa", "--limt", "3"], "unrecognized arguments: --limt 3; the nearest option is --limit"),
        (["--suite", "ruler", "--lengths", "abc"], "--lengths: abc: a whole number, 1 or more, is allowed"),
        (["--suite", "needle", "--lengths", "0", "256"], "--lengths: 0: a whole number, 1 or more, is allowed"),
        (["--suite", "ruler", "--lengths", ","], "--lengths: ',' is an empty list: give one value or more, as A,B"),
        (["--suite", "needle", "--depths", "0", "12.5", "25"], "--depths: 12.5: a whole number, 0 or more, is allowed"),
        (["--suite", "needle", "--depths", ""], "--depths: '' is an empty list: give one value or more, as A,B"),
    ],
)
def test_wrong_options_are_refused(words: list[str], message: str, trained_run: Path, capsys) -> None:
    assert status([str(trained_run), "--device", "cpu", *words]) == 2
    assert message in capsys.readouterr().err


def status(words: list[str]) -> object:
    """Return the exit status of eval.py, also of argparse."""
    try:
        return command.main(words)
    except SystemExit as end:
        return end.code
