"""The task `chars`: a small transformer predicts the next character of the Python standard library's own source.

Every machine that runs Python has this text. Files are taken in the order of their names until MAX_CHARACTERS; so the
text depends on the Python version, and numbers of different versions compare only roughly.
"""

from __future__ import annotations

import math
import sysconfig
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from manyhands.errors import BadInput
from manyhands.task import Task

CONTEXT = 96  # characters a window
MAX_CHARACTERS = 1_200_000
SHARES = (0.90, 0.05, 0.05)  # of the characters, for train, validation, test: whole files, in the order of their names
ALPHABET = 128  # ASCII
BATCH_SIZE, PEAK_RATE, WARMUP = 32, 2e-3, 0.1

Windows = tuple[Tensor, Tensor]  # characters int64 [rows, CONTEXT], and those that follow them


def chars(**fields: Any) -> Task:
    """The task, with any of Task's fields changed. One epoch takes about a minute on two cores."""
    train, validation, test = (windows(text) for text in split())
    task = Task(
        name="chars",
        model=CharsNet,
        loss=loss,
        evaluate=evaluate,
        optimizer=adamw,
        schedule=warmup_then_cosine,
        train_data=train,
        validation_data=validation,
        test_data=test,
        batch_size=BATCH_SIZE,
        clip_norm=1.0,
    )
    return task.with_fields(**fields)


# -- the model -------------------------------------------------------------------------------------------------------


class CharsNet(nn.Module):
    """A causal transformer, pre-norm, no dropout: uint8 or int64 [rows, context] -> [rows, context, ALPHABET]."""

    def __init__(self, width: int = 128, heads: int = 4, layers: int = 4, context: int = CONTEXT) -> None:
        super().__init__()
        self.characters = nn.Embedding(ALPHABET, width)
        self.positions = nn.Parameter(torch.randn(context, width) * 0.02)
        self.blocks = nn.Sequential(*(TransformerBlock(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, ALPHABET)

    def forward(self, characters: Tensor) -> Tensor:
        x = self.characters(characters.long()) + self.positions[: characters.shape[1]]  # [rows, context, width]
        logits: Tensor = self.head(self.norm(self.blocks(x)))
        return logits


class TransformerBlock(nn.Module):
    """Attention of each position to itself and those before it, then a two-layer perceptron, each added to its input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:  # [rows, context, width]
        rows, context, width = x.shape
        split = self.queries_keys_values(self.norm1(x)).view(rows, context, 3, self.heads, width // self.heads)
        queries, keys, values = split.permute(2, 0, 3, 1, 4)  # each [rows, heads, context, width / heads]
        mixed = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, context, width))
        hidden: Tensor = self.mlp(self.norm2(x))
        return x + hidden


def loss(model: nn.Module, batch: Windows) -> Tensor:
    """Mean cross-entropy of the next character, in nats."""
    before, after = batch
    return F.cross_entropy(model(before).flatten(0, 1), after.long().flatten())


def evaluate(model: nn.Module, batch: Windows) -> dict[str, Tensor]:
    """The loss, and the same in bits per character (text compressors count in these)."""
    nats = loss(model, batch)
    return {"loss": nats, "bits_per_character": nats / math.log(2)}


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW; the schedule sets its rate."""
    return torch.optim.AdamW(model.parameters(), lr=PEAK_RATE, betas=(0.9, 0.95), weight_decay=0.1)


def warmup_then_cosine(optimizer: torch.optim.Optimizer, total_steps: int) -> torch.optim.lr_scheduler.LambdaLR:
    """A rising line over the first WARMUP of the steps, then half a cosine down to a twentieth of the rate."""
    warmup = max(1, int(WARMUP * total_steps))

    def factor(step: int) -> float:
        done = min(1.0, (step - warmup) / max(1, total_steps - warmup))
        return (step + 1) / warmup if step < warmup else 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * done))

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


# -- the text --------------------------------------------------------------------------------------------------------


def windows(text: np.ndarray[Any, np.dtype[np.uint8]]) -> Windows:
    """(characters, those that follow): uint8 [rows, CONTEXT] each, views of `text`; a rest is left out."""
    rows = (len(text) - 1) // CONTEXT
    before, after = torch.from_numpy(text[: rows * CONTEXT]), torch.from_numpy(text[1 : rows * CONTEXT + 1])
    return before.view(rows, CONTEXT), after.view(rows, CONTEXT)


@lru_cache(maxsize=1)
def split() -> tuple[np.ndarray[Any, np.dtype[np.uint8]], ...]:
    """The texts of train, validation and test, uint8 below ALPHABET; no file is in two of them."""
    files = texts(Path(sysconfig.get_path("stdlib")))
    ends = np.cumsum([len(text) for text in files])
    train, validation = (int(np.abs(ends - ends[-1] * share).argmin()) + 1 for share in np.cumsum(SHARES[:2]))
    parts = (files[:train], files[train:validation], files[validation:])
    return tuple(np.frombuffer(bytearray(b"".join(part)), dtype=np.uint8) for part in parts)


def texts(folder: Path, limit: int = MAX_CHARACTERS) -> list[bytes]:
    """The ASCII characters of `folder`'s own Python files in the order of their names, up to `limit` in all.

    Raises BadInput where there is too little text (some distributions ship the library without its source).
    """
    found: list[bytes] = []
    left = limit
    named = folder.glob("[a-z]*.py")  # those with _ differ by platform, or repeat others
    for path in sorted(named, key=lambda path: path.name):
        text = bytes(byte for byte in path.read_bytes() if byte < ALPHABET)[:left]
        found.append(text)
        left -= len(text)
        if left <= 0:
            break
    if limit - left < 100 * CONTEXT or len(found) < 10:
        raise BadInput(
            f"{folder} holds {limit - left} characters of Python source in {len(found)} files, too little for the task chars: install Python with its library's source"
        )
    return found
