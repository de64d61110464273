"""Triton kernels of gated linear attention: `gla.py` launches them."""
