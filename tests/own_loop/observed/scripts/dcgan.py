"""Two networks against each other: batch norm, noise, three backwards a step, two optimizers."""

import torch
from record import images, options, printed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

opt = options(__doc__, batch_size=32, nz=6, niter=2, lr=0.0002, beta1=0.5, seed=1)
torch.manual_seed(opt.seed)
data = images(203, 8).to(torch.get_default_dtype())
dataloader = DataLoader(TensorDataset(data), batch_size=opt.batch_size, shuffle=True)


netG = nn.Sequential(
    *(nn.ConvTranspose2d(opt.nz, 16, 4, 1, 0, bias=False), nn.BatchNorm2d(16), nn.ReLU(True)),
    *(nn.ConvTranspose2d(16, 1, 4, 2, 1, bias=False), nn.Tanh()),
)
netD = nn.Sequential(
    *(nn.Conv2d(1, 16, 4, 2, 1, bias=False), nn.BatchNorm2d(16), nn.LeakyReLU(0.2, inplace=True)),
    *(nn.Conv2d(16, 1, 4, 1, 0, bias=False), nn.Sigmoid(), nn.Flatten(0)),
)
criterion = nn.BCELoss()
fixed_noise = torch.randn(opt.batch_size, opt.nz, 1, 1)
optimizerD = torch.optim.Adam(netD.parameters(), lr=opt.lr, betas=(opt.beta1, 0.999))
optimizerG = torch.optim.Adam(netG.parameters(), lr=opt.lr, betas=(opt.beta1, 0.999))

for epoch in range(opt.niter):
    for i, (real,) in enumerate(dataloader, 0):
        batch_size = real.size(0)
        netD.zero_grad()
        label = torch.full((batch_size,), 1.0, dtype=real.dtype)
        errD_real = criterion(netD(real), label)
        errD_real.backward()
        fake = netG(torch.randn(batch_size, opt.nz, 1, 1))
        label.fill_(0.0)
        errD_fake = criterion(netD(fake.detach()), label)
        errD_fake.backward()
        errD = errD_real + errD_fake
        optimizerD.step()
        netG.zero_grad()
        label.fill_(1.0)
        errG = criterion(netD(fake), label)
        errG.backward()
        optimizerG.step()
        printed(f"[{epoch}/{opt.niter}][{i}/{len(dataloader)}] Loss_D: {errD.item():.4f} Loss_G: {{:.4f}}", errG.item())
    torch.save(netG(fixed_noise).detach(), f"fake_samples_epoch_{epoch}.pt")
opt.save()
