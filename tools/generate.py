"""Generate text from a checkpoint: `python -m tools.generate runs/default --prompt "def "`."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from megatron_lite.plural import counted
from tools.cli.arguments import (
    INTERRUPTED,
    check_not_read,
    check_writable,
    command,
    command_line,
    from_zero,
    positive,
    seed,
    utf8_text,
)

if TYPE_CHECKING:  # torch is imported where it is used, so that --help answers at once
    from tools.loading.model import LoadedModel


@command
def main(arguments: Sequence[str] | None = None) -> int:
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.out is not None and options.prompts_file is None:
        parser.error("--out goes with --prompts-file; the text of one --prompt goes to stdout")
    if options.out is not None:
        check_writable(options.out, "--out")
        check_not_read(options.out, "--out", [options.prompts_file])
    from tools.inference.generation import longest_continuation, prompt_ids
    from tools.inference.sampling import check_sampling
    from tools.loading.model import load_located, locate_checkpoint

    check_sampling(options.temperature, options.top_k, options.top_p)
    prompts = _prompts(options)
    located = locate_checkpoint(options.checkpoint, device=options.device, dtype=options.dtype)
    located.refuse_images()
    if located.model.bidirectional_mixers():
        raise ValueError(
            f"{located.checkpoint} is a masked model: it reads both sides of a token and continues no text; "
            "python -m tools.length evaluates it, python -m tools.finetune_glue trains it on tasks"
        )
    loaded = load_located(located)
    for prompt in prompts:
        ids = prompt_ids(loaded.tokenizer, prompt)
        longest = longest_continuation(loaded.model, ids)
        if options.max_tokens > longest:
            raise ValueError(
                f"--max-tokens {options.max_tokens}: after a prompt of {counted(len(ids), 'token')} at most {longest} is "
                f"allowed (model.max_positions = {located.model.max_positions})"
            )
    started = time.perf_counter()
    count = status = 0
    if options.prompts_file is None:
        print(prompts[0], end="", flush=True)
        try:
            for text, tokens in _stream(loaded, prompts[0], options):
                print(text, end="", flush=True)
                count = tokens
        except KeyboardInterrupt:  # Ctrl-C ends the text; the speed is still printed
            status = INTERRUPTED
        print()
    else:
        with _texts_file(options.out) as out:
            for number, (prompt, text, tokens) in enumerate(_batched(loaded, prompts, options), start=1):
                count += tokens
                print(f"--- {number} of {len(prompts)} ---\n{prompt}{text}", flush=True)
                if out is not None:
                    line = json.dumps({"prompt": prompt, "text": text, "tokens": tokens}, ensure_ascii=False)
                    out.write(line + "\n")
                    out.flush()
    seconds = time.perf_counter() - started
    print(
        f"{count} tokens in {seconds:.1f} s ({count / seconds:,.0f} tokens/s), step {loaded.step} of {loaded.run}",
        file=sys.stderr,
    )
    return status


@contextlib.contextmanager
def _texts_file(path: Path | None) -> Iterator[IO[str] | None]:
    """Yield a temporary file that replaces `path` at the end, or None without a path.

    After an error or Ctrl-C the file replaces `path` too, unless it is empty.
    """
    if path is None:
        yield None
        return
    from data.atomic_io import put_in_place, sync, temporary_path

    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_path(path)
    with temporary.open("w", encoding="utf-8") as file:
        try:
            yield file
        finally:
            if temporary.stat().st_size:
                sync(temporary)
                put_in_place(temporary, path)
            else:
                temporary.unlink()


def _stream(loaded: LoadedModel, prompt: str, options: argparse.Namespace) -> Iterator[tuple[str, int]]:
    """Yield complete pieces of the text and the number of tokens so far."""
    from tools.inference.generation import TextStream, generate, prompt_ids

    ids = prompt_ids(loaded.tokenizer, prompt)
    stream = TextStream(loaded.tokenizer, ids)
    count = 0
    for step in generate(loaded.model, [ids], **_settings(loaded, options)):
        for token in step:
            if token is not None:
                count += 1
                yield stream.push(token), count
    yield stream.finish(), count


def _batched(
    loaded: LoadedModel, prompts: Sequence[str], options: argparse.Namespace
) -> Iterator[tuple[str, str, int]]:
    """Yield (prompt, generated text, tokens) in the order of the prompts."""
    from tools.inference.generation import TextStream, generate, prompt_ids

    for first in range(0, len(prompts), options.batch_size):
        batch = prompts[first : first + options.batch_size]
        ids = [prompt_ids(loaded.tokenizer, prompt) for prompt in batch]
        streams = [TextStream(loaded.tokenizer, i) for i in ids]
        texts, counts = [""] * len(batch), [0] * len(batch)
        for step in generate(loaded.model, ids, first_row=first, **_settings(loaded, options)):
            for row, token in enumerate(step):
                if token is not None:
                    texts[row] += streams[row].push(token)
                    counts[row] += 1
        for prompt, text, stream, count in zip(batch, texts, streams, counts, strict=True):
            yield prompt, text + stream.finish(), count


def _settings(loaded: LoadedModel, options: argparse.Namespace) -> dict[str, Any]:
    return {
        "max_tokens": options.max_tokens,
        "vocab_size": loaded.tokenizer.vocab_size,
        "stop_id": loaded.tokenizer.end_of_document_id,
        "temperature": 0.0 if options.greedy else options.temperature,
        "top_k": options.top_k,
        "top_p": options.top_p,
        "seed": options.seed,
    }


def _prompts(options: argparse.Namespace) -> list[str]:
    if options.prompts_file is None:
        return [options.prompt]
    if not options.prompts_file.is_file():
        raise ValueError(f"--prompts-file {options.prompts_file}: no such file; give a file with one prompt per line")
    try:
        prompts = options.prompts_file.read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"--prompts-file {options.prompts_file}: no UTF-8 at byte {error.start}; save it as UTF-8"
        ) from error
    if prompts[-1] == "":
        prompts.pop()
    if not prompts:
        raise ValueError(f"{options.prompts_file} is empty: write one prompt per line")
    return prompts


def _parser() -> argparse.ArgumentParser:
    parser = command_line(
        "python -m tools.generate",
        "Continue a text with a trained model. The text is printed while it is generated.",
        (
            "examples:\n"
            '  python -m tools.generate runs/default --prompt "def "\n'
            '  python -m tools.generate runs/default --prompt "import " --temperature 0.7 --top-p 0.9 --seed 3\n'
            '  python -m tools.generate runs/default/checkpoints/step_00000100 --prompt "class " --greedy\n'
            "  python -m tools.generate runs/default --prompts-file prompts.txt --out texts.jsonl\n"
            "\n"
            "The same seed gives the same text. Prompt n of a file, counted from 0, uses seed + n and does not depend on\n"
            "the other prompts. Results go to stdout, speed and errors to stderr."
        ),
    )
    parser.add_argument("checkpoint", help="folder of a run, or one of its checkpoints/step_*")
    source = parser.add_mutually_exclusive_group()
    source.add_argument(
        "--prompt",
        type=utf8_text,
        default="",
        help="text to continue (default: a new document). Tokens of tools.train_tokenizer end with spaces: give one after the "
        "last whole word",
    )
    source.add_argument("--prompts-file", type=Path, help="UTF-8 file with one prompt per line, continued in batches")
    parser.add_argument(
        "--out", type=Path, help="with --prompts-file: also write the results to this file as JSON lines"
    )
    parser.add_argument(
        "--max-tokens", type=positive, default=256, help="most tokens of the continuation (default 256)"
    )
    parser.add_argument(
        "--temperature", type=float, default=0.8, help="0: greedy; 1: the model's distribution (default 0.8)"
    )
    parser.add_argument(
        "--top-p",
        type=float,
        default=0.95,
        help="sample from the most likely tokens that together reach this probability (default 0.95; 1: all)",
    )
    parser.add_argument(
        "--top-k", type=from_zero, default=0, help="sample from the k most likely tokens (default 0: all)"
    )
    parser.add_argument("--greedy", action="store_true", help="always select the most likely token")
    parser.add_argument("--seed", type=seed, default=0, help="random seed (default 0)")
    parser.add_argument("--batch-size", type=positive, default=16, help="prompts per batch (default 16)")
    parser.add_argument("--device", default="auto", help="cpu, cuda, cuda:1 ... (default: a GPU if there is one)")
    parser.add_argument("--dtype", default="auto", help="fp32, bf16, fp16, fp64 (default: bf16 on a GPU, else fp32)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
