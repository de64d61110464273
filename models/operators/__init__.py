"""Operators: the recurrences and losses that mixers and the head call, in PyTorch. Each chooses its kernel.

Start with `gla/gated_linear_attention.py`; `scan/` has elementwise recurrences, `lion/` the bidirectional operator.
"""
