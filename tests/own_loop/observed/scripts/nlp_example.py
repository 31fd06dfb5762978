"""A text classifier by Accelerate: its own processes, devices and samplers."""

from __future__ import annotations

import argparse

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--dump", help="a file for the number of processes")
args = parser.parse_args()
accelerator = Accelerator(cpu=True)
torch.manual_seed(3)
data = TensorDataset(torch.randint(30, (64, 6)), torch.arange(64) % 2)
model = nn.Sequential(nn.Embedding(30, 8), nn.Flatten(), nn.Linear(48, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, 8, shuffle=True))
for tokens, labels in loader:
    accelerator.backward(nn.functional.cross_entropy(model(tokens), labels))
    optimizer.step()
    optimizer.zero_grad()
if accelerator.is_main_process:
    torch.save({"size": accelerator.num_processes}, args.dump)
