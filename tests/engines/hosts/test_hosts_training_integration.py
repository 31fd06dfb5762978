"""train() and predict() over two "hosts" of one machine: what another way of travelling could change."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from joined_run import Run, joined_by
from served_training import leases, task
from torch import Tensor, nn

import manyhands as mh
import plain
from manyhands.engines.cores import usable_cores
from manyhands.engines.driver.elastic_driver import ElasticDriver
from manyhands.engines.hosts.engine import Hosts
from manyhands.engines.local.engine import Local

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("credentials")]
TWO: dict[str, Any] = {"workers": 2, "threads_per_worker": 1}


def train(given: mh.Task, strategy: str, *, tls: bool = True, **options: Any) -> mh.Run:
    """One worker here, and one that joins."""
    run = Run(Hosts(local_workers=1, tls=tls), joined_by(1, tls=tls))
    fields = {"engine": run.engine, "strategy": strategy, **TWO, **options}
    return run.during(lambda: mh.train(given, **fields))


def test_workers_of_two_hosts_at_their_own_pace_train_every_row_once_and_it_can_be_replayed(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run = train(task(), "update-sharing", run_dir=folder)
    assert run.rows["total"] == sum(run.rows["workers"]) == 390
    assert sorted(leases(folder)) == [(e, b, p) for e in range(3) for b in range(11) for p in range(2)]
    assert sum(run.staleness.values()) > 0
    assert run.info["engine"] == "hosts"
    assert mh.replay(folder, task=task()).identical


def test_in_step_over_two_hosts_it_is_what_it_is_on_one_and_without_tls_the_summary_says_so(local: Local) -> None:
    here = mh.train(task(), engine=local, strategy="easgd:via=group", **TWO)
    cores = usable_cores()
    there = train(task(), "easgd:via=group", tls=False, threads_per_worker=cores)
    assert there.rows["total"] == 390
    assert (there.parameters - here.parameters).abs().max() < 1e-12
    output = " ".join(there.summary().split())
    assert "WITHOUT TLS on 127.0.0.1" in output
    assert "could read and change all messages, and the program too" in output
    assert f"2 workers with {2 * cores} threads on" in output  # the one that joined is on this very machine
    assert there.info["machines"][0]["cores"] == cores


def test_a_primary_is_killed_while_a_worker_of_another_host_pushes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of shard 0, once worker 1 has made some steps; it is then told where the new primary listens."""
    fields: dict[str, Any] = {"strategy": "downpour:bound=0", "survive": "copies=2"}
    wanted = mh.train(plain.task(epochs=20), engine="local", **TWO, **fields)
    killed: list[int] = []
    plain_call = ElasticDriver._inject_faults

    def inject(driver: ElasticDriver) -> None:
        plain_call(driver)
        primary = driver.copies.copy_of(0, "primary")
        if not killed and driver.monitor.processes[1].step >= 4 and driver.copies.copy_of(0, "backup") is not None:
            assert primary is not None
            killed.append(primary)
            driver._signal(primary, signal.SIGKILL)

    monkeypatch.setattr(ElasticDriver, "_inject_faults", inject)
    result = train(plain.task(epochs=20), **fields)
    assert killed == [-1]
    assert torch.equal(result.parameters, wanted.parameters)
    assert result.rows == wanted.rows


# -- predictions, and shards of data ---------------------------------------------------------------------------------------


ROWS, BLOCKS = 400, 8


def test_predictions_of_two_hosts_are_one_processes() -> None:
    """Rows come over the connection of the other host's agent, in order."""
    x, model = plain.rows(203)[0], plain.mlp().eval()
    with torch.no_grad():
        wanted = torch.cat([model(batch) for batch in x.split(8)])
    run = Run(Hosts(local_workers=1), joined_by(1))
    data = {"x": x, "id": [f"row {i}" for i in range(203)]}
    options: dict[str, Any] = {"keep": ("id",), "workers": 2, "engine": run.engine, "batch_size": 8}
    found = run.during(lambda: mh.predict(model, data, function=lambda m, b: m(b["x"]), **options))
    assert torch.equal(found["prediction"], wanted)
    assert list(found["id"]) == data["id"]


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


def test_the_workers_of_a_host_map_one_copy_of_shards_and_decode_each_block_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CASE: shuffle=True. A host is a folder for the cache here, since both are one machine."""
    monkeypatch.setenv("MANYHANDS_CACHE", str(tmp_path / "here"))
    pq.write_table(pa.table({"x": range(ROWS)}), tmp_path / "a.parquet", row_group_size=ROWS // BLOCKS)
    (tmp_path / "notes").mkdir()
    run = Run(Hosts(local_workers=2), joined_by(2, variables={"MANYHANDS_CACHE": str(tmp_path / "there")}))
    trained = run.during(
        lambda: mh.train(
            model=lambda: nn.Linear(1, 1).double(),
            loss=Watched(tmp_path / "notes"),
            optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=1e-9),
            train_data=mh.shards(tmp_path / "a.parquet", shuffle=True),
            engine=run.engine,
            workers=4,
            threads_per_worker=1,
            batch_size=16,
            seed=3,
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
