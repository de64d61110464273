"""Load an image classifier for images of another size than in training."""

from __future__ import annotations

import dataclasses

from megatron_lite.checkpoint.reader import read_weights
from models.image_classifier import resized_positions
from models.language_model import LanguageModel
from tools.loading.model import LocatedCheckpoint, build_model


def load_classifier(located: LocatedCheckpoint, image_size: int) -> LanguageModel:
    """Return the classifier for images of `image_size` x `image_size` pixels, in evaluation mode, without gradients.

    Learned positions are interpolated. Raises ValueError for a language model, and as `ModelConfig` for the size; otherwise as
    `tools.loading.model.load_located`.
    """
    shape = located.model
    if shape.image_size is None:
        raise ValueError(f"{located.checkpoint} is a language model; name a run that classifies images")
    weights = read_weights(located.checkpoint)
    new = dataclasses.replace(shape, image_size=image_size, max_positions=None)
    if shape.positions == "learned":
        name = "embedding.positions"
        side, old_side = (config.image_size // shape.patch_size for config in (new, shape))
        weights[name] = resized_positions(weights[name], old_side, side)
    model = build_model(new, weights, located.checkpoint)
    return model.to(device=located.device, dtype=located.dtype).eval().requires_grad_(False)
