"""A convolutional network on images of digits, as beginners train it: Adadelta, StepLR, dropout, a test after each epoch."""

import torch
from record import dropout, evaluated, images, options, printed
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    def __init__(self, args) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 4, 3), nn.Conv2d(4, 8, 3)
        self.dropout1, self.dropout2 = dropout(0.25, args), dropout(0.5, args)
        self.fc1, self.fc2 = nn.Linear(8 * 4 * 4, 32), nn.Linear(32, 10)

    def forward(self, x):
        x = F.relu(self.conv2(F.relu(self.conv1(x))))
        x = self.dropout1(F.max_pool2d(x, 2)).flatten(1)
        return F.log_softmax(self.fc2(self.dropout2(F.relu(self.fc1(x)))), dim=1)


def train(args, model, device, loader, optimizer, epoch) -> None:
    model.train()
    for batch_idx, (data, target) in enumerate(loader):
        data, target = data.to(device), target.to(device)
        optimizer.zero_grad()
        loss = F.nll_loss(model(data), target)
        loss.backward()
        optimizer.step()
        if batch_idx % args.log_interval == 0:
            done = batch_idx * len(data)
            printed(f"Train Epoch: {epoch} [{done}/{len(loader.dataset)}]\tLoss: {{:.6f}}", loss.item())


def test(model, device, loader) -> None:
    model.eval()
    test_loss, correct = 0.0, 0
    with torch.no_grad():
        for data, target in loader:
            data, target = data.to(device), target.to(device)
            output = model(data)
            test_loss += F.nll_loss(output, target, reduction="sum").item()
            correct += output.argmax(dim=1, keepdim=True).eq(target.view_as(output[:, :1])).sum().item()
    evaluated("\nTest set: Average loss: {:.4f}", test_loss / len(loader.dataset))
    evaluated("Accuracy: {:.0%}\n", correct / len(loader.dataset))


def main() -> None:
    args = options(__doc__, batch_size=32, epochs=3, lr=1.0, gamma=0.7, seed=1, log_interval=2, device="cpu")
    torch.manual_seed(args.seed)
    device = torch.device(args.device)
    x, y = images(203, 12).to(torch.get_default_dtype()), torch.arange(203) * 7 % 10
    train_loader = DataLoader(TensorDataset(x, y), batch_size=args.batch_size, shuffle=True)
    test_loader = DataLoader(TensorDataset(x[:90], y[:90]), batch_size=100)
    model = Net(args).to(device)
    optimizer = torch.optim.Adadelta(model.parameters(), lr=args.lr)
    scheduler = StepLR(optimizer, step_size=1, gamma=args.gamma)
    for epoch in range(1, args.epochs + 1):
        train(args, model, device, train_loader, optimizer, epoch)
        test(model, device, test_loader)
        scheduler.step()
    torch.save(model.state_dict(), "mnist_cnn.pt")
    args.save()


if __name__ == "__main__":
    main()
