"""Ranks with different configurations, code or data are refused at the start. The message names ranks and differences."""

from __future__ import annotations

import re
import shutil
import sys

import numpy as np

from data.indexed import IndexedWriter
from megatron_lite.fault_tolerance.rank_consistency import (
    code_facts,
    configuration_facts,
    difference,
    file_facts,
    rank_words,
)
from tests.cli.conftest import ROOT, output_of

SHELL, SHELL_OPTIONS = ("bash", "-c"), ("--no-python",)


def test_different_configuration_and_checkout_are_named(launch, arguments, tmp_path):
    copy = tmp_path / "checkout"
    for name in ("configs", "data", "megatron_lite", "models", "tools"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copyfile(ROOT / "train.py", copy / "train.py")
    with open(copy / "models" / "layers" / "mlp.py", "a") as file:
        file.write("\n# an older version\n")
    script = f'[ $RANK = 0 ] || {{ cd {copy}; set -- "$@" run.seed=7; }}; exec {sys.executable} train.py "$@"'
    agent = launch(arguments(), *SHELL, script, "train", options=SHELL_OPTIONS)
    output = output_of(agent, None)
    assert "error: the processes of this run differ; nothing was started" in output
    assert re.search(r"configuration: run\.seed: rank 0 \(\S+\) 1234; rank 1 \(\S+\) 7\n", output)
    assert re.search(
        r"code: models/layers/mlp\.py: rank 0 \(\S+\) SHA-256 \w{12}; rank 1 \(\S+\) SHA-256 \w{12}\n", output
    )
    assert "packages:" not in output
    assert not (tmp_path / "run").exists()


def test_different_data_under_the_same_name_are_named(launch, arguments, tmp_path):
    for rank in range(2):
        draw = np.random.default_rng(rank)  # as many tokens, but others
        with IndexedWriter(tmp_path / f"disk{rank}" / "text", np.dtype("<u2")) as writer:
            for _ in range(20):
                writer.add_document(draw.integers(0, 256, 100))
    script = f'cd {tmp_path}/disk$RANK; exec {sys.executable} {ROOT}/train.py "$@"'
    words = [word for word in arguments(**{"data.train": "text"}) if not word.startswith("data.corpus")]
    agent = launch([*words, "data.corpus=null"], *SHELL, script, "train", options=SHELL_OPTIONS)
    output = output_of(agent, None)
    assert re.search(
        r"data: text\.bin: rank 0 \(\S+\) 4,000 bytes, SHA-256 \w{12}; rank 1 \(\S+\) 4,000 bytes, SHA", output
    )
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_message_names_the_minority_last():
    majority = {"packages": {"torch": "2.13.0", "numpy": "2.4.6"}, "code": {"train.py": "a" * 64}}
    other = {"packages": {"torch": "2.12.0"}, "code": {"train.py": "a" * 64}}
    text = difference([majority, majority, other, majority], ["gpu1", "gpu1", "gpu2", "gpu2"])
    assert "packages: torch: ranks 0-1, 3 (gpu1, gpu2) 2.13.0; rank 2 (gpu2) 2.12.0" in text
    assert "packages: numpy: ranks 0-1, 3 (gpu1, gpu2) 2.4.6; rank 2 (gpu2) absent" in text
    assert "code" not in text
    many = [{"code": {f"{i}.py": str(rank) for i in range(20)}} for rank in range(2)]
    assert difference(many, ["a", "b"]).count("code:") == 9
    assert "code: and 12 more" in difference(many, ["a", "b"])


def test_facts_of_code_configuration_and_files(tmp_path):
    facts = code_facts(ROOT, ("train.py", "models"))
    assert {"train.py", "models/language_model.py", "models/mixers/metala.py"} <= facts.keys()
    assert configuration_facts({"a": {"b": (1, 2), "c": {}}, "d": None}) == {"a.b": "[1, 2]", "a.c": "{}", "d": "null"}
    large = tmp_path / "tokens.bin"
    large.write_bytes(bytes(3 << 20))
    facts = file_facts([large, tmp_path / "gone.bin", None])
    assert facts[str(tmp_path / "gone.bin")] == "no such file"
    large.write_bytes(bytes((3 << 20) - 1) + b"1")
    assert file_facts([large]) != {str(large): facts[str(large)]}
    assert rank_words([4, 0, 1, 2]) == "ranks 0-2, 4"
