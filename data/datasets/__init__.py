"""Cut token files into samples and order them. Start with `causal.py`; `masked.py` and `blend.py` build on it."""
