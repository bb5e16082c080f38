"""PyTorch's caching allocator."""
