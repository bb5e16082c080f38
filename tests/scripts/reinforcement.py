"""REINFORCE with an environment on the host and a policy on the GPU."""

import random

import torch
from torch import nn
from torch.distributions import Categorical, Normal

random.seed(1)


class Walk:
    def reset(self):
        self.place, self.time = 0.0, 0
        return [self.place] * 8

    def step(self, action):
        assert action in (0, 1, 2, 3)
        self.place += action - 1.5
        self.time += 1
        return [self.place + random.random()] * 8, -abs(self.place), self.time >= 20


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 512), nn.Tanh(), nn.Linear(512, 512), nn.Tanh())
        self.actor, self.critic = nn.Linear(512, 4), nn.Linear(512, 2)

    def forward(self, x):
        x = self.body(x)
        mean, spread = self.critic(x).chunk(2, dim=-1)
        return Categorical(logits=self.actor(x), validate_args=True), Normal(
            mean, nn.functional.softplus(spread) + 1e-3
        )


device = torch.device("cuda")
policy = Policy().to(device)
optimizer = torch.optim.RMSprop(policy.parameters(), lr=1e-3)
environment = Walk()
for episode in range(6):
    state, done, logs, rewards, values = environment.reset(), False, [], [], []
    while not done:
        distribution, value = policy(torch.tensor(state, dtype=torch.float32, device=device).unsqueeze(0))
        action = distribution.sample()
        logs.append(distribution.log_prob(action))
        values.append(value.rsample().squeeze())
        state, reward, done = environment.step(action.item())
        rewards.append(reward)
    returns = torch.tensor(rewards, device=device).flip(0).cumsum(0).flip(0)
    returns = (returns - returns.mean()) / (returns.std() + 1e-6)
    advantage = returns - torch.stack(values)
    loss = -(torch.cat(logs) * advantage.detach()).sum() + advantage.pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    assert len(rewards) == 20
    print(episode, sum(rewards), loss.item())
