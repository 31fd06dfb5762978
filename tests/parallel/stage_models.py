"""Models that stages cut, and tasks that train them in float64: AdamW with weight decay and a schedule, clipped."""

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LinearLR
from torch.utils.checkpoint import checkpoint
from torch.utils.data import Dataset, TensorDataset

import manyhands as mh

VOCABULARY, LENGTH, WIDTH = 40, 9, 16
ROWS, BATCH, MICRO = 81, 39, 10  # two batches of 39 rows, then one of 3


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 3 * WIDTH), nn.GELU(), nn.Linear(3 * WIDTH, WIDTH), nn.Dropout(dropout)
        )

    def forward(self, x: Tensor) -> Tensor:
        length = x.size(1)
        mask = torch.triu(torch.full((length, length), float("-inf"), dtype=x.dtype, device=x.device), 1)
        own = self.norm1(x)
        x = x + self.attention(own, own, own, attn_mask=mask, need_weights=False)[0]
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """Tied input and output embeddings; initialised as nanoGPT is."""

    def __init__(self, blocks: int = 4, dropout: float = 0.0) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight
        self.apply(self._initialise)
        for name, p in self.named_parameters():
            if name.endswith("mlp.2.weight"):
                nn.init.normal_(p, mean=0.0, std=0.02 / (2 * blocks) ** 0.5)

    def _initialise(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.2)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.drop(self.tokens(tokens) + self.places(torch.arange(tokens.size(1), device=tokens.device)))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class MLP(nn.Sequential):
    """Unequal layers, nothing tied."""

    def __init__(self) -> None:
        sizes = [12, 40, 8, 64, 16, 5]
        layers = [nn.Sequential(nn.Linear(a, b), nn.Tanh()) for a, b in pairwise(sizes)]
        super().__init__(*layers)


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = (nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2))
        self.norm1, self.norm2 = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.norm1(self.conv1(x)), inplace=True)
        out = self.norm2(self.conv2(out))
        out += x
        return F.relu(out, inplace=True)


class CNN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 4, 3, padding=1)
        self.blocks = nn.Sequential(Residual(4), Residual(4), Residual(4))
        self.head = nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


class Translator(nn.Module):
    """One embedding of both languages and of the output: what the second one gives is needed behind a cut as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.source, self.target = (nn.Embedding(VOCABULARY, WIDTH) for _ in range(2))
        self.encoder = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.join, self.head = nn.Bilinear(WIDTH, WIDTH, WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.source.weight = self.target.weight = self.head.weight

    def forward(self, tokens: Tensor) -> Tensor:
        encoded, target = self.encoder(self.source(tokens)), self.target(tokens.flip(0))
        return self.head(self.join(encoded, target) + target)


class Attention(nn.Module):
    """As nanoGPT has it: heads are split off, moved, and made contiguous for a view."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.size()
        parts = self.project(x).split(width, dim=2)
        q, k, v = (part.view(rows, length, 2, width // 2).transpose(1, 2) for part in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(y.transpose(1, 2).contiguous().view(rows, length, width))


class Checkpointed(nn.Module):
    """Blocks that are computed again in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.blocks = nn.ModuleList(Attention() for _ in range(4))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x)


class Encoder(nn.Module):
    """torch's own encoder, whose layers are deep copies of one."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, batch_first=True, dropout=0.0)
        self.tokens, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.body = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.size(1)
        mask = torch.triu(torch.full((length, length), float("-inf"), device=tokens.device, dtype=torch.float64), 1)
        return self.head(self.body(self.tokens(tokens), mask=mask))


class Marked(nn.Module):
    """Layers that are no modules: `mh.cut` marks where stages may begin."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(n, 12) / 4) for n in (12, 12, 12, 5))

    def forward(self, x: Tensor) -> Tensor:
        first, second, third, last = self.weights
        x, skipped = mh.cut((torch.tanh(x @ first.t()), x))
        x = mh.cut(torch.tanh(x @ second.t()) + skipped)
        return mh.cut(torch.tanh(x @ third.t())) @ last.t()


def tokens(rows: int, seed: int = 0) -> TensorDataset:
    draws = torch.Generator().manual_seed(seed)
    return TensorDataset(*(torch.randint(VOCABULARY, (rows, LENGTH), generator=draws) for _ in range(2)))


def numbers(rows: int, shape: tuple[int, ...], seed: int = 0) -> TensorDataset:
    draws = torch.Generator().manual_seed(seed)
    return TensorDataset(
        torch.randn(rows, *shape, generator=draws, dtype=torch.float64), torch.randint(5, (rows,), generator=draws)
    )


def masked(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, float]:
    """The mean over tokens that a mask leaves, and their number."""
    given, targets = batch
    left = targets % 3 != 0
    return F.cross_entropy(model(given)[left], targets[left]), float(left.sum())


def trimmed(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, float]:
    """`masked`, of rows as long as the longest of a micro-batch: activations have another shape in each."""
    given, targets = batch
    longest = int((given[:, 0] % LENGTH).max()) + 1
    return masked(model, (given[:, :longest], targets[:, :longest]))


def classified(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    return torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": others}], lr=1e-2)


def task(model: Any, loss: Any, data: Dataset[Any], held_out: Dataset[Any], **fields: Any) -> mh.Task:
    given = {
        "optimizer": adamw,
        "schedule": lambda optimizer, steps: LinearLR(optimizer, 1.0, 0.1, total_iters=steps),
        "batch_size": BATCH,
        "epochs": 2,
        "clip_norm": 0.5,
        "micro_batch_size": MICRO,
    }
    return mh.Task(
        model=lambda: model().double(), loss=loss, train_data=data, validation_data=held_out, **given | fields
    )


TASKS = {
    "gpt": task(GPT, masked, tokens(ROWS), tokens(20, seed=1)),
    "lengths": task(GPT, trimmed, tokens(79), tokens(20, seed=1)),  # the last batch has one row
    "tied": task(Translator, masked, tokens(ROWS), tokens(20, seed=1)),
    "checkpointed": task(Checkpointed, masked, tokens(ROWS), tokens(20, seed=1)),
    "encoder": task(Encoder, masked, tokens(ROWS), tokens(20, seed=1)),
    "marked": task(Marked, classified, numbers(ROWS, (12,)), numbers(20, (12,), seed=1)),
    "dropout": task(lambda: GPT(dropout=0.3), masked, tokens(ROWS), tokens(20, seed=1)),
    "mlp": task(MLP, classified, numbers(ROWS, (12,)), numbers(20, (12,), seed=1)),
    "cnn": task(CNN, classified, numbers(ROWS, (1, 6, 6)), numbers(20, (1, 6, 6), seed=1)),
}
