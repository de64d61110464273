"""The delta rule: `delta_rule.py` is the operator, `select_kernel.py` chooses its kernel."""
