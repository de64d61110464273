"""Triton kernels, imported only when a CUDA device (or Triton's interpreter) runs them.

Each kernel has a plain PyTorch reference: `models/operators/` for LION, gated linear attention and MetaLA, and the layer that
calls it for the others. `cpu/` holds the C++ kernels.
"""
