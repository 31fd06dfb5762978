"""A network with dropout, batch norm and augmentation, and a loss by the first argument."""

import random
import sys

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

LOSSES = {
    "mean": F.cross_entropy,
    "sum": lambda z, y: F.cross_entropy(z, y, reduction="sum"),
    "masked by hand": lambda z, y: (F.cross_entropy(z, y, reduction="none") * (y > 0)).sum() / (y > 0).sum(),
    "normalized by hand": lambda z, y: F.cross_entropy(z - z.mean(0, keepdim=True).detach(), y),
}


class Rows(Dataset):
    def __init__(self) -> None:
        draws = torch.Generator().manual_seed(0)
        self.x, self.y = torch.randn(203, 10, generator=draws), torch.randint(4, (203,), generator=draws)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        noise = torch.randn(10) if random.random() < 0.5 else torch.zeros(10)
        return self.x[row] + 0.1 * noise, self.y[row]


torch.manual_seed(1)
model = nn.Sequential(nn.Linear(10, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, 4))
optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
for _ in range(2):
    for x, y in DataLoader(Rows(), 32, shuffle=True):
        optimizer.zero_grad()
        LOSSES[sys.argv[1]](model(x), y).backward()
        optimizer.step()
print("trained")
