"""How soon the first batch comes where an epoch of 1,000,000 rows goes on at 90 %, and how much is read for it.

    python benchmarks/resume_shards.py [--rows 1000000] [--blocks 5]

Parquet files with row groups of 1,000 rows, in the default order (shuffle="blocks:16"), and in the rows' own order. The time is from
the call of `open_source` on: files are found, and their footers are read.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import manyhands as mh
from manyhands.data.feed import Feed
from manyhands.data.open_source import open_source


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--blocks", type=int, default=5)
    parser.add_argument("--row-group", type=int, default=1000)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="manyhands-resume-") as folder:
        draw = np.random.default_rng(0)
        for i in range(10):
            many = asked.rows // 10
            x = pa.FixedSizeListArray.from_arrays(pa.array(draw.normal(size=many * 64).astype(np.float32)), 64)
            table = pa.table({"x": x, "y": draw.integers(0, 10, many)})
            pq.write_table(table, f"{folder}/{i}.parquet", row_group_size=asked.row_group)
        stored = sum(path.stat().st_size for path in Path(folder).iterdir())
        for shuffle in ("blocks:16", False):
            times, shares = [], []
            for _ in range(asked.blocks):
                start = time.perf_counter()
                source = open_source(mh.shards(folder, shuffle=shuffle))
                feed = Feed(source, batch_size=256)
                slices = feed.epoch(0, int(0.9 * asked.rows / 256))
                next(slices)
                times.append(time.perf_counter() - start)
                assert source.counters is not None
                shares.append(source.counters.bytes / stored)
                slices.close()
            print(
                f"shuffle={shuffle}: first batch after {statistics.median(times):.2f} s, {100 * statistics.median(shares):.2f} % of {stored:,} bytes read"
            )


if __name__ == "__main__":
    main()
