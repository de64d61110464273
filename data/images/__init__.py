"""Read, augment and sample labelled images."""
