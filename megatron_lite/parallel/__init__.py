"""Process groups, layouts, collectives, and the sharding of plain modules. Start with `grid.py`, then `sharding_plan.py`."""
