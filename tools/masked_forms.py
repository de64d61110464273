"""Compare LION's exact forms on one checkpoint: differences of outputs, time and memory by length or by image size.

An untrained softmax encoder of the same shape is measured too. The measured pass is the forward pass on random tokens or images,
without the head. Memory is the peak that the forward pass allocates.
"""

from __future__ import annotations

import dataclasses
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from data.atomic_io import write_json
from data.progress import ProgressBar
from tools.cli.arguments import check_picture, command, command_line, positive
from tools.reporting.tables import plain_table

FORMS = ("parallel", "chunked", "recurrent")
SOFTMAX = "softmax attention"

EPILOG = """
example:
  python -m tools.masked_forms runs/lion_s_base --lengths 128 512 2048 8192 --device cuda     to runs/lion_s_base/forms.png
  python -m tools.masked_forms runs/imagenet_lion_s --lengths 224 448 896 --device cuda       images of 224 x 224 pixels, ...
"""


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line. Returns 1 if the forms differ, 2 for invalid input."""
    parser = command_line("python -m tools.masked_forms", __doc__, EPILOG)
    parser.add_argument("run", type=Path, help="a run, or a step folder")
    parser.add_argument(
        "--lengths",
        type=positive,
        nargs="+",
        help="tokens (default: 128 256 512 1024 2048 4096); of an image classifier pixels (default: 1, 2, 3 and 4 times the "
        "trained size)",
    )
    parser.add_argument("--batch", type=positive, default=1, help="sequences or images (%(default)s)")
    parser.add_argument("--device", default="auto", help="cuda or cpu (%(default)s)")
    parser.add_argument("-o", "--out", type=Path, help="the plot; default: forms.png in the run's folder")
    options = parser.parse_args(arguments)
    if options.out:
        check_picture(options.out, "--out")
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler reports every start and stop
    rows = compare(options.run, options.lengths, batch=options.batch, device=options.device)
    cells = []
    for row in rows:
        difference = "-" if row["form"] == SOFTMAX else f"{row['difference']:.1e}"
        size = [str(row["image_size"])] if "image_size" in row else []
        cells.append([row["form"], *size, f"{row['length']:,}", f"{row['ms']:.1f}", f"{row['mib']:.1f}", difference])
    size = ["image size"] if "image_size" in rows[0] else []
    print(plain_table(["form", *size, "tokens", "ms", "MiB", "largest difference to parallel"], cells))
    from tools.loading.model import run_of

    out = options.out or run_of(options.run) / "forms.png"
    write_json(out.with_suffix(".json"), rows)
    plot(rows, out)
    print(out)
    return int(any(row["form"] != SOFTMAX and not row["difference"] <= 1e-3 for row in rows))  # also for NaN


def compare(
    run: Path, lengths: Sequence[int] | None = None, *, batch: int = 1, device: str = "auto"
) -> list[dict[str, Any]]:
    """Return one row per length and form, measured in float32.

    Keys: form, length (tokens), ms, mib, and difference: the largest difference of the normed hidden states to the parallel
    form's, relative to their largest value (NaN for softmax). Of an image classifier lengths are pixels, and image_size is a
    further key.

    Raises ValueError for a model without LION's forms.
    """
    import torch

    from models.language_model import LanguageModel
    from tools.loading.image_model import load_classifier
    from tools.loading.model import load_located, locate_checkpoint

    located = locate_checkpoint(run, device=device, dtype="fp32")
    trained, positions = located.model.image_size, located.model.max_positions
    if "lion" not in located.model.bidirectional_mixers():
        raise ValueError(
            f"{run} has no bidirectional lion mixers: model.mixers = {list(located.model.mixers)}; "
            "name a run of `lion` with causal: false"
        )
    if lengths is None:
        lengths = [128, 256, 512, 1024, 2048, 4096] if trained is None else [n * trained for n in (1, 2, 3, 4)]
    lengths = sorted(set(lengths))
    if trained is None and positions is not None and max(lengths) > positions:
        raise ValueError(f"--lengths {max(lengths)}: {run} has {positions} positions; at most {positions} is allowed")
    softmax = {"attention": {"causal": False, "rotary_pct": 0.0}}
    text_model = None if trained else load_located(located).model
    rows = []
    for length in ProgressBar(lengths, desc="lengths", unit="length", leave=False):
        generator = torch.Generator().manual_seed(length)
        model = text_model or load_classifier(located, length)
        config = model.config
        if trained:
            inputs = torch.randn(batch, 3, length, length, generator=generator)
        else:
            inputs = torch.randint(config.vocab_size, (batch, length), generator=generator)
        inputs = inputs.to(located.device)
        shape = {"length": config.tokens_per_image, "image_size": length} if trained else {"length": length}
        with torch.device(located.device):
            other = dataclasses.replace(config, mixers=("attention",), mixer_options=softmax)
            encoder = LanguageModel(other, seed=0).eval().requires_grad_(False)
        reference = None
        for form in (*FORMS, SOFTMAX):
            measured = encoder if form == SOFTMAX else _with_form(model, form)
            with torch.inference_mode():
                hidden, ms, mib = _measure(lambda m=measured, x=inputs: _encode(m, x), inputs)
            reference = hidden if reference is None else reference
            scale = reference.abs().max()
            difference = math.nan if form == SOFTMAX else ((hidden - reference).abs().max() / scale).item()
            rows.append({"form": form, **shape, "ms": ms, "mib": mib, "difference": difference})
    return rows


def _with_form(model: Any, form: str) -> Any:
    from models.mixers.lion import Lion

    for mixer in (block.mixer for block in model.blocks if isinstance(block.mixer, Lion)):
        mixer.options = dataclasses.replace(mixer.options, form=form)
    return model


def _encode(model: Any, tokens: Any) -> Any:
    hidden = model.embedding(tokens)
    for block in model.blocks:
        hidden = block(hidden)
    return model.head.norm(hidden)


def _measure(work: Callable[[], Any], tokens: Any) -> tuple[Any, float, float]:
    """Return (result, median milliseconds, peak MiB) of a forward pass. A pass that takes seconds is run once."""
    import torch

    def once() -> tuple[Any, float, int]:
        allocated = 0
        if tokens.is_cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            allocated = torch.cuda.memory_allocated()
        begin = time.perf_counter()
        result = work()
        if tokens.is_cuda:
            torch.cuda.synchronize()
        return result, (time.perf_counter() - begin) * 1e3, torch.cuda.max_memory_allocated() - allocated

    result, ms, peak = once()
    times = [ms]
    if ms < 2_000:
        times = []
        while len(times) < 3 or (sum(times) < 500 and len(times) < 20):
            _, ms, peak = once()
            times.append(ms)
    return result, statistics.median(times), (peak if tokens.is_cuda else _host_peak(work)) / 2**20


def _host_peak(work: Callable[[], Any]) -> int:
    """Return the peak bytes that `work` allocates on the CPU."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    allocated = peak = 0
    events = profiler.profiler.kineto_results.events()
    for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        allocated += event.nbytes()
        peak = max(peak, allocated)
    return peak


def plot(rows: Sequence[dict[str, Any]], out: Path) -> None:
    """Plot time and memory against length, one line per form."""
    from tools.reporting.style import label_lines, log_axes, saved_figure, series_style

    x = "image_size" if "image_size" in rows[0] else "length"
    lengths = sorted({row[x] for row in rows})
    with saved_figure(out, 1, 2) as (_, panels):
        for key, label, axes in (("ms", "ms per forward pass", panels[0]), ("mib", "peak MiB", panels[1])):
            for number, form in enumerate((*FORMS, SOFTMAX)):
                values = [row[key] for row in rows if row["form"] == form]
                axes.plot(lengths, values, label=form, **series_style(number))
            log_axes(axes, "x", lengths)
            log_axes(axes, "y")
            axes.set(xlabel="image size (pixels)" if x == "image_size" else "tokens", ylabel=label)
        label_lines(panels[1])


if __name__ == "__main__":
    sys.exit(main())
