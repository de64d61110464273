"""Turn raw text into training batches: corpora, tokenizers, token files, samples and loading.

Functions take plain arguments, never a config, and do not import `models` or `megatron_lite`.
Start with `preprocessing/prepare_corpus.py` (text to token files), then `datasets/causal.py` and `loader.py`.
"""
