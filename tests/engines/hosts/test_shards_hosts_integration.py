"""Shards over two "hosts" of one machine: the workers of a host map one copy of the rows, and decode each block once."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from joined_run import Run, joined_by
from torch import Tensor, nn

import manyhands as mh
from manyhands.engines.hosts.engine import Hosts

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("credentials")]

ROWS, BLOCKS = 400, 8


class Watched:
    """A loss that notes, for each worker, its host's cache folder, the cache's files that it maps, and its rows."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._rows = folder, list[int]()

    def __call__(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        self._rows += batch["x"].tolist()
        cache = os.environ["MANYHANDS_CACHE"]
        maps = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if f" {cache}/" in line]
        found = {path: f"{device} {inode}" for _, _, _, device, inode, path, *_ in maps}
        told = {"host": Path(cache).name, "files": found, "rows": self._rows}
        (self._folder / f"{os.getpid()}.json").write_text(json.dumps(told))
        return model(batch["x"].double()[:, None]).square().mean()


def test_the_workers_of_a_host_map_one_copy_and_decode_each_block_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CASE: shuffle=True. A host is a folder for the cache here, since both are one machine."""
    monkeypatch.setenv("MANYHANDS_CACHE", str(tmp_path / "here"))
    pq.write_table(pa.table({"x": range(ROWS)}), tmp_path / "a.parquet", row_group_size=ROWS // BLOCKS)
    (tmp_path / "notes").mkdir()
    run = Run(Hosts(local_workers=2), joined_by(2, variables={"MANYHANDS_CACHE": str(tmp_path / "there")}))
    fields: dict[str, Any] = {"workers": 4, "threads_per_worker": 1, "batch_size": 16, "seed": 3}
    trained = run.during(
        lambda: mh.train(
            model=lambda: nn.Linear(1, 1).double(),
            loss=Watched(tmp_path / "notes"),
            optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=1e-9),
            train_data=mh.shards(tmp_path / "a.parquet", shuffle=True),
            engine=run.engine,
            **fields,
        )
    )
    notes = [json.loads(path.read_text()) for path in (tmp_path / "notes").iterdir()]
    assert sorted(one["host"] for one in notes) == ["here", "here", "there", "there"]
    inodes = {host: set[str]() for host in ("here", "there")}
    for host, found in inodes.items():
        first, second = (one["files"] for one in notes if one["host"] == host)
        assert first == second
        assert set(first) == {str(path) for path in (tmp_path / host).glob("*.arrow")}
        found |= set(first.values())
        assert len(found) == BLOCKS
    assert not inodes["here"] & inodes["there"]
    assert (trained.input["misses"], trained.input["hits"]) == (2 * BLOCKS, 2 * BLOCKS)
    assert sorted(row for one in notes for row in one["rows"]) == list(range(ROWS))
    assert trained.rows["total"] == ROWS
