"""Policy gradients in a walk on a line: one action after the other, no DataLoader."""

from __future__ import annotations

import torch
from record import options
from torch import nn
from torch.distributions import Categorical

args = options(__doc__, gamma=0.99, seed=543, episodes=3)
torch.manual_seed(args.seed)
policy = nn.Sequential(nn.Linear(1, 16), nn.ReLU(), nn.Linear(16, 2))
optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
for _episode in range(args.episodes):
    position, log_probs, rewards = 0.0, [], []
    for _ in range(20):
        action = Categorical(logits=policy(torch.tensor([position])))
        step = action.sample()
        log_probs.append(action.log_prob(step))
        position += 1.0 if step.item() else -1.0
        rewards.append(-abs(position))
    returns = torch.tensor(rewards).flip(0).cumsum(0).flip(0)
    optimizer.zero_grad()
    (-torch.stack(log_probs) * returns).sum().backward()
    optimizer.step()
args.save()
