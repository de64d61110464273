"""Several models trained by one recipe: a plan from one YAML file, the runs side by side, one table and figures."""
