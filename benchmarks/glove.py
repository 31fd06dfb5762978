"""GloVe beside its NumPy references: pairs a CPU second, and the cost after four passes over the same pairs.

    python benchmarks/glove.py [--words 2000000] [--vocabulary 30000] [--dim 100] [--passes 4] [--blocks 5]
                               [--reference-pairs 50000] [--json FILE]

A text is generated: words by Zipf's law, half of them of one of 50 topics a text. Its co-occurrences (window 15) are
counted once. In alternating blocks, each on one core: `solo` trains on all pairs in the order in which they are
counted, `shuffled` in an order drawn anew for each pass; `by pair` is the kernel's reference, NumPy over the numbers of a
vector, on the first --reference-pairs; `by 1,000` is NumPy over as many pairs at once, which all see the rows before
them. The cost is then that of the first --reference-pairs alone, after the passes of each over them.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from pathlib import Path
from typing import Any

import machine
import numpy as np

import manyhands as mh
from manyhands.data.cooccurrence import count_cooccurrences
from manyhands.data.ragged import Ragged
from manyhands.kernels.glove import Glove, reference_step

GOAL, COST_GOAL = 20.0, 0.01
RATE, AT_ONCE = 0.05, 1000

Columns = dict[str, np.ndarray[Any, Any]]
Seconds = dict[str, float]


def main() -> None:
    args = arguments()
    facts = machine.facts()
    started, cpu = time.perf_counter(), time.process_time()
    pairs = count_cooccurrences(text(args)).data()
    print(
        f"{args.words:,} words, {len(pairs['counts']):,} pairs, counted in {time.process_time() - cpu:.1f} s of CPU time, "
        f"{time.perf_counter() - started:.1f} s"
    )
    kernel = Glove(words=args.vocabulary, dim=args.dim)
    few = {name: column[: args.reference_pairs] for name, column in pairs.items()}
    trained(kernel, {name: column[:100] for name, column in pairs.items()}, 1)  # what is to be compiled
    blocks: list[dict[str, Seconds]] = []
    for number in range(args.blocks):
        block = {
            "solo": trained(kernel, pairs, args.passes),
            "shuffled": trained(kernel, pairs, 1, shuffle=True),
            "by pair": stepped(kernel, few, 1, reference_step),
            "by 1,000": stepped(kernel, few, 1, by_many),
        }
        blocks.append(block)
        print(f"block {number}  " + "  ".join(f"{arm} {one['cpu_ns']:.0f}" for arm, one in block.items()), flush=True)
    found = {
        arm: {name: statistics.median(block[arm][name] for block in blocks) for name in ("cpu_ns", "wall_ns")}
        for arm in blocks[0]
    }
    print("\nmedians: CPU and wall nanoseconds a pair")
    for arm, one in found.items():
        print(f"{arm:9} {one['cpu_ns']:9.1f} {one['wall_ns']:9.1f}")
    for arm in ("by pair", "by 1,000"):
        ratio = found[arm]["cpu_ns"] / found["solo"]["cpu_ns"]
        print(f"{ratio:.0f} times the pairs of NumPy {arm} (goal {GOAL:.0f}: {'met' if ratio >= GOAL else 'not met'})")
    print(f"{found['shuffled']['cpu_ns'] / found['solo']['cpu_ns']:.2f} times the pairs of a shuffled order")
    costs = {
        "solo": trained(kernel, few, args.passes)["cost"],
        "by pair": stepped(kernel, few, args.passes, reference_step)["cost"],
        "by 1,000": stepped(kernel, few, args.passes, by_many)["cost"],
    }
    off = costs["solo"] / costs["by pair"] - 1
    print(
        f"cost after {args.passes} passes over {len(few['counts']):,} pairs: "
        + ", ".join(f"{arm} {cost:.6f}" for arm, cost in costs.items())
    )
    print(f"{100 * off:+.4f} % beside NumPy by pair (goal within 1 %: {'met' if abs(off) <= COST_GOAL else 'not met'})")
    if args.json:
        found = {"machine": facts, "blocks": blocks, "medians": found, "costs": costs}
        args.json.write_text(json.dumps(found, indent=1) + "\n")


def trained(kernel: Glove, pairs: Columns, passes: int, shuffle: bool = False) -> Seconds:
    """By one worker."""
    cpu, wall = time.process_time(), time.perf_counter()
    run = mh.train(
        kernel=kernel,
        rate=RATE,
        train_data=pairs,
        batch_size_per_worker=max(1, min(100_000, len(pairs["counts"]) // 16)),
        epochs=passes,
        shuffle=shuffle,
        strategy="solo",
        engine="local",
        workers=1,
        threads_per_worker=1,
    )
    seconds = a_pair(time.process_time() - cpu, time.perf_counter() - wall, len(pairs["counts"]) * passes)
    model: Any = run.model
    return {**seconds, "cost": cost(kernel, model.tables(), pairs)}


def stepped(kernel: Glove, pairs: Columns, passes: int, step: Any) -> Seconds:
    """By a function that makes the kernel's steps."""
    rows, batch = kernel.module(0).tables(), kernel.prepare(pairs, 0)
    cpu, wall = time.process_time(), time.perf_counter()
    for _ in range(passes):
        step(kernel, rows, batch, RATE)
    seconds = a_pair(time.process_time() - cpu, time.perf_counter() - wall, len(pairs["counts"]) * passes)
    return {**seconds, "cost": cost(kernel, rows, pairs)}


def cost(kernel: Glove, rows: Columns, pairs: Columns) -> float:
    loss: Any = kernel.measure(rows, kernel.prepare(pairs, 0))["loss"]
    return float(loss[0])


def a_pair(cpu_s: float, wall_s: float, pairs: int) -> Seconds:
    return {"cpu_ns": cpu_s / pairs * 1e9, "wall_ns": wall_s / pairs * 1e9}


def by_many(kernel: Glove, rows: Columns, batch: Columns, rate: float) -> None:
    """AdaGrad of AT_ONCE pairs at a time; gradients of one row are added up."""
    for start in range(0, len(batch["logs"]), AT_ONCE):
        some = {name: column[start : start + AT_ONCE] for name, column in batch.items()}
        w, c = rows["words"][some["rows"]], rows["contexts"][some["columns"]]  # [b, dim]
        error = (w * c).sum(1) - some["logs"]
        error += rows["word_bias"][some["rows"], 0] + rows["context_bias"][some["columns"], 0]
        slope = (rate * some["weights"] * error)[:, None]
        one = np.ones((len(slope), 1), slope.dtype)
        for name, keys, other in (("word", some["rows"], c), ("context", some["columns"], w)):
            move = slope * np.concatenate([other, one], 1)  # [b, dim + 1]
            steps = move / np.sqrt(rows[f"{name}_sums"][keys])
            np.subtract.at(rows[f"{name}s"], keys, steps[:, :-1])
            np.subtract.at(rows[f"{name}_bias"], keys, steps[:, -1:])
            np.add.at(rows[f"{name}_sums"], keys, move**2)


def text(args: argparse.Namespace, length: int = 500, topics: int = 50) -> Ragged:
    """Texts of so many words, as numbers that fall with how frequent the words are."""
    random = np.random.default_rng(args.seed)
    shares = 1 / np.arange(1, args.vocabulary + 1)
    words = np.searchsorted(np.cumsum(shares / shares.sum())[:-1], random.random(args.words))
    topic = np.repeat(random.integers(topics, size=math.ceil(args.words / length)), length)[: args.words]
    moved = (words > 100) & (random.random(args.words) < 0.5)  # to the word of its topic that is nearly as frequent
    words[moved] = np.minimum(words[moved] // topics * topics + topic[moved], args.vocabulary - 1)
    offsets = np.minimum(np.arange(math.ceil(args.words / length) + 1) * length, args.words)
    return Ragged(offsets, {"words": words.astype(np.uint32)})


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--words", type=int, default=2_000_000)
    parser.add_argument("--vocabulary", type=int, default=30_000)
    parser.add_argument("--dim", type=int, default=100)
    parser.add_argument("--passes", type=int, default=4)
    parser.add_argument("--blocks", type=int, default=5)
    parser.add_argument("--reference-pairs", type=int, default=50_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, default=None)
    return parser.parse_args()


if __name__ == "__main__":
    main()
