"""The delta rule with one gate: start with `delta_rule.py`. `layer.py` has the elementwise steps around the operator."""
