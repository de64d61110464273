"""FP8 matmuls of linear layers: scales, quantisation, and the three matmuls of a training step."""
