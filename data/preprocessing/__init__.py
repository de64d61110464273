"""Write token files. Start with `prepare_corpus.py` (one process) or `pipeline.py` (many processes, resumable)."""
