"""Train several models with the same settings from one YAML file and compare them in one table and figures.

Start with __main__.py (command line), then spec.py (YAML file to runs), launcher.py (worker processes) and results.py (tables).
"""
