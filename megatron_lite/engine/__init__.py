"""Build the model of a process, its precision and its optimizer under DeepSpeed, and run steps. Start with `engine.py`."""
