"""Measure training steps of LION's image classifiers and of ViT with softmax attention (PyTorch's SDPA), in one run.

The images are random and already on the device. `measure_loader` measures the data loader alone.
"""

from __future__ import annotations

import io
import os
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

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


def measure_loader(seconds: float, pixels: int, threads: Sequence[int]) -> list[dict[str, Any]]:
    """Print and return the images per second of the decoding and augmentation of configs/data/imagenet.yml, by threads.

    The photographs are JPEG files of low-frequency noise. The threads share one Python interpreter, as in each of a run's
    processes.

    Args:
        seconds: time per number of threads.
        pixels: height and width of a sample.
    """
    config = load_config(
        [CONFIGS / "imagenet_lion_s.yml"], [f"model.image_size={pixels}"], model_type=ModelConfig, world_size=1
    )
    augmentation = augmentation_of(config.data.images, pixels)
    random = np.random.default_rng(0)
    photographs = []
    for _ in range(_PHOTOGRAPHS):
        coarse = random.integers(0, 256, (24, 32, 3), dtype=np.uint8)
        file = io.BytesIO()
        Image.fromarray(coarse).resize(_PHOTOGRAPH, Image.Resampling.BICUBIC).save(file, "JPEG", quality=90)
        photographs.append(file.getvalue())

    def sample(number: int) -> None:
        with Image.open(io.BytesIO(photographs[number % _PHOTOGRAPHS])) as image:
            augmentation.training(image.convert("RGB"), np.random.default_rng(number))

    rows = []
    for count in threads:
        with ThreadPoolExecutor(count) as pool:
            done, begin = 0, time.perf_counter()
            while time.perf_counter() - begin < seconds:
                done += sum(1 for _ in pool.map(sample, range(done, done + 8 * count)))
            rows.append({"threads": count, "images / s": done / (time.perf_counter() - begin)})
    print(table(rows, f"Decoding and augmentation of ImageNet, {os.cpu_count()} cores"))
    return rows
