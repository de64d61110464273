"""Compute and log the metrics of a run. Start with `logger.py`, which writes `metrics.jsonl`."""
