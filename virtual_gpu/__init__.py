"""The virtual GPU: simulates the memory of training on a GPU, without one."""
