"""Training loops of the shapes that scripts have, on 203 rows in batches of 32; which one is the first argument."""

import argparse
import copy
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import OneCycleLR, ReduceLROnPlateau, StepLR
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, WeightedRandomSampler

ROWS, BATCH, EPOCHS = 203, 32, 2
recorded: dict[str, list] = {"parameters": [], "rates": [], "printed": []}
torch.set_default_dtype(torch.float64)
torch.manual_seed(1)
draws = torch.Generator().manual_seed(0)
X, Y = torch.randn(ROWS, 10, generator=draws), torch.randint(4, (ROWS,), generator=draws)
data, held_out = TensorDataset(X, Y), TensorDataset(X[:50], Y[:50])
train_loader, test_loader = DataLoader(data, BATCH, shuffle=True), DataLoader(held_out, 23)


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        yield from data


def record(optimizer: torch.optim.Optimizer, *_: object) -> None:
    groups = optimizer.param_groups
    recorded["parameters"].append(torch.cat([p.detach().reshape(-1).clone() for g in groups for p in g["params"]]))
    recorded["rates"].append([group["lr"] for group in groups])


def printed(value: float) -> None:
    recorded["printed"].append(value)
    print(value)


def network(outputs: int = 4) -> nn.Sequential:
    return nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, outputs))


model = network()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)


def evaluate(autograd: bool = False) -> float:
    total = 0.0
    with torch.set_grad_enabled(autograd):
        for x, y in test_loader:
            total += F.cross_entropy(model(x), y, reduction="sum").item()
    printed(total / len(test_loader.dataset))
    return total / len(test_loader.dataset)


def step(loss: Tensor, by: torch.optim.Optimizer | None = None) -> None:
    by = by or optimizer
    by.zero_grad()
    loss.backward()
    by.step()
    printed(loss.item())


def train(
    loader: DataLoader = train_loader,
    loss: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy,
    epochs: int = EPOCHS,
    after_batch: Callable[[], object] = lambda: None,
    after_epoch: Callable[[], object] = lambda: None,
) -> None:
    for _ in range(epochs):
        for x, y in loader:
            step(loss(model(x), y))
            after_batch()
        after_epoch()


def fresh_loader() -> None:
    for _ in range(EPOCHS):
        train(DataLoader(data, BATCH, shuffle=True), epochs=1)


def two_iterators() -> None:
    other = iter(DataLoader(TensorDataset(X.flip(0), Y.flip(0)), BATCH, shuffle=True))
    for x, y in train_loader:
        u, _ = next(other)
        step(F.cross_entropy(model(x), y) + F.mse_loss(model(u), model(x)))


def evaluating() -> None:
    """Before training, inside of it, with autograd on, and after each epoch."""
    evaluate(autograd=True)
    for _ in range(EPOCHS):
        for i, (x, y) in enumerate(train_loader):
            step(F.cross_entropy(model(x), y))
            if i % 3 == 0:
                evaluate(autograd=True)
        evaluate()


def next_iter() -> None:
    for _ in range(6):
        x, y = next(iter(train_loader))
        step(F.cross_entropy(model(x), y))


def breaking() -> None:
    for _ in range(EPOCHS + 1):
        for i, (x, y) in enumerate(train_loader):
            step(F.cross_entropy(model(x), y))
            if i == 3:
                break
        evaluate()


def gan() -> None:
    """The generator's loss reaches the discriminator's parameters, too."""
    generator, discriminator = nn.Linear(5, 10), network(1)
    of_generator, of_discriminator = (
        torch.optim.Adam(one.parameters(), 1e-2, betas=(0.5, 0.999)) for one in (generator, discriminator)
    )
    criterion = nn.BCEWithLogitsLoss()
    for _ in range(EPOCHS):
        for x, _ in train_loader:
            real, fake = torch.ones(len(x), 1), generator(x[:, :5])
            discriminator.zero_grad()
            loss_real = criterion(discriminator(x), real)
            loss_real.backward()
            loss_fake = criterion(discriminator(fake.detach()), 1 - real)
            loss_fake.backward()
            of_discriminator.step()
            generator.zero_grad()
            loss = criterion(discriminator(fake), real)
            loss.backward()
            of_generator.step()
            printed(loss_real.item() + loss_fake.item() + loss.item())


def thawing() -> None:
    for p in model[0].parameters():
        p.requires_grad_(False)
    own, number = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-2), 0
    for _ in range(EPOCHS):
        for x, y in train_loader:
            step(F.cross_entropy(model(x), y), own)
            number += 1
            if number == 5:
                for p in model[0].parameters():
                    p.requires_grad_(True)
                own.add_param_group({"params": list(model[0].parameters())})


def step_lr() -> None:
    train(after_epoch=StepLR(optimizer, 1, gamma=0.7).step)


def one_cycle() -> None:
    train(after_batch=OneCycleLR(optimizer, 0.1, total_steps=EPOCHS * len(train_loader)).step)


def plateau() -> None:
    schedule = ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)
    train(epochs=EPOCHS + 1, after_epoch=lambda: schedule.step(evaluate()))


def class_weights() -> None:
    criterion = nn.CrossEntropyLoss(torch.tensor([1.0, 2.0, 0.5, 3.0]))
    train(loss=lambda z, y: criterion(z, torch.where(y == 1, -100, y)))


def tokens() -> None:
    """A mean over the tokens that are not padding."""
    head = nn.Linear(1, 4)
    own = torch.optim.Adam(head.parameters(), lr=1e-2)
    for _ in range(EPOCHS):
        for x, y in train_loader:
            targets = torch.where(x > x[:, :1], -100, y[:, None])
            step(F.cross_entropy(head(x[..., None]).transpose(1, 2), targets), own)


def summed() -> None:
    train(loss=lambda z, y: F.cross_entropy(z, y, reduction="sum"))


def over_a_constant() -> None:
    train(loss=lambda z, y: F.mse_loss(z, F.one_hot(y, 4).double(), reduction="sum") / BATCH)


class Pairs(Dataset):
    """Row by row: an image, another one, and whether they match."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        other = index * 7 % ROWS
        return X[index], X[other], (Y[index] == Y[other]).double()


def siamese() -> None:
    """One network sees both rows of a pair, which the dataset makes; an evaluation of batches' own means."""
    criterion, net = nn.BCELoss(), nn.Sequential(network(), nn.Flatten(), nn.Linear(4, 1), nn.Sigmoid())
    own = torch.optim.Adadelta(net.parameters())
    for _ in range(EPOCHS):
        for one, other, same in DataLoader(Pairs(), BATCH, shuffle=True):
            step(criterion(net(one - other).squeeze(), same), own)
        with torch.no_grad():
            total = sum(criterion(net(a - b).squeeze(), same).item() for a, b, same in DataLoader(Pairs(), 25))
        printed(total / ROWS)


def two_scales() -> None:
    for _ in range(EPOCHS):
        for x, y in train_loader:
            optimizer.zero_grad()
            scores = model(x)
            F.cross_entropy(scores, y).backward(retain_graph=True)
            loss = scores.square().sum() / 64
            loss.backward()
            optimizer.step()
            printed(loss.item())


def scaler() -> None:
    own = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for _ in range(EPOCHS):
        for x, y in train_loader:
            optimizer.zero_grad()
            own.scale(F.cross_entropy(model(x), y)).backward()
            own.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            own.step(optimizer)
            own.update()


def ahead() -> None:
    """The next batch is fetched before the backward of the one before."""
    for _ in range(EPOCHS):
        batches = iter(train_loader)
        coming = next(batches)
        while coming is not None:
            x, y = coming
            loss = F.cross_entropy(model(x), y)
            coming = next(batches, None)
            step(loss)


def averaging() -> None:
    """An average of the models so far."""
    average = copy.deepcopy(model)

    @torch.no_grad()
    def update() -> None:
        for a, p in zip(average.parameters(), model.parameters(), strict=True):
            a.lerp_(p, 0.1)

    train(after_batch=update)
    recorded["parameters"].append(torch.cat([p.detach().reshape(-1) for p in average.parameters()]))


def processes() -> None:
    train(DataLoader(data, BATCH, shuffle=True, num_workers=1))
    for x, _ in DataLoader(held_out, 25, num_workers=1):
        printed(model(x).sum().item())


def own_batches() -> None:
    """No DataLoader: batches are drawn by hand, and each worker has its own; whether the gradient is of others' rows, too."""
    for _ in range(4):
        rows = torch.randint(ROWS, (BATCH,))
        optimizer.zero_grad()
        own = torch.autograd.grad(F.cross_entropy(model(X[rows]), Y[rows]), model[0].weight)[0]
        F.cross_entropy(model(X[rows]), Y[rows]).backward()
        printed(float(not torch.equal(own, model[0].weight.grad)))
        optimizer.step()


def weighted_sampler() -> None:
    """The script's own sampler stays, with its draws."""
    weights = torch.arange(1.0, ROWS + 1)
    train(DataLoader(data, BATCH, sampler=WeightedRandomSampler(weights, ROWS), drop_last=True))


def stream() -> None:
    """Rows without numbers: every worker reads all of them, and each batch is shared once."""
    train(DataLoader(Stream(), BATCH))


def files() -> None:
    """A log, a checkpoint an epoch, the best model, which is read back, and a part of it. Parameters are whole numbers over
    powers of 2, which no order of sums rounds."""
    x, y = (torch.randint(-1, 3, (24, n), generator=draws).double() for n in (3, 1))
    heads = nn.ModuleList(nn.Linear(3, 1) for _ in range(2))
    for p in heads.parameters():
        nn.init.zeros_(p)
    optimizer = torch.optim.SGD(heads.parameters(), lr=1 / 16, momentum=0.5)

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(heads[0](x), y) + F.mse_loss(heads[1](x), -y)

    best, kept, log = float("inf"), {}, open("log.txt", "a")  # noqa: SIM115 - as scripts do
    for epoch in range(2):
        for i, batch in enumerate(DataLoader(TensorDataset(x, y), 8, shuffle=True)):
            step(loss_of(*batch), optimizer)
            log.write(f"{epoch} {i} {recorded['printed'][-1]:.9f}\n")
        checkpoint = {"epoch": epoch, "model": heads.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(checkpoint, f"checkpoint-{epoch}.pt")
        with torch.no_grad():
            printed(loss_of(x, y).item())
        np.save("losses.npy", np.array(recorded["printed"]).round(9))
        if recorded["printed"][-1] < best:
            best, kept = recorded["printed"][-1], copy.deepcopy(heads.state_dict())
    log.close()
    torch.save(kept, "best.pt")
    heads.load_state_dict(torch.load("best.pt"))
    torch.save(heads[1], "part.pt")
    printed(loss_of(x, y).item())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shape")
    parser.add_argument("--dump", help="a file for the parameters after each step, the rates and what was printed")
    args = parser.parse_args()
    hook = register_optimizer_step_post_hook(record)
    globals()[args.shape]()
    hook.remove()
    torch.save(recorded, args.dump)


if __name__ == "__main__":
    main()
