"""Small tasks with one thing planted in each that keeps N workers from equalling one, at the line `# plant: NAME`."""

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset, IterableDataset

import manyhands as mh

ROWS = 41


def line_of(name: str) -> int:
    """Where a plant is."""
    lines = Path(__file__).read_text().splitlines()
    return next(i for i, line in enumerate(lines, start=1) if line.endswith(f"# plant: {name}"))


def rows(n: int = ROWS) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(1)
    return torch.randn(n, 5, generator=g), torch.randint(0, 3, (n,), generator=g)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def cross_entropy(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def task(**fields: Any) -> mh.Task:
    """Clean, but for what is given."""
    common = {"model": mlp, "loss": cross_entropy, "optimizer": sgd, "train_data": rows(), "batch_size": 12}
    return mh.Task(**{**common, **fields})


# -- models ----------------------------------------------------------------------------------------------------------


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 8)
        self.norm = nn.BatchNorm1d(8)  # plant: batch-norm
        self.last = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.norm(self.first(x))))


def dropping() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.3), nn.Linear(8, 3))


class OneLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


def layer(forward: Callable[[Any, Tensor], Tensor]) -> type[OneLayer]:
    """With this forward."""
    return type("Net", (OneLayer,), {"forward": forward})


DroppingByFunction = layer(lambda self, x: self.layer(F.dropout(x, 0.2, self.training)))  # plant: functional dropout
Noisy = layer(lambda self, x: self.layer(x + 0.1 * torch.randn_like(x)))  # plant: randomness
Timed = layer(lambda self, x: self.layer(x * (1 + time.perf_counter() % 1)))  # plant: nondeterministic


class Clipped(OneLayer):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.layer.weight.mul_(0.95)  # plant: in-place
        return self.layer(x)


class Centered(OneLayer):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(5))

    def forward(self, x: Tensor) -> Tensor:
        out = self.layer(x - self.center)
        self.center = 0.5 * self.center + 0.5 * x.detach().mean(0)  # plant: buffers
        return out


def spectral() -> nn.Module:  # plant: spectral
    return nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(5, 3)))


class Counting(OneLayer):
    """Remembers in an attribute."""

    scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        out = self.layer(x * self.scale)  # plant: hidden state
        self.scale = 0.9 * self.scale + 0.1 * float(x.abs().mean())
        return out


class Projected(OneLayer):
    """Holds a tensor that is neither parameter nor buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.projection = torch.from_numpy(np.random.default_rng().normal(size=(5, 5)))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x @ self.projection)


def projected() -> nn.Module:  # plant: attribute not rebuilt
    return Projected()


def unseeded() -> nn.Module:  # plant: not rebuilt
    model = mlp()
    with torch.no_grad():
        model[0].weight.add_(torch.from_numpy(np.random.default_rng().normal(size=(8, 5))))
    return model


class SingleOnly(OneLayer):
    def forward(self, x: Tensor) -> Tensor:
        if x.dtype != torch.float32:
            raise TypeError("float32 only")
        return self.layer(x)


class AtLeastEight(OneLayer):
    def forward(self, x: Tensor) -> Tensor:
        if len(x) < 8:
            raise ValueError(f"{len(x)} rows are too few")  # plant: eight rows
        return self.layer(x)


class Unused(OneLayer):
    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(2, 2)


# -- losses ----------------------------------------------------------------------------------------------------------


def summed(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    losses = F.cross_entropy(model(batch[0]), batch[1], reduction="none")
    return losses.sum() / 12  # plant: summed


def summed_by_argument(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    penalty = 1e-3 * sum((p**2).mean() for p in model.parameters())
    return penalty + F.cross_entropy(model(batch[0]), batch[1], reduction="sum")  # plant: summed by argument


WEIGHTS = torch.tensor([0.2, 1.0, 3.0])


def weighted(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:  # plant: wrong weight
    return F.cross_entropy(model(batch[0]), batch[1], weight=WEIGHTS)


def rightly_weighted(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return F.cross_entropy(model(batch[0]), batch[1], weight=WEIGHTS), WEIGHTS[batch[1]].sum()


def contrast(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    one = F.normalize(model(batch[0]), dim=1)
    likeness = one @ one.T  # plant: coupled loss
    return F.cross_entropy(likeness, torch.arange(len(one)))


def mixed_up(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    share = random.random()
    return F.cross_entropy(model(batch[0]), batch[1]) * (0.5 + share)  # plant: python randomness


def shaken(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    noise = torch.from_numpy(np.random.normal(size=tuple(batch[0].shape)))  # for each row, and not torch's
    return F.cross_entropy(model(batch[0] + noise.to(batch[0].dtype)), batch[1])


def recomputed(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(checkpoint(model, batch[0].float(), use_reentrant=False), batch[1])


def infinite(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:  # plant: not finite
    return (model(batch[0]) * 1e200).pow(2).mean()


def of_one(model: nn.Module) -> torch.optim.Optimizer:  # plant: not in optimizer
    return torch.optim.SGD(model[2].parameters(), lr=0.1)


class Langevin(torch.optim.SGD):
    """Adds noise to each step."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step()
        for p in (p for group in self.param_groups for p in group["params"]):
            p.add_(0.01 * torch.randn_like(p))


def noisy_steps(model: nn.Module) -> torch.optim.Optimizer:  # plant: random step
    return Langevin(model.parameters(), lr=0.1)


class SignSGD(torch.optim.SGD):
    """Rounding decides the sign of what is nearly zero."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in (p for group in self.param_groups for p in group["params"]):
            if p.grad is not None:
                p.sub_(0.1 * p.grad.sign())


def signs(model: nn.Module) -> torch.optim.Optimizer:
    return SignSGD(model.parameters(), lr=0.1)


class Shifting(nn.Module):
    """Its softmax does not feel the bias, whose gradient is rounding alone."""

    def __init__(self) -> None:
        super().__init__()
        self.shift, self.last = nn.Linear(5, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        shifted = torch.softmax(x + self.shift(x).sum(1, keepdim=True), 1)
        return self.last(shifted)


def by_workers(model: nn.Module) -> torch.optim.Optimizer:  # plant: rate by workers
    return torch.optim.SGD(model.parameters(), lr=0.1 * mh.worker().size)


def schedule_by_workers(optimizer: torch.optim.Optimizer, steps: int) -> Any:  # plant: schedule
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: mh.worker().size if step else 1)


# -- data ------------------------------------------------------------------------------------------------------------


class Pairs(Dataset):
    def __init__(self) -> None:
        self.x, self.y = rows()

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return self.x[i], self.y[i]


class Leaking(Pairs):
    """Rows depend on how many were read before."""

    read = 0

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        x, y = super().__getitem__(i)
        self.read += 1  # plant: data order
        return x * (1 + self.read % 5), y


class Augmented(Pairs):
    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:  # plant: random rows
        return self.x[i] * (1 + 0.1 * torch.rand(())), self.y[i]


class Stream(IterableDataset):
    def __iter__(self):  # plant: unseeded stream
        for i in np.random.default_rng().permutation(ROWS):
            yield rows()[0][i], rows()[1][i]


def seeded_stream() -> Any:
    return zip(*rows(), strict=True)


def drawn_rows() -> tuple[Tensor, Tensor]:
    """From the generator that the task's seed set."""
    return torch.randn(ROWS, 5), torch.randint(0, 3, (ROWS,))


CALLS: list[int] = []


def counted_rows() -> tuple[Tensor, Tensor]:
    CALLS.append(1)
    return rows()


def unseeded_rows() -> tuple[Tensor, Tensor]:  # plant: unseeded function
    noise = np.random.default_rng().normal(size=(ROWS, 5))
    return rows()[0] + torch.from_numpy(noise).float(), rows()[1]


def from_nowhere() -> Any:
    return np.load("nowhere.npy")


class OwnOrder(torch.utils.data.Sampler):
    def __len__(self) -> int:
        return ROWS

    def __iter__(self):  # plant: unseeded sampler
        return iter(np.random.default_rng().permutation(ROWS).tolist())


def loader_with_own_order() -> DataLoader:
    return DataLoader(Pairs(), batch_size=12, sampler=OwnOrder())


def own_order(epoch: int) -> Any:  # plant: unseeded order
    return np.random.default_rng().permutation(ROWS)


def seeded_order(epoch: int) -> Any:
    return np.random.default_rng(epoch).permutation(ROWS)[:30]


class Words(Dataset):
    """Rows of unequal length."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        return torch.ones(1 + i % 7) * (1 + i % 3), i % 3


def padded(rows: list[Any]) -> tuple[Tensor, Tensor]:  # plant: collate
    length = max(len(words) for words, _ in rows)
    x = torch.stack([F.pad(words, (0, length - len(words))) for words, _ in rows])
    return x, torch.tensor([y for _, y in rows])


class OverWords(nn.Module):
    """Means over padding too."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 3)

    def forward(self, words: Tensor) -> Tensor:
        return self.layer(words.mean(1, keepdim=True))


class OverWordsMasked(OverWords):
    def forward(self, words: Tensor) -> Tensor:
        return self.layer(words.sum(1, keepdim=True) / (words > 0).sum(1, keepdim=True))


# -- metrics ---------------------------------------------------------------------------------------------------------


def count_right(model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Any]:  # plant: metric
    right = (model(batch[0]).argmax(1) == batch[1]).float()
    return {"accuracy": right.mean(), "right": right.sum()}


def training_evaluate(model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Any]:
    model[0].weight.data.mul_(0.5)  # plant: metric in place
    return {"loss": cross_entropy(model, batch)}


def sorted_rows() -> tuple[Tensor, Tensor]:
    x, y = rows(120)
    return x, y.sort().values
