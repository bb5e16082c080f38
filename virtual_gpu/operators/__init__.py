"""The memory of CUDA's kernels, and the paths that operators take on CUDA."""
