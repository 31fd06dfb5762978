"""Whether two images are of one kind: pairs that the dataset draws, a network that sees both, binary cross entropy."""

from __future__ import annotations

import torch
from record import evaluated, images, options, printed
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, Dataset


class Matcher(Dataset):
    """Row by row: an image, another one of the same kind or of another, and whether they match."""

    def __init__(self, rows: int, noise: bool) -> None:
        self.images, self.kinds = images(rows, 10).to(torch.get_default_dtype()), torch.arange(rows) % 5
        self.noise = noise

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int):
        same = index % 2 == 0
        candidates = ((self.kinds == self.kinds[index]) == same).nonzero().flatten()
        pick = int(torch.randint(len(candidates), ())) if self.noise else index * 7 % len(candidates)
        return self.images[index], self.images[candidates[pick]], torch.tensor(float(same))


class SiameseNetwork(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 8, 3, stride=2), nn.ReLU(), nn.Flatten())
        self.fc = nn.Sequential(nn.Linear(2 * 8 * 16, 32), nn.ReLU(), nn.Linear(32, 1))
        self.sigmoid = nn.Sigmoid()

    def forward(self, one, other):
        return self.sigmoid(self.fc(torch.cat((self.body(one), self.body(other)), 1)))


def train(args, model, loader, optimizer, epoch) -> None:
    model.train()
    criterion = nn.BCELoss()
    for batch_idx, (one, other, targets) in enumerate(loader):
        optimizer.zero_grad()
        loss = criterion(model(one, other).squeeze(), targets)
        loss.backward()
        optimizer.step()
        if batch_idx % args.log_interval == 0:
            printed(f"Train Epoch: {epoch}\tLoss: {{:.6f}}", loss.item())


def test(model, loader) -> None:
    model.eval()
    test_loss, correct = 0.0, 0
    with torch.no_grad():
        for one, other, targets in loader:
            outputs = model(one, other).squeeze()
            test_loss += nn.functional.binary_cross_entropy(outputs, targets).sum().item()
            correct += (outputs > 0.5).eq(targets.view_as(outputs)).sum().item()
    evaluated("Test set: Average loss: {:.4f}", test_loss / len(loader.dataset))
    evaluated("Accuracy {:.0%}", correct / len(loader.dataset))


def main() -> None:
    args = options(__doc__, batch_size=32, epochs=3, lr=1.0, gamma=0.7, seed=1, log_interval=2)
    torch.manual_seed(args.seed)
    train_loader = DataLoader(Matcher(203, not args.no_noise), batch_size=args.batch_size, shuffle=True)
    test_loader = DataLoader(Matcher(60, False), batch_size=25)
    model = SiameseNetwork()
    optimizer = torch.optim.Adadelta(model.parameters(), lr=args.lr)
    scheduler = StepLR(optimizer, step_size=1, gamma=args.gamma)
    for epoch in range(1, args.epochs + 1):
        train(args, model, train_loader, optimizer, epoch)
        test(model, test_loader)
        scheduler.step()
    args.save()


if __name__ == "__main__":
    main()
