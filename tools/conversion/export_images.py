"""Write the files of an exported image classifier besides its weights: config.json, preprocessor_config.json, source."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from models.config import ModelConfig
from tools.conversion.flatten_source import flat_source
from tools.loading.image_data import CLASSES, augmentation_of
from tools.loading.token_data import data_config

_BICUBIC = 3  # PIL's number


def class_names(run: Path, classes: int) -> list[str]:
    """Return the class names that a run wrote, or numbers without that file. Raises ValueError for another number of names."""
    file = run / CLASSES
    if not file.is_file():
        return [str(number) for number in range(classes)]
    try:
        names = json.loads(file.read_text(encoding="utf-8"))
    except ValueError:  # no JSON, or no UTF-8
        names = None
    if not isinstance(names, list) or len(names) != classes:
        raise ValueError(f"{file}: {classes} class names are needed, one per class of the model; write the file again")
    return [str(name) for name in names]


def write_image_description(
    folder: Path, model: ModelConfig, config: Mapping[str, Any], dtype: str, names: list[str]
) -> None:
    """Write config.json, preprocessor_config.json and the source files of an image classifier.

    config: the run's configuration as plain YAML values. dtype: as in transformers. names: of the classes.
    """
    settings = {
        "architectures": ["MetalionForImageClassification"],
        "auto_map": {
            "AutoConfig": "configuration_metalion.MetalionConfig",
            "AutoModelForImageClassification": "modeling_metalion.MetalionForImageClassification",
        },
        "model_type": "metalion",
        **asdict(model),
        "id2label": dict(enumerate(names)),
        "label2id": {name: number for number, name in enumerate(names)},
        "dtype": dtype,
        "use_cache": False,
    }
    assert model.image_size is not None
    images = augmentation_of(data_config(dict(config)).images, model.image_size)
    # The processor of BiT in transformers has the same steps as `Augmentation.validation`.
    processor = {
        "image_processor_type": "BitImageProcessor",
        "do_convert_rgb": True,
        "do_resize": True,
        "size": {"shortest_edge": round(model.image_size / images.validation_crop)},
        "resample": _BICUBIC,
        "do_center_crop": True,
        "crop_size": {"height": model.image_size, "width": model.image_size},
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(images.mean),
        "image_std": list(images.std),
    }
    for name, content in (("config.json", settings), ("preprocessor_config.json", processor)):
        (folder / name).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    for name, text in flat_source(model.mixers, images=True).items():
        (folder / name).write_text(text, encoding="utf-8")
