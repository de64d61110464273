"""Every program answers invalid arguments and unusable files with one message on stderr and exit status 2.

No program shows a traceback for them.
"""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path

import pytest

from tests.cli.conftest import ROOT
from tools.cli import arguments

# Arguments and a part of the message. Words such as RUN stand for the fixture `places`, and OUT for a new folder.
CASES = {
    "train.py": [
        ("NONE.yml", r"nothing\.yml: no such file; configs/README.md lists"),
        (
            "configs/experiments/mqar.yml",
            "mqar.yml: the key suite .*: python eval.py --suite mqar --config configs/exp",
        ),
        ("configs/experiments/compare_lm.yml", "the key models .*: python -m tools.compare configs/experiments/comp"),
        ("configs/eval/superglue.yml", "the key columns .*: python eval.py RUN --suite configs/eval/superglue.yml"),
        ("configs/finetune/glue.yml", "the key tasks .*: python -m tools.finetune_glue RUN --recipe configs/finetune"),
        ("configs", "configs: is a folder; name a file, such as configs/"),
        ("optimizer.lr 1e-3", "optimizer.lr: has no value: write optimizer.lr=VALUE"),
        ("--lr 1e-3", "--lr is not an option. Keys are set without dashes, .*; nearest: optimizer.lr"),
        ("--dryrun", "--dryrun is not an option; the nearest option is --dry-run"),
        ("--hidden-size=64", "--hidden-size=64 is not an option.* nearest: model.hidden_size"),
        ("TEXT", r"README\.md:\d+: YAML syntax"),
        ("model.hiden_size=64", "model.hiden_size is an unknown key; nearest: model.hidden_size"),
        ("model.hidden_size=wide", 'model.hidden_size = "wide": whole number is allowed'),
        ("model.mixers=[metalla]", "unknown mixer 'metalla'; did you mean metala or mamba"),
        ("parallel.tensor=3", "parallel: tensor 3 = 3 processes .* or take tensor 1"),
        ("batch.global_batch_size=7 batch.micro_batch_size=2", "nearest: batch.global_batch_size=6 or"),
        (
            "--dry-run run.device=cuda",
            "run.device: the device 'cuda' is not here: allowed are auto, cpu; run.device=auto counts the memory of a GPU",
        ),
        ("data.corpus=NONE run.directory=OUT", "the data path .*nothing does not exist .* A corpus is"),
        ("run.directory=FILE/run", "run.directory = .*name a folder that can be written"),
        (
            "data.corpus=TEXT data.validation_fraction=0 data.tokenizer.type=bytes batch.sequence_length=1000000000 "
            "run.directory=OUT data.cache_directory=OUT/cache",
            r"batch.sequence_length = 1000000000: the token file .* tokens, fewer than one sample .* or less, or add text",
        ),
        (
            "run.directory=OUT checkpoint.resume=NONE",
            "nothing does not exist .*: a run folder, .* is needed; auto, newest_readable and never are also allowed",
        ),
    ],
    "eval.py": [
        ("NONE", "does not exist .*: a run folder, .* is needed"),
        ("BROKEN", r"weights-00000\.safetensors is corrupted"),
        ("DAMAGED", r"manifest\.json is damaged: its SHA-256 is not the one in .*; name another step folder"),
        (
            "RUN --suite nosuch",
            r"no suite 'nosuch' \(a .* also allowed\); allowed are commonsense, lra, mad, mqar, needle, ruler, superglue\n",
        ),
        ("RUN --data NONE", "nothing does not exist"),
        ("RUN --data TOKENS", r"tokens\.bin is 1 bytes short: .* copy it again"),
        ("RUN --dtype int8", "dtype = 'int8': allowed are auto, fp32"),
        ("RUN --sequence-length x", "--sequence-length: x: a whole number, 1 or more, is allowed"),
        ("RUN --suite needle --depths 200", "--depths 200: percent of the filler, from 0 to 100"),
        ("RUN --suite needle --filler NONE", r"--filler .*nothing: No such file or directory; give a text file"),
        ("RUN --suite ruler --samples 0", "--samples: 0: a whole number, 1 or more"),
        ("table NONE", "does not exist: python eval.py MODEL --suite ... writes it"),
        ("compare TEXT TEXT", "is no JSON"),
        (
            "--suite mqar --config CONFIG",
            r"the key model belongs to another program: python train.py configs/default\.yml",
        ),
        ("--suite mad --config configs/finetune/glue.yml", "the key max_length .*: python -m tools.finetune_glue RUN"),
        ("--suite lra --config configs/experiments/ladder.yml", "the key name .*: python -m tools.compare configs/exp"),
        (
            "RUN --suite configs/experiments/lra.yml",
            "the key suite .*: python eval.py --suite lra --config configs/exp",
        ),
        ("--suite mqar tasks=[8xq]", "'8xq': allowed is LENGTHxPAIRS, for example"),
        ("--suite mqar models=[nosuch] --dry-run", "'nosuch' is not in .definitions.; allowed are attention, .*metala"),
    ],
    "tools.benchmark.__main__": [
        ("decode --config NONE --device cpu --output OUT", "nothing: no such file"),
        ("decode --config FILE --device cpu --output OUT", r"file:1: sections"),
        ("decode --config configs/experiments/mqar.yml --device cpu --output OUT", "the key suite .*: python eval.py"),
        ("decode --config CLUSTER --device cpu --output OUT", r"1gpu\.yml has no section `model`"),
        (
            "decode --config WIDE --device cpu --output OUT",
            r"model\.hiden_size is an unknown key; allowed are vocab_size",
        ),
        ("decode --device nope --output OUT", "the device 'nope' is not here: allowed are auto, cpu"),
        ("profile --device nope --output OUT", "the device 'nope' is not here: allowed are auto, cpu"),
        (
            "masked --size base model.vocab_size=512 --output OUT",
            r"model\.vocab_size = 512: allowed are values >= 1001",
        ),
        ("mixers --only nosuch --output OUT", "--only nosuch: allowed are attention"),
        ("mixers --batch 0 --output OUT", "--batch: 0: a whole number, 1 or more"),
        ("train --subjects nosuch --output OUT", "--subjects nosuch: allowed are metalion"),
        ("train --shapes 3 --output OUT", "--shapes 3: allowed is LENGTHxBATCH, for example"),
        ("profile --shape axb --output OUT", "--shape axb: allowed is LENGTHxBATCH"),
        ("masked --size huge --output OUT", "--size huge: .* allowed are base, large"),
        ("layouts --gpus 99 --output OUT", "--gpus 99: this machine has"),
        ("decode --output FILE/out", "Not a directory; give a folder"),
    ],
    "tools.benchmark_evaluation": [
        ("--data-dir NONE", "--tokenizer is missing: the random model needs one; or give a --checkpoint"),
        ("--data-dir NONE --checkpoint RUN", r"--data-dir .*nothing: no such folder\. Name a folder"),
        ("--data-dir EMPTY --checkpoint RUN", "empty lacks .*boolq"),
        ("--data-dir NONE --checkpoint RUN --output FILE/out", "--output .*: cannot be written"),
        ("--data-dir NONE --checkpoint RUN --hf-batch x", "--hf-batch: x: a whole number, 1 or more"),
        ("--data-dir NONE --checkpoint RUN --scale 0", "--scale: 0: a number above 0"),
    ],
    "tools.compare.__main__": [
        ("NONE", "nothing does not exist: give a comparison's YAML file, such as"),
        ("CLUSTER", r"name is missing in .*1gpu\.yml: text like .* is allowed"),
        ("CONFIG", r"the key model belongs to another program: python train.py configs/default\.yml"),
        (
            "configs/experiments/mad.yml",
            "the key suite .*: python eval.py --suite mad --config configs/experiments/mad",
        ),
        ("TEXT", r"README\.md:\d+: YAML syntax"),
        (
            "configs/experiments/ladder_cpu.yml --page FILE/page.md --report",
            r"--page .*page\.md: cannot be written \(Not a directory",
        ),
        (
            "configs/experiments/compare_lm.yml --models nosuch --dry-run",
            "--models nosuch is not in the comparison; allowed are",
        ),
        ("configs/experiments/compare_lm.yml --workers 0", "--workers: 0: a whole number, 1 or more"),
    ],
    "tools.config_reference": [("nosuch", "unrecognized arguments: nosuch")],
    "tools.convert_hf": [
        ("export NONE OUT", "does not exist"),
        ("export BROKEN OUT", "corrupted"),
        ("export RUN OUT --shard-size 1GB", "--shard-size 1GB; the nearest option is --max-shard-size"),
        ("export RUN OUT --zzz", "unrecognized arguments: --zzz; --help lists the options"),
        ("export RUN OUT --max-shard-size abc", "--max-shard-size: 'abc': a number of bytes, or a size such as 500MB"),
        (
            "export RUN OUT --max-shard-size infGB",
            "--max-shard-size: 'infGB': a number of bytes, or a size such as 500MB",
        ),
        ("import HUGGING OUT", r"config\.json has no key 'num_attention_heads', which a llama needs"),
        ("import HUGGING OUT --tolerance nan", "--tolerance: nan: a number above 0"),
        ("import NONE OUT", r"nothing is no Hugging Face folder: config\.json is missing"),
    ],
    "tools.finetune_glue": [
        ("NONE", "does not exist"),
        ("RUN --seeds 0", "--seeds: 0: a whole number, 1 or more"),
        ("RUN --tasks nosuch", "--tasks nosuch: the recipe has mnli,"),
        ("RUN --recipe TEXT", r"README\.md:\d+: YAML syntax"),
        ("RUN --recipe CONFIG", r"the key model belongs to another program: python train.py configs/default\.yml"),
        ("RUN lr.start=3", "lr = "),
        ("RUN lr", "override 'lr': write key.sub=value"),
    ],
    "tools.generate": [
        ("NONE", "does not exist"),
        ("BROKEN", "corrupted"),
        ("UNREADABLE", r"config\.yml is damaged \(while parsing .*\); name another step folder"),
        ("LOST", r"description\.json is damaged: .*; copy it again, or remove its folder"),
        ("RUN --prompts-file NONE", "--prompts-file .*nothing: no such file; give a file with one prompt per line"),
        ("RUN --temperature -1", r"temperature = -1\.0: 0 .* or more is allowed"),
        ("RUN --temperature nan", r"temperature = nan: 0 .* or more is allowed"),
        ("RUN --prompt caf\udce9", r"--prompt: 'caf\\udce9': no UTF-8 at character 3; give UTF-8 text"),
        ("RUN --prompts-file FILE --out FILE", "--out .*file: this command reads it, .* give another file"),
        ("RUN --prompts-file BINARY", "--prompts-file .*binary: no UTF-8 at byte 5"),
        ("RUN --max-new-tokens 8", "unrecognized arguments: --max-new-tokens 8; the nearest option is --max-tokens"),
        ("RUN --max-tokens many", "--max-tokens: many: a whole number, 1 or more"),
        ("RUN --seed 99999999999999999999", r"--seed: 9+: a whole number from 0 to 2\^63 - 1 is allowed"),
    ],
    "tools.inspect_data": [
        ("NONE", r"nothing\.idx does not exist"),
        ("TOKENS", r"tokens\.bin is 1 bytes short: .* copy it again"),
        ("OTHERS", r"others\.json is no JSON .*: copy it again, .*or remove it"),
        ("TOKENS --document -1", "--document: -1: a whole number, 0 or more"),
        ("TOKENS --document 1 --sample 2", "--sample: not allowed with argument --document"),
    ],
    "tools.length.__main__": [
        ("NONE", "does not exist"),
        (
            "RUN --lengths 7",
            r"--lengths 7: it must divide the longest length, \d+ \(the trained length is also measured",
        ),
        (
            "RUN --lengths 7000001",
            r"the trained length \d+ is also measured: it must divide the longest length, 7000001",
        ),
        ("RUN --lengths 0", "--lengths: 0: a whole number, 1 or more"),
        ("RUN --data TOKENS", r"tokens\.bin is 1 bytes short: .* copy it again"),
    ],
    "tools.image_sizes": [
        ("NONE", "does not exist"),
        ("RUN", "is a language model; name a run that classifies images"),
        ("RUN --sizes 0", "--sizes: 0: a whole number, 1 or more"),
        ("RUN -o FILE/l.png", "--out .*: cannot be written"),
    ],
    "tools.masked_forms": [
        ("NONE", "does not exist"),
        ("RUN", "has no bidirectional lion mixers: .*; name a run of `lion`"),
        ("RUN --batch 0", "--batch: 0: a whole number, 1 or more"),
    ],
    "tools.neox_config": [
        ("NONE", "nothing: no such file; name GPT-NeoX's"),
        ("FILE -o FILE", "--out .*file: this command reads it, .* give another file"),
        ("FILE -o FILE/out", "--out .*out: cannot be written"),
        ("CONFIG", "has the section run: it is of this project already"),
        ("BINARY", "binary: cannot be read: not UTF-8 text; save it as UTF-8"),
    ],
    "tools.plan": [
        ("CONFIG --gpus 0", "--gpus: 0: a whole number, 1 or more, is allowed"),
        ("CONFIG --gpu V100", "--gpu 'V100': its bf16 peak is not known; allowed are A10, "),
        ("CONFIG --mfu 40", "--mfu: 40: a number above 0 and at most 1 is allowed"),
        ("CONFIG --node-bandwidth 0", "--node-bandwidth: 0: a number above 0"),
        ("configs/eval/superglue.yml", "the key columns .*: python eval.py RUN --suite configs/eval/superglue.yml"),
        ("CONFIG --tensor 2", "--tensor is not an option.*; nearest: parallel.tensor"),
        ("CONFIG model.nosuch=1", "model.nosuch is an unknown key; allowed in model are"),
    ],
    "tools.plot": [
        ("NONE", "no metrics there .*; name the folder of a run"),
        ("RUN --html -o OUT/page.png", r"--out .*page\.png: the name of a page must end in \.html"),
        ("RUN --html -o FILE/page.html", r"--out .*page\.html: cannot be written \(Not a directory"),
        ("RUN -o OUT/plot.nosuch", r"--out .*plot\.nosuch: the name must end in an image format, such as \.png"),
        ("RUN -o FILE/plot.png", r"--out .*plot\.png: cannot be written \(Not a directory"),
    ],
    "tools.preprocess_data": [
        ("--input NONE --tokenizer-type bytes --output-prefix OUT", "nothing does not exist"),
        (
            "--input TEXT --tokenizer-type bytes --vocab-file NONE --output-prefix OUT",
            "nothing: the tokenizer bytes has no file; leave it out",
        ),
        ("--input TEXT --tokenizer-type hf --vocab-file TEXT --output-prefix OUT", "is not a Hugging Face tokenizer"),
        (
            "--input TEXT --tokenizer-type bytes --output-prefix OUT --workers 0",
            "--workers: 0: a whole number, 1 or more",
        ),
        ("--input TEXT --tokenizer-type bytes --output-prefix OUT --max-broken -1", "--max-broken: -1: a whole number"),
        (
            "--input TEXT --tokenizer-type bytes --output-prefix FILE/out",
            r"--output-prefix .*out_text_document\.bin: cannot be written",
        ),
        (
            "--input TEXT --tokenizer-type bytes --output-prefix OUT --near-duplicates x",
            "--near-duplicates: x: a number above 0 is",
        ),
    ],
    "tools.retrieval_text": [
        (
            "--output OUT --documents 2 --tokenizer-type bytes --tasks ,",
            "--tasks: ',' is an empty list: give one value or more, as A,B",
        ),
        (
            "--output OUT --documents 2 --tokenizer-type bytes --tasks nosuch",
            "--tasks nosuch: allowed are niah_single_1",
        ),
        ("--output OUT --documents 2 --tokenizer-type bytes --haystack NONE", "nothing does not exist"),
    ],
    "tools.reshard": [
        ("NONE OUT", "does not exist"),
        ("BROKEN OUT", "corrupted"),
        (
            "RUN OUT --tensor 3",
            "--tensor = 3 does not divide model.num_heads = 4; nearest allowed: --tensor 1 --pipeline 1",
        ),
        ("RUN parallel.tensor=2", "unrecognized arguments: parallel.tensor=2; the nearest option is --tensor"),
        ("RUN OUT --data 0", "--data: 0: a whole number, 1 or more"),
        ("RUN OUT parallel.tensor=2", "unrecognized arguments: parallel.tensor=2; the nearest option is --tensor"),
    ],
    "tools.serve": [
        ("HUGGING", r"config\.json has no key 'architectures': python -m tools\.convert_hf export"),
        ("NONE", r"is no export: config\.json is missing; python -m tools\.convert_hf export"),
    ],
    "tools.train_tokenizer": [
        ("--input NONE --output OUT", "nothing does not exist"),
        ("--input FILE --output FILE", "--output .*file: this command reads it, or its folder, as input; give another"),
        ("--input TEXT --output OUT --vocab-size 10", "vocab_size 10 is too small: .* set 264 or more"),
        ("--input TEXT --output OUT --workers 0", "--workers: 0: a whole number, 1 or more"),
        ("--input TEXT --output RUN", r"--output .* is a folder: name a file in it, such as .*/tokenizer\.model"),
    ],
}


@pytest.mark.parametrize(
    ("program", "line", "message"),
    [(program, *case) for program, cases in CASES.items() for case in cases],
    ids=[f"{program.removesuffix('.__main__')} {line}" for program, cases in CASES.items() for line, _ in cases],
)
def test_invalid_input_prints_one_message_and_exits_with_2(
    program, line, message, places, tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(ROOT)
    known = {**places, "OUT": str(tmp_path / "out")}
    words = [re.sub("|".join(known), lambda place: known[place[0]], word) for word in line.split()]
    try:
        status = importlib.import_module(program.removesuffix(".py")).main(words)
    except SystemExit as end:
        status = end.code
    printed = capsys.readouterr()
    assert status == 2, printed
    assert len(re.findall(r"(?m)^(?:error|python .*: error): ", printed.err)) == 1
    assert re.search(message, printed.err, re.DOTALL), printed.err
    assert not Path(places["NONE"]).exists()


def test_every_program_has_cases():
    def is_program(path: Path) -> bool:
        tree = ast.parse(path.read_text())
        called = {
            node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        }
        return called & {"command_line", "parse_evaluation"} and any(
            isinstance(n, ast.FunctionDef) and n.name == "main" for n in tree.body
        )

    files = [
        path.relative_to(ROOT) for path in [*ROOT.glob("*.py"), *(ROOT / "tools").rglob("*.py")] if is_program(path)
    ]
    names = {path.name if len(path.parts) == 1 else ".".join(path.with_suffix("").parts) for path in files}
    assert names == set(CASES)


def test_full_disk_exits_with_1(capsys):
    @arguments.command
    def main(words: object) -> int:
        raise OSError(28, "No space left on device", "x.bin")

    assert main() == arguments.FAILED
    assert capsys.readouterr().err.startswith(
        "error: x.bin: No space left on device. Finished work is saved: free disk space"
    )


def test_error_of_the_program_keeps_its_traceback():
    @arguments.command
    def main(words: object) -> int:
        raise TypeError("an error")

    with pytest.raises(TypeError, match="an error"):
        main()
