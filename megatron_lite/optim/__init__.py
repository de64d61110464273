"""AdamW, Muon, learning-rate schedules and the sharded optimizer state. Start with `param_groups.py`, then `zero_state.py`."""
