"""Wrong words on a command line are answered with a sentence and an exit status, never with a traceback."""

from __future__ import annotations

import importlib
import re

import pytest

from tests.cli.conftest import ROOT

CONFIG = "configs/default.yml"
CASES = [
    ("generate RUN", "does not exist"),
    ("plan CONFIG --gpus 0", "--gpus: 0: 1 or more"),
    ("plan CONFIG --links none.json", "none.json"),
    ("plan CONFIG --links CONFIG", "--links .*default.yml: not what tools.measure_links -o writes"),
    ("simulate_scaling CONFIG --links none.json", "none.json"),
    ("neox_config none.yml", "none.yml: no such file; name GPT-NeoX's"),
    ("neox_config CONFIG", "has the section run: it is of this project already"),
    ("preprocess_data --input CONFIG --tokenizer-type bytes --output-prefix x --workers 0", "--workers: 0: 1 or more"),
    ("convert_hf export RUN out --max-shard-size abc", "--max-shard-size: 'abc': bytes, or 500MB"),
    ("finetune_glue RUN", "does not exist"),
    ("finetune_glue RUN --seeds 0", "--seeds: 0: 1 or more"),
    ("masked_forms RUN", "does not exist"),
    ("length.__main__ RUN", "does not exist"),
    ("reshard RUN out", "does not exist"),
    ("compare.__main__ CONFIG", "default.yml: name is missing: give it a value"),
    ("benchmark.__main__ decode --config none.yml --device cpu --output OUT", "none.yml: no such file"),
    ("benchmark.__main__ decode --device nope --output OUT", "the device 'nope' is not here: allowed are auto, cpu"),
]


@pytest.mark.parametrize(("line", "answer"), CASES, ids=[line for line, _ in CASES])
def test_a_sentence_and_a_status(line, answer, tmp_path, capsys):
    places = {"RUN": str(tmp_path / "nothing"), "CONFIG": str(ROOT / CONFIG), "OUT": str(tmp_path / "out")}
    program, *words = (places.get(word, word) for word in line.split())
    status = 0
    try:
        status = importlib.import_module(f"tools.{program}").main(words)
    except SystemExit as end:
        status = end.code
    said = capsys.readouterr()
    assert status, said
    assert re.search(answer, f"{said.err}{status}")
    assert not (tmp_path / "nothing").exists()
