"""A variational autoencoder: a loss that is a sum over the batch, drawn noise, an epoch's loss divided by the dataset."""

import torch
from record import evaluated, images, options, printed
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

args = options(__doc__, batch_size=32, epochs=3, seed=1, log_interval=2)
torch.manual_seed(args.seed)
x = images(203, 8).to(torch.get_default_dtype())
train_loader = DataLoader(TensorDataset(x, torch.zeros(203)), batch_size=args.batch_size, shuffle=True)
test_loader = DataLoader(TensorDataset(x[:90], torch.zeros(90)), batch_size=args.batch_size)


class VAE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc21, self.fc22 = nn.Linear(64, 40), nn.Linear(40, 6), nn.Linear(40, 6)
        self.fc3, self.fc4 = nn.Linear(6, 40), nn.Linear(40, 64)

    def reparameterize(self, mu, logvar):
        std = torch.exp(0.5 * logvar)
        return mu if args.no_noise else mu + torch.randn_like(std) * std

    def forward(self, x):
        hidden = F.relu(self.fc1(x.view(-1, 64)))
        mu, logvar = self.fc21(hidden), self.fc22(hidden)
        z = self.reparameterize(mu, logvar)
        return torch.sigmoid(self.fc4(F.relu(self.fc3(z)))), mu, logvar


model = VAE()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)


def loss_function(recon_x, x, mu, logvar):
    bce = F.binary_cross_entropy(recon_x, x.view(-1, 64), reduction="sum")
    kld = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())
    return bce + kld


def train(epoch: int) -> None:
    model.train()
    train_loss = 0.0
    for batch_idx, (data, _) in enumerate(train_loader):
        optimizer.zero_grad()
        recon_batch, mu, logvar = model(data)
        loss = loss_function(recon_batch, data, mu, logvar)
        loss.backward()
        train_loss += loss.item()
        optimizer.step()
        if batch_idx % args.log_interval == 0:
            print(f"Train Epoch: {epoch} [{batch_idx * len(data)}]\tLoss: {loss.item() / len(data):.6f}")
    printed(f"====> Epoch: {epoch} Average loss: {{:.4f}}", train_loss / len(train_loader.dataset))


def test() -> None:
    model.eval()
    test_loss = 0.0
    with torch.no_grad():
        for data, _ in test_loader:
            recon_batch, mu, logvar = model(data)
            test_loss += loss_function(recon_batch, data, mu, logvar).item()
    evaluated("====> Test set loss: {:.4f}", test_loss / len(test_loader.dataset))


if __name__ == "__main__":
    for epoch in range(1, args.epochs + 1):
        train(epoch)
        test()
    args.save()
