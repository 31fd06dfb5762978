"""Scripts that several workers cannot run as they are; which one is the first argument."""

import sys

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

X, Y = torch.randn(203, 10), torch.randint(4, (203,))
data = TensorDataset(X, Y)
loader = DataLoader(data, 32, shuffle=True)
model = nn.Linear(10, 4)
optimizer = torch.optim.SGD(model.parameters(), 0.1)


def train(batches=loader, loss=F.cross_entropy, net=model, after=lambda x: None) -> None:
    for x, y in batches:
        optimizer.zero_grad()
        loss(net(x), y).backward()
        optimizer.step()
        with torch.no_grad():
            after(x)


def no_loader() -> None:
    rows = torch.randint(203, (32,))
    F.cross_entropy(model(X[rows]), Y[rows]).backward()


def closure() -> None:
    for x, y in loader:

        def evaluate(x=x, y=y):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            return loss

        optimizer.step(evaluate)


def started() -> None:
    import torch.multiprocessing as mp

    model.share_memory()
    mp.get_context("fork").Process(target=print, args=(model,)).start()


def prepared() -> None:
    import manyhands as mh

    mh.prepare(model, optimizer, loader)


def shared_apart() -> None:
    import manyhands as mh

    mh.share((torch.arange(5), torch.arange(6)))


def tensor() -> None:
    global optimizer
    weights = torch.zeros(10, 4, requires_grad=True)
    optimizer = torch.optim.SGD([weights], 0.1)
    train(net=lambda x: x @ weights)


def sharded_data() -> None:
    class Split(IterableDataset):
        _distributed = "rank 0 of 2"

        def __iter__(self):
            yield from data

    train(DataLoader(Split(), 32))


def late() -> None:
    """A loss that comes first when rows are shared, and is neither a mean nor a sum of torch's."""
    for i, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        if i == 3:
            torch.logsumexp(model(x).flatten(), 0).backward()


def second_optimizer() -> None:
    torch.optim.Adam(model.parameters()).zero_grad()
    other = torch.optim.Adam(model.parameters())
    for x, y in loader:
        F.cross_entropy(model(x), y).backward()
        other.step()
        optimizer.step()


def no_optimizer() -> None:
    global optimizer
    del optimizer
    for x, y in loader:
        F.cross_entropy(model(x), y).backward()
        for p in model.parameters():
            p.data.add_(p.grad, alpha=-0.1)


def drifting_average() -> None:
    average = nn.Linear(10, 4)
    for _ in range(2):
        train(after=lambda x: average.bias.add_(x.mean()))


TRAININGS = {
    "own_loader": lambda: train(),
    "contrast": lambda: train(loss=lambda z, y: F.cross_entropy(z @ z.T, torch.arange(len(z)))),
    "contrast_with_constant_keys": lambda: train(
        loss=lambda z, y: F.cross_entropy(z @ z.detach().T, torch.arange(len(z)))
    ),
    "normalized_over_the_batch": lambda: train(loss=lambda z, y: F.cross_entropy(z / z.norm(dim=0), y)),
    "penalized_sum": lambda: train(
        loss=lambda z, y: F.cross_entropy(z, y, reduction="sum") + model.weight.square().sum()
    ),
    "sampler": lambda: train(DataLoader(data, 32, sampler=DistributedSampler(data, num_replicas=1, rank=0))),
    "data_parallel": lambda: train(net=nn.DataParallel(model)),
    "small_batches": lambda: train(DataLoader(data, 1)),
    "drift": lambda: train(after=lambda x: model.bias.add_(x.mean())),  # each worker by its own rows
    "one_batch_size": lambda: train(net=lambda x: model(x.view(32, 10))),
}


if __name__ == "__main__":
    (TRAININGS | globals())[sys.argv[1]]()
    print("trained")
