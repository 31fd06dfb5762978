"""Field-aware factorization machines on clicks: rows/s of one core and the loss of rows held out, beside libffm.

    python benchmarks/ffm.py [--rows 100000] [--blocks 5] [--epochs 4] [--peer-python PYTHON] [--json FILE]

Clicks are generated: 39 fields, one feature each, frequencies as words have them (Zipf), about 60,000 features; targets from
planted weights and products of pairs, with noise. In alternating blocks, each in a process of its own, one thread: libffm
(pylibffm, its own AVX code) and the kernel `FFM`, both with k = 4, rate 0.2, lambda 2e-5, rows of length 1, in an order that
is random for each epoch.

Rates are rows by seconds of training. libffm's are those of the epochs after the first, because a call of it also reads its
file and makes its model; ours are those of the kernel, one step an epoch, without loading compiled code. Losses are
logarithmic, of a tenth of the rows, after the last epoch; libffm's as it prints them. The peer needs pip packages pylibffm and
scipy in PYTHON; default: the interpreter of this benchmark.
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
from pathlib import Path
from typing import Any

import machine
import numpy as np

from manyhands.data.csr import Csr
from manyhands.kernels.ffm import FFM

FIELDS, RATE = 39, 0.2

PEER = """
import json, os, sys, time
import numpy, pylibffm, scipy.sparse
data, epochs, folder = numpy.load(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
keys, targets, features, train = data["keys"], data["targets"], int(data["features"]), int(data["train"])
count, fields = keys.shape
rows = scipy.sparse.csr_matrix(
    (numpy.ones(keys.size, "float32"), keys.ravel().astype("int32"), numpy.arange(count + 1, dtype="int32") * fields),
    shape=(count, features),
)
of_feature = numpy.zeros(features, "int32")
for field in range(fields):
    of_feature[keys[:, field]] = field
sys.stdout.flush()
own = os.dup(1)
os.dup2(2, 1)  # libffm prints there
path, _ = pylibffm.make_bin(folder, rows[:train], targets[:train], of_feature)
def seconds(iterations):
    cpu, wall = time.process_time(), time.perf_counter()
    pylibffm.train_with_bin(path, {"nr_iters": iterations})
    return numpy.array([time.process_time() - cpu, time.perf_counter() - wall])
cpu, wall = seconds(epochs + 1) - seconds(1)
held_out, _ = pylibffm.make_bin(folder, rows[train:], targets[train:], of_feature)
pylibffm.train_with_bin(path, {"nr_iters": epochs, "auto_stop": True}, held_out)
done = train * epochs
os.write(own, json.dumps({"cpu": done / cpu, "wall": done / wall}).encode())
"""


def main() -> None:
    args = arguments()
    facts = machine.facts()
    keys, targets, features = clicks(args.rows)
    train = int(args.rows * 0.9)
    print(f"{args.rows:,} rows of {FIELDS} features, {features:,} in all, positive {targets.mean():.1%}")
    blocks = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "clicks.npz"
        np.savez(path, keys=keys, targets=targets, features=features, train=train)
        for _ in range(args.blocks):
            block = {
                "libffm": peer(path, folder, args),
                "FFM": started([sys.executable, __file__, "--alone", path], args),
            }
            blocks.append(block)
            shown = "   ".join(
                f"{name} {v['cpu'] / 1e3:.0f} by CPU, {v['wall'] / 1e3:.0f} by wall, loss {v['loss']:.5f}"
                for name, v in block.items()
            )
            print(f"block {len(blocks)}, thousand rows/s: {shown}", flush=True)
    for what in ("cpu", "wall", "loss"):
        ratio = statistics.median(block["FFM"][what] / block["libffm"][what] for block in blocks)
        median = {name: statistics.median(block[name][what] for block in blocks) for name in blocks[0]}
        print(f"median {what}: libffm {median['libffm']:.5g}, FFM {median['FFM']:.5g}; FFM to libffm {ratio:.4f}")
    if args.json:
        args.json.write_text(json.dumps({"machine": facts, "rows": args.rows, "blocks": blocks}, indent=1) + "\n")


def peer(path: Path, folder: str, args: argparse.Namespace) -> dict[str, float]:
    command = [args.peer_python, "-c", PEER, path, str(args.epochs), folder]
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    last = [line.split() for line in done.stderr.splitlines() if len(line.split()) == 4][-1]
    assert int(last[0]) == args.epochs, "libffm stopped before the last epoch: choose fewer epochs"
    return json.loads(done.stdout) | {"loss": float(last[2])}


def started(command: list[Any], args: argparse.Namespace) -> dict[str, float]:
    command = [*command, "--epochs", str(args.epochs)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def alone(args: argparse.Namespace) -> None:
    """One process of ours: prints its figures as JSON."""
    data = np.load(args.alone)
    count, train = len(data["keys"]), int(data["train"])
    rows = Csr(
        np.arange(count + 1) * FIELDS,
        data["keys"].ravel(),
        np.ones(count * FIELDS),
        data["targets"],
        fields=np.tile(np.arange(FIELDS), count),
        features=int(data["features"]),
        field_count=FIELDS,
    )
    kernel, random = FFM.of(rows), np.random.default_rng(0)
    kernel.step(kernel.module(0).tables(), kernel.prepare(rows[:10], 0), RATE)  # loads compiled code
    tables = kernel.module(1).tables()
    cpu, wall = time.process_time(), time.perf_counter()
    for _ in range(args.epochs):
        kernel.step(tables, kernel.prepare(rows.take(random.permutation(train)), 0), RATE)
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    loss, _ = kernel.measure(tables, kernel.prepare(rows.take(range(train, count)), 0))["loss"]
    print(json.dumps({"cpu": train * args.epochs / cpu, "wall": train * args.epochs / wall, "loss": loss}))


def clicks(rows: int) -> tuple[Any, Any, int]:
    """(features of each row [rows, FIELDS], targets [rows], how many features there are)."""
    random = np.random.default_rng(0)
    sizes = random.choice([10, 100, 1000, 3000], FIELDS)
    begins = np.concatenate([[0], np.cumsum(sizes)])
    keys = np.empty((rows, FIELDS), np.uint32)
    for field, size in enumerate(sizes):
        shares = 1 / (np.arange(size) + 2.0)
        drawn = np.searchsorted(np.cumsum(shares / shares.sum()), random.random(rows)).clip(0, size - 1)
        keys[:, field] = begins[field] + drawn
    weights, vectors = random.normal(size=begins[-1]), random.normal(size=(begins[-1], 4))
    some = vectors[keys[:, :12]]  # [rows, 12, 4]
    pairs = ((some.sum(1) ** 2).sum(1) - (some**2).sum((1, 2))) / 2
    scores = 0.1 * weights[keys].sum(1) + 0.12 * pairs - 1
    return keys, (scores + random.logistic(size=rows) > 0).astype(np.float32), int(begins[-1])


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--blocks", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--peer-python", default=sys.executable, help="an interpreter that has pylibffm")
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--alone", type=Path, default=None, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    given = arguments()
    alone(given) if given.alone else main()
