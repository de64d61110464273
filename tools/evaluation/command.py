"""`python eval.py MODEL --suite ...`: from a name on the command line to tables, results and a chart."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from data.atomic_io import read_json, write_whole
from tools.evaluation.harness import (
    Prepared,
    Request,
    evaluate,
    how_it_is_asked,
    metric_value,
    prepare_tasks,
    read_results,
    shots_of,
    what_is_asked,
    write_json,
    write_samples,
)
from tools.evaluation.open_model import look_for_model, number_format, open_model
from tools.evaluation.report import (
    bar_chart,
    detail_rows,
    latex,
    markdown,
    metrics_of,
    suite_table,
)
from tools.evaluation.results_file import (
    check_output,
    difference,
    earlier_results,
    refuse_others,
    suite_settings,
    with_tasks,
)
from tools.evaluation.suites import Suite, read_suite, suite_names, task_suite
from tools.reporting.tables import plain_table

Results = dict[str, Any]


def run_suites(options: argparse.Namespace) -> Results | None:
    """Evaluates a model, prints the tables and writes everything beside `options.out`; None on helping processes.

    Raises as `look_for_model`, `prepare_tasks` and `open_model`.
    """
    look_for_model(options)  # before the hub is asked for data
    request = Request(
        tuple(options.suite),
        tuple(options.tasks),
        tuple(options.without),
        options.data_dir,
        options.hub,
        options.split,
        options.shots,
    )
    prepared = prepare_tasks(request)
    opened = open_model(options, "results.json")
    ours = {"model": opened.facts, **how_it_is_asked(opened.lm), **what_is_asked(prepared)}
    model = {"model_dtype": number_format(opened.lm)}
    now = suite_settings({"config": model, "n-shot": shots_of(prepared), "metalion": ours})
    refuse_others(opened.out, suite_settings(earlier_results(opened.out, "suites")), now)
    results = evaluate(opened.lm, prepared, use_cache=opened.cache)
    if results is None:
        return None
    results["metalion"].update(model=opened.facts, title=opened.name)
    samples = results.pop("samples")
    alone = results
    earlier = earlier_results(opened.out, "suites")  # as it is by now
    if not difference(suite_settings(earlier), now):
        results = with_tasks(earlier, results)
    write_json(opened.out, results)
    if options.samples:
        write_samples(opened.out.parent, samples)
    opened.finish()
    print(f"\n{plain_table(*detail_rows(results))}")
    suites = prepared.suites if results is alone else _suites_of([results], prepared.suites)
    write_tables(suites, [(opened.name, results)], opened.out)
    if opened.loaded is not None:
        _summarise(opened.loaded.run, opened.loaded.checkpoint, alone, prepared)
    return results


def write_tables(suites: Sequence[Suite], models: Sequence[tuple[str, Results]], out: Path) -> None:
    """Prints the suites' tables and writes them as `out` with the suffixes .md, .tex and .png."""
    tables = [suite_table(suite, models) for suite in suites]
    for table in tables:
        print(f"\n{table.title}\n\n{plain_table(*table.text_rows())}\n")
        for note in table.notes:
            print(f"  {note}")
    files = {".md": markdown(tables, models), ".tex": latex(tables)}
    for suffix, text in files.items():
        write_whole(out.with_suffix(suffix), text)
    bar_chart(tables, out.with_suffix(".png"))
    written = (out.with_suffix(suffix) for suffix in (".json", *files, ".png"))
    print("\n" + "\n".join(str(path) for path in written if path.is_file()))


def table_command(arguments: Sequence[str]) -> int:
    """`python eval.py table a.json b.json ...`: several models in one table."""
    parser = argparse.ArgumentParser(
        prog="python eval.py table",
        description="Several evaluated models in one table, as Markdown, LaTeX and a chart.",
    )
    parser.add_argument("results", nargs="+", type=Path, help="results.json of each model, or its folder")
    parser.add_argument(
        "--out", type=Path, default=Path("runs/evaluation/table.md"), help="where (default %(default)s)"
    )
    options = parser.parse_args(arguments)
    check_output(options.out.with_suffix(".md"))
    models = [(str(r["metalion"]["title"]), r) for r in (read_results(path, tables=True) for path in options.results)]
    write_tables(_suites_of([r for _, r in models]), models, options.out)
    return 0


def compare_command(arguments: Sequence[str]) -> int:
    """`python eval.py compare a.json b.json`: the differences and whether they are more than chance."""
    from tools.evaluation.significance import compare, comparison_rows, left_out

    parser = argparse.ArgumentParser(
        prog="python eval.py compare",
        description="Differences between two models, paired by document, with their significance: the exact sign test "
        "where a document is right or wrong, a permutation test otherwise; Holm's correction over all rows.",
    )
    parser.add_argument("first", type=Path, help="results.json, or its folder")
    parser.add_argument("second", type=Path, help="results.json, or its folder")
    parser.add_argument("--out", type=Path, help="write the rows as JSON too")
    options = parser.parse_args(arguments)
    if options.out:
        check_output(options.out)
    first, second = read_results(options.first), read_results(options.second)
    found = compare(first, second)
    print(f"first:  {first['metalion']['title']}\nsecond: {second['metalion']['title']}\n")
    print(plain_table(*comparison_rows(found)))
    for text in left_out(first, second):
        print(f"\nnot compared: {text}")
    print(
        "\np: chance of a difference this large between models that are equal on every document; significant: p (Holm) < 0.05"
    )
    if options.out:
        write_json(options.out, [{**vars(d), "change": d.change} for d in found])
    return 0


def scores(results: Mapping[str, Any], suites: Sequence[Suite]) -> dict[str, float]:
    """What one follows over time: every column of the suites and their averages, by "suite/label", shares in percent."""
    found: dict[str, float] = {}
    for suite in suites:
        table = suite_table(suite, [("", results)])
        row = table.rows[0]
        found.update({f"{suite.name}/{label}": value for label, (value, _) in row.cells.items()})
        average = table.average_of(row)
        if average is not None:
            found[f"{suite.name}/average"] = average
    return found


def _summarise(run: Path, checkpoint: Path, results: Results, prepared: Prepared) -> None:
    """The scores in the run's own results file, which its report page shows."""
    path = run / "results.json"
    content = read_json(path, "remove it: python eval.py RUN writes it anew") if path.is_file() else {}
    said = str(checkpoint.resolve())
    if content.get("checkpoint") != said:
        return
    suites = {
        suite.name: {
            task: {m: found[0] for m in metrics_of(results, task) if (found := metric_value(results, task, m))}
            for task in suite.tasks
            if task in results["results"]
        }
        for suite in prepared.suites
    }
    before = content.get("results", {})
    content["results"] = {**before, **{name: {**before.get(name, {}), **tasks} for name, tasks in suites.items()}}
    write_json(path, content)


def _suites_of(models: Sequence[Mapping[str, Any]], known: Sequence[Suite] = ()) -> list[Suite]:
    """What the results say that they were asked for, and a table of the tasks of none of them. known: suites by their own
    files, which results do not name."""
    names = dict.fromkeys(name for results in models for name in results["metalion"]["suites"])
    own = {suite.name: suite for suite in known if suite.name != "tasks"}
    suites = [own.get(name) or read_suite(name) for name in names if name in own or name in suite_names()]
    shown = {task for suite in suites for task in suite.tasks}
    rest = [task for results in models for task in results["versions"] if task not in shown]
    return [*suites, *([task_suite(list(dict.fromkeys(rest)))] if rest else [])]
