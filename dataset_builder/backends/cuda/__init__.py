"""The backend `cuda`: trains each spec in a fresh child process on a GPU while NVML is monitored from the parent."""
