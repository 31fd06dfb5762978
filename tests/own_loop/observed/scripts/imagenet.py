"""A residual network on made-up images: meters, accuracies, StepLR, a checkpoint and a copy of the best; it can make a group of processes."""

import os
import shutil

import torch
import torch.distributed as dist
from record import evaluated, images, options, printed
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, Subset, TensorDataset


class Block(nn.Sequential):
    def forward(self, x):
        return torch.relu(x + super().forward(x))


class AverageMeter:
    avg, sum, count = 0.0, 0.0, 0

    def update(self, value: float, n: int) -> None:
        self.sum, self.count = self.sum + value * n, self.count + n
        self.avg = self.sum / self.count


def accuracy(output, target) -> float:
    with torch.no_grad():
        return output.argmax(1).eq(target).float().sum().item() * 100.0 / target.size(0)


def train(loader, model, criterion, optimizer, epoch, args) -> None:
    model.train()
    losses, top1 = AverageMeter(), AverageMeter()
    for i, (x, target) in enumerate(loader):
        output = model(x)
        loss = criterion(output, target)
        losses.update(loss.item(), x.size(0))
        top1.update(accuracy(output, target), x.size(0))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if i % args.print_freq == 0:
            printed(f"Epoch: [{epoch}][{i + 1}] Loss {{:.4e}} Acc@1 {top1.avg:6.2f}", loss.item())


def validate(loader, model, criterion) -> float:
    losses, top1 = AverageMeter(), AverageMeter()
    model.eval()
    with torch.no_grad():
        for x, target in loader:
            output = model(x)
            losses.update(criterion(output, target).item(), x.size(0))
            top1.update(accuracy(output, target), x.size(0))
    evaluated(" * Loss {:.5f}", losses.avg)
    evaluated(" * Acc@1 {:.3f}", top1.avg)
    return top1.avg


def main() -> None:
    sizes = {"epochs": 2, "batch_size": 32, "print_freq": 2, "world_size": -1, "seed": 3}
    args = options(__doc__, dummy=False, lr=0.1, dist_url="tcp://127.0.0.1:1", no_norm=False, **sizes)
    torch.manual_seed(args.seed)
    if args.dist_url == "env://" and args.world_size == -1:
        args.world_size = int(os.environ["WORLD_SIZE"])
    if args.world_size > 1:
        dist.init_process_group("gloo")
    print("=> creating model 'resnet'")
    blocks = [
        Block(nn.Conv2d(8, 8, 3, padding=1), nn.Identity() if args.no_norm else nn.BatchNorm2d(8)) for _ in range(2)
    ]
    model = nn.Sequential(nn.Conv2d(1, 8, 3), *blocks, nn.Flatten(), nn.Linear(8 * 64, 5))
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9, weight_decay=1e-4)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.1)
    data = TensorDataset(images(263, 10).to(torch.get_default_dtype()), torch.arange(263) % 5)
    train_loader = DataLoader(Subset(data, range(203)), batch_size=args.batch_size, shuffle=True)
    val_loader = DataLoader(Subset(data, range(203, 263)), batch_size=args.batch_size)
    best = 0.0
    for epoch in range(args.epochs):
        train(train_loader, model, criterion, optimizer, epoch, args)
        acc1 = validate(val_loader, model, criterion)
        scheduler.step()
        is_best, best = acc1 > best, max(acc1, best)
        torch.save({"epoch": epoch + 1, "state_dict": model.state_dict(), "best_acc1": best}, "checkpoint.pth.tar")
        if is_best:
            shutil.copyfile("checkpoint.pth.tar", "model_best.pth.tar")
    args.save()


if __name__ == "__main__":
    main()
