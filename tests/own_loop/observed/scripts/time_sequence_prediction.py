"""Sine waves, all of them in one tensor, by LBFGS with a closure."""

from __future__ import annotations

import torch
from record import options
from torch import nn

args = options(__doc__, steps=2)
torch.manual_seed(0)
waves = torch.sin(torch.arange(20.0) / 3 + torch.randn(12, 1))
x, target = waves[:, :-1, None], waves[:, 1:]
lstm, head, criterion = nn.LSTM(1, 8, batch_first=True), nn.Linear(8, 1), nn.MSELoss()
model = nn.ModuleList([lstm, head])
optimizer = torch.optim.LBFGS(model.parameters(), lr=0.8)
for _ in range(args.steps):

    def closure():
        optimizer.zero_grad()
        loss = criterion(head(lstm(x)[0])[..., 0], target)
        loss.backward()
        return loss

    optimizer.step(closure)
args.save()
