"""Convert checkpoints to Hugging Face folders and back. Start with export_hf.py and import_hf.py."""
