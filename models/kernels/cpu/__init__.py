"""Kernels in C++ for CPUs, each a file of C++ beside the Python that calls it, compiled at its first use and kept.

In PyTorch's operators every elementwise step reads and writes all of its tensors, and on a CPU that is most of a small model's
time. A kernel takes less than a second to compile, for this machine's processor and with sizes as constants, without
PyTorch's headers. Where there is no compiler (`c++` or $CXX) or no source, as in exported models, the plain PyTorch beside
which a kernel is called runs instead; so it does with METALION_NATIVE=0.
"""
