"""A network that makes small images larger: mean squared error, peak signal to noise in the test, a checkpoint an epoch."""

from __future__ import annotations

from math import log10

import torch
from record import evaluated, images, options, printed
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Pairs(Dataset):
    """A small image, and the large one that it was made from."""

    def __init__(self, rows: int) -> None:
        self.large = images(rows, 12).to(torch.get_default_dtype())

    def __len__(self) -> int:
        return len(self.large)

    def __getitem__(self, index: int):
        return self.large[index, :, ::3, ::3], self.large[index]


class Net(nn.Module):
    def __init__(self, upscale: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 16, 5, padding=2), nn.Conv2d(16, upscale**2, 3, padding=1)
        self.shuffle = nn.PixelShuffle(upscale)
        for conv in (self.conv1, self.conv2):
            nn.init.orthogonal_(conv.weight)

    def forward(self, x):
        return self.shuffle(self.conv2(torch.relu(self.conv1(x))))


opt = options(__doc__, upscale_factor=3, batch_size=32, test_batch_size=10, n_epochs=3, lr=0.01, seed=123)
torch.manual_seed(opt.seed)
training_data_loader = DataLoader(Pairs(203), batch_size=opt.batch_size, shuffle=True)
testing_data_loader = DataLoader(Pairs(30), batch_size=opt.test_batch_size, shuffle=False)
model = Net(opt.upscale_factor)
criterion = nn.MSELoss()
optimizer = torch.optim.Adam(model.parameters(), lr=opt.lr)


def train(epoch: int) -> None:
    epoch_loss = 0.0
    for _iteration, batch in enumerate(training_data_loader, 1):
        source, target = batch[0], batch[1]
        optimizer.zero_grad()
        loss = criterion(model(source), target)
        epoch_loss += loss.item()
        loss.backward()
        optimizer.step()
        printed("loss {:.4f}", loss.item())
    print(f"===> Epoch {epoch} complete: Avg. Loss: {epoch_loss / len(training_data_loader):.4f}")


def test() -> None:
    avg_psnr = 0.0
    with torch.no_grad():
        for batch in testing_data_loader:
            mse = criterion(model(batch[0]), batch[1])
            avg_psnr += 10 * log10(1 / mse.item())
    evaluated("===> Avg. PSNR: {:.4f} dB", avg_psnr / len(testing_data_loader))


for epoch in range(1, opt.n_epochs + 1):
    train(epoch)
    test()
    torch.save(model.state_dict(), f"model_epoch_{epoch}.pth")
opt.save()
