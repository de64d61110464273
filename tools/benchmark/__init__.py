"""Times and peak memory on this machine, each beside its peers in the same run."""
