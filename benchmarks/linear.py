"""Logistic regression on rows like RCV1's: rows/s and accuracy beside scikit-learn, and what two workers without locks gain.

    python benchmarks/linear.py [--rows 800000] [--blocks 5] [--epochs 8] [--peer-python PYTHON] [--json FILE]

Rows are generated: 47,000 features, about 75 a row, frequencies as words have them (Zipf), values like tf-idf, of length 1;
a planted weight vector with noise decides the targets. In alternating blocks, each in processes of its own:

    scikit-learn        SGDClassifier(loss="log_loss", learning_rate="constant", penalty=None, average=False)
    one                 one worker
    two                 `hogwild`, 2 workers, which merge their moves as `Linear` does by itself
    two in place        likewise with merge_every=1: each row is written at once, as the paper has it
    one locks, two locks    in place, and each row holds the locks of all its features from before its read to after its write

Rates are of all epochs but the first, which loads compiled code. CPU: rows by the seconds that all workers' kernels computed.
Wall: rows by the seconds from the first step's begin to the last step's end, the loop between them included. The peer needs
pip packages scikit-learn and scipy in PYTHON; default: the interpreter of this benchmark.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import machine
import numpy as np
from locks import acquire, release
from numpy.typing import NDArray

import manyhands as mh
from manyhands.data.csr import Csr
from manyhands.kernels.linear import Linear, _output
from manyhands.kernels.sparse_rows import log_loss
from manyhands.sparse.compile import compiled, prefetch
from manyhands.sparse.rows import Rows

Array = NDArray[Any]

FEATURES, PER_ROW = 47_000, 75
RATE = 0.3

PEER = """
import json, sys, time, warnings
import numpy, scipy.sparse
from sklearn.linear_model import SGDClassifier
warnings.filterwarnings("ignore")
data, epochs, rate = numpy.load(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
offsets, keys = data["offsets"].astype("int32"), data["keys"].astype("int32")
rows = scipy.sparse.csr_matrix((data["values"], keys, offsets), shape=(len(offsets) - 1, int(data["features"])))
train, held_out = rows[: int(data["train"])], rows[int(data["train"]) :]
targets = data["targets"]
def fitted(n):
    model = SGDClassifier(loss="log_loss", learning_rate="constant", eta0=rate, penalty=None, average=False, max_iter=n, tol=None)
    cpu, wall = time.process_time(), time.perf_counter()
    model.fit(train, targets[: train.shape[0]])
    return time.process_time() - cpu, time.perf_counter() - wall, model
cpu, wall, model = fitted(epochs)
accuracy = model.score(held_out, targets[train.shape[0] :])
done = train.shape[0] * epochs
print(json.dumps({"cpu": done / cpu, "wall": done / wall, "accuracy": accuracy}))
"""


@dataclass(frozen=True, kw_only=True)
class TimedLinear(Linear):
    """Writes a line for each step: process, rows, CPU seconds, when it began and ended."""

    log: str = ""

    def step(self, rows: Mapping[str, Array], batch: Mapping[str, Array], rate: float) -> float:
        begun, cpu = time.monotonic(), time.process_time()
        loss = self.timed_step(rows, batch, rate)
        line = f"{os.getpid()} {len(batch['rows'])} {time.process_time() - cpu} {begun} {time.monotonic()}\n"
        with open(self.log, "a") as file:
            file.write(line)
        return loss

    def timed_step(self, rows: Mapping[str, Array], batch: Mapping[str, Array], rate: float) -> float:
        return super().step(rows, batch, rate)


@dataclass(frozen=True, kw_only=True)
class LockedLinear(TimedLinear):
    """A row holds the locks of its features, in ascending order, while it reads and writes them."""

    def tables(self) -> dict[str, Rows]:
        return super().tables() | {"locks": Rows(fields=("keys",), rows=self.features)}

    def timed_step(self, rows: Mapping[str, Array], batch: Mapping[str, Array], rate: float) -> float:
        columns = [batch[name] for name in ("rows", "offsets", "keys", "values", "targets")]
        locks = rows["locks"].ravel().view(np.int32)
        return float(locked_step(rows["weights"].ravel(), locks, *columns, np.float32(rate)))


@compiled
def locked_step(
    weights: Array, locks: Array, rows: Array, offsets: Array, keys: Array, values: Array, targets: Array, rate: float
) -> float:
    losses, none = 0.0, np.zeros(1, weights.dtype)
    count = np.uint64(len(rows))
    for n in range(count):
        if n + np.uint64(16) < count:
            prefetch(offsets, np.uint64(rows[n + np.uint64(16)]))
        if n + np.uint64(8) < count:
            ahead = np.uint64(rows[n + np.uint64(8)])
            for i in range(np.uint64(offsets[ahead]), np.uint64(offsets[ahead + np.uint64(1)]), np.uint64(16)):
                prefetch(keys, np.uint64(i))
                prefetch(values, np.uint64(i))
        row = np.uint64(rows[n])
        begin, end = np.uint64(offsets[row]), np.uint64(offsets[row + np.uint64(1)])
        target = np.float32(1) if targets[row] > 0 else np.float32(-1)
        for i in range(begin, end):
            acquire(locks, keys[np.uint64(i)])
        margin = target * _output(weights, none, keys, values, begin, end)
        move = rate * target / (np.float32(1) + np.exp(margin))
        for i in range(begin, end):
            weights[keys[np.uint64(i)]] += move * values[np.uint64(i)]
        for i in range(begin, end):
            release(locks, np.uint64(keys[np.uint64(i)]))
        losses += log_loss(margin)
    return losses


VARIANTS: dict[str, tuple[type[TimedLinear], dict[str, Any], int]] = {
    "one": (TimedLinear, {}, 1),
    "two": (TimedLinear, {}, 2),
    "two in place": (TimedLinear, {"merge_every": 1}, 2),
    "one locks": (LockedLinear, {}, 1),
    "two locks": (LockedLinear, {}, 2),
}


def main() -> None:
    args = arguments()
    facts = machine.facts()
    data, train = generated(args.rows), int(args.rows * 0.9)
    print(f"{len(data):,} rows, {len(data.keys) / len(data):.1f} features each, positive {data.targets.mean():.1%}")
    blocks = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.npz"
        columns = {name: getattr(data, name) for name in ("offsets", "keys", "values", "targets")}
        np.savez(path, **columns, features=FEATURES, train=train)
        for _ in range(args.blocks):
            block = {"scikit-learn": peer(path, args)}
            for name, (kind, options, workers) in VARIANTS.items():
                kernel = kind(features=FEATURES, bias=False, log=str(Path(folder) / "steps"), **options)
                block[name] = ours(kernel, data, train, workers, args)
            blocks.append(block)
            shown = "   ".join(f"{name} {values['wall'] / 1e6:.2f}" for name, values in block.items())
            print(f"block {len(blocks)}, million rows/s by wall time: {shown}", flush=True)
    report(blocks)
    if args.json:
        args.json.write_text(json.dumps({"machine": facts, "rows": args.rows, "blocks": blocks}, indent=1) + "\n")


def report(blocks: list[dict[str, dict[str, float]]]) -> None:
    medians = {
        name: {what: statistics.median(block[name][what] for block in blocks) for what in blocks[0][name]}
        for name in blocks[0]
    }
    print(f"\n{'medians':14}  million rows/s by CPU   by wall   accuracy of rows held out")
    for name, found in medians.items():
        print(f"{name:14}  {found['cpu'] / 1e6:21.2f}  {found['wall'] / 1e6:8.2f}  {found['accuracy']:10.4f}")

    def ratio(one: str, other: str, what: str) -> float:
        return statistics.median(block[one][what] / block[other][what] for block in blocks)

    print(f"\none worker to scikit-learn, by CPU {ratio('one', 'scikit-learn', 'cpu'):.2f}")
    for name in ("two", "two in place"):
        print(
            f"{name}: to one, by wall {ratio(name, 'one', 'wall'):.2f}; to two with locks {ratio(name, 'two locks', 'wall'):.2f}"
        )


def ours(kernel: TimedLinear, data: Csr, train: int, workers: int, args: argparse.Namespace) -> dict[str, float]:
    log = Path(kernel.log)
    log.unlink(missing_ok=True)
    run = mh.train(
        mh.Task(
            kernel=kernel,
            rate=RATE,
            train_data=data.take(range(train)),
            test_data=data.take(range(train, len(data))),
            batch_size_per_worker=args.slice,
            epochs=args.epochs + 1,
        ),
        strategy="hogwild",
        engine="local:apart=true" if workers == 1 else "local",
        workers=workers,
        threads_per_worker=1,
    )
    steps = sorted(
        (float(begun), int(rows), float(cpu), float(end)) for _, rows, cpu, begun, end in map(str.split, log.open())
    )
    seen = 0
    while seen < train:  # the first epoch
        seen += steps.pop(0)[1]
    rows = sum(rows for _, rows, _, _ in steps)
    cpu, wall = sum(cpu for _, _, cpu, _ in steps), max(end for *_, end in steps) - steps[0][0]
    return {"cpu": rows / cpu * 1.0, "wall": rows / wall, "accuracy": run.metrics["test_accuracy"]}


def peer(path: Path, args: argparse.Namespace) -> dict[str, float]:
    done = subprocess.run(
        [args.peer_python, "-c", PEER, path, str(args.epochs), str(RATE)],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def generated(rows: int) -> Csr:
    shares = 1 / (np.arange(FEATURES) + 10.0)
    counts = np.random.default_rng(0).poisson(PER_ROW, rows).clip(5)
    offsets = np.concatenate([[0], np.cumsum(counts)])
    names = np.random.default_rng(1).permutation(FEATURES)  # the frequent ones are anywhere
    keys = drawn(offsets, np.cumsum(shares / shares.sum()), names)
    random = np.random.default_rng(2)
    rarity = np.log(rows / np.maximum(np.bincount(keys, minlength=FEATURES), 1))
    values = (1 + np.log(random.geometric(0.6, len(keys)))) * rarity[keys]
    values /= np.repeat(np.sqrt(np.add.reduceat(values**2, offsets[:-1])), counts)
    scores = np.add.reduceat(values * random.normal(size=FEATURES)[keys], offsets[:-1])
    targets = 4 * scores + 0.5 * random.logistic(size=rows) > 0
    return Csr(offsets, keys, values, targets, features=FEATURES)


@compiled
def drawn(offsets: Array, cumulative: Array, names: Array) -> Array:
    """Distinct features of each row, by their shares, in ascending order."""
    np.random.seed(0)
    keys, by = np.empty(offsets[-1], np.uint32), np.full(len(names), -1, np.int64)
    for row in range(len(offsets) - 1):
        at = offsets[row]
        while at < offsets[row + 1]:
            key = names[min(np.searchsorted(cumulative, np.random.random()), len(names) - 1)]
            if by[key] != row:
                by[key] = row
                keys[at] = key
                at += 1
        keys[offsets[row] : offsets[row + 1]].sort()
    return keys


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=800_000)
    parser.add_argument("--blocks", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--slice", type=int, default=60_000, help="rows that a worker takes at once: about 10 ms")
    parser.add_argument("--peer-python", default=sys.executable, help="an interpreter that has scikit-learn")
    parser.add_argument("--json", type=Path, default=None)
    return parser.parse_args()


if __name__ == "__main__":
    main()
