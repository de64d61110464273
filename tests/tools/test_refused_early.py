"""Invalid input is refused before slow work: the hub, weights, a folder of data, another run."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

from tests.tools.evaluation.conftest import eval_data
from tests.tools.masked_lm.conftest import masked_run

__all__ = ["eval_data", "masked_run"]

TASKS, MODEL = "tools.evaluation.harness.load_tasks", "tools.evaluation.needle.open_model"
RULER = "tools.evaluation.ruler.open_model"
WEIGHTS, SUITES = "tools.loading.model.read_weights", "tools.evaluation.command.run_suites"
SYNTHETIC = "tools.synthetic.command.synthetic_command"

# Program, arguments, the slow function that is not called, and a part of the message. Words such as RUN stand for `places`,
# MASKED for a masked run, DATA for rows of every task, and OUT for a new folder.
CASES = [
    ("eval", "NONE --suite superglue", TASKS, "nothing does not exist .*: a run folder, .* is needed"),
    ("eval", "NONE --tasks piqa --data-dir DATA", TASKS, "nothing does not exist .*: a run folder, .* is needed"),
    ("eval", "EMPTY --suite superglue", TASKS, "empty is not a checkpoint: a run folder, .* is needed"),
    ("eval", "RUN --suite superglue --dtype int8", TASKS, "dtype = 'int8': allowed are auto, fp32"),
    ("eval", "RUN --suite superglue --device nope", TASKS, "the device 'nope' is not here"),
    (
        "eval",
        "owner/nosuch --suite superglue",
        TASKS,
        "owner/nosuch is no local folder, and the hub does not provide it: ",
    ),
    ("eval", "RUN --suite needle,nosuch", MODEL, r"there is no suite 'nosuch' \(a .yml file"),
    ("eval", "RUN --suite needle --filler NONE", MODEL, "nothing: No such file"),
    ("eval", "EXPORT --suite needle", MODEL, "name the filler with --filler FILE"),
    ("eval", "MASKED --suite needle", MODEL, "is a masked model: it reads both directions"),
    ("eval", "RUN --suite ruler --filler NONE", RULER, "nothing: No such file"),
    ("eval", "RUN --suite ruler --tasks piqa", RULER, "--tasks piqa: there is no such task of RULER .*; allowed are"),
    ("eval", "MASKED --suite ruler", RULER, "is a masked model: it reads both directions"),
    ("eval", "RUN --suite superglue --data NONE", SUITES, "nothing does not exist"),
    ("eval", "EXPORT --suite superglue --data FILE --by-position", SUITES, "export: --by-position needs a run"),
    ("eval", "RUN --suite mqar", SYNTHETIC, "tiny: --suite mqar trains its own models and takes no checkpoint"),
    ("eval", "--suite=mad RUN widths=[64]", SYNTHETIC, "--suite mad trains its own models and takes no checkpoint"),
    ("eval", "RUN --data FILE NONE", WEIGHTS, "nothing does not exist"),
    ("eval", "MASKED --data FILE", WEIGHTS, "and has no perplexity"),
    ("eval", "LOST --data FILE", WEIGHTS, r"description\.json is damaged"),
    ("tools.generate", "MASKED", WEIGHTS, "is a masked model: it reads both sides"),
    ("tools.generate", "RUN --prompts-file FILE --out /proc/t", WEIGHTS, r"--out /proc/t: cannot be written"),
    ("tools.generate", "LOST", WEIGHTS, r"description\.json is damaged"),
    ("tools.length.__main__", "RUN NONE", WEIGHTS, "nothing does not exist"),
    ("tools.length.__main__", "RUN MASKED", WEIGHTS, "give only one kind of model per command"),
    ("tools.length.__main__", "RUN --lengths 7", WEIGHTS, "--lengths 7: it must divide the longest"),
    ("tools.length.__main__", "RUN --data NONE", WEIGHTS, r"nothing\.idx does not exist"),
    (
        "tools.length.__main__",
        "RUN -o /proc/l.png",
        WEIGHTS,
        r"--out /proc/l\.png: cannot be written \(.*: /proc\); give",
    ),
    ("tools.length.__main__", "RUN -o FILE/l.png", WEIGHTS, r"--out .*: cannot be written \(Not a directory: .*file\)"),
    ("tools.length.__main__", "RUN -o OUT", WEIGHTS, "--out .*out: the name must end in an image format, such as"),
    ("tools.masked_forms", "MASKED -o OUT.json", WEIGHTS, r"--out .*out\.json: the name must end in an image format"),
    ("tools.length.__main__", "RUN -o EMPTY", WEIGHTS, r"--out .*empty: is a folder; give a file"),
    ("tools.masked_forms", "MASKED -o /proc/f.png", WEIGHTS, r"--out /proc/f\.png: cannot be written"),
    ("tools.inspect_data", "NONE --histogram /proc/l.png", "tools.inspect_data.IndexedTokens", "--histogram /proc/l"),
    ("tools.convert_hf", "export RUN OUT --text NONE", "tools.conversion.export_hf.export", "nothing: No such file"),
    ("tools.convert_hf", "import EXPORT OUT --text NONE", "tools.conversion.import_hf.import_folder", "No such file"),
    (
        "tools.benchmark_evaluation",
        "--data-dir DATA --checkpoint NONE",
        "tools.benchmark_evaluation.write_whole_sets",
        "nothing does not exist",
    ),
    (
        "tools.benchmark_evaluation",
        "--data-dir DATA --tokenizer NONE",
        "tools.benchmark_evaluation.write_whole_sets",
        "the tokenizer file .*nothing does not exist",
    ),
    (
        "tools.finetune_glue",
        "MASKED --tasks rte --data EMPTY --output OUT",
        "tools.conversion.export_hf.export",
        r"mnli/train\.jsonl\.gz does not exist: put the split there.* rte starts from the weights of mnli; --start pretrained",
    ),
]


@pytest.mark.parametrize(
    ("program", "line", "slow", "message"), CASES, ids=[f"{program} {line}" for program, line, *_ in CASES]
)
def test_invalid_input_is_refused_before_slow_work(
    program, line, slow, message, places, masked_run, eval_data, tmp_path, capsys, monkeypatch
):
    def called(*_: object, **__: object) -> None:
        raise AssertionError(f"{slow} was called")

    def unknown(name: str, file: str) -> None:
        raise OSError(f"{name} is no model of the hub\nthat has {file}")

    monkeypatch.setattr(slow, called)
    monkeypatch.setattr("transformers.utils.cached_file", unknown)
    known = {**places, "MASKED": str(masked_run), "DATA": str(eval_data), "OUT": str(tmp_path / "out")}
    words = [re.sub("|".join(known), lambda place: known[place[0]], word) for word in line.split()]
    assert importlib.import_module(program).main(words) == 2
    assert re.search(message, capsys.readouterr().err)
    assert not (tmp_path / "out").exists()
    assert not Path(places["NONE"]).exists()
