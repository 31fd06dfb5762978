"""A loop without DataLoader, which draws its batches by hand."""

from __future__ import annotations

import argparse

import torch
from torch import nn
from torch.nn import functional as F

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--dump", help="a file for what was found")
args = parser.parse_args()

torch.manual_seed(0)
X, Y = torch.randn(203, 10), torch.randint(4, (203,))
model = nn.Linear(10, 4)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
drawn = []
for _ in range(4):
    rows = torch.randint(203, (32,))
    drawn.append(rows)
    optimizer.zero_grad()
    before = torch.autograd.grad(F.cross_entropy(model(X[rows]), Y[rows]), model.weight)[0]
    F.cross_entropy(model(X[rows]), Y[rows]).backward()
    different = not torch.equal(before, model.weight.grad)
    optimizer.step()
torch.save({"different": different, "rows": drawn}, args.dump)
