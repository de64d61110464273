"""Learning-rate schedules: pure functions of the step, so that a resumed run needs no schedule state."""

from __future__ import annotations

import math
from typing import Literal

Kind = Literal["constant", "linear", "cosine", "inverse_sqrt", "wsd"]


def learning_rate(
    step: int,
    *,
    kind: Kind,
    peak: float,
    warmup_steps: int,
    decay_steps: int,
    min_ratio: float,
    wsd_decay_fraction: float = 0.2,
) -> float:
    """Return the learning rate of one step.

    The warmup rises linearly from peak / warmup_steps at step 0 to the peak at step `warmup_steps - 1`.
    After it, with t = (step - warmup_steps) / (decay_steps - warmup_steps) clamped to [0, 1]:

    - constant: peak
    - linear: peak to min_ratio * peak along a line
    - cosine: peak to min_ratio * peak along half a cosine, as GPT-3. GPT-NeoX before August 2023 had
      max(peak / 2 (1 + cos(pi (step - warmup_steps) / decay_steps)), min_ratio * peak)
    - inverse_sqrt: peak * sqrt(w / (step + 1)) with w = max(warmup_steps, 1) (Vaswani et al. 2017, Section 5.3, scaled
      so that the peak is reached at the end of the warmup), not under min_ratio * peak
    - wsd: peak, then over the last `wsd_decay_fraction` of decay_steps along a line to min_ratio * peak
      (warmup-stable-decay, MiniCPM, Hu et al. 2024)

    Args:
        step: optimizer steps done so far (0 for the first).
        peak: the highest learning rate.
        decay_steps: the step at which the lowest rate is reached; it stays there afterwards.
    """
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    floor = peak * min_ratio
    if kind == "constant":
        return peak
    if kind == "inverse_sqrt":
        reference = max(warmup_steps, 1)
        return max(floor, peak * math.sqrt(reference / max(step + 1, reference)))
    if kind == "wsd":
        length = max(1, round(wsd_decay_fraction * decay_steps))
        progress = (step - (decay_steps - length)) / length
        return floor + (peak - floor) * (1 - _clamp(progress))
    progress = _clamp((step - warmup_steps) / max(1, decay_steps - warmup_steps))
    if kind == "linear":
        return floor + (peak - floor) * (1 - progress)
    if kind == "cosine":
        return floor + (peak - floor) * 0.5 * (1 + math.cos(math.pi * progress))
    raise ValueError(f"schedule.kind: {kind!r} is not one of constant, linear, cosine, inverse_sqrt, wsd")


def _clamp(value: float) -> float:
    return min(1.0, max(0.0, value))
