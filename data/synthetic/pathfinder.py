"""Generate Pathfinder: images of dashed paths in which two marked ends lie on one path or on two paths.

Source: Linsley et al. 2018 (arXiv 1805.08315). Long Range Arena (Tay et al. 2020, arXiv 2011.04006) reads the pixels as a
sequence.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..process_pool import process_pool, usable_cores
from .examples import Examples

CLASSES = 2
PIXEL_VALUES = 256
# Coordinates are integers, in 1/1024 pixel, so that every processor accepts the same paths.
_UNIT = 1024
_HEADINGS = 64
_PROPOSALS = 8
# Fewer blocks are drawn in this process: starting others takes seconds.
_BLOCKS_FOR_PROCESSES = 20
# Images that are drawn together, and how often a path without room is drawn again.
_BATCH = 512
_ATTEMPTS, _DISTRACTOR_ATTEMPTS = 24, 2

Numbers = NDArray[np.int64]


@dataclass(frozen=True)
class Pathfinder:
    """Hold the geometry of the images. Lengths are in pixels.

    Attributes:
        size: height and width of the image.
        dashes: dashes of each of the two long paths.
        start_distance: distance of the two long paths' first ends.
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
    start_distance: float = 7.0
    distractors: int = 4
    distractor_dashes: int = 3
    dash: float = 2.0
    gap: float = 1.5
    margin: float = 3.5
    turn: float = 30.0
    thickness: float = 0.9
    radius: float = 1.3

    @property
    def drawn(self) -> float:
        """Return the share of a dash in the length of a dash and its gap."""
        return self.dash / (self.dash + self.gap)

    def __post_init__(self) -> None:
        for key in ("dash", "thickness", "radius"):
            if not getattr(self, key) > 0:
                raise ValueError(f"{key} = {getattr(self, key)}: a number above 0 is allowed")
        for key, least in (("gap", 0), ("distractors", 0), ("distractor_dashes", 1)):
            if not getattr(self, key) >= least:
                raise ValueError(f"{key} = {getattr(self, key)}: at least {least} is allowed")
        if not 0 <= self.turn <= 180:
            raise ValueError(f"turn = {self.turn}: 0 to 180 degrees are allowed")
        reach = self.dashes * (self.dash + self.gap)
        edge = self.radius + 1
        if not 2 * edge < self.size:
            raise ValueError(
                f"size = {self.size}, radius = {self.radius}: markers need a size above 2 (radius + 1) = {2 * edge:g}"
            )
        # A path that turns by `turn` at every dash is a circle around its centre: it needs about reach / pi pixels.
        if (
            self.dashes < 2
            or reach / math.pi > self.size - 2 * edge
            or self.margin <= self.gap + self.thickness
            or not self.margin < self.start_distance < self.size
        ):
            raise ValueError(
                f"size {self.size} cannot hold two paths of {self.dashes} dashes ({reach:g} pixels long) with margin "
                f"{self.margin:g}: at least 2 dashes, at most {int((self.size - 2 * edge) * math.pi / (self.dash + self.gap))}, "
                f"a margin above gap + thickness = {self.gap + self.thickness:g}, and a start_distance between margin and size "
                f"(now {self.start_distance:g}) are allowed"
            )


def pathfinder(examples: int, *, seed: int | list[int] = 0, **geometry: float) -> Examples:
    """Return images as rows of grey pixels, and whether both markers lie on one path.

    Each image has two long dashed paths and several short ones. One marker lies at the first end of a path, the other at the
    last end of this path (label 1) or of the other one (label 0). As in the source, the first ends of both paths have a fixed
    distance. The distance of the markers alone classifies 72 % of the images of 32 x 32. Half of the images have each label.

    Args:
        geometry: attributes of `Pathfinder`.

    Returns tokens [examples, size * size] uint8, row by row, and labels [examples, 1] int32.

    Raises ValueError for paths that the image cannot hold.
    """
    shape = Pathfinder(**geometry)  # type: ignore[arg-type]
    entropy = seed if isinstance(seed, list) else [seed]
    labels = np.random.default_rng(entropy).permutation(np.arange(examples) % CLASSES).astype(np.int32)
    # Every block has its own generator, so that the number of processes does not matter. NumPy ignores zeros at the end of a
    # seed, so block 0 would repeat the numbers of the labels.
    blocks = [
        ([*entropy, number + 1], shape, labels[start : start + _BATCH])
        for number, start in enumerate(range(0, examples, _BATCH))
    ]
    if len(blocks) < _BLOCKS_FOR_PROCESSES:
        parts = [_block(block) for block in blocks]
    else:
        with process_pool(min(usable_cores(), -(-len(blocks) // 4))) as pool:
            parts = list(pool.map(_block, blocks))
    return Examples(np.concatenate(parts), labels[:, None])


def _block(block: tuple[list[int], Pathfinder, NDArray[np.int32]]) -> NDArray[np.uint8]:
    """Return the images of a block's seed, geometry and labels."""
    seed, shape, labels = block
    return _images(np.random.default_rng(seed), shape, labels)


def _images(generator: np.random.Generator, shape: Pathfinder, labels: NDArray[np.int32]) -> NDArray[np.uint8]:
    """Return one image per label, [images, size * size]. Raises ValueError for paths that the image cannot hold."""
    tokens = np.zeros((len(labels), shape.size**2), np.uint8)
    done, drawn = 0, 0
    while done < len(labels):
        number = min(_BATCH, 4 * (len(labels) - done))
        paths, ends = _draw(generator, shape, number, len(labels) - done)
        rows = slice(done, done + len(ends))
        done, drawn = rows.stop, drawn + number
        if drawn > 100 * (done + 1):
            raise ValueError(
                f"{shape}: {done} of {drawn} images hold both long paths; use fewer dashes, a smaller margin or a larger size"
            )
        tokens[rows] = _render(paths, ends[np.arange(len(ends)), labels[rows]], shape)
    return tokens


@dataclass
class _Paths:
    """Hold the paths of several images.

    Attributes:
        points: [images, paths, dashes + 1, 2], ends of the dashes and of their gaps, in 1/1024 pixel.
        valid: [images, paths], whether the path is complete. counts: dashes of each path.
        blocked: [images, pixels], within the margin of a path. The image has an edge of the margin's width around it.
    """

    points: Numbers
    valid: NDArray[np.bool_]
    blocked: NDArray[np.bool_]
    counts: list[int]


def _draw(
    generator: np.random.Generator, shape: Pathfinder, number: int, most: int
) -> tuple[_Paths, NDArray[np.float64]]:
    """Draw `number` images with two long paths. Return at most `most` of them that suit, with short paths, and `_ends`."""
    counts = [shape.dashes] * 2 + [shape.distractor_dashes] * shape.distractors
    width = shape.size + 2 * math.ceil(shape.margin)
    points = np.zeros((number, len(counts), max(counts) + 1, 2), np.int64)
    valid = np.ones((number, len(counts)), np.bool_)
    paths = _Paths(points, valid, np.zeros((number, width * width), np.bool_), counts)
    for path in (0, 1):
        _place(generator, shape, paths, path, _ATTEMPTS)
    suitable = np.flatnonzero(valid[:, 0] & valid[:, 1])[:most]
    paths = _Paths(points[suitable], valid[suitable], paths.blocked[suitable], counts)
    for path in range(2, len(counts)):
        _place(generator, shape, paths, path, _DISTRACTOR_ATTEMPTS)
    return paths, _ends(generator, paths, shape)


def _ends(generator: np.random.Generator, paths: _Paths, shape: Pathfinder) -> NDArray[np.float64]:
    """Return the ends to mark for each label, [images, labels, 2 (markers), 2] in pixels."""
    first, last_start, gap_end = (paths.points[:, :2, i] / _UNIT for i in (0, shape.dashes - 1, shape.dashes))
    # The end of the last dash, not of the gap after it.
    last = last_start + (gap_end - last_start) * shape.drawn
    images, path = np.arange(len(first)), generator.integers(0, 2, len(first))
    start = first[images, path]
    return np.stack([np.stack([start, last[images, end]], 1) for end in (1 - path, path)], 1)


def _place(generator: np.random.Generator, shape: Pathfinder, paths: _Paths, path: int, attempts: int) -> None:
    """Draw one path of every image, which keeps its margin from all earlier ones."""
    count, pending = paths.counts[path], np.arange(len(paths.points))
    for _ in range(attempts):
        near = paths.points[pending, 0, 0] if path == 1 else None
        drawn, complete = _draw_path(generator, shape, count, paths.blocked, pending, near)
        paths.points[pending, path, : count + 1] = drawn
        pending = pending[~complete]
    paths.valid[pending, path] = False
    images = np.flatnonzero(paths.valid[:, path])
    along = paths.points[images, path, : count + 1]
    edge = math.ceil(shape.margin)
    disc = _disc(edge, shape.margin) @ [shape.size + 2 * edge, 1]
    # Discs two pixels apart leave no gap between them.
    for place in _between(along[:, :-1], along[:, 1:], shape, 2):
        paths.blocked[images[:, None, None], _pixel(place, shape)[..., None] + disc] = True


def _draw_path(
    generator: np.random.Generator,
    shape: Pathfinder,
    count: int,
    blocked: NDArray[np.bool_],
    pending: Numbers,
    near: Numbers | None,
) -> tuple[Numbers, NDArray[np.bool_]]:
    """Return the points [pending, count + 1, 2] of one path for each image in `pending`, and whether it is complete.

    near: points [pending, 2] that the paths start `start_distance` away from; None: they start anywhere.
    """
    number = len(pending)
    edge = math.ceil((shape.radius + 1) * _UNIT)
    low, high = edge, shape.size * _UNIT - edge
    length = shape.dash + shape.gap
    angles = 2 * np.pi * np.arange(_HEADINGS) / _HEADINGS
    directions = np.stack([np.sin(angles), np.cos(angles)], 1) * _UNIT
    steps = np.rint(directions * length).astype(np.int64)
    largest = int(shape.turn / 360 * _HEADINGS)
    images = np.arange(number)
    points = np.zeros((number, count + 1, 2), np.int64)
    if near is None:
        start = generator.integers(low, high, (number, _PROPOSALS, 2))
    else:
        away = np.rint(directions * shape.start_distance).astype(np.int64)
        start = near[:, None] + away[generator.integers(0, _HEADINGS, (number, _PROPOSALS))]
    free = ((start >= low) & (start < high)).all(-1) & ~blocked[pending[:, None], _pixel(start, shape)]
    points[:, 0] = start[images, free.argmax(1)]
    valid = np.asarray(free.any(1))
    heading = generator.integers(0, _HEADINGS, number)
    for step in range(count):
        turn = generator.integers(-largest, largest + 1, (number, _PROPOSALS))
        if not step:
            turn = generator.integers(0, _HEADINGS, (number, _PROPOSALS))
        headings = (heading[:, None] + turn) % _HEADINGS
        end = points[:, step, None] + steps[headings]
        row, column = end[..., 0], end[..., 1]
        free = (row >= low) & (row < high) & (column >= low) & (column < high)
        for place in _between(points[:, step, None], end, shape, 1):
            free &= ~blocked[pending[:, None], _pixel(place, shape)]
        if step > 1:
            # The end of a dash is a margin and half a dash away from all but its neighbours: so are the points between.
            earlier = points[:, None, : step - 1]
            squares = (row[..., None] - earlier[..., 0]) ** 2 + (column[..., None] - earlier[..., 1]) ** 2
            free &= squares.min(-1) >= int(((shape.margin + length / 2) * _UNIT) ** 2)
        chosen = free.argmax(1)
        points[:, step + 1], heading = end[images, chosen], headings[images, chosen]
        valid &= free.any(1)
    return points, valid


def _pixel(place: Numbers, shape: Pathfinder) -> Numbers:
    """Return the number of the pixel of each place [..., 2] in the blocked pixels of an image."""
    edge = math.ceil(shape.margin)
    # A path without room may leave the image.
    pixel = np.clip(place // _UNIT, 0, shape.size - 1) + edge
    return pixel[..., 0] * (shape.size + 2 * edge) + pixel[..., 1]


def _between(start: Numbers, end: Numbers, shape: Pathfinder, apart: int) -> list[Numbers]:
    """Return points from start to end, at most `apart` pixels apart."""
    count = math.ceil((shape.dash + shape.gap) / apart)
    return [start + (end - start) * i // count for i in range(count + 1)]


def _disc(reach: int, radius: float) -> Numbers:
    """Return the offsets [offsets, 2] of the pixels within `radius`, at most `reach` rows and columns away."""
    offsets = np.stack(np.meshgrid(*[np.arange(-reach, reach + 1)] * 2, indexing="ij"), -1).reshape(-1, 2)
    return offsets[(offsets**2).sum(1) <= radius**2]


def _render(paths: _Paths, ends: NDArray[np.float64], shape: Pathfinder) -> NDArray[np.uint8]:
    """Return the images [images, size * size]: white dashes, and markers at `ends`, on black, with smooth edges."""
    image = np.zeros((len(ends), shape.size, shape.size), np.float32)
    for path, count in enumerate(paths.counts):
        for step in range(count):
            start = paths.points[:, path, step] / _UNIT
            end = start + (paths.points[:, path, step + 1] / _UNIT - start) * shape.drawn
            _add_line(image, start, end, shape.thickness / 2, paths.valid[:, path])
    for place in ends.swapaxes(0, 1):
        _add_line(image, place, place, shape.radius, np.ones(len(ends), np.bool_))
    return np.rint(image * (PIXEL_VALUES - 1)).astype(np.uint8).reshape(len(ends), shape.size**2)


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
