"""Signals, hangs, lost processes, non-finite values and faulty devices. Start with `guards.py`, then `heartbeat.py`."""
