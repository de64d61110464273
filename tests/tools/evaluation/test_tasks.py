"""Stock tasks with local data, suites, and refused data."""

from __future__ import annotations

import gzip
import json
import shutil
from pathlib import Path

import pyarrow.parquet
import pytest

from models.options import nearest_names
from tests.tools.evaluation.conftest import made_up_rows, write_rows
from tools.evaluation.harness import prepare_tasks
from tools.evaluation.request import TaskRequest
from tools.evaluation.row_checks import template_fields
from tools.evaluation.suites import UnknownNameError, read_suite, suite_names
from tools.evaluation.task_factory import local_data, stock_config
from tools.evaluation.tasks import load_tasks, task_manager

SUITES = {name: read_suite(name) for name in ("superglue", "commonsense")}
TASKS = sorted({task for suite in SUITES.values() for task in suite.tasks})
FIELDS = {task: names for suite in SUITES.values() for task, names in suite.fields.items()}
FOLDERS = [folder for suite in SUITES.values() for folder in suite.folders]
MAY_DIFFER = {
    "dataset_path",
    "dataset_name",
    "dataset_kwargs",
    "training_split",
    "validation_split",
    "test_split",
    "metadata",
}


def load(names: list[str], data: Path, **more: object) -> dict:
    request = TaskRequest(data_dir=data, **more)
    return load_tasks(names, request, fields=FIELDS, local=["logiqa"], folders=FOLDERS).tasks


def comparable(value: object) -> object:
    """Replace each function by its file and name, because every load creates new ones."""
    if callable(value):
        return value.__code__.co_filename, value.__qualname__
    if isinstance(value, dict):
        return {key: comparable(item) for key, item in value.items()}
    return [comparable(item) for item in value] if isinstance(value, list) else value


@pytest.fixture(scope="module")
def loaded(eval_data: Path) -> dict:
    return load(TASKS, eval_data)


def test_suites_have_the_tasks_of_the_paper():
    assert set(suite_names()) >= {"superglue", "commonsense"}
    assert SUITES["superglue"].tasks == ("wsc", "wic", "sglue_rte", "cb", "multirc", "boolq", "copa")
    assert set(SUITES["commonsense"].tasks) == {
        *("lambada_openai", "logiqa", "wsc273", "boolq", "piqa", "hellaswag", "winogrande"),
        *("arc_easy", "arc_challenge", "openbookqa"),
    }
    metrics = {c.label: c.metric for suite in SUITES.values() for c in suite.columns}
    assert metrics["CB"] == "f1"
    assert metrics["MultiRC"] == "exact_match"
    assert {metrics[label] for label in ("HellaSwag", "ARC-c", "OpenBookQA")} == {"acc_norm"}
    assert metrics["LAMBADA ppl"] == "perplexity"
    rest = metrics.keys() - {"CB", "MultiRC", "HellaSwag", "ARC-c", "OpenBookQA", "LAMBADA ppl"}
    assert {metrics[label] for label in rest} == {"acc"}


@pytest.mark.parametrize(
    ("name", "row", "average"), [("superglue", 0, 44.05), ("superglue", 1, 49.22), ("commonsense", 0, 42.52)]
)
def test_averages_equal_the_published_ones(name, row, average):
    suite = SUITES[name]
    values = [suite.rows[row][label] for label in suite.average]
    assert sum(values) / len(values) == pytest.approx(average, abs=0.006)


@pytest.mark.parametrize("name", TASKS)
def test_task_equals_the_stock_task_except_its_data(name, loaded):
    """Compare prompts, choices, processing, metrics and shots with those of the installed harness."""
    from lm_eval.tasks._yaml_loader import load_yaml

    entry = task_manager([name], FOLDERS).task_index[name]
    stock = load_yaml(entry.yaml_path, resolve_func=True, recursive=True)
    config = loaded[name].task.config
    expected = type(config)(**{key: value for key, value in stock.items() if key not in ("tag", "group")})
    for key, value in vars(expected).items():
        if key not in MAY_DIFFER | {"fewshot_config"}:
            assert comparable(getattr(config, key)) == comparable(value), key
    actual, stock_examples = vars(config.fewshot_config), vars(expected.fewshot_config)
    # The split of the examples depends on the files.
    assert {k: comparable(v) for k, v in actual.items() if k != "split"} == {
        k: comparable(v) for k, v in stock_examples.items() if k != "split"
    }
    assert config.metadata["version"] == stock["metadata"]["version"]
    for key in ("training_split", "validation_split", "test_split"):
        assert getattr(config, key) in (None, stock.get(key))


@pytest.mark.parametrize("name", TASKS)
def test_local_data_override_nothing_else(name, eval_data):
    changes, files = local_data(name, stock_config(task_manager([name], FOLDERS).task_index[name]), eval_data)
    assert files
    assert changes.keys() <= MAY_DIFFER - {"metadata"}
    assert changes["dataset_kwargs"].keys() == {"data_files"}


def test_split_is_that_of_the_stock_task(loaded, eval_data):
    assert {name: loaded[name].split for name in ("boolq", "arc_easy")} == {"boolq": "validation", "arc_easy": "test"}
    assert not any(task.other_split for task in loaded.values())
    other = load(["arc_easy", "arc_challenge", "boolq"], eval_data, split="validation")
    assert {name: (task.split, task.other_split) for name, task in other.items()} == {
        "arc_easy": ("validation", True),
        "arc_challenge": ("test", False),  # its folder has no validation file
        "boolq": ("validation", False),
    }


def test_folder_without_the_stock_split_is_marked(eval_data, tmp_path):
    shutil.copytree(eval_data / "ai2_arc", tmp_path / "ai2_arc")
    (tmp_path / "ai2_arc/ARC-Easy/test.jsonl").unlink()
    assert load(["arc_easy"], tmp_path)["arc_easy"].other_split


@pytest.mark.parametrize("name", ["arc_easy", "wsc273", "boolq", "logiqa"])
def test_document_is_no_example_in_its_own_prompt(name, eval_data, tmp_path):
    # A folder with the evaluated split only provides the examples from it.
    shutil.copytree(eval_data, tmp_path, dirs_exist_ok=True)
    (tmp_path / "ai2_arc/ARC-Easy/validation.jsonl").unlink()
    task = load([name], tmp_path)[name].task
    task.set_fewshot_seed(1234)
    for document in task.eval_docs:
        own = task.fewshot_context(document, 0)
        prompt = task.fewshot_context(document, 6)  # of eight rows
        for whole, end in zip(*([x] if isinstance(x, str) else x for x in (prompt, own)), strict=True):
            assert whole.endswith(end)
            assert end not in whole.removesuffix(end)


def test_fields_of_the_suites_cover_the_templates():
    for name in TASKS:
        assert set(template_fields(stock_config(task_manager([name], FOLDERS).task_index[name]))) <= {
            field.partition(".")[0] for field in FIELDS[name]
        }


@pytest.mark.parametrize(
    ("name", "path", "row", "field"),
    [
        ("boolq", "super_glue/boolq/validation.jsonl.gz", 3, "passage"),
        ("copa", "super_glue/copa/validation.jsonl", 1, "choice2"),
        ("multirc", "super_glue/multirc/validation.jsonl", 8, "idx.question"),
        ("hellaswag", "hellaswag/validation.jsonl", 2, "endings"),
        ("arc_easy", "ai2_arc/ARC-Easy/test.jsonl", 5, "choices.label"),
    ],
)
def test_row_without_a_field_is_refused(name, path, row, field, tmp_path):
    rows = made_up_rows()[path]
    holder = rows[row - 1]
    *parents, last = field.split(".")
    for parent in parents:
        holder = holder[parent]
    del holder[last]
    write_rows(tmp_path / path, rows)
    with pytest.raises(ValueError, match=rf"^{name}: .*{Path(path).name}, row {row} lacks the field '{field}'"):
        load([name], tmp_path)


@pytest.mark.parametrize(
    ("name", "path", "change", "message"),
    [
        ("hellaswag", "hellaswag/validation.jsonl", {"endings": "abcd"}, "has endings = 'abcd', where a list of texts"),
        ("hellaswag", "hellaswag/validation.jsonl", {"ctx_a": 5}, "has ctx_a = 5, where text is expected"),
        (
            "arc_easy",
            "ai2_arc/ARC-Easy/test.jsonl",
            {"choices": {"text": ["a", "b"], "label": ["A", "B", "C"]}},
            "has 2 texts and 3 labels",
        ),
        ("openbookqa", "openbookqa/test.jsonl", {"answerKey": "E"}, "has answerKey = 'E', where one of its labels"),
        ("logiqa", "logiqa/test.jsonl", {"options": ["a", "b", "c"]}, "has 3 options, where 4 are expected"),
        (
            "wic",
            "super_glue/wic/validation.jsonl",
            {"end1": 5000},
            "has start1 = 0 and end1 = 5000, where places",
        ),
        ("wsc", "super_glue/wsc.fixed/validation.jsonl", {"span2_index": 8}, r"has span2_index = 8, .*\(0 to 7\)"),
        ("wsc273", "wsc273/test.jsonl", {"pronoun_loc": -5}, "has pronoun_loc = -5, where the place of"),
        ("winogrande", "winogrande/validation.jsonl", {"sentence": "No blank."}, "has no _ in its sentence"),
        (
            "multirc",
            "super_glue/multirc/validation.jsonl",
            {"answer": "it's '''so"},
            "has answer = .*, whose apostrophes or backslashes",
        ),
    ],
)
def test_row_that_the_harness_would_score_wrongly_is_refused(name, path, change, message, tmp_path):
    rows = made_up_rows()[path]
    rows[2].update(change)
    write_rows(tmp_path / path, rows)
    with pytest.raises(
        ValueError, match=rf"^{name}: .*{Path(path).name}, row 3 {message}.*: get the file again, or leave"
    ):
        load([name], tmp_path)


def test_data_folder_name_is_no_pattern(tmp_path):
    rows = made_up_rows()["winogrande/validation.jsonl"]
    write_rows(tmp_path / "data[1]/winogrande/validation.jsonl", rows)
    assert len(load(["winogrande"], tmp_path / "data[1]")["winogrande"].task.eval_docs) == len(rows)


def test_rows_of_a_parquet_file_are_checked(tmp_path):
    rows = made_up_rows()["winogrande/validation.jsonl"]
    rows[2]["sentence"] = "No blank."
    (tmp_path / "winogrande").mkdir()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "winogrande/validation.parquet")
    with pytest.raises(ValueError, match=r"winogrande: .*validation\.parquet, row 3 has no _ in its sentence"):
        load(["winogrande"], tmp_path)


def test_data_that_are_no_utf8_are_refused(tmp_path):
    write_rows(tmp_path / "piqa/validation.jsonl", made_up_rows()["piqa/validation.jsonl"])
    with (tmp_path / "piqa/validation.jsonl").open("ab") as file:
        file.write(b'{"goal": "\xff"}')
    with pytest.raises(ValueError, match=r"piqa: .*validation\.jsonl, row 9 is no UTF-8 .*get the file again"):
        load(["piqa"], tmp_path)
    (tmp_path / "piqa/validation.jsonl").rename(tmp_path / "piqa/validation.parquet")
    with pytest.raises(ValueError, match=r"piqa: .*validation\.parquet is no whole Parquet file .*get the file again"):
        load(["piqa"], tmp_path)


def test_more_examples_than_rows_are_refused(eval_data):
    with pytest.raises(
        ValueError, match=r"copa: 8 examples in the prompt, .*has 8 rows .*allowed are at most 7 \(--shots\)"
    ):
        load(["copa"], eval_data, shots=8)
    assert load(["copa"], eval_data, shots=7)


def test_unknown_metric_of_a_task_is_refused(eval_data, tmp_path):
    for metric, message in (
        ("acc_nrom", r"own: copa has no metric 'acc_nrom'; .*acc"),
        ("acc,strict", r"own: copa has no filter 'strict'; allowed are none"),
    ):
        (tmp_path / "own.yml").write_text(f"columns: [{{task: copa, metric: '{metric}'}}]\nfolders: [super_glue]\n")
        with pytest.raises(ValueError, match=message):
            prepare_tasks(TaskRequest(suites=(str(tmp_path / "own.yml"),), data_dir=eval_data))


def test_row_that_is_no_json_is_refused(tmp_path):
    write_rows(tmp_path / "piqa/validation.jsonl", made_up_rows()["piqa/validation.jsonl"])
    with (tmp_path / "piqa/validation.jsonl").open("a") as file:
        file.write('{"goal": \n')
    with pytest.raises(ValueError, match=r"piqa: .*row 9 is no JSON"):
        load(["piqa"], tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"validation\.jsonl\.gz is cut short: it ends at byte 0"),
        (gzip.compress(b""), r"copa: .*validation\.jsonl\.gz holds no row"),
        (gzip.compress(json.dumps({"premise": "a"}).encode())[:-9], r"validation\.jsonl\.gz is cut short"),
        (b"{}", r"validation\.jsonl\.gz is damaged: no gzip data from byte 0"),
    ],
    ids=["empty", "nothing packed", "cut short", "not packed"],
)
def test_empty_or_damaged_file_is_refused(content, message, tmp_path):
    path = tmp_path / "super_glue/copa/validation.jsonl.gz"
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        load(["copa"], tmp_path)


def test_row_that_is_no_object_is_refused(tmp_path):
    (tmp_path / "piqa").mkdir()
    (tmp_path / "piqa/validation.json").write_text("[1, 2]")
    with pytest.raises(ValueError, match=r"piqa: .*row 1 is int, not a JSON object"):
        load(["piqa"], tmp_path)


@pytest.mark.parametrize(
    ("name", "path", "change", "message"),
    [
        ("piqa", "piqa/validation.jsonl", {"label": -1}, r"document 3 has the label -1: a number from 0 to 1"),
        ("piqa", "piqa/validation.jsonl", {"label": 2}, r"document 3 has the label 2"),
        ("copa", "super_glue/copa/validation.jsonl", {"label": -1}, r"document 3 has the label -1"),
        ("wsc273", "wsc273/test.jsonl", {"label": 5}, r"document 3 has the label 5"),
        (
            "copa",
            "super_glue/copa/validation.jsonl",
            {"question": "why"},
            r"document 3 cannot be evaluated: KeyError: 'why'",
        ),
        (
            "winogrande",
            "winogrande/validation.jsonl",
            {"answer": "3"},
            r"document 3 cannot be evaluated: KeyError: '3'",
        ),
        ("hellaswag", "hellaswag/validation.jsonl", {"label": ""}, r"as this task's data: ValueError"),
    ],
)
def test_label_that_the_harness_would_count_as_wrong_is_refused(name, path, change, message, tmp_path):
    # The harness counts an unknown label as a wrong answer; COPA's functions take it as the second choice.
    rows = made_up_rows()[path]
    rows[2].update(change)
    write_rows(tmp_path / path, rows)
    with pytest.raises(ValueError, match=rf"^{name}: .*{Path(path).name}.*{message}"):
        load([name], tmp_path)


def test_labels_of_another_type_are_refused(tmp_path):
    rows = made_up_rows()["piqa/validation.jsonl"]
    for row in rows:
        row["label"] = str(row["label"])
    write_rows(tmp_path / "piqa/validation.jsonl", rows)
    with pytest.raises(ValueError, match=r"^piqa: .*document 1 has the label '\d': a number from 0 to 1"):
        load(["piqa"], tmp_path)


def test_missing_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"boolq: .*super_glue/boolq/validation\.jsonl"):
        load(["boolq"], tmp_path)


def test_logiqa_needs_a_file_even_online():
    with pytest.raises(FileNotFoundError, match=r"logiqa: .*script.*datasets 4.*--data-dir"):
        load_tasks(["logiqa"], TaskRequest(), local=["logiqa"], folders=FOLDERS)


def test_task_of_a_tag_is_excluded(eval_data):
    assert list(load(["ai2_arc"], eval_data)) == ["arc_challenge", "arc_easy"]
    assert list(load(["ai2_arc"], eval_data, without=("arc_easy",))) == ["arc_challenge"]
    with pytest.raises(UnknownNameError, match=r"--without arc_esy: it is none .*; did you mean arc_easy or"):
        load(["ai2_arc"], eval_data, without=("arc_esy",))


def test_unknown_names_list_the_nearest(monkeypatch):
    import lm_eval.tasks

    folder = Path(lm_eval.tasks.__file__).parent / "hellaswag"  # not the whole index, which takes seconds
    real = lm_eval.tasks.TaskManager
    monkeypatch.setattr(lm_eval.tasks, "TaskManager", lambda: real(include_defaults=False, include_path=[folder]))
    with pytest.raises(UnknownNameError, match="superglue"):
        read_suite("superglu")
    with pytest.raises(UnknownNameError, match=r"no task 'hellaswagg'; did you mean .*hellaswag"):
        load_tasks(["hellaswagg"], TaskRequest())
    assert nearest_names("x", ["a", "b"]) == "allowed are a, b"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("columns: [{task: piqa}]\nfoo: 1\n", "unknown key 'foo'"),
        ("columns: [{tsk: piqa}]\n", "task, metric, label"),
        ("columns: [{task: piqa}, {task: piqa, metric: acc_norm}]\n", "unique label"),
        ("columns: [{task: piqa}]\naverage: [PIQA]\n", "'PIQA' is no column label; .*piqa"),
        ("- piqa\n", "is no suite"),
        ("columns: [{task: piqa}\n", r"own\.yml is no YAML .*superglue\.yml is an example"),
        ("columns: 5\n", "columns = 5: a list is expected"),
        ("columns: [{task: 5}]\n", r"columns\[0\]: task = 5: text is expected"),
        ("columns: [{task: piqa}]\npaper: {rows: [3]}\n", r"paper.rows = \[3\]: a list of"),
        ("columns: [{task: piqa}]\npaper: {rows: 3}\n", "paper.rows = 3: a list of"),
        ("columns: [{task: piqa}]\npaper: {rows: [{model: a, piqa: good}]}\n", "piqa = 'good': a number is expected"),
        ("columns: [{task: piqa}]\nnotes: [mean: of all]\n", r"notes = \[\{'mean': 'of all'\}\]: a list of texts"),
        ("columns: [{task: piqa}]\nfields: {piqa: goal}\n", "fields = .*: a mapping of tasks to lists of fields"),
        ("columns: [{task: piqa}]\ndocuments: {piqa: many}\n", "documents = .* to numbers of documents"),
    ],
)
def test_suite_file_is_checked(text, message, tmp_path):
    (tmp_path / "own.yml").write_text(text)
    with pytest.raises(ValueError, match=message):
        read_suite(str(tmp_path / "own.yml"))
