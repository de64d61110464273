"""Pictures of an image classifier: the confusion matrix by label and prediction, accuracy by image size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tools.image_sizes import plot
from tools.reporting import style
from tools.reporting.image_figures import draw_confusions, draw_predictions


def test_accuracy_by_image_size_has_ticks_at_the_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures: list[Any] = []
    monkeypatch.setattr(style, "save_figure", lambda figure, out: figures.append(figure))
    plot(
        [{"run": "a", "image_size": size, "trained": size == 32, "accuracy": size / 100} for size in (24, 32, 48)],
        tmp_path / "sizes.png",
    )
    axes = figures[0].axes[0]
    assert list(axes.get_xticks()) == [24, 32, 48]
    np.testing.assert_allclose(axes.lines[0].get_xydata(), [(24, 24), (32, 32), (48, 48)])
    assert set(axes.lines[1].get_xdata()) == {32}


def test_confusions_are_shares_of_each_label(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures: list[Any] = []
    monkeypatch.setattr(style, "save_figure", lambda figure, out: figures.append(figure))
    # Three images of the first class are seen as the second one, and none the other way round.
    # No image has the third label.
    counts = torch.tensor([[1.0, 3.0, 0.0], [0.0, 4.0, 0.0], [0.0, 0.0, 0.0]])
    draw_confusions(tmp_path / "confusions.png", counts, ["cat", "dog", "fox"])
    axes = figures[0].axes[0]
    np.testing.assert_allclose(axes.images[0].get_array(), [[0.25, 0.75, 0], [0, 1, 0], [0, 0, 0]])
    assert [(text.get_text(), text.get_position()) for text in axes.texts] == [
        ("25%", (0, 0)),
        ("75%", (1, 0)),
        ("0%", (2, 0)),
        ("0%", (0, 1)),
        ("100%", (1, 1)),
        ("0%", (2, 1)),
    ]
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("predicted", "label")
    assert axes.get_title("left").endswith("62.50% are correct")


def test_long_class_names_are_shortened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures: list[Any] = []
    monkeypatch.setattr(style, "save_figure", lambda figure, out: figures.append(figure))
    names = ["cat", "tench, Tinca tinca, Cyprinus tinca", "flat-coated retriever of no other name"]
    draw_confusions(tmp_path / "confusions.png", torch.eye(3), names)
    draw_predictions(tmp_path / "p.png", [np.zeros((4, 4, 3), np.uint8)] * 3, [0, 1, 1], torch.eye(3), names)
    beside, above = (figure.axes[0] for figure in figures)
    assert [text.get_text() for text in beside.get_yticklabels()] == ["cat", "tench", "flat-coated retriever of no…"]
    assert [text.get_text() for text in above.texts] == ["cat 100%", "tench 100%", "flat-coated… 100%\nis tench"]
