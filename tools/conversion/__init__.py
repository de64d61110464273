"""Checkpoints to Hugging Face folders and back."""
