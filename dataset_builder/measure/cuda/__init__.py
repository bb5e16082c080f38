"""A real GPU as a backend: each spec in a fresh child process, with NVML looking on from outside."""
