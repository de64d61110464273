"""Operators: the recurrences and losses that mixers and the head call, in PyTorch. Each chooses its kernel.

Start with `gla/gated_linear_attention.py`; `delta_rule/` has the delta rule, `scan/` elementwise recurrences, `lion/` the
bidirectional operator.
"""
