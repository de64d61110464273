"""Small models trained on generated tasks, MQAR and MAD: `python eval.py --suite mqar`."""
