"""Small models trained on generated tasks, MQAR, MAD and ListOps: `python eval.py --suite mqar`."""
