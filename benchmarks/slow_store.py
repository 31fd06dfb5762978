"""Shards in a store whose every answer takes 50 ms: the first epoch, and the second from the host's cache.

    pip install 'moto[server]' s3fs
    python benchmarks/slow_store.py [--blocks 5] [--latency-ms 50]

The store is moto's S3 server on this machine, with a pause before each answer. One worker reads Parquet and tar; the loop does nothing.
"""

from __future__ import annotations

import argparse
import io
import os
import shutil
import statistics
import tarfile
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import closing
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import manyhands as mh
from manyhands.data.feed import Feed
from manyhands.data.open_source import open_source

FILES, ROWS = 16, 4000  # rows of a file


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=5)
    parser.add_argument("--latency-ms", type=float, default=50)
    asked = parser.parse_args()
    os.environ |= {"AWS_ACCESS_KEY_ID": "none", "AWS_SECRET_ACCESS_KEY": "none", "AWS_DEFAULT_REGION": "us-east-1"}
    with closing(_Store(asked.latency_ms / 1000)) as store, tempfile.TemporaryDirectory() as folder:
        os.environ["AWS_ENDPOINT_URL"] = store.url
        store.pause_s, pause_s = 0.0, store.pause_s
        _upload()
        store.pause_s = pause_s
        for kind, counted in (("parquet", None), ("tar", None)):
            firsts, seconds, ratios = [], [], []
            for _ in range(asked.blocks):
                cache = f"{folder}/cache"
                source = open_source(mh.shards(f"s3://rows/{kind}/*", cache="2GB", cache_folder=cache, counted=counted))
                feed = Feed(source, batch_size=256)
                firsts.append(_rate(feed, 0))
                seconds.append(_rate(feed, 1))
                ratios.append(seconds[-1] / firsts[-1])
                shutil.rmtree(cache)
            print(
                f"{kind}: first epoch {statistics.median(firsts):,.0f} rows/s, second {statistics.median(seconds):,.0f}, "
                f"ratio {statistics.median(ratios):.1f} (from {min(ratios):.1f} to {max(ratios):.1f}); {source.counters}"
            )


def _rate(feed: Feed, epoch: int) -> float:
    start, rows = time.perf_counter(), 0
    for part in feed.epoch(epoch):
        rows += part.rows
    assert rows == FILES * ROWS
    return rows / (time.perf_counter() - start)


def _upload() -> None:
    import s3fs

    fs, draw = s3fs.S3FileSystem(), np.random.default_rng(0)
    fs.mkdir("rows")
    for i in range(FILES):
        x = draw.normal(size=(ROWS, 64)).astype(np.float32)
        table = pa.table({"x": pa.FixedSizeListArray.from_arrays(pa.array(x.reshape(-1)), 64), "y": np.arange(ROWS)})
        file = io.BytesIO()
        pq.write_table(table, file, row_group_size=ROWS // 4)
        fs.pipe_file(f"rows/parquet/{i:02}.parquet", file.getvalue())
        file = io.BytesIO()
        with tarfile.open(fileobj=file, mode="w") as tar:
            for j, row in enumerate(x):
                data = io.BytesIO()
                np.save(data, row)
                member = tarfile.TarInfo(f"{j:06}.npy")
                member.size = len(data.getvalue())
                tar.addfile(member, io.BytesIO(data.getvalue()))
        fs.pipe_file(f"rows/tar/{i:02}.tar", file.getvalue())


class _Store:
    """moto's S3 server on a free port, in threads of this process."""

    def __init__(self, pause_s: float) -> None:
        from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
        from werkzeug.serving import make_server

        self.pause_s, answer = pause_s, DomainDispatcherApplication(create_backend_app)

        def paused(environment: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
            time.sleep(self.pause_s)
            return answer(environment, start)

        self._server = make_server("127.0.0.1", 0, paused, threaded=True)
        self.url = f"http://127.0.0.1:{self._server.port}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join(10)


if __name__ == "__main__":
    import logging

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    main()
