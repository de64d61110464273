"""Read, check and dump the configuration of a run. Start with `loader.py` (`load_config`), then `schema.py` (every key)."""
