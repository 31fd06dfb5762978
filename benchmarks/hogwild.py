"""What it costs hogwild's workers to write the same memory: rows/s beside as many independent processes, and the final loss beside solo's.

    python benchmarks/hogwild.py [--workers 2] [--blocks 5] [--steps 120] [--json FILE]

In alternating blocks, the task `chars` on workers of one thread each: `independent` are as many solo runs at once, each on
rows of its own share, that know nothing of each other; `hogwild` works on one piece of memory. Rows/s are those of the
training loop, all workers together. At the end one epoch of solo (all threads) and of hogwild, and the loss of both.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import manyhands as mh


def main() -> None:
    args = arguments()
    blocks: list[dict[str, float]] = []
    for block in range(args.blocks):
        rates = {
            "independent": sum(mh.launch(alone, args, engine="local", workers=args.workers, threads_per_worker=1)),
            "hogwild": together(args),
        }
        blocks.append({**rates, "ratio": rates["hogwild"] / rates["independent"]})
        print(
            f"block {block}  independent {rates['independent']:7.1f} rows/s  hogwild {rates['hogwild']:7.1f}",
            flush=True,
        )
    medians = {name: statistics.median(block[name] for block in blocks) for name in blocks[0]}
    print(
        f"\nmedians: independent {medians['independent']:.1f} rows/s, hogwild {medians['hogwild']:.1f}, ratio {medians['ratio']:.3f}"
    )
    losses = final_losses(args) if not args.no_loss else {}
    if losses:
        worse = 100 * (losses["hogwild"] / losses["solo"] - 1)
        print(f"test loss after one epoch: solo {losses['solo']:.4f}, hogwild {losses['hogwild']:.4f} ({worse:+.2f} %)")
    if args.json:
        args.json.write_text(json.dumps({"blocks": blocks, "medians": medians, "losses": losses}, indent=1) + "\n")


def alone(args: argparse.Namespace) -> float:
    """Rows/s of one process, while as many others train a model of their own."""
    run = mh.train(
        "chars",
        strategy="solo",
        engine="local",
        workers=1,
        threads_per_worker=1,
        max_steps=args.steps,
        batch_size=16,
        validation_data=None,
        test_data=None,
    )
    return rows_per_second(run)


def together(args: argparse.Namespace) -> float:
    run = mh.train(
        "chars",
        strategy="hogwild",
        engine="local",
        workers=args.workers,
        threads_per_worker=1,
        max_steps=args.steps,
        batch_size=16 * args.workers,
        validation_data=None,
        test_data=None,
    )
    return rows_per_second(run)


def rows_per_second(run: mh.Run) -> float:
    """Of the loop's own seconds, without its first tenth."""
    rows = run.history[len(run.history) // 10 :]
    seconds = max(row["seconds"] for row in rows) - min(row["seconds"] for row in rows)
    return float(sum(row["rows"] for row in rows[1:]) / seconds)


def final_losses(args: argparse.Namespace) -> dict[str, float]:
    runs: dict[str, Any] = {
        "solo": mh.train("chars", strategy="solo", engine="local", workers=1),
        "hogwild": mh.train("chars", strategy="hogwild", engine="local", workers=args.workers, threads_per_worker=1),
    }
    return {name: run.metrics["test_loss"] for name, run in runs.items()}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--blocks", type=int, default=5)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--no-loss", action="store_true", help="only the rows/s")
    parser.add_argument("--json", type=Path, default=None)
    return parser.parse_args()


if __name__ == "__main__":
    main()
