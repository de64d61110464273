"""Estimate FLOPs, memory and communication of a training step. Start with `flops.py`; `python -m tools.plan` uses all three."""
