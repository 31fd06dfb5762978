"""Loops whose model, or whose loader, computes with more than its rows: which one is the first argument."""

import argparse
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset, Sampler

torch.set_default_dtype(torch.float64)
torch.manual_seed(1)
random.seed(1)
X = torch.randn(46, 6)
Y = X[:, :1].sin()
seen: list[Any] = []
switch = [False]
printed: list[float] = []


def batches(epochs: int = 2) -> Iterator[tuple[Tensor, Tensor]]:
    for _ in range(epochs):
        yield from zip(X.split(10), Y.split(10), strict=True)


def fit(
    model: nn.Module,
    call: Callable[..., Tensor] | None = None,
    loader: Callable[[], Any] = batches,
    penalty: Callable[[], Any] = float,
    before: Callable[[int], object] = int,
) -> nn.Module:
    """Steps by SGD; `before` each one, with its number."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for number, (x, y) in enumerate(loader()):
        before(number)
        optimizer.zero_grad()
        loss = F.mse_loss((call or model)(x), y) + penalty()
        loss.backward()
        optimizer.step()
        printed.append(loss.item())
    return model


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))


class Within(nn.Module):
    """Two layers, and `between` them what is tried."""

    def __init__(self, between: Callable[..., Tensor], **attributes: Any) -> None:
        super().__init__()
        self.a, self.b, self.between = nn.Linear(6, 6), nn.Linear(6, 1), between
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x: Tensor, *more: Any) -> Tensor:
        scores: Tensor = self.b(self.between(self, self.a(x), *more))
        return scores


# -- what leaves a call by another way than its output ---------------------------------------------------------------------


def hook() -> nn.Module:
    model = mlp()
    model[1].register_forward_hook(lambda module, given, output: seen.append(output))
    return fit(model, penalty=lambda: seen[-1].std(0).sum() + len(seen))


def later_hook() -> nn.Module:
    model = mlp()

    def before(number: int) -> None:
        if number == 3:
            model[1].register_forward_hook(lambda module, given, output: seen.append(output.mean().item()))

    model = fit(model, before=before)
    printed.extend(seen)
    return model


def kept() -> nn.Module:
    def between(self: Any, h: Tensor) -> Tensor:
        seen.append(h)
        return h

    return fit(Within(between), penalty=lambda: seen[-1].mean(0).square().sum() + len(seen))


def says() -> nn.Module:
    def between(self: Any, h: Tensor) -> Tensor:
        print(f"{h.mean():.9f}")
        return h

    return fit(Within(between))


def gradient_hook() -> nn.Module:
    model = mlp()
    model[1].register_full_backward_hook(lambda module, given, wanted: seen.append(wanted[0].norm().item()))
    fit(model)
    printed.extend(seen)
    return model


def moving() -> nn.Module:
    """A mean of all rows so far, in a parameter without a gradient."""
    mean = nn.Parameter(torch.zeros(6), requires_grad=False)
    return fit(Within(lambda self, h: h - self.mean.lerp_(h.detach().mean(0), 0.1), mean=mean))


# -- what changes from call to call ----------------------------------------------------------------------------------------


def centered(self: Any, h: Tensor, on: Any = None) -> Tensor:
    return h - h.mean(0) if (self.on if on is None else on) else h


def attribute() -> nn.Module:
    model = Within(centered, on=False)
    return fit(model, before=lambda number: setattr(model, "on", number > 3))


def variable() -> nn.Module:
    def between(self: Any, h: Tensor) -> Tensor:
        return h - h.mean(0) if switch[0] else h

    return fit(Within(between), before=lambda number: switch.__setitem__(0, number > 3))


def argument() -> nn.Module:
    model, number = Within(lambda self, h, step: centered(self, h, step > 3)), iter(range(99))
    return fit(model, lambda x: model(x, next(number)))


def layer() -> nn.Module:
    class Center(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x - x.mean(0)

    model = mlp()
    return fit(model, before=lambda number: model.__setitem__(1, Center() if number > 3 else nn.Tanh()))


def inner_mode() -> nn.Module:
    class Center(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x - x.mean(0) if self.training else x

    model = nn.Sequential(nn.Linear(6, 8), Center(), nn.Linear(8, 1)).eval()
    return fit(model, before=lambda number: model[1].train(number > 3))


def gate() -> nn.Module:
    """A buffer that begins at zero."""
    model = Within(lambda self, h: h - self.gate * h.mean(0))
    model.register_buffer("gate", torch.zeros(1))
    return fit(model, before=lambda number: model.gate.add_(0.1))


def counted() -> nn.Module:
    """A number of steps is given, and is an attribute, too."""
    model, number = Within(lambda self, h, step: h / (1 + step)), iter(range(99))
    return fit(
        model,
        lambda x: model(x, next(number)),
        loader=lambda: batches(5),
        before=lambda step: setattr(model, "step", step),
    )


def tables() -> nn.Module:
    @lru_cache
    def table(count: int) -> Tensor:
        return torch.linspace(0, 1, count)

    return fit(Within(lambda self, h: h * table(h.shape[1])))


def longest() -> nn.Module:
    """Cut to the longest row; in the first batch all are as long."""
    lengths = iter([torch.full((10,), 6), *(torch.arange(10) % 6 + 1 for _ in range(20))])

    def between(self: Any, h: Tensor, counts: Tensor) -> Tensor:
        kept = h[:, : int(counts.max())]
        return F.pad(kept - kept.mean(1, keepdim=True), (0, 6 - kept.shape[1]))

    model = Within(between)
    return fit(model, lambda x: model(x, next(lengths)[: len(x)]))


def penalty() -> nn.Module:
    """A number beside the outputs, which is 0 at first."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.least = nn.Linear(6, 1), 9.0

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            scores = self.layer(x)
            return scores, F.relu(scores.abs().mean() - self.least)

    model = Model()
    return fit(
        model, lambda x: sum(model(x)), before=lambda number: setattr(model, "least", 9.0 if number < 3 else 0.2)
    )


# -- the way back ----------------------------------------------------------------------------------------------------------


class Straight(torch.autograd.Function):
    """The gradient passes rounding."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return (x * 8).round() / 8

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient


class Normed(torch.autograd.Function):
    """Rows meet on the way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient / gradient.norm()


def straight() -> nn.Module:
    return fit(Within(lambda self, h: Straight.apply(h)))


def normed() -> nn.Module:
    return fit(Within(lambda self, h: Normed.apply(h)))


def hooked() -> nn.Module:
    def between(self: Any, h: Tensor) -> Tensor:
        if h.requires_grad:
            h.register_hook(lambda gradient: gradient / gradient.norm())
        return h

    return fit(Within(between))


def checkpointed() -> nn.Module:
    return fit(Within(lambda self, h: checkpoint(self.a, h, use_reentrant=False)))


def looked_at() -> nn.Module:
    """Without gradients, between the call and its loss."""
    model = mlp()

    def call(x: Tensor) -> Tensor:
        scores = model(x)
        with torch.no_grad():
            printed.append(scores.topk(2, dim=0).values.sum().item())
        return scores

    return fit(model, call)


def in_use() -> nn.Module:
    """Gradients of features whose part the head has used."""
    features, head = nn.Linear(6, 4), nn.Linear(4, 1)
    model = nn.ModuleList([features, head])
    for x, y in batches():
        middle = features(x)
        loss = F.mse_loss(head(middle), y)
        (found,) = torch.autograd.grad(loss, middle, retain_graph=True)
        middle.register_hook(lambda gradient: gradient / gradient.norm())
        loss.backward()
        printed.append(found.norm().item())
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.1 * p.grad
                p.grad = None
    return model


def held() -> nn.Module:
    """Gradients are held in a list, and set to zero."""
    model = mlp()
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    gradients = [p.grad for p in model.parameters()]
    for x, y in batches():
        torch._foreach_zero_(gradients)
        F.mse_loss(model(x), y).backward()
        printed.append(sum(g.norm().item() for g in gradients))
        with torch.no_grad():
            torch._foreach_add_(list(model.parameters()), gradients, alpha=-0.1)
    return model


# -- other modules ---------------------------------------------------------------------------------------------------------


def scripted() -> nn.Module:
    return fit(torch.jit.script(nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))))


def traced() -> nn.Module:
    return fit(torch.jit.trace(mlp(), X[:3]))


def compiled() -> nn.Module:
    return fit(torch.compile(nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)), backend="aot_eager"))


def inner_norm() -> nn.Module:
    """Batch normalization that trains in a model that evaluates."""
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)).eval()
    model[1].train()
    return fit(model)


def for_each_row() -> nn.Module:
    """Gradients of rows, clipped."""
    model = mlp()

    def loss(weights: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(torch.func.functional_call(model, weights, (x,)), y)

    for x, y in batches():
        weights = {name: p.detach() for name, p in model.named_parameters()}
        found = torch.func.vmap(torch.func.grad(loss), (None, 0, 0))(weights, x, y)
        with torch.no_grad():
            for name, p in model.named_parameters():
                p -= 0.1 * found[name].clamp(-0.1, 0.1).mean(0)
    return model


@dataclass
class Scores:
    loss: Tensor
    logits: Tensor


def dataclasses() -> nn.Module:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 1)

        def forward(self, rows: Any) -> Scores:
            logits = self.layer(rows["x"])
            return Scores(F.mse_loss(logits, rows["y"]), logits)

    model, given = Model(), iter(list(batches()))

    def call(x: Tensor) -> Tensor:
        found = model({"x": x, "y": next(given)[1]})
        return found.logits + found.loss

    return fit(model, call)


# -- reading ---------------------------------------------------------------------------------------------------------------


class Rows(Dataset):
    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return X[index], Y[index]


def by_row(rows: Any) -> tuple[Tensor, Tensor]:
    return torch.stack([x * 2 for x, _ in rows]), torch.stack([y for _, y in rows])


def without_late(rows: Any) -> tuple[Tensor, Tensor]:
    """Rows of the second half of the data are left out, unless they are alone."""
    return by_row([row for row in rows if not any(torch.equal(row[0], x) for x in X[30:34])] or rows)


class Turning(Rows):
    """A row depends on how often rows were read."""

    reads = 0

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self.reads += 1
        return X[index].roll(self.reads % 6), Y[index]


class Ordered(Sampler):
    """The script's own."""

    def __init__(self) -> None:
        self.passes = 0

    def __iter__(self) -> Iterator[int]:
        self.passes += 1
        return iter(random.Random(self.passes).sample(range(46), 33))


def own_collate() -> nn.Module:
    loader = DataLoader(Rows(), 10, shuffle=True, collate_fn=by_row, num_workers=1, persistent_workers=True)
    return fit(mlp(), loader=lambda: (batch for _ in range(2) for batch in loader))


def drops_rows() -> nn.Module:
    loader = DataLoader(Rows(), 10, collate_fn=without_late)
    return fit(mlp(), loader=lambda: (batch for _ in range(2) for batch in loader))


def turning() -> nn.Module:
    loader = DataLoader(Turning(), 10)
    return fit(mlp(), loader=lambda: (batch for _ in range(2) for batch in loader))


def own_sampler() -> nn.Module:
    loader = DataLoader(Rows(), 10, sampler=Ordered())
    return fit(mlp(), loader=lambda: (batch for _ in range(2) for batch in loader))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("kind")
    parser.add_argument("--dump")
    options = parser.parse_args()
    trained = globals()[options.kind]()
    parameters = [p.detach().reshape(-1) for p in trained.state_dict().values()]
    print(*printed)
    torch.save({"parameters": parameters, "printed": printed}, options.dump)
