"""Generate the synthetic tasks MQAR, MAD and ListOps with NumPy. A seed determines a data set.

Start with `mqar.py`, the smallest task; every task returns the `Examples` of `examples.py`.
"""
