"""Write, read, verify and reshard checkpoints. Start with `reader.py`, which describes the format."""
