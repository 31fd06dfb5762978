"""A plain PyTorch script with one changed line: telling two spirals apart.

python examples/plain.py                                                     alone
manyhands run -n 4 examples/plain.py                                         four workers, the same steps
manyhands run -n 4 --strategy local-sgd:period=8 examples/plain.py           four workers that seldom talk
torchrun --nproc-per-node 4 examples/plain.py                                torchrun's workers
"""

import argparse

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import manyhands as mh


def spirals(rows: int, seed: int) -> tuple[Tensor, Tensor]:
    """Points of two arms, and which arm each lies on."""
    generator = torch.Generator().manual_seed(seed)
    arm = torch.randint(0, 2, (rows,), generator=generator)
    turn = 0.3 + torch.rand(rows, generator=generator) * 2.7
    angle = turn * 3 + arm * torch.pi
    points = torch.stack([angle.cos(), angle.sin()], 1) * turn[:, None]
    return points + 0.05 * torch.randn(rows, 2, generator=generator), arm


parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=8)
args = parser.parse_args()

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
loader = DataLoader(TensorDataset(*spirals(2000, seed=1)), batch_size=128, shuffle=True)
model, optimizer, loader = mh.prepare(model, optimizer, loader)  # the changed line
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs * len(loader))

test_points, test_arms = spirals(1000, seed=2)
for epoch in range(args.epochs):
    for points, arms in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(points), arms)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        accuracy = (model(test_points).argmax(1) == test_arms).float().mean()
    print(f"epoch {epoch + 1}: test accuracy {accuracy:.1%}")
