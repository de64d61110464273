"""List and run the jobs of the project: `metalion JOB ...`, or `python -m tools JOB ...` without installation."""

from __future__ import annotations

import difflib
import runpy
import sys
from collections.abc import Sequence

from tools.cli.arguments import command

# Job: the program, its first arguments, and one sentence. `metalion JOB ...` equals `python -m PROGRAM ARGUMENTS ...`.
JOBS: dict[str, tuple[str, tuple[str, ...], str]] = {
    "preprocess": ("tools.preprocess_data", (), "tokenize raw text to token files"),
    "retrieval-text": ("tools.retrieval_text", (), "write generated retrieval texts, to be mixed into a corpus"),
    "train-tokenizer": ("tools.train_tokenizer", (), "train a SentencePiece tokenizer on raw text"),
    "inspect": ("tools.inspect_data", (), "show token files and samples; compare checksums; decode images"),
    "neox-config": ("tools.neox_config", (), "translate GPT-NeoX configuration files"),
    "plan": ("tools.plan", (), "estimate memory and speed in each layout, without a GPU"),
    "train": ("train", (), "train a model: language, masked, images"),
    "plot": ("tools.plot", (), "plot the curves of runs, or write their report page"),
    "generate": ("tools.generate", (), "continue a text with a trained model"),
    "eval": ("eval", (), "evaluate a model: suites, perplexity, synthetic tasks"),
    "length": ("tools.length", (), "measure loss and accuracy beyond the trained length"),
    "finetune-glue": ("tools.finetune_glue", (), "fine-tune a masked or causal model on GLUE"),
    "compare": ("tools.compare", (), "train and evaluate several models by one recipe"),
    "export": ("tools.convert_hf", ("export",), "export a checkpoint to a Hugging Face folder"),
    "import": ("tools.convert_hf", ("import",), "import a Hugging Face folder as a run"),
    "verify": ("tools.convert_hf", ("verify",), "compare the files of a run or an export with their hashes"),
    "serve": ("tools.serve", (), "serve an export with an OpenAI-compatible server"),
    "reshard": ("tools.reshard", (), "write a checkpoint in another layout"),
    "benchmark": ("tools.benchmark", (), "measure speed and memory of kernels, layouts, models"),
    "benchmark-evaluation": ("tools.benchmark_evaluation", (), "measure the time of an evaluation"),
    "image-sizes": ("tools.image_sizes", (), "measure a classifier of images on other image sizes"),
    "masked-forms": ("tools.masked_forms", (), "measure the speed of LION's forms of attention"),
    "config-reference": ("tools.config_reference", (), "write configs/README.md from the schema"),
}


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Run a job with its arguments, or print the list of jobs. Returns the exit status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or words[0] in ("-h", "--help", "help"):
        print(overview())
        return 0
    if words[0] not in JOBS:
        near = difflib.get_close_matches(words[0], JOBS, 1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise ValueError(f"{words[0]} is not a job: {hint}metalion --help lists the jobs")
    program, first, _ = JOBS[words[0]]
    sys.argv = [program, *first, *words[1:]]
    runpy.run_module(program, run_name="__main__", alter_sys=True)
    return 0


def overview() -> str:
    """Return the list of jobs with the command that each one runs."""
    lines = ["usage: metalion JOB ...     (without installation: python -m tools JOB ...)", "", "jobs:"]
    for name, (program, first, sentence) in JOBS.items():
        start = f"python -m {program}" if "." in program else f"python {program}.py"
        lines.append(f"  {name:<22}{sentence}")
        lines.append(f"  {'':<22}= {' '.join([start, *first])}")
    return "\n".join([*lines, "", "metalion JOB --help describes a job. On several GPUs: torchrun ... train.py"])


if __name__ == "__main__":
    sys.exit(main())
