"""Learning-rate schedules: pure functions of the step, so that a resumed run needs no schedule state."""

from __future__ import annotations

import math

from megatron_lite.config.schema import ScheduleConfig


def learning_rate(step: int, peak: float, schedule: ScheduleConfig) -> float:
    """Return the learning rate of one step.

    The warmup rises linearly from peak / warmup_steps at step 0 to the peak at step `warmup_steps - 1`.
    After it, with t = (step - warmup_steps) / (decay_steps - warmup_steps) clamped to [0, 1], and floor = min_lr_ratio * peak:

    - constant: peak
    - linear: peak to floor along a line
    - cosine: peak to floor along half a cosine, as GPT-3. GPT-NeoX before August 2023 had
      max(peak / 2 (1 + cos(pi (step - warmup_steps) / decay_steps)), floor)
    - inverse_sqrt: peak * sqrt(w / (step + 1)) with w = max(warmup_steps, 1) (Vaswani et al. 2017, Section 5.3, scaled
      so that the peak is reached at the end of the warmup), not under floor
    - wsd: peak, then over the last `wsd_decay_fraction` of decay_steps along a line to floor
      (warmup-stable-decay, MiniCPM, Hu et al. 2024)

    Args:
        step: optimizer steps done so far (0 for the first).
        peak: the highest learning rate.
        schedule: its `decay_steps` is the step at which the lowest rate is reached; it stays there afterwards.
    """
    kind, warmup_steps, decay_steps = schedule.kind, schedule.warmup_steps, schedule.decay_steps
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    floor = peak * schedule.min_lr_ratio
    if kind == "constant":
        return peak
    if kind == "inverse_sqrt":
        reference = max(warmup_steps, 1)
        return max(floor, peak * math.sqrt(reference / max(step + 1, reference)))
    if kind == "wsd":
        length = max(1, round(schedule.wsd_decay_fraction * decay_steps))
        progress = (step - (decay_steps - length)) / length
        return floor + (peak - floor) * (1 - _clamp(progress))
    progress = _clamp((step - warmup_steps) / max(1, decay_steps - warmup_steps))
    if kind == "linear":
        return floor + (peak - floor) * (1 - progress)
    return floor + (peak - floor) * 0.5 * (1 + math.cos(math.pi * progress))  # cosine


def _clamp(value: float) -> float:
    return min(1.0, max(0.0, value))
