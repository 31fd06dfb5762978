"""A Hugging Face model in a loop of your own: a small DistilBERT is pretrained on sentences and fine-tuned.

python examples/hugging_face.py                                              alone
manyhands run -n 2 examples/hugging_face.py                                  two workers, the same steps
torchrun --nproc-per-node 2 examples/hugging_face.py                         torchrun's workers
manyhands run -n 2 examples/hugging_face.py --save reviews                   the model stays, for from_pretrained("reviews")

Nothing is downloaded: the sentences are made here, and the model is built from its config. Of 16 words that praise or
blame, the labelled sentences have only 8. The model knows the others from pretraining, where words of one kind stand
together; with --pretrain-epochs 0 it has to guess.
"""

import argparse
import random
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import (
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    DataCollatorForLanguageModeling,
    DistilBertConfig,
    DistilBertTokenizerFast,
    PreTrainedModel,
    get_scheduler,
)
from transformers.utils import logging

import manyhands as mh

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
TOPICS = ["acting", "cast", "ending", "film", "music", "plot"]
BAD = ["awful", "boring", "dull", "poor", "clumsy", "dreadful", "stale", "tedious"]
GOOD = ["clever", "fine", "great", "superb", "charming", "gripping", "moving", "witty"]


def reviews(rows: int, seed: int, words: slice) -> tuple[list[str], Tensor]:
    """Sentences like "the plot was dull and the cast was poor", and 1 for praise, 0 for blame. words: of GOOD and BAD."""
    draw = random.Random(seed)
    labels = [draw.randrange(2) for _ in range(rows)]
    clauses = [
        [
            f"the {topic} was {draw.choice((BAD, GOOD)[label][words])}"
            for topic in draw.sample(TOPICS, draw.randint(2, 4))
        ]
        for label in labels
    ]
    return [" and ".join(some) for some in clauses], torch.tensor(labels)


def train(model: PreTrainedModel, batch: Mapping[str, Tensor], epochs: int, rate: float) -> None:
    """Train on all rows of `batch`: AdamW, clipping, a rate that rises over a tenth of the steps and falls to 0."""
    rows = [dict(zip(batch, row, strict=True)) for row in zip(*batch.values(), strict=True)]
    loader = DataLoader(rows, batch_size=32, shuffle=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    model, optimizer, loader = mh.prepare(model, optimizer, loader)
    steps = epochs * len(loader)
    schedule = get_scheduler("linear", optimizer, num_warmup_steps=steps // 10, num_training_steps=steps)
    model.train()
    for epoch in range(epochs):
        for batch in loader:
            optimizer.zero_grad()
            loss = model(**batch).loss
            counted = (batch["labels"] != -100).sum().item()  # what it is a mean over: masked words, or labels
            mh.weight(counted)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
        print(f"{type(model).__name__}, epoch {epoch + 1}: loss {mh.mean(loss.item(), weight=counted):.2f}")


@torch.no_grad()
def accuracy(model: PreTrainedModel, texts: list[str], labels: Tensor) -> float:
    model.eval()
    outputs = model(**tokenizer(texts, padding=True, return_tensors="pt"))
    return (outputs.logits.argmax(1) == labels).float().mean().item()


parser = argparse.ArgumentParser()
parser.add_argument("--pretrain-epochs", type=int, default=6)
parser.add_argument("--epochs", type=int, default=8)
parser.add_argument("--save", metavar="FOLDER", help="where the fine-tuned model goes, for from_pretrained")
args = parser.parse_args()

logging.disable_progress_bar()
torch.manual_seed(0)
with tempfile.TemporaryDirectory() as folder:
    vocabulary = [*SPECIAL, "the", "was", "and", *TOPICS, *BAD, *GOOD]
    Path(folder, "vocab.txt").write_text("\n".join(vocabulary))
    tokenizer = DistilBertTokenizerFast.from_pretrained(folder)
small = {"dim": 64, "hidden_dim": 128, "n_layers": 2, "n_heads": 4, "initializer_range": 0.1}
exact = {"dropout": 0.0, "attention_dropout": 0.0, "seq_classif_dropout": 0.0}  # N workers then take one's steps
config = DistilBertConfig(vocab_size=len(vocabulary), **small, **exact)

pretrained = AutoModelForMaskedLM.from_config(config)
texts, _ = reviews(2000, seed=1, words=slice(8))
mask = DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.3)
rows = mask([{"input_ids": ids} for ids in tokenizer(texts)["input_ids"]])
train(pretrained, rows, args.pretrain_epochs, rate=5e-3)

model = AutoModelForSequenceClassification.from_config(config)
model.base_model.load_state_dict(pretrained.base_model.state_dict())  # all but the head
texts, labels = reviews(64, seed=2, words=slice(4))
train(model, {**tokenizer(texts, padding=True, return_tensors="pt"), "labels": labels}, args.epochs, rate=2e-3)
print(f"test accuracy: {accuracy(model, *reviews(500, seed=3, words=slice(4))):.1%}")
print(f"on words that no label showed: {accuracy(model, *reviews(500, seed=3, words=slice(4, 8))):.1%}")
if args.save:
    model.save_pretrained(args.save)  # written once: the first worker's files are the run's
    tokenizer.save_pretrained(args.save)
