"""Processes of the script's own, which train one model in shared memory."""

from __future__ import annotations

import torch
import torch.multiprocessing as mp
from record import images, options
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def train(rank: int, model: nn.Module, seed: int) -> None:
    torch.manual_seed(seed + rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = DataLoader(TensorDataset(images(64, 8).flatten(1), torch.arange(64) % 10), 16, shuffle=True)
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()


if __name__ == "__main__":
    args = options(__doc__, num_processes=2, seed=1)
    model = nn.Linear(64, 10)
    model.share_memory()
    started = []
    for rank in range(args.num_processes):
        process = mp.get_context("fork").Process(target=train, args=(rank, model, args.seed))
        process.start()
        started.append(process)
    for process in started:
        process.join()
    args.save()
