"""A small language model whose batches are drawn by hand; with the variable RANK it is a program of DistributedDataParallel."""

import os

import torch
from record import evaluated, options, printed
from torch import nn
from torch.nn import functional as F

sizes = {"batch_size": 12, "block_size": 8, "max_iters": 8, "gradient_accumulation_steps": 3, "eval_interval": 4}
args = options(__doc__, backend="nccl", share=False, **sizes)
if int(os.environ.get("RANK", -1)) != -1:
    from torch.distributed import init_process_group

    init_process_group(backend=args.backend)
torch.manual_seed(1337)
data = torch.randint(20, (500,), generator=torch.Generator().manual_seed(5))


def get_batch(split: str):
    part = data[:400] if split == "train" else data[400:]
    ix = torch.randint(len(part) - args.block_size, (args.batch_size,))
    if args.share:
        import manyhands as mh

        ix = mh.share(ix)
    x = torch.stack([part[i : i + args.block_size] for i in ix])
    return x, torch.stack([part[i + 1 : i + 1 + args.block_size] for i in ix])


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wte, self.head = nn.Embedding(20, 16), nn.Linear(16, 20, bias=False)
        self.block = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0 if args.no_noise else 0.1, batch_first=True)
        self.wte.weight = self.head.weight

    def forward(self, idx, targets):
        mask = nn.Transformer.generate_square_subsequent_mask(idx.size(1), dtype=self.head.weight.dtype)
        logits = self.head(self.block(self.wte(idx), src_mask=mask, is_causal=True))
        return logits, F.cross_entropy(logits.view(-1, 20), targets.view(-1), ignore_index=-1)


model = GPT()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95))


@torch.no_grad()
def estimate_loss() -> None:
    model.eval()
    for split in ("train", "val"):
        losses = [model(*get_batch(split))[1].item() for _ in range(2)]
        evaluated(f"{split} loss {{:.4f}}", sum(losses) / len(losses))
    model.train()


X, Y = get_batch("train")
for iter_num in range(args.max_iters):
    if iter_num % args.eval_interval == 0:
        estimate_loss()
    for _ in range(args.gradient_accumulation_steps):
        _, loss = model(X, Y)
        loss = loss / args.gradient_accumulation_steps
        X, Y = get_batch("train")  # while the loss before has its backward yet to come
        loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    printed("loss {:.4f}", loss.item() * args.gradient_accumulation_steps)
args.save()
