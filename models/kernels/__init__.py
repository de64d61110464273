"""Triton kernels, imported only where a CUDA device (or Triton's interpreter) runs them.

`lion.py` is LION's operator over `lion_tile.py` (short sequences) and `lion_chunk.py` (long ones); its plain PyTorch
reference is `models/bidirectional.py`. `metala_epilogue.py` holds its reference itself and needs no Triton to import.
"""
