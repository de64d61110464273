"""Run the commands of `eval.py`: evaluate a model, tabulate results, compare results."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data.atomic_io import write_text
from tools.cli.arguments import command_line
from tools.evaluation.document_metrics import metric_value, metrics_of
from tools.evaluation.harness import Prepared, evaluate, model_settings, prepare_tasks, shots_of, task_settings
from tools.evaluation.open_model import is_huggingface, locate_model, open_model, results_file
from tools.evaluation.report import bar_chart, latex, markdown
from tools.evaluation.request import EvaluationRequest, TaskRequest
from tools.evaluation.results_file import (
    KINDS,
    check_output,
    matching_results,
    number_format,
    read_results,
    refuse_others,
    suite_settings,
    with_tasks,
    write_harness_files,
    write_json,
)
from tools.evaluation.suites import Suite, read_suite, suite_names, task_suite
from tools.evaluation.tables import detail_rows, limits, suite_table, whole_size
from tools.reporting.tables import plain_table

if TYPE_CHECKING:  # torch is imported where it is used, so that a refusal comes at once
    from tools.loading.model import LoadedModel, LocatedCheckpoint

Results = dict[str, Any]


def evaluate_model(request: EvaluationRequest) -> None:
    """Run all evaluations of a request. Raises as `check_request` and the kinds of evaluations."""
    located = check_request(request)
    if request.needle is not None:
        from tools.evaluation.needle import run_needle

        run_needle(request, request.needle, located)
    if request.ruler is not None:
        from tools.evaluation.ruler import run_ruler

        run_ruler(request, request.ruler, located)
    if request.tasks is not None:
        run_suites(request, request.tasks, located)
    if request.texts is not None:
        from tools.evaluation.texts import run_texts

        run_texts(request, request.texts, located)


def check_request(request: EvaluationRequest) -> LocatedCheckpoint | None:
    """Check all that needs neither weights nor the hub's data. Return the checkpoint, or None for a Hugging Face model.

    Raises as `read_suite`, `check_needle`, `check_ruler`, `locate_model`, `check_output` and `check_texts`; ValueError for
    texts of a masked or Hugging Face model or with several processes, and for one `--out` of several kinds of results.
    """
    if request.tasks is not None:
        for name in request.tasks.suites:
            read_suite(name)
        if request.tasks.fewshot_as_multiturn and not request.tasks.apply_chat_template:
            raise ValueError("--fewshot-as-multiturn needs --apply-chat-template")
    if request.texts is not None and request.texts.stride and request.texts.by_position:
        raise ValueError("--stride and --by-position cannot be combined: leave one out")
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    if request.texts is not None and processes > 1:
        raise ValueError(
            f"WORLD_SIZE = {processes}: the perplexity of texts is measured by one process; start it without torchrun"
        )
    kinds = request.kinds
    if request.out and len(kinds) > 1:
        raise ValueError(
            f"--out {request.out}: {' and '.join(KINDS[kind][1] for kind in kinds)} have a results file each: request "
            "one of them at a time, or leave --out out"
        )
    huggingface = is_huggingface(request.checkpoint)
    if request.max_length and request.tasks is None and not (huggingface and request.texts):
        raise ValueError(
            f"--max-length {request.max_length}: it is the length of tasks; give --sequence-length for perplexities, or "
            "--lengths for --suite needle and ruler"
        )
    if request.needle is not None:
        from tools.evaluation.needle import check_needle

        check_needle(request.needle, huggingface=huggingface)
    if request.ruler is not None:
        from tools.evaluation.ruler import check_ruler

        check_ruler(request.ruler, alone=request.tasks is None)
    if request.texts is not None and huggingface:
        from tools.evaluation.texts import check_huggingface_texts

        check_huggingface_texts(request.checkpoint, request.texts)
    located = locate_model(request)
    if request.texts is not None and located is not None and located.model.bidirectional_mixers():
        raise ValueError(
            f"{located.checkpoint} is a masked model: it reads the token that it would predict and has no perplexity. "
            "--suite ranks choices by its pseudo-log-likelihood"
        )
    for kind in kinds:
        check_output(results_file(request, located, kind), kind)
    if request.texts is not None:
        from tools.evaluation.texts import check_texts

        check_texts(request.texts.data)
    return located


def run_suites(request: EvaluationRequest, tasks: TaskRequest, located: LocatedCheckpoint | None) -> None:
    """Evaluate a model on suites; on the main process print the tables, and write results, tables and chart.

    Raises as `prepare_tasks` and `open_model`.
    """
    prepared = prepare_tasks(tasks)
    opened = open_model(request, located, "suites")
    if tasks.apply_chat_template:
        from tools.evaluation.chat import check_chat_template

        check_chat_template(opened.lm, opened.name)
    description = {"model": opened.facts, **model_settings(opened.lm), **task_settings(prepared)}
    model = {"model_dtype": number_format(opened.lm.model)}
    settings = suite_settings({"config": model, "n-shot": shots_of(prepared), "metalion": description})
    refuse_others(opened.out, "suites", suite_settings, settings)
    results = evaluate(opened.lm, prepared, use_cache=opened.cache)
    if results is None:
        return
    results["metalion"].update(model=opened.facts, title=opened.name)
    samples = results.pop("samples")
    new_results = results
    # The file may have changed since.
    results = with_tasks(matching_results(opened.out, "suites", suite_settings, settings), results)
    write_json(opened.out, results)
    written = write_harness_files(opened.out.parent, new_results, samples if request.save_samples else {})
    opened.finish()
    print(f"\n{plain_table(*detail_rows(results))}")
    suites = prepared.suites if results is new_results else _suites_of([results], prepared.suites)
    write_tables(suites, [(opened.name, results)], opened.out)
    print("\n".join(map(str, written)))
    if opened.loaded is not None and tasks.limit is None:  # a trial does not replace the scores of whole sets
        _add_to_run(opened.loaded, new_results, prepared)


def write_tables(suites: Sequence[Suite], models: Sequence[tuple[str, Results]], out: Path) -> None:
    """Print the suites' tables and write them as `out` with the suffixes .md, .tex and .png."""
    tables = [suite_table(suite, models) for suite in suites]
    for table in tables:
        print(f"\n{table.caption}\n\n{plain_table(*table.text_rows())}\n")
        for note in table.notes:
            print(f"  {note}")
    files = {".md": markdown(tables, models), ".tex": latex(tables)}
    for suffix, text in files.items():
        write_text(out.with_suffix(suffix), text)
    bar_chart(tables, out.with_suffix(".png"))
    written = (out.with_suffix(suffix) for suffix in (".json", *files, ".png"))
    print("\n" + "\n".join(str(path) for path in written if path.is_file()))


def table_command(arguments: Sequence[str]) -> int:
    """Run `python eval.py table a.json b.json ...`: several models in one table."""
    parser = command_line(
        "python eval.py table",
        "Several evaluated models in one table, as Markdown, LaTeX and a chart.",
    )
    parser.add_argument("results", nargs="+", type=Path, help="results.json of each model, or its folder")
    parser.add_argument(
        "--out", type=Path, default=Path("runs/evaluation/table.md"), help="Markdown file (default %(default)s)"
    )
    options = parser.parse_args(arguments)
    check_output(options.out.with_suffix(".md"), suffix=".md")
    models = [(str(r["metalion"]["title"]), r) for r in (read_results(path, tables=True) for path in options.results)]
    write_tables(_suites_of([r for _, r in models]), models, options.out)
    return 0


def compare_command(arguments: Sequence[str]) -> int:
    """Run `python eval.py compare a.json b.json`: the differences and their significance."""
    from tools.evaluation.significance import compare, comparison_rows, excluded_metrics

    parser = command_line(
        "python eval.py compare",
        "Differences between two models, paired by document, with their significance: the exact sign test "
        "where a document is right or wrong, a permutation test otherwise; Holm's correction over all rows.",
    )
    parser.add_argument("first", type=Path, help="results.json, or its folder")
    parser.add_argument("second", type=Path, help="results.json, or its folder")
    parser.add_argument("--out", type=Path, help="also write the rows to this .json file")
    options = parser.parse_args(arguments)
    if options.out:
        check_output(options.out)
    first, second = read_results(options.first), read_results(options.second)
    differences = compare(first, second)
    for word, results in (("first: ", first), ("second:", second)):
        print(", ".join([f"{word} {results['metalion']['title']}", *limits([results])]))
    print()
    print(plain_table(*comparison_rows(differences)))
    for text in excluded_metrics(first, second):
        print(f"\nnot compared: {text}")
    print(
        "\n↑ higher is better, ↓ lower is better. p: probability of a difference this large between models that are equal on "
        "every document; significant: p (Holm) < 0.05"
    )
    if options.out:
        write_json(options.out, [{**vars(d), "change": d.change} for d in differences])
    return 0


def scores(results: Mapping[str, Any], suites: Sequence[Suite]) -> dict[str, float]:
    """Return every column of the suites and their averages by "suite/label", shares in percent."""
    values: dict[str, float] = {}
    for suite in suites:
        table = suite_table(suite, [("", results)])
        row = table.rows[0]
        values.update({f"{suite.name}/{label}": value for label, (value, _) in row.cells.items()})
        average = table.average_of(row)
        if average is not None:
            values[f"{suite.name}/average"] = average
    return values


def _add_to_run(loaded: LoadedModel, results: Results, prepared: Prepared) -> None:
    """Add the scores to the run's results file with standard error, chance, majority class and number of documents."""
    from tools.evaluation.run_results import add_to_run

    members, chance, majority = (results["metalion"].get(key, {}) for key in ("members", "chance", "majority"))
    scores: dict[str, Any] = {}
    details: dict[str, Any] = {}
    for suite in prepared.suites:
        names = dict.fromkeys(name for task in suite.tasks for name in (task, *members.get(task, ())))
        for task in (name for name in names if name in results["results"]):
            values = {m: score for m in metrics_of(results, task) if (score := metric_value(results, task, m))}
            samples = results.get("n-samples", {}).get(task, {})
            shared = {"documents": samples.get("effective"), "whole": samples and whole_size(results, task)}
            scores.setdefault(suite.name, {})[task] = {metric: value for metric, (value, _) in values.items()}
            details.setdefault(suite.name, {})[task] = {
                metric: {
                    "stderr": error,
                    "chance": chance.get(task) if metric.startswith("acc") else None,
                    "majority": majority.get(task, {}).get(metric),
                    **shared,
                }
                for metric, (_, error) in values.items()
            }
    add_to_run(loaded, scores, details)


def _suites_of(models: Sequence[Mapping[str, Any]], requested: Sequence[Suite] = ()) -> list[Suite]:
    """Return the suites that the results name, and a table of the tasks that are in none of them.

    requested: suites from YAML files, which results name without their file.
    """
    names = dict.fromkeys(name for results in models for name in results["metalion"]["suites"])
    from_files = {suite.name: suite for suite in requested if suite.name != "tasks"}
    suites = [from_files.get(name) or read_suite(name) for name in names if name in from_files or name in suite_names()]
    shown = {task for suite in suites for task in suite.tasks}
    rest: dict[str, None] = {}
    for results in models:
        members = {n: tasks for n, tasks in results["metalion"].get("members", {}).items() if n not in shown}
        covered = {
            *shown,
            *members,
            *results.get("group_subtasks", ()),
            *(t for tasks in members.values() for t in tasks),
        }
        rest.update(dict.fromkeys([*members, *(task for task in results["versions"] if task not in covered)]))
    return [*suites, *([task_suite(list(rest))] if rest else [])]
