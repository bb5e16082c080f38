"""Record what a training step allocates and frees."""
