"""Generate the synthetic tasks MQAR, MAD and ListOps with NumPy, and the texts of RULER. A seed determines a data set.

Start with `mqar.py`, the smallest task. Every NumPy task returns the `Examples` of `examples.py`.
"""
