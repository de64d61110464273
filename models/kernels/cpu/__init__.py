"""C++ kernels for CPUs. `build.py` compiles each at its first use, for this processor, in less than a second, and caches it.

On a CPU a small model spends most of its time in elementwise operators that read and write whole tensors. The kernels fuse
them. Plain PyTorch runs instead if there is no compiler (`c++` or $CXX), if there are no sources (exported models), or with
METALION_NATIVE=0.
"""
