"""Two models that train against each other, each prepared with its optimizer: a generator learns to draw a ring.

python examples/gan.py
manyhands run -n 2 examples/gan.py
"""

import argparse

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import manyhands as mh


def network(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, outputs))


def ring(rows: int) -> Tensor:
    angle = torch.rand(rows, generator=torch.Generator().manual_seed(1)) * 2 * torch.pi
    return 2 * torch.stack([angle.cos(), angle.sin()], 1)


parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=30)
args = parser.parse_args()

torch.manual_seed(0)
generator, critic = network(4, 2), network(2, 1)
generator_rule = torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.5, 0.9))
critic_rule = torch.optim.Adam(critic.parameters(), lr=2e-3, betas=(0.5, 0.9))
loader = DataLoader(TensorDataset(ring(2048)), batch_size=128, shuffle=True)

generator, generator_rule = mh.prepare(generator, generator_rule)
critic, critic_rule, loader = mh.prepare(critic, critic_rule, loader)

for epoch in range(args.epochs):
    for (real,) in loader:
        fake = generator(torch.randn(len(real), 4))  # every worker draws noise of its own

        critic_rule.zero_grad()
        loss = F.softplus(-critic(real)).mean() + F.softplus(critic(fake.detach())).mean()
        (slope,) = torch.autograd.grad(critic(real.requires_grad_()).sum(), real, create_graph=True)
        (loss + 0.1 * slope.square().sum(1).mean()).backward()  # a critic that is not steep keeps both learning
        critic_rule.step()

        generator_rule.zero_grad()
        F.softplus(-critic(fake)).mean().backward()
        generator_rule.step()
    if (epoch + 1) % 10 == 0:
        with torch.no_grad():
            radius = generator(torch.randn(1000, 4)).norm(dim=1)
        print(f"epoch {epoch + 1}: radius {radius.mean():.2f} ± {radius.std():.2f} (the ring's is 2)")
