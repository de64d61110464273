"""Plain PyTorch language models over linear-attention mixers. `models.config` describes one, `models.language_model`
builds it."""
