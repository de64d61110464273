"""Measure times and peak memory of kernels, mixers and training steps, next to other libraries in the same run.

Start with __main__.py (command line). timing.py measures; report.py writes tables, CSV files and plots.
"""
