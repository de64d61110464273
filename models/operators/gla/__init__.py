"""Gated linear attention: `gated_linear_attention.py` is the operator, `select_kernel.py` chooses its kernel."""
