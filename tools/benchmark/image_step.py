"""Measure training steps of LION's image classifiers and of ViT with softmax attention (PyTorch's SDPA), in one run.

The images are random and already on the device. `measure_loader` measures the data loader alone.
"""

from __future__ import annotations

import io
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from data.images.dataset import ImageDataset
from data.loader import batches
from megatron_lite.config.files import read_sources
from megatron_lite.config.loader import load_config
from models.config import ModelConfig
from tools.loading.image_data import augmentation_of

from .report import table
from .step_rounds import Timing, compare_models, time_steps
from .training_models import step_config

CONFIGS = Path(__file__).parents[2] / "configs"
# Model -> its configuration, with {size} tiny, small or base, and changes to it.
MODELS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "vit": ("vit_{size}", ()),
    "lion_s": ("lion_s_vit_{size}", ()),
    "lion_s_natural": ("lion_s_vit_{size}", ("model.patch_order=both",)),
    "lion_d": ("lion_s_vit_{size}", ("model.mixer_options.lion.variant=d",)),
    "lion_lit": ("lion_s_vit_{size}", ("model.mixer_options.lion.variant=lit", "model.positions=learned")),
}
_IMAGENET = ("model.vocab_size=1000", "model.patch_size=16")
# The mean size of ImageNet's photographs, and the number of photographs that the loader reads.
_PHOTOGRAPH, _PHOTOGRAPHS = (500, 375), 64


def run(
    output: Path,
    size: str,
    shapes: Sequence[tuple[int, int]],
    steps: int,
    rounds: int,
    subjects: Sequence[str],
    overrides: Sequence[str],
) -> None:
    """Print the table and write images.csv, after each shape, and images.png.

    shapes: (image size in pixels, batch). Raises ValueError for an unknown size or model.
    """
    if unknown := [name for name in subjects if name not in MODELS]:
        raise ValueError(f"--subjects {' '.join(unknown)}: allowed are {', '.join(MODELS)}")
    configs = {(name, *shape): _config(name, size, *shape, overrides) for name in subjects for shape in shapes}
    compare_models(
        output / "images",
        f"Image classifiers, {size}, training step",
        subjects,
        [
            {"image size": pixels, "length": configs[subjects[0], pixels, batch].model.tokens_per_image, "batch": batch}
            for pixels, batch in shapes
        ],
        rounds,
        lambda name, shape: _measure(configs[name, shape["image size"], shape["batch"]], steps),
        lambda shape: ("images", shape["batch"]),
    )


def _config(name: str, size: str, pixels: int, batch: int, overrides: Sequence[str]) -> Any:
    pattern, changes = MODELS[name]
    file = CONFIGS / "model" / f"{pattern.format(size=size)}.yml"
    if not file.is_file():
        raise ValueError(f"--size {size}: {file} does not exist; allowed are tiny, small, base")
    return image_config(file, (*_IMAGENET, *changes, *overrides), pixels, batch)


def is_image_classifier(file: Path, overrides: Sequence[str]) -> bool:
    """Return whether a configuration trains an image classifier. Raises ValueError if it cannot be read."""
    data = read_sources([file], overrides).tree.get("data")
    return isinstance(data, dict) and data.get("objective") == "classification"


def image_config(file: Path, overrides: Sequence[str], pixels: int, batch: int) -> Any:
    """Return the configuration with images of `pixels` x `pixels`. Its data are not read. Raises as `step_config`."""
    settings = [
        f"model.image_size={pixels}",
        "data.images.train=-",
        "optimizer.lr=1e-5",
        "schedule.train_steps=1000",
        *overrides,
    ]
    return step_config(file, settings, batch)


def _measure(config: Any, steps: int) -> Timing:
    batch = image_batch(config)
    return time_steps(config, lambda _: batch, steps)


def image_batch(config: Any) -> dict[str, Tensor]:
    """Return one random micro-batch of an image classifier, the pixels on the GPU if there is one."""
    model, batch = config.model, config.batch.micro_batch_size
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randn(batch, 3, model.image_size, model.image_size, generator=generator)
    labels = torch.randint(model.vocab_size, (batch,), generator=generator)
    return {
        "tokens": pixels.to("cuda" if torch.cuda.is_available() else "cpu"),
        "labels": labels,
        "loss_weight": torch.ones(batch),
    }


def measure_loader(seconds: float, pixels: int, batch: int, threads: Sequence[int]) -> list[dict[str, Any]]:
    """Print and return the images per second of a run's data loader, by threads.

    Up to 64 pixels the settings are those of configs/data/cifar10.yml, whose images stay decoded in memory; above, those of
    configs/data/imagenet.yml. The images are JPEG files of low-frequency noise.

    Args:
        seconds: time per number of threads.
        pixels: height and width of a sample.
        batch: images per micro-batch.
    """
    small = pixels <= 64
    name, size = ("cifar10", (pixels, pixels)) if small else ("imagenet", _PHOTOGRAPH)
    config = load_config(
        [CONFIGS / f"{name}_lion_s.yml"], [f"model.image_size={pixels}"], model_type=ModelConfig, world_size=1
    )
    samples = ImageDataset(_Photographs(size), augmentation_of(config.data.images, pixels), num_samples=10**12)
    rows = []
    for count in threads:
        with closing(batches(samples, global_batch_size=batch, micro_batch_size=batch, threads=count)) as steps:
            next(steps)
            done, begin = 0, time.perf_counter()
            while time.perf_counter() - begin < seconds:
                next(steps)
                done += batch
            rows.append({"threads": count, "images / s": done / (time.perf_counter() - begin)})
    print(table(rows, f"Data loader, {name}, micro-batches of {batch}, {os.cpu_count()} cores"))
    return rows


class _Photographs:
    """Provide encoded images of random low-frequency noise, as `LabelledImages` does."""

    def __init__(self, size: tuple[int, int]) -> None:
        self.labels, self.class_names = np.zeros(_PHOTOGRAPHS, np.int64), ("noise",)
        random = np.random.default_rng(0)
        self._files = []
        for _ in range(_PHOTOGRAPHS):
            file = io.BytesIO()
            coarse = Image.fromarray(random.integers(0, 256, (24, 32, 3), dtype=np.uint8))
            coarse.resize(size, Image.Resampling.BICUBIC).save(file, "JPEG", quality=90)
            self._files.append(file.getvalue())

    def __len__(self) -> int:
        return _PHOTOGRAPHS

    def image(self, row: int) -> Image.Image:
        """Return a decoded image."""
        with Image.open(io.BytesIO(self._files[row])) as image:
            return image.convert("RGB")
