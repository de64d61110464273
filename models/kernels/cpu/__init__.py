"""C++ kernels for CPUs. `build.py` compiles each at its first use, for this processor, in less than a second, and caches it.

On a CPU most of a small model's time is elementwise operators that read and write whole tensors; the kernels fuse them.
Plain PyTorch runs instead without a compiler (`c++` or $CXX), without the sources (exported models), and with
METALION_NATIVE=0.
"""
