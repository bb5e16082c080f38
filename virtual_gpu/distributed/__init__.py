"""Memory of each rank of a distributed training run: torch.distributed itself runs on tensors without data."""
