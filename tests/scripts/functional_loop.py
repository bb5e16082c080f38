"""A loop in the style of JAX: pure functions of parameters, and gradients of each sample by torch.func."""

import torch
from torch import nn
from torch.func import functional_call, grad_and_value, vmap

network = nn.Sequential(nn.Linear(256, 1024), nn.Tanh(), nn.Linear(1024, 16)).cuda()
parameters = {name: value.detach() for name, value in network.named_parameters()}
momenta = {name: torch.zeros_like(value) for name, value in parameters.items()}


def loss_of(values, x, y):
    out = functional_call(network, values, (x.unsqueeze(0),))
    return nn.functional.mse_loss(out.squeeze(0), y)


for step in range(6):
    x, y = torch.randn(8, 256, device="cuda"), torch.randn(8, 16, device="cuda")
    gradients, losses = vmap(grad_and_value(loss_of), (None, 0, 0))(parameters, x, y)
    momenta = {name: 0.9 * momenta[name] + gradients[name].mean(0) for name in parameters}
    parameters = {name: parameters[name] - 0.01 * momenta[name] for name in parameters}
    print("step", step, float(losses.mean()))
