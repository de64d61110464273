"""From raw text to batches: corpora, tokenizers, indexed token files, samples, order, loading.

Functions here take plain arguments and never a config; nothing here knows of models or of the trainer.
"""
