"""Evaluate models: suites of the lm-evaluation-harness, needles, RULER, perplexity, and fine-tuning on GLUE.

Start with command.py, which runs the requests of request.py. open_model.py loads the model.
"""
