"""torch.compile without a GPU: Dynamo, AOTAutograd and partitioner of torch, and an own rule for what is allocated."""
