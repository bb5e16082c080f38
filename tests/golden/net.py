from torch import nn


def make(width=64):
    return nn.Sequential(
        nn.Conv2d(3, width, 7, stride=2),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.Conv2d(width, width, 3, padding=1, groups=2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(width, 10),
    )


class Rnn(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.LSTM(40, 128, 2, batch_first=True)
        self.head = nn.Linear(128, 5)

    def forward(self, x):
        return self.head(self.rnn(x)[0][:, -1])


def step(network, batch):
    return network(*batch if isinstance(batch, tuple) else (batch,)).square().mean()
