"""Layers of every model besides the mixers: embedding, norms, projections, convolution, MLP and head."""
