"""Labelled images: reading, augmentation, samples."""
