"""Generated tasks that measure what a mixer stores and retrieves: MQAR and MAD. NumPy alone; a seed is a data set."""
