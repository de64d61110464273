"""What a model makes of texts longer, and shorter, than those it was trained on."""
