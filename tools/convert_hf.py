"""Convert checkpoints to Hugging Face folders and back: `python -m tools.convert_hf export runs/default out/`."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_lite.plural import counted
from tools.cli.arguments import FAILED, above_zero, command, command_line
from tools.cli.help_text import HelpFormatter

if TYPE_CHECKING:  # torch is imported where it is used, so that --help answers at once
    from tools.conversion.export_hf import Export


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line. Returns 0, 1 if logits differ by more than the tolerance, 2 after an error."""
    options = _parser().parse_args(arguments)
    if getattr(options, "text", None) is not None:
        options.text.open("rb").close()  # raise before a folder is written
    return {"export": _export, "import": _import, "verify": _verify}[options.command](options)


def _verify(options: argparse.Namespace) -> int:
    from megatron_lite.checkpoint.reader import resolve, step_folders
    from megatron_lite.checkpoint.verify import verify
    from tools.conversion.hf_folder import check_folder

    folder, check = options.folder, verify
    if (folder / "config.json").is_file():
        places, check = [folder], check_folder
    else:
        places = [*step_folders(folder).values(), *step_folders(folder / "checkpoints").values()] or [resolve(folder)]
    status = 0
    for place in places:
        try:
            count = check(place)
            print(f"{place}: {count} files match their hashes" if count else f"{place} has no hashes")
        except ValueError as error:
            print(f"error: {error}", file=sys.stderr)
            status = FAILED
    return status


def _export(options: argparse.Namespace) -> int:
    from tools.conversion.export_hf import export

    done = export(
        options.checkpoint,
        options.folder,
        dtype=options.dtype,
        max_shard_bytes=options.max_shard_size,
        form=options.format,
        overwrite=options.overwrite,
        licence=options.licence,
        tokenizer_file=options.tokenizer,
        text=options.text,
        progress=True,
    )
    size = f"{done.bytes / 1e9:,.2f} GB" if done.bytes >= 1e9 else f"{done.bytes / 1e6:,.1f} MB"
    print(f"{done.folder}: {done.parameters:,} parameters in {options.dtype}, {size} in {counted(done.shards, 'file')}")
    return _check(done, options)


def _import(options: argparse.Namespace) -> int:
    import torch

    from megatron_lite.checkpoint.reader import Weights
    from tools.conversion.hf_folder import Tensors
    from tools.conversion.import_hf import import_folder, original_logits, processes_per_replica
    from tools.conversion.logit_parity import count_of, real_text, rows_of, rows_without_tokenizer, trainer_logits

    done = import_folder(
        options.folder,
        options.run,
        overwrite=options.overwrite,
        text=options.text,
        trust_remote_code=options.trust_remote_code,
    )
    print(f"{done.checkpoint}: {done.parameters:,} parameters of {options.folder} ({done.kind})")
    if done.tokenizer is not None:
        text, name = real_text(done.config, done.tokenizer, options.text)
        tokens = rows_of(text, done.tokenizer, done.model)
    else:
        if done.model.image_size is None:
            print(
                "the folder has no tokenizer: set data.tokenizer before training. To generate or evaluate, copy the model's "
                "tokenizer into it and import it again with --overwrite"
            )
        tokens, name = rows_without_tokenizer(done.model)
    trust = options.trust_remote_code
    theirs, origin = original_logits(options.folder, done.kind, done.model, tokens, trust_remote_code=trust)
    if theirs is None:
        print(f"logits are not compared with the original's: {origin}")
    else:
        ours = trainer_logits(Weights(done.checkpoint), done.model, tokens, torch.float32, progress=True)
        difference, largest = (ours - theirs).abs().max().item(), theirs.abs().max().item()
        print(
            f"logits on {count_of(tokens)} of {name}: largest difference to {origin} {difference:.2e} "
            f"(largest logit {largest:.2f})"
        )
        if not difference <= options.tolerance * max(1.0, largest):  # also for NaN
            print(
                f"error: over the tolerance of {options.tolerance:g}; {done.run} is kept. The largest weight is "
                f"{Tensors(options.folder).largest()}; if the file is damaged, copy it again and import with --overwrite",
                file=sys.stderr,
            )
            return FAILED
    # The configuration has either data.train or data.corpus, and refuses both together.
    texts = "data.train=... data.validation=..." if done.config["data"].get("train") else "data.corpus=..."
    if done.model.image_size is not None:
        texts = "data.images.train=... data.images.validation=..."
    file = shlex.quote(f"{done.run}/config.yml")
    processes = processes_per_replica(done.config)
    start = "python" if processes == 1 else f"torchrun --nproc-per-node {processes}"
    print(f"{start} train.py {file} {texts}   continues the training; check the file first")
    return 0


def _check(done: Export, options: argparse.Namespace) -> int:
    from megatron_lite.dtypes import DTYPES
    from tools.conversion.logit_parity import compare_logits, real_text, rows_of, rows_without_tokenizer
    from tools.conversion.tokenizer import check_same_ids
    from tools.loading.model import model_config

    config = model_config(done.config)
    if done.tokenizer is None:
        if config.image_size is None:
            print("no tokenizer: the run was imported without one; --tokenizer FILE adds one to the folder")
        tokens, name = rows_without_tokenizer(config)
    else:
        text, name = real_text(done.config, done.tokenizer, options.text)
        tokens = rows_of(text, done.tokenizer, config)
        compared = check_same_ids(done.tokenizer, done.folder, [text])
        print(f"tokenizer: AutoTokenizer gives the same ids on {compared:,} tokens")
    kind = DTYPES[options.dtype]
    result = compare_logits(done.weights, config, done.folder, tokens, kind)
    print(
        f"logits on {result.count} of {name}: largest difference to the trainer's {result.converted:.2e} "
        f"(largest logit {result.largest:.2f})"
    )
    if options.dtype != "fp32":
        print(f"storing the weights in {options.dtype} itself changes logits by up to {result.rounded:.2e}")
    if not result.converted <= options.tolerance:  # also for NaN
        print(
            f"error: over the tolerance of {options.tolerance:g}; {done.folder} is kept, do not use it",
            file=sys.stderr,
        )
        return FAILED
    return 0


def _bytes(text: str) -> int:
    units = {"KB": 10**3, "MB": 10**6, "GB": 10**9}
    unit = units.get(text[-2:].upper())
    try:
        size = int(float(text[:-2]) * unit) if unit else int(text)
    except (OverflowError, ValueError):
        size = 0
    if size < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: a number of bytes, or a size such as 500MB or 5GB, is allowed")
    return size


def _parser() -> argparse.ArgumentParser:
    parser = command_line(
        "python -m tools.convert_hf",
        "Convert checkpoints to Hugging Face folders and back.",
        (
            "examples:\n"
            "  python -m tools.convert_hf export runs/default exported/           weights as float32\n"
            "  python -m tools.convert_hf export runs/default exported/ --dtype bf16 --overwrite\n"
            "  python -m tools.convert_hf import exported/ runs/again              an export, for further training\n"
            "  python -m tools.convert_hf import pythia-410m/ runs/pythia          GPT-NeoX, Llama, MetaLA, GLA and others\n"
            "  python -m tools.convert_hf verify runs/default                      read and check every file of a run or export\n"
            "\n"
            "An export compares its logits with the trainer's and fails if they differ by more than the tolerance.\n"
            "See docs/guide/huggingface.md"
        ),
    )
    commands = parser.add_subparsers(dest="command", required=True)
    export = commands.add_parser(
        "export",
        help="export a checkpoint to a Hugging Face folder",
        description="Write a folder that AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True) loads.",
        epilog="example:\n  python -m tools.convert_hf export runs/default exported/ --dtype bf16",
        formatter_class=HelpFormatter,
    )
    export.add_argument("checkpoint", help="folder of a run, or one of its checkpoints/step_*")
    export.add_argument("folder", type=Path, help="the folder to write")
    export.add_argument(
        "--format",
        default="metalion",
        choices=("metalion", "fla"),
        help="the project's own with its source, or flash-linear-attention's for the mixers of the delta rule (metalion)",
    )
    export.add_argument("--dtype", default="fp32", choices=("fp32", "bf16", "fp16"), help="type of the weights (fp32)")
    export.add_argument(
        "--max-shard-size", type=_bytes, default="5GB", help="largest weight file, such as 500MB (default 5GB)"
    )
    export.add_argument("--overwrite", action="store_true", help="replace the folder if it is an export")
    export.add_argument(
        "--licence", default="apache-2.0", help="licence in the model card, a name of the hub (apache-2.0)"
    )
    export.add_argument(
        "--tokenizer",
        type=Path,
        metavar="FILE",
        help="tokenizer.json, tokenizer.model, vocab.txt or a folder with one (default: the run's)",
    )
    export.add_argument(
        "--text",
        type=Path,
        help="text to compare logits on (default: the run's training text, or a module of Python)",
    )
    export.add_argument(
        "--tolerance", type=above_zero, default=1e-4, help="largest difference of logits (default 1e-4)"
    )
    imported = commands.add_parser(
        "import",
        help="import a Hugging Face folder as a run for further training",
        description="Write a run with a checkpoint, the tokenizer and a config.yml for train.py. Weights: safetensors.",
        epilog="example:\n  python -m tools.convert_hf import exported/ runs/again",
        formatter_class=HelpFormatter,
    )
    imported.add_argument(
        "folder",
        type=Path,
        help="an export of this project, or a model of another codebase (docs/guide/huggingface.md lists them)",
    )
    imported.add_argument("run", type=Path, help="the run folder to write")
    imported.add_argument("--overwrite", action="store_true", help="replace an import that was not trained further")
    imported.add_argument(
        "--trust-remote-code",
        action="store_true",
        help="run the source in the folder, if it differs from this version's, to compare its logits",
    )
    imported.add_argument("--text", type=Path, help="text to compare logits on (default: as for export)")
    imported.add_argument(
        "--tolerance",
        type=above_zero,
        default=1e-4,
        help="largest difference of logits, relative to the largest logit if that is > 1 (1e-4)",
    )
    verified = commands.add_parser(
        "verify",
        help="compare the files of a run's checkpoints or of an export with their hashes",
        description="Read every file and compare its SHA-256. Damaged files are named, with exit status 1.",
        epilog="example:\n  python -m tools.convert_hf verify runs/default",
        formatter_class=HelpFormatter,
    )
    verified.add_argument("folder", type=Path, help="a run, a checkpoints folder, a step folder or an export")
    return parser


if __name__ == "__main__":
    sys.exit(main())
