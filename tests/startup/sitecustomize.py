"""Settings of every Python process that a test starts. Python imports this file from PYTHONPATH.

Importing torch makes a million objects. By default they are traversed again and again, and once more at the end of the
process, which is a third of the processor time of a short one.
"""

import atexit
import gc

gc.set_threshold(100_000, 20, 20)
atexit.register(gc.freeze)
