"""Runs whose data, model and loss draw from all generators of random numbers."""

import hashlib
import random
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import manyhands as mh
from plain import cross_entropy, task


class Noisy(torch.utils.data.Dataset):
    """Rows with noise from all three generators, drawn when they are read."""

    def __init__(self, rows: int = 37) -> None:
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(rows, 5, generator=generator, dtype=torch.float64)
        self.y = torch.randint(0, 3, (rows,), generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        noise = 0.1 * np.random.randn() + 0.1 * random.random() + 0.1 * torch.rand(5, dtype=torch.float64)
        return self.x[index] + noise, self.y[index]


def model() -> nn.Module:
    """Draws in its forward too, and has buffers that every batch moves."""
    return nn.Sequential(
        nn.Linear(5, 8), nn.BatchNorm1d(8, momentum=0.3), nn.Dropout(0.3), nn.Tanh(), nn.Linear(8, 3)
    ).double()


def loss(module: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Numpy's and Python's generators are drawn from here too."""
    return cross_entropy(module, batch) * (1 + 0.1 * np.random.rand() + 0.1 * random.random())


def noisy_task() -> mh.Task:
    """Batches of 10, the last of 7: shares of two sizes, none of fewer rows than batch-norm needs."""
    return task(model=model, loss=loss, train_data=Noisy(), validation_data=Noisy(7), batch_size=10, epochs=2)


def train(spec: str, workers: int, engine: Any) -> mh.Run:
    return mh.train(noisy_task(), strategy=spec, engine=engine, workers=workers, threads_per_worker=1)


def digests() -> list[str]:
    """Of runs on a network with jitter, stragglers and lost messages, where what happens first is drawn."""
    engine = "sim:network='latency=1ms,bandwidth=1e8',compute='row=1e-3,jitter=lognormal:0.5,1=3x'"
    lossy = f"{engine},faults='drop=0.1,delay=0.1:0.01,retry=0.05'"
    trained = (("downpour", lossy), ("gossip:graph=pairs", engine), ("local-sgd:period=2", engine))
    runs = [train(spec, 3, engine) for spec, engine in trained]
    return [hashlib.sha256(run.parameters.numpy().tobytes()).hexdigest() + repr(run.seconds) for run in runs]
