"""The Transformers classes of an exported model: start with `modeling_metalion.py`."""
