"""Find and read the documents of a corpus. Start with `discovery.py` (which files), then `readers.py`."""
