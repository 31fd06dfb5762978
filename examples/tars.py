"""Train a small network on images in tars, in webdataset's layout, which are read while it trains.

python examples/tars.py
python examples/tars.py --folder my_tars --workers 2

Without --folder it writes the bundled digits as tars first: 000001.npy, 000001.cls, and so on.
"""

import argparse
import io
import tarfile
import tempfile
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

import manyhands as mh


def write_digits(folder: Path, rows_a_tar: int = 300) -> None:
    """The digits as tars: of each row its image, uint8 [8, 8], and its class."""
    data = mh.tasks.digits().train_data
    images, classes = (np.asarray(column) for column in data)
    for first in range(0, len(images), rows_a_tar):
        with tarfile.open(folder / f"digits-{first:05}.tar", "w") as tar:
            for i in range(first, min(first + rows_a_tar, len(images))):
                image = io.BytesIO()
                np.save(image, (16 * images[i]).astype(np.uint8).reshape(8, 8))
                for suffix, content in (("npy", image.getvalue()), ("cls", str(int(classes[i])).encode())):
                    member = tarfile.TarInfo(f"{i:06}.{suffix}")
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content))


def decode(row: dict[str, bytes], rng: np.random.Generator) -> tuple[torch.Tensor, int]:
    """An image with a little noise, which depends on (seed, epoch, row) alone, and its class."""
    image = np.load(io.BytesIO(row["npy"])).astype(np.float32) / 16
    return torch.from_numpy(image + rng.normal(scale=0.05, size=image.shape).astype(np.float32)), int(row["cls"])


def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    images, classes = batch
    return F.cross_entropy(model(images.flatten(1)), classes)


def accuracy(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> dict[str, torch.Tensor]:
    images, classes = batch
    return {"accuracy": (model(images.flatten(1)).argmax(1) == classes).double().mean()}


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--folder", type=Path)
parser.add_argument("--workers", type=int, default=2)
parser.add_argument("--epochs", type=int, default=5)

if __name__ == "__main__":
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        folder = asked.folder or Path(made)
        if asked.folder is None:
            write_digits(folder)
        run = mh.train(
            model=lambda: nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)),
            loss=loss,
            evaluate=accuracy,
            optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
            train_data=mh.shards(f"{folder}/*.tar", shuffle="blocks:4", decode=decode),
            validation_data=mh.shards(
                f"{folder}/*.tar", shuffle=False, decode=lambda row: decode(row, np.random.default_rng(0))
            ),
            epochs=asked.epochs,
            workers=asked.workers,
        )
    print(run.summary())
