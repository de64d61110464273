"""Bidirectional linear attention: start with `bidirectional_attention.py`."""
