"""Generate Pathfinder: images of dashed paths in which two marked ends lie on one path or on two paths.

Source: Linsley et al. 2018 (arXiv 1805.08315). Long Range Arena (Tay et al. 2020, arXiv 2011.04006) reads the pixels as a
sequence.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .examples import Examples

CLASSES = 2
PIXEL_VALUES = 256
# Coordinates are integers, in 1/1024 pixel, so that every processor accepts the same paths.
_UNIT = 1024
_HEADINGS = 64
_PROPOSALS = 8
# Images that are drawn together at most, and how often a path without room is drawn again.
_BATCH = 512
_ATTEMPTS, _DISTRACTOR_ATTEMPTS = 24, 2

Numbers = NDArray[np.int64]


@dataclass(frozen=True)
class Pathfinder:
    """Hold the geometry of the images. Lengths are in pixels.

    Attributes:
        size: height and width of the image.
        dashes: dashes of each of the two long paths.
        distractors: short paths, at most; a short path without room is left out.
        distractor_dashes: dashes of a short path.
        dash, gap: length of a dash and of the gap after it.
        margin: smallest distance between two paths, and between distant parts of one path.
        turn: largest change of direction between two dashes, in degrees.
        thickness: width of a dash.
        radius: radius of a marker.
    """

    size: int = 32
    dashes: int = 8
    distractors: int = 4
    distractor_dashes: int = 3
    dash: float = 2.0
    gap: float = 1.5
    margin: float = 3.5
    turn: float = 30.0
    thickness: float = 0.9
    radius: float = 1.3

    def __post_init__(self) -> None:
        reach = self.dashes * (self.dash + self.gap)
        edge = self.radius + 1
        # A path that turns by `turn` at every dash is a circle around its centre: it needs about reach / pi pixels.
        if self.dashes < 2 or reach / math.pi > self.size - 2 * edge or self.margin <= self.gap + self.thickness:
            raise ValueError(
                f"size {self.size} cannot hold two paths of {self.dashes} dashes ({reach:g} pixels long) with margin "
                f"{self.margin:g}: at least 2 dashes, at most {int((self.size - 2 * edge) * math.pi / (self.dash + self.gap))}, "
                f"and a margin above gap + thickness = {self.gap + self.thickness:g} are allowed"
            )


def pathfinder(examples: int, *, seed: int | list[int] = 0, **geometry: float) -> Examples:
    """Return images as rows of grey pixels, and whether both markers lie on one path.

    Each image has two long dashed paths and several short ones. A marker lies at an end of the first path, the other one
    at its second end (label 1) or at an end of the second path (label 0). The label is drawn after the paths, half of the
    images each.

    Args:
        geometry: attributes of `Pathfinder`.

    Returns tokens [examples, size * size] uint8, row by row, and labels [examples, 1] int32.

    Raises ValueError for paths that the image cannot hold.
    """
    shape = Pathfinder(**geometry)  # type: ignore[arg-type]
    generator = np.random.default_rng(seed)
    tokens = np.zeros((examples, shape.size**2), np.uint8)
    labels = generator.permutation(np.arange(examples) % CLASSES).astype(np.int32)[:, None]
    done, drawn = 0, 0
    while done < examples:
        paths = _draw(generator, shape, min(_BATCH, 4 * (examples - done)))
        complete = np.flatnonzero(paths.valid[:, :2].all(1))[: examples - done]
        drawn += len(paths.valid)
        if drawn > 100 * (done + len(complete) + 1):
            raise ValueError(
                f"{shape}: {done + len(complete)} of {drawn} images hold both long paths; use fewer "
                "dashes, a smaller margin or a larger size"
            )
        tokens[done : done + len(complete)] = _render(
            paths.select(complete), labels[done : done + len(complete), 0], shape
        )
        done += len(complete)
    return Examples(tokens, labels)


@dataclass
class _Paths:
    """The paths of several images.

    Attributes:
        points: [images, paths, dashes + 1, 2], ends of the dashes and of their gaps, in 1/1024 pixel.
        valid: [images, paths], whether the path is complete. counts: dashes of each path.
    """

    points: Numbers
    valid: NDArray[np.bool_]
    counts: list[int]

    def select(self, images: Numbers) -> _Paths:
        return _Paths(self.points[images], self.valid[images], self.counts)


def _draw(generator: np.random.Generator, shape: Pathfinder, images: int) -> _Paths:
    """Draw the paths of several images one after another. A path keeps its margin from all earlier ones."""
    counts = [shape.dashes] * 2 + [shape.distractor_dashes] * shape.distractors
    points = np.zeros((images, len(counts), max(counts) + 1, 2), np.int64)
    valid = np.ones((images, len(counts)), np.bool_)
    blocked = np.zeros((images, shape.size, shape.size), np.bool_)
    disc = _disc(math.ceil(shape.margin), shape.margin)
    for path, count in enumerate(counts):
        pending = np.arange(images)
        for _ in range(_ATTEMPTS if path < 2 else _DISTRACTOR_ATTEMPTS):
            points[pending, path, : count + 1], complete = _draw_path(generator, shape, count, blocked[pending])
            pending = pending[~complete]
        valid[pending, path] = False
        for step in range(count):
            for place in _between(points[:, path, step], points[:, path, step + 1], shape):
                cells = (place // _UNIT)[:, None] + disc
                inside = ((cells >= 0) & (cells < shape.size)).all(-1) & valid[:, path, None]
                number, near = np.nonzero(inside)
                row, column = cells[number, near].T
                blocked[number, row, column] = True
    return _Paths(points, valid, counts)


def _draw_path(
    generator: np.random.Generator, shape: Pathfinder, count: int, blocked: NDArray[np.bool_]
) -> tuple[Numbers, NDArray[np.bool_]]:
    """Return the points [images, count + 1, 2] of one path per image, and whether it is complete."""
    images = np.arange(len(blocked))
    edge = math.ceil((shape.radius + 1) * _UNIT)
    low, high = edge, shape.size * _UNIT - edge
    length = shape.dash + shape.gap
    angles = 2 * np.pi * np.arange(_HEADINGS) / _HEADINGS
    steps = np.rint(np.stack([np.sin(angles), np.cos(angles)], 1) * length * _UNIT).astype(np.int64)
    largest = int(shape.turn / 360 * _HEADINGS)
    points = np.zeros((len(blocked), count + 1, 2), np.int64)
    start = generator.integers(low, high, (len(blocked), _PROPOSALS, 2))
    free = ~blocked[images[:, None], *np.moveaxis(start // _UNIT, -1, 0)]
    points[:, 0] = start[images, free.argmax(1)]
    valid = free.any(1)
    heading = generator.integers(0, _HEADINGS, len(blocked))
    for step in range(count):
        turn = generator.integers(-largest, largest + 1, (len(blocked), _PROPOSALS))
        if not step:
            turn = generator.integers(0, _HEADINGS, (len(blocked), _PROPOSALS))
        headings = (heading[:, None] + turn) % _HEADINGS
        end = points[:, step, None] + steps[headings]
        free = ((end >= low) & (end < high)).all(-1)
        for place in _between(points[:, step, None], end, shape):
            cells = np.clip(place // _UNIT, 0, shape.size - 1)
            free &= ~blocked[images[:, None], *np.moveaxis(cells, -1, 0)]
        if step > 1:
            # The end of a dash is a margin and half a dash away from all but its neighbours: so are the points between.
            away = ((end[:, :, None] - points[:, None, : step - 1]) ** 2).sum(-1).min(-1)
            free &= away >= int(((shape.margin + length / 2) * _UNIT) ** 2)
        chosen = free.argmax(1)
        points[:, step + 1], heading = end[images, chosen], headings[images, chosen]
        valid &= free.any(1)
    return points, valid


def _between(start: Numbers, end: Numbers, shape: Pathfinder) -> list[Numbers]:
    """Return points from start to end, at most one pixel apart."""
    count = math.ceil(shape.dash + shape.gap)
    return [start + (end - start) * i // count for i in range(count + 1)]


def _disc(reach: int, radius: float) -> Numbers:
    """Return the offsets [offsets, 2] of the pixels within `radius`, at most `reach` rows and columns away."""
    offsets = np.stack(np.meshgrid(*[np.arange(-reach, reach + 1)] * 2, indexing="ij"), -1).reshape(-1, 2)
    return offsets[(offsets**2).sum(1) <= radius**2]


def _render(paths: _Paths, labels: NDArray[np.int32], shape: Pathfinder) -> NDArray[np.uint8]:
    """Return the images [images, size * size]: white dashes and markers on black, with smooth edges."""
    image = np.zeros((len(labels), shape.size, shape.size), np.float32)
    drawn = shape.dash / (shape.dash + shape.gap)
    for path, count in enumerate(paths.counts):
        for step in range(count):
            start = paths.points[:, path, step] / _UNIT
            end = start + (paths.points[:, path, step + 1] / _UNIT - start) * drawn
            _add_line(image, start, end, shape.thickness / 2, paths.valid[:, path])
    last = paths.points[:, :, shape.dashes] / _UNIT
    # The end of the last dash, not of the gap after it.
    last = last - (last - paths.points[:, :, shape.dashes - 1] / _UNIT) * (1 - drawn)
    first, everywhere = paths.points[:, 0, 0] / _UNIT, np.ones(len(labels), np.bool_)
    second = np.where(labels[:, None] == 1, last[:, 0], last[:, 1])
    for place in (first, second):
        _add_line(image, place, place, shape.radius, everywhere)
    return np.rint(image * (PIXEL_VALUES - 1)).astype(np.uint8).reshape(len(labels), shape.size**2)


def _add_line(
    image: NDArray[np.float32], start: NDArray, end: NDArray, radius: float, where: NDArray[np.bool_]
) -> None:
    """Draw one line with round ends per image into `image`. Coordinates are rows and columns; pixel 0 has its centre at 0.5."""
    span = float(np.abs(end - start).max(initial=0)) / 2 + radius + 1
    offsets = _disc(math.ceil(span), math.inf)
    centre = ((start + end) / 2).astype(np.int64)[:, None] + offsets
    inside = ((centre >= 0) & (centre < image.shape[1])).all(-1) & where[:, None]
    number, near = np.nonzero(inside)
    pixel = centre[number, near]
    begin, along = start[number], (end - start)[number]
    length = (along**2).sum(1)
    share = np.divide(((pixel + 0.5 - begin) * along).sum(1), length, out=np.zeros_like(length), where=length > 0)
    distance = np.sqrt(((pixel + 0.5 - begin - np.clip(share, 0, 1)[:, None] * along) ** 2).sum(1))
    value = np.clip(radius + 0.5 - distance, 0, 1).astype(np.float32)
    row, column = pixel.T
    image[number, row, column] = np.maximum(image[number, row, column], value)
