"""A virtual GPU that a script sees as CUDA: device tensors without data, torch.cuda answered from a live simulation."""
