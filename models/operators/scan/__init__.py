"""Elementwise recurrences: `linear_scan.py`, and Mamba's `selective_scan.py`."""
