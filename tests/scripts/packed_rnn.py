"""A sequence tagger: an LSTM over packed sequences of different lengths."""

import random

import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence

random.seed(0)
vocabulary, tags = 5000, 17


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, 128, padding_idx=0)
        self.lstm = nn.LSTM(128, 256, num_layers=2, batch_first=True, bidirectional=True, dropout=0.2)
        self.out = nn.Linear(512, tags)

    def forward(self, tokens, lengths):
        packed = pack_padded_sequence(self.embedding(tokens), lengths.cpu(), batch_first=True, enforce_sorted=False)
        states, _ = self.lstm(packed)
        padded, _ = pad_packed_sequence(states, batch_first=True)
        assert padded.shape[1] == int(lengths.max())
        return self.out(padded)


model = Tagger().cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for step in range(12):
    sentences = [torch.randint(1, vocabulary, (random.randint(5, 80),)) for _ in range(32)]
    lengths = torch.tensor([len(item) for item in sentences]).cuda()
    tokens = pad_sequence(sentences, batch_first=True).cuda()
    labels = torch.randint(0, tags, tokens.shape, device="cuda").masked_fill(tokens == 0, -100)
    loss = nn.functional.cross_entropy(model(tokens, lengths).flatten(0, 1), labels.flatten())
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 5.0)
    optimizer.step()
    print(step, tuple(tokens.shape), loss.item())
