"""Train small models on generated tasks: MQAR, MAD, ListOps and Long Range Arena (`python eval.py --suite mqar`).

Start with command.py (command line) and experiment.py (configuration). training.py trains the runs of one sweep together;
workers.py distributes the groups over processes and devices.
"""
