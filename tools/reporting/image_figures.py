"""Draw what an image classifier does: the confusion matrix, and predictions on single images."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from tools.reporting.style import COLORS, saved_figure

PREDICTIONS, CONFUSIONS = "predictions.png", "confusion_matrix.png"  # files in a run folder

_COLUMNS = 8
_NAMED_CLASSES = 32  # at most; the names of more classes do not fit
_NUMBERED_CLASSES = 12
_NAME_BESIDE, _NAME_ABOVE = 28, 12  # characters of a name beside the confusion matrix and above a picture


def _shortened(name: str, characters: int) -> str:
    """Return the name of a class, without its synonyms and its end if it is longer. ImageNet's have up to 130 characters."""
    if len(name) > characters:
        name = name.partition(",")[0]
    return name if len(name) <= characters else f"{name[: characters - 1]}…"


def draw_confusions(out: Path, counts: Tensor, class_names: Sequence[str]) -> None:
    """Draw counts [classes (label), classes (predicted)] as shares of each label's images."""
    shares = (counts / counts.sum(1, keepdim=True).clamp_min(1)).numpy()
    size = len(class_names)
    with saved_figure(out, 1, 1, height=7.6, style={"axes.grid": False}) as (figure, axes):
        image = axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
        if size <= _NAMED_CLASSES:
            names = [_shortened(name, _NAME_BESIDE) for name in class_names]
            axes.set_xticks(range(size), names, rotation=45, ha="right", rotation_mode="anchor")
            axes.set_yticks(range(size), names)
        for row, column in np.ndindex(shares.shape) if size <= _NUMBERED_CLASSES else ():
            if not counts[row].any():  # no image has this label
                continue
            color = "white" if shares[row, column] > 0.5 else "black"
            axes.text(column, row, f"{shares[row, column]:.0%}", ha="center", va="center", color=color, fontsize=8)
        accuracy = float(counts.trace() / counts.sum().clamp_min(1))
        axes.set(xlabel="predicted", ylabel="label", title=f"share of each label's images; {accuracy:.2%} are correct")
        figure.colorbar(image, ax=axes, format=lambda value, _: f"{value:.0%}", shrink=0.8)


def draw_predictions(
    out: Path,
    pictures: Sequence[NDArray[np.uint8]],
    labels: Sequence[int],
    probabilities: Tensor,
    class_names: Sequence[str],
) -> None:
    """Draw pictures [height, width, 3] with prediction and probability; a wrong one has another colour and the label.

    probabilities: [pictures, classes].
    """
    rows = -(-len(pictures) // _COLUMNS)
    names = [_shortened(name, _NAME_ABOVE) for name in class_names]
    # One panel for all pictures, whose layout takes a tenth of the time of one panel each.
    with saved_figure(out, height=1.75 * rows, style={"axes.grid": False}) as (_, axes):
        for number, (picture, label) in enumerate(zip(pictures, labels, strict=True)):
            row, column = divmod(number, _COLUMNS)
            left, top = 1.08 * column, 1.5 * row + 0.4
            axes.imshow(picture, extent=(left, left + 1, top + 1, top))
            predicted = int(probabilities[number].argmax())
            correct = predicted == label
            text = f"{names[predicted]} {float(probabilities[number, predicted]):.0%}"
            text = text if correct else f"{text}\nis {names[label]}"
            axes.text(left, top - 0.05, text, va="bottom", fontsize=7.5, color=COLORS[0 if correct else 1])
        axes.set(xlim=(0, 1.08 * _COLUMNS), ylim=(1.5 * rows, 0), aspect="equal")
        axes.axis("off")
