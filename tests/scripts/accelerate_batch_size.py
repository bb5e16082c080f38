"""accelerate looks for a batch size that fits, starting from one that does not."""

import torch
from accelerate import Accelerator
from accelerate.utils import find_executable_batch_size
from plain_loop import Net
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator(mixed_precision="bf16")
data = TensorDataset(torch.randn(4096, 3, 64, 64), torch.randint(0, 10, (4096,)))


@find_executable_batch_size(starting_batch_size=4096)
def train(batch_size):
    accelerator.free_memory()
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = DataLoader(data, batch_size, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    print("trying", batch_size)
    for _ in range(2):
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
    return batch_size


print("found", train())
