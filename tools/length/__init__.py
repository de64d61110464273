"""Evaluate models on texts shorter and longer than in training. Start with __main__.py."""
