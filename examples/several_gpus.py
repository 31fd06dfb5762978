"""One loop on several GPUs, in mixed precision: a small transformer learns to predict the next character.

manyhands run -n 2 examples/several_gpus.py                                  a GPU for each worker
torchrun --nproc-per-node 2 examples/several_gpus.py                         torchrun's workers
manyhands run -n 2 examples/several_gpus.py --cpu --rows 2000 --epochs 1     the same program without a GPU

Each worker computes on `mh.worker().device`. Gradients are float32 and are averaged between the GPUs by nccl. The
forward runs under bfloat16 autocast, which needs no GradScaler. The same as a declared task:

manyhands train chars:precision=bf16-mixed --workers 2
"""

import argparse
import time

import torch
from torch.utils.data import DataLoader, TensorDataset

import manyhands as mh
from manyhands.tasks.chars_task import CONTEXT, CharsNet, loss, split, windows

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--rows", type=int, default=11_000, help=f"to train on, {CONTEXT} characters each")
parser.add_argument("--batch-size", type=int, default=256, help="of all workers together")
parser.add_argument("--cpu", action="store_true", help="use no GPU")
args = parser.parse_args()
if not args.cpu and torch.cuda.device_count() < 2:
    parser.error(f"two GPUs are needed, and torch sees {torch.cuda.device_count()} here: --cpu runs it without")

worker = mh.worker()
device = torch.device("cpu") if args.cpu else worker.device
bfloat16 = torch.autocast(device.type, torch.bfloat16, enabled=not args.cpu)  # many CPUs only emulate it

torch.manual_seed(0)
train, _, test = (windows(text) for text in split())  # each a pair: characters, and those that follow them
model = CharsNet().to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
rows = TensorDataset(*(part[: args.rows] for part in train))
loader = DataLoader(rows, args.batch_size, shuffle=True)
model, optimizer, loader = mh.prepare(model, optimizer, loader)

for epoch in range(args.epochs):
    start = time.perf_counter()
    for batch in loader:
        batch = [part.to(device) for part in batch]
        optimizer.zero_grad()
        with bfloat16:
            nats = loss(model, batch)
        nats.backward()
        optimizer.step()
    last = mh.mean(nats.item(), weight=len(batch[0]))
    speed = len(rows) * CONTEXT / (time.perf_counter() - start)
    print(f"epoch {epoch + 1}: loss {last:.2f} nats, {speed:,.0f} characters/s on {worker.size} workers, {device.type}")

with torch.no_grad(), bfloat16:
    nats = loss(model, [part[: args.rows].to(device) for part in test])
print(f"test loss: {nats:.2f} nats a character")
