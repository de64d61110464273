"""The distributed trainer: configuration, engine, optimizer, schedule, checkpoints, metrics and resilience."""
