"""Measure the accuracy of a trained image classifier on validation images of other sizes than in training.

The images are resized and cropped as in validation. Learned positions are interpolated between patches. The sizes are those of
LION's Figure 13 (arXiv 2502.16249) by default: up to 1.7 times the trained size.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data.atomic_io import write_json
from data.machine_memory import machine_memory
from data.progress import ProgressBar
from tools.cli.arguments import check_picture, command, command_line, positive
from tools.reporting.run_curves import distinct_names
from tools.reporting.tables import plain_table

if TYPE_CHECKING:  # torch is imported where it is used, so that --help answers at once
    from tools.loading.model import LocatedCheckpoint

EPILOG = """
example:
  python -m tools.image_sizes runs/cifar10_lion_s --sizes 24 32 40 48     to runs/cifar10_lion_s/image_sizes.png
"""


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line. Returns the exit status."""
    parser = command_line("python -m tools.image_sizes", __doc__, EPILOG)
    parser.add_argument("run", type=Path, nargs="+", help="runs, or step folders")
    parser.add_argument(
        "--sizes", type=positive, nargs="+", help="pixels (default: 0.75 to 1.75 times the trained size)"
    )
    parser.add_argument("--limit", type=positive, metavar="N", help="the first N validation images only")
    parser.add_argument("--batch", type=positive, default=256, help="images per batch (%(default)s)")
    parser.add_argument("--device", default="auto", help="cuda or cpu (%(default)s)")
    parser.add_argument("-o", "--out", type=Path, help="the plot; default: image_sizes.png in the first run's folder")
    options = parser.parse_intermixed_args(arguments)
    if options.out:
        check_picture(options.out, "--out")
    rows: list[dict[str, Any]] = []
    for name, run in zip(distinct_names(options.run), options.run, strict=True):
        measured = measure(run, options.sizes, limit=options.limit, batch=options.batch, device=options.device)
        rows += [{"run": name, **row} for row in measured]
    from tools.loading.model import run_of

    out = options.out or run_of(options.run[0]) / "image_sizes.png"
    print(plain_table(["run", "pixels", "", "images", "top-1", "top-5"], [_cells(row) for row in rows]))
    write_json(out.with_suffix(".json"), rows)
    plot(rows, out)
    print(out)
    return 0


def _cells(row: dict[str, Any]) -> list[str]:
    trained = "trained" if row["trained"] else ""
    accuracies = [f"{row[key]:.2%}" for key in ("accuracy", "top5_accuracy")]
    return [row["run"], str(row["image_size"]), trained, f"{row['images']:,}", *accuracies]


def measure(
    run: Path, sizes: Sequence[int] | None, *, limit: int | None = None, batch: int = 256, device: str = "auto"
) -> list[dict[str, Any]]:
    """Return one row per size: image_size, trained (whether it is the trained size), images, accuracy, top5_accuracy.

    Raises ValueError for a run without images or validation images, for a size that is no multiple of the patch, and for a size
    whose images need more memory than the machine has.
    """
    from data.images.dataset import ImageDataset
    from data.loader import batches
    from tools.loading.image_data import augmentation_of, open_images
    from tools.loading.image_model import load_classifier
    from tools.loading.model import locate_checkpoint
    from tools.loading.token_data import data_config

    located = locate_checkpoint(run, device=device)
    trained, patch = located.model.image_size, located.model.patch_size
    if trained is None:
        raise ValueError(f"{located.checkpoint} is a language model; name a run that classifies images")
    data = data_config(located.config)
    images = open_images(data, "validation", located.model.vocab_size)
    if images is None:
        raise ValueError(
            f"{located.checkpoint} has no data.images.validation, whose images are measured: name a run with it"
        )
    if sizes is None:
        sizes = [patch * round(trained * quarters / 4 / patch) for quarters in range(3, 8)]
    for size in sizes:
        _check_memory(size, batch, located)
    models = {size: load_classifier(located, size) for size in sorted(set(sizes))}
    rows = []
    for size, model in ProgressBar(models.items(), desc=run.name, unit="size", leave=False):
        dataset = ImageDataset(images, augmentation_of(data.images, size), num_samples=None)
        count = top1 = top5 = 0.0
        for (micro,) in batches(
            dataset, global_batch_size=batch, micro_batch_size=batch, fill_last=True, threads=data.images.threads
        ):
            weight = micro["loss_weight"].clone()
            if limit is not None:
                weight[max(0, limit - int(count)) :] = 0.0
            logits: Any = model(micro["tokens"].to(located.device, located.dtype))
            correct = logits.float().cpu().topk(min(5, logits.shape[-1])).indices == micro["labels"][:, None]
            top1 += float((correct[:, 0] * weight).sum())
            top5 += float((correct.any(1) * weight).sum())
            count += float(weight.sum())
            if limit is not None and count >= limit:
                break
        rows.append(
            {
                "image_size": size,
                "trained": size == trained,
                "images": int(count),
                "accuracy": top1 / count,
                "top5_accuracy": top5 / count,
            }
        )
    return rows


def _check_memory(size: int, batch: int, located: LocatedCheckpoint) -> None:
    """Raise ValueError if the machine cannot hold a batch: pixels, and on a CPU residual stream, queries, keys and values."""
    needed, memory = 12 * size**2, machine_memory()
    if located.device.type == "cpu":
        needed += 4 * located.model.hidden_size * (size // located.model.patch_size) ** 2 * located.dtype.itemsize
    if batch * needed > memory:
        raise ValueError(
            f"--sizes {size}: {batch} images take {batch * needed // 2**30:,} GiB or more, and this machine has "
            f"{memory / 2**30:,.0f} GiB; give a smaller size, or a smaller --batch"
        )


def plot(rows: Sequence[dict[str, Any]], out: Path) -> None:
    """Plot accuracy against the image size, one line per run; the trained size is marked."""
    from tools.reporting.style import label_lines, saved_figure, series_style

    with saved_figure(out, 1, 1) as (_, axes):
        for number, name in enumerate(dict.fromkeys(row["run"] for row in rows)):
            of_run = [row for row in rows if row["run"] == name]
            sizes, values = ([row[key] for row in of_run] for key in ("image_size", "accuracy"))
            axes.plot(sizes, [100 * value for value in values], label=name, **series_style(number))
        for size in dict.fromkeys(row["image_size"] for row in rows if row["trained"]):
            axes.axvline(size, color="0.6", lw=1, ls=":")
        axes.set_xticks(sorted({row["image_size"] for row in rows}))
        axes.set(xlabel="image size (pixels); dotted: in training", ylabel="top-1 accuracy (%)")
        label_lines(axes)


if __name__ == "__main__":
    sys.exit(main())
