"""Pathfinder: an independent connectivity test finds the label from the pixels alone."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import ndimage

from data.synthetic import pathfinder as module
from data.synthetic.pathfinder import Pathfinder, pathfinder

# Large enough to tell a gap in a path from the room between two paths.
LARGE = {"size": 96, "dashes": 14, "distractors": 6, "dash": 5, "gap": 3, "margin": 8, "thickness": 1.5, "radius": 3,
         "start_distance": 20}  # fmt: skip


def disc(radius: float) -> NDArray[np.bool_]:
    reach = np.arange(-int(radius), int(radius) + 1)
    return reach[:, None] ** 2 + reach**2 <= radius**2


def markers_of(image: NDArray[np.uint8]) -> NDArray[np.int32]:
    """Find the two discs by erosion. Return their numbers 1 and 2 at their pixels."""
    markers, count = ndimage.label(ndimage.binary_erosion(image > 128, disc(2)), np.ones((3, 3)))
    assert count == 2
    return markers


def markers_are_connected(image: NDArray[np.uint8]) -> bool:
    """Return whether a walk over bright pixels with jumps of a gap leads from one disc to the other."""
    markers = markers_of(image)
    paths, _ = ndimage.label(ndimage.binary_dilation(image > 64, disc(1)), np.ones((3, 3)))
    first, second = (set(paths[markers == marker].tolist()) for marker in (1, 2))
    return bool(first & second)


def test_label_says_whether_the_markers_are_connected():
    tokens, labels = pathfinder(60, seed=3, **LARGE)
    found = [markers_are_connected(row.reshape(96, 96)) for row in tokens]
    assert found == labels[:, 0].astype(bool).tolist()


def test_images_hold_both_labels_equally_often_and_equal_brightness():
    tokens, labels = pathfinder(200, seed=1)
    assert (tokens.shape, tokens.dtype, labels.shape) == ((200, 1024), np.uint8, (200, 1))
    assert labels.sum() == 100
    means = [tokens[labels[:, 0] == label].mean() for label in (0, 1)]
    assert means[0] == pytest.approx(means[1], rel=0.1)
    assert tokens.max() == 255


def test_first_ends_have_the_start_distance_and_a_marker():
    shape = Pathfinder(**LARGE)
    paths, ends = module._draw(np.random.default_rng(0), shape, 40, 40)
    starts = paths.points[:, :2, 0] / 1024
    np.testing.assert_allclose(np.hypot(*(starts[:, 0] - starts[:, 1]).T), 20, atol=0.01)
    path = (ends[:, :, :1] == starts[:, None]).all(-1).argmax(-1)  # [images, labels]
    assert (ends[:, :, 0] == starts[np.arange(len(path))[:, None], path]).all()
    assert 0.2 < path.mean() < 0.8
    # The other marker is nearest to the last point of the same path or of the other one.
    last = paths.points[:, :2, shape.dashes] / 1024
    nearest = np.square(ends[:, :, 1, None] - last[:, None]).sum(-1).argmin(-1)
    assert (nearest[:, 1] == path[:, 1]).all()
    assert (nearest[:, 0] != path[:, 0]).all()
    # It is at the end of the last dash, before the gap.
    before = paths.points[:, :2, shape.dashes - 1][np.arange(len(path)), path[:, 1]] / 1024
    np.testing.assert_allclose(np.hypot(*(ends[:, 1, 1] - before).T), shape.dash, atol=0.01)


def test_paths_turn_to_both_sides():
    points = module._draw(np.random.default_rng(0), Pathfinder(**LARGE), 40, 40)[0].points[:, :2]
    step = np.diff(points, axis=2).astype(np.int64)
    turn = step[:, :, :-1, 0] * step[:, :, 1:, 1] - step[:, :, :-1, 1] * step[:, :, 1:, 0]
    assert (turn > 0).mean() == pytest.approx((turn < 0).mean(), abs=0.1)


def test_seed_decides_the_images_also_with_processes(monkeypatch):
    count, small = 2 * module._BATCH + 3, {"size": 16, "dashes": 3, "distractors": 1, "distractor_dashes": 2}
    one, other = (pathfinder(count, seed=seed, **small) for seed in ([0, 1], [0, 2]))
    monkeypatch.setattr(module, "_BLOCKS_FOR_PROCESSES", 3)
    same = pathfinder(count, seed=[0, 1], **small)
    assert (one.tokens == same.tokens).all()
    assert (one.labels == same.labels).all()
    assert (one.tokens != other.tokens).any(1).mean() > 0.99


@pytest.mark.parametrize(
    ("geometry", "message"),
    [
        ({"dashes": 40}, r"size 32 cannot hold two paths of 40 dashes \(140 pixels long\).*at most 24"),
        ({"start_distance": 3.0}, r"a start_distance between margin and size \(now 3\)"),
        ({"margin": 1.0}, r"a margin above gap \+ thickness = 2.4"),
        ({"radius": 20.0}, r"size = 32, radius = 20.0: markers need a size above 2 \(radius \+ 1\) = 42"),
        ({"dash": 0.0, "gap": 0.0}, "dash = 0.0: a number above 0 is allowed"),
        ({"distractors": -1}, "distractors = -1: at least 0 is allowed"),
        ({"distractor_dashes": 0}, "distractor_dashes = 0: at least 1 is allowed"),
        ({"turn": -10.0}, "turn = -10.0: 0 to 180 degrees are allowed"),
        ({"dashes": 24, "turn": 1.0}, r"0 of \d+ images hold both long paths; use fewer dashes"),
    ],
)
def test_paths_without_room_are_refused(geometry, message):
    with pytest.raises(ValueError, match=message):
        pathfinder(4, **geometry)
