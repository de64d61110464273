"""Triton kernels of bidirectional linear attention: `lion.py` launches them."""
