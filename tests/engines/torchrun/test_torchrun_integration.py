"""Workers that a launcher started: on one host, and on two of one machine. Each launch answers what several tests ask."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from driver_script import wait_until

import manyhands as mh
import plain
from manyhands.engines.local.engine import Local
from manyhands.own_loop.launch import launch
from manyhands.transport.credentials import Credentials

pytestmark = pytest.mark.slow
TESTS = Path(__file__).resolve().parents[2]

PROLOGUE = """
import hashlib, json, os, signal, sys
from pathlib import Path
import numpy as np
import torch
import manyhands as mh
import plain
from manyhands.engines.torchrun import engine
from manyhands.kernels import Factors

rank, host = int(os.environ["RANK"]), os.environ["ON_HOST"]
engine.host_identity = lambda: host  # two "hosts" on one machine

def train(strategy=None):
    torch.manual_seed(0)
    model = plain.mlp().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x, y = plain.rows(39)
    data = torch.utils.data.TensorDataset(x.double(), y, torch.arange(39))
    loader = torch.utils.data.DataLoader(data, batch_size=12, shuffle=True)
    model, optimizer, loader = mh.prepare(model, optimizer, loader, strategy=strategy)
    rows = []
    for _ in range(2):
        for a, b, numbers in loader:
            optimizer.zero_grad()
            plain.cross_entropy(model, (a, b)).backward()
            optimizer.step()
            rows += numbers.tolist()
    server = mh.worker().server
    return {"rows": rows, "parameters": plain.flat(model).tolist(), "shards": 0 if server is None else server.shards}

def launched(strategy):
    return mh.launch(train, strategy=strategy)[rank]

def tables(strategy, **options):
    random = np.random.default_rng(0)
    users, items = random.integers(0, 50, 2000), random.integers(0, 40, 2000)
    data = {"users": users, "items": items, "ratings": random.normal(size=2000) + users % 3}
    run = mh.train(kernel=Factors(users=50, items=40, rank=4), rate=0.1, train_data=data, validation_data=data,
                   batch_size=200, epochs=2, strategy=strategy, **options)
    tables = b"".join(table.tobytes() for table in run.model.tables().values())
    return [hashlib.sha256(tables).hexdigest(), run.metrics, run.rows["total"]]
"""


class Ranks:
    """Processes as a launcher starts them."""

    def __init__(self, folder: Path, text: str, hosts: list[str], **environment: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        (folder / "program.py").write_text(PROLOGUE + textwrap.dedent(text))
        self.folder, self.processes = folder, []
        for rank, host in enumerate(hosts):
            place = {
                "RANK": rank,
                "WORLD_SIZE": len(hosts),
                "LOCAL_RANK": hosts[:rank].count(host),
                "LOCAL_WORLD_SIZE": hosts.count(host),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
                "ON_HOST": host,
                **surroundings(folder),
            }
            self.processes.append(
                subprocess.Popen(
                    [sys.executable, "program.py"],
                    cwd=folder,
                    env={**os.environ, **{name: str(value) for name, value in place.items()}, **environment},
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            )

    def found(self) -> list[dict[str, Any]]:
        """What each rank wrote, once all have ended well."""
        for process, output in [(process, process.communicate(timeout=110)[0]) for process in self.processes]:
            assert process.returncode == 0, output
        return [json.loads((self.folder / f"{rank}.json").read_text()) for rank in range(len(self.processes))]


def surroundings(folder: Path) -> dict[str, str]:
    return {"PYTHONPATH": os.pathsep.join([str(TESTS.parent / "src"), str(TESTS)]), "TMPDIR": str(folder)}


def torchrun(folder: Path, text: str) -> subprocess.CompletedProcess[str]:
    (folder / "program.py").write_text(PROLOGUE + textwrap.dedent(text))
    return subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", "program.py"],
        cwd=folder,
        env={**os.environ, **surroundings(folder), "ON_HOST": "alpha"},
        capture_output=True,
        text=True,
        timeout=110,
    )


def shards_of(folder: Path) -> set[int]:
    """The processes of shards that run now, of workers that were started in this folder."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if b"shard_process" in path.read_bytes() and str(folder) in (path.parent / "environ").read_text():
                found.add(int(path.parent.name))
        except OSError:  # it ended meanwhile
            continue
    return found


def check_rows(found: list[dict[str, Any]]) -> None:
    """Each row once in each of two epochs, and all ranks have the same parameters."""
    assert sorted(row for one in found for row in one["rows"]) == sorted([*range(39)] * 2)
    assert all(one["parameters"] == found[0]["parameters"] for one in found)


def scope() -> dict[str, Any]:
    """What the programs define, for workers that another engine starts."""
    found: dict[str, Any] = {"__name__": "program"}
    ours = PROLOGUE[: PROLOGUE.index("rank, host =")] + PROLOGUE[PROLOGUE.index("def train(") :]
    exec(ours, found)
    return found


@pytest.fixture(scope="module")
def credentials(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("credentials") / "run.pem"
    Credentials.create().save(path)
    return str(path)


# -- one host, started by torchrun -------------------------------------------------------------------------------------

ONE_HOST = """
from manyhands.engines import engine_of
from manyhands.engines.base import LaunchSpec, Observer
from manyhands.worker import current

class Record(Observer):
    def __init__(self):
        self.seen = []
    def event(self, event):
        self.seen.append((event.rank, event.step))

def program(worker):
    assert current() is worker
    tensor = torch.full((5,), float(worker.rank))
    total = worker.group.mean_(tensor, weight=2.0)
    worker.emit("step", step=10 + worker.rank)
    worker.driver.collect(worker.group)
    further = worker.make_group([0, 1])
    assert further is not worker.group and further.all_gather_json(worker.rank) == [0, 1]
    further.close()
    return [type(worker.group).__name__, worker.rank, worker.size, tensor.tolist(), total.weight, worker.threads]

def launches():
    record, engine = Record(), engine_of("auto")
    plan = LaunchSpec(workers=engine.default_workers(), observer=record, threads_per_worker=1)
    values = engine.launch(program, plan)
    return [values, sorted(record.seen), torch.distributed.is_initialized()]

def pushes():
    server, center = mh.worker().server, torch.zeros(3)
    server.initialize(center)
    server.activate()
    server.push(torch.full((3,), float(mh.worker().rank + 1)))
    server.deactivate()
    mh.worker().group.barrier()
    server.center(center)
    return center.tolist()

found = {"launches": [launches()]}
torch.distributed.init_process_group("gloo")
found["launches"].append(launches())
torch.distributed.destroy_process_group()
found["hogwild"] = launched("hogwild")
found["pushes"] = mh.launch(pushes, servers=1)[rank]
found["tables"] = {strategy: tables(strategy) for strategy in ("rotate:blocks=4", "local-sgd:period=3", "hogwild")}
found["downpour"] = train("downpour")
Path(f"{rank}.json").write_text(json.dumps(found))
"""


@pytest.fixture(scope="module")
def on_one_host(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("one_host")
    done = torchrun(folder, ONE_HOST)
    assert done.returncode == 0, done.stderr
    wait_until(lambda: not shards_of(folder))
    assert not list(folder.glob("manyhands*"))
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)]


def test_workers_of_one_host_share_memory(on_one_host: list[dict[str, Any]]) -> None:
    """Without a process group, and with one that is there already, which stays."""
    for rank, found in enumerate(on_one_host):
        for own_group, (values, seen, initialized) in enumerate(found["launches"]):
            assert values[rank] == ["SharedMemoryGroup", rank, 2, [0.5] * 5, 4.0, 1]
            assert values[1 - rank] is None
            assert seen == ([[0, 10], [1, 11]] if rank == 0 else [])
            assert initialized == bool(own_group)


def test_a_server_and_leases_on_one_host(on_one_host: list[dict[str, Any]]) -> None:
    for strategy, shards in (("downpour", 1), ("hogwild", 0)):
        found = [one[strategy] for one in on_one_host]
        check_rows(found)
        assert [one["shards"] for one in found] == [shards] * 2
    assert [one["pushes"] for one in on_one_host] == [[3.0] * 3] * 2


def test_every_rank_gets_the_tables_of_engine_local(on_one_host: list[dict[str, Any]]) -> None:
    first, second = (one["tables"] for one in on_one_host)
    assert first == second
    assert all(total == 4000 for _, _, total in first.values())
    assert scope()["tables"]("rotate:blocks=4", engine="local", workers=2) == first["rotate:blocks=4"]


def test_an_error_ends_all_ranks_and_is_shown(tmp_path: Path) -> None:
    done = torchrun(
        tmp_path,
        """
        from manyhands.engines.base import LaunchSpec

        def program(worker):
            if worker.rank == 1:
                raise KeyError("weights")
            worker.group.barrier()

        engine.Torchrun().launch(program, LaunchSpec(workers=2, timeout_s=20))
        """,
    )
    assert done.returncode != 0
    assert "failed in phase start at step 0: KeyError: 'weights'" in done.stderr
    assert "PeerLost: worker 1 on" in done.stderr


# -- two hosts ---------------------------------------------------------------------------------------------------------

TWO_HOSTS = """
if __name__ == "__main__":
    found, credentials = {"refused": []}, os.environ.pop("MANYHANDS_CREDENTIALS")
    for strategy in ("downpour", "update-sharing", "hogwild"):
        try:
            launched(strategy)
        except mh.BadInput as error:
            found["refused"].append(f"{type(error).__name__}: {error}")
    os.environ["MANYHANDS_CREDENTIALS"] = credentials
    for strategy in ("easgd:bound=0,period=2", "quorum", "update-sharing", "gossip"):
        found[strategy] = launched(strategy)
    for epochs, more in ((1, {}), (2, {"resume": True})):
        run = mh.train(plain.task(epochs=epochs), strategy="downpour:bound=0", run_dir="run", **more)
    found["trained"] = {"rows": run.rows["total"], "parameters": plain.flat(run.model).tolist()}
    Path(f"{rank}.json").write_text(json.dumps(found))
"""


@pytest.fixture(scope="module")
def on_two_hosts(tmp_path_factory: pytest.TempPathFactory, credentials: str) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("two_hosts")
    found = Ranks(folder, TWO_HOSTS, ["alpha", "beta"], MANYHANDS_CREDENTIALS=credentials).found()
    wait_until(lambda: not shards_of(folder))
    return found


def close(one: Any, other: Any) -> None:
    one, other = (torch.as_tensor(value, dtype=torch.float64) for value in (one, other))
    torch.testing.assert_close(one, other, rtol=0, atol=1e-10)


@pytest.mark.parametrize(("strategy", "shards"), [("easgd:bound=0,period=2", 2), ("quorum", 1)])
def test_in_step_it_is_what_other_engines_train(
    local: Local, on_two_hosts: list[dict[str, Any]], strategy: str, shards: int
) -> None:
    found = [one[strategy] for one in on_two_hosts]
    check_rows(found)
    assert [one["shards"] for one in found] == [shards] * 2
    wanted = launch(scope()["train"], strategy, workers=2, strategy=strategy, engine=local)
    close(found[0]["parameters"], wanted[0]["parameters"])


def test_a_declared_task_is_trained_and_resumed(local: Local, on_two_hosts: list[dict[str, Any]]) -> None:
    first, second = (one["trained"] for one in on_two_hosts)
    assert first == second
    assert first["rows"] == 78
    close(first["parameters"], mh.train(plain.task(), strategy="downpour:bound=0", engine=local, workers=2).parameters)


def test_each_row_once_without_a_server(on_two_hosts: list[dict[str, Any]]) -> None:
    for strategy in ("update-sharing", "gossip"):
        found = [one[strategy] for one in on_two_hosts]
        check_rows(found)
        assert [one["shards"] for one in found] == [0, 0]


def test_what_two_hosts_cannot_do_is_refused_on_both(on_two_hosts: list[dict[str, Any]]) -> None:
    """Without credentials, and hogwild, which is for one machine."""
    for one in on_two_hosts:
        server, messages, hogwild = one["refused"]
        assert "BadInput: a parameter server (rule add) over 2 hosts needs credentials" in server
        assert "BadInput: an exchange of messages over 2 hosts needs credentials" in messages
        assert "MANYHANDS_CREDENTIALS is not set there" in server
        assert hogwild.startswith("Unsupported: ")
        assert "machine" in hogwild


PREPARED = """
if __name__ == "__main__":
    Path(f"{rank}.json").write_text(json.dumps(train("downpour:warmup=2")))
"""


def test_a_prepared_loop_has_its_server_on_two_hosts(tmp_path: Path, credentials: str) -> None:
    found = Ranks(tmp_path, PREPARED, ["alpha", "alpha", "beta"], MANYHANDS_CREDENTIALS=credentials).found()
    check_rows(found)
    assert [one["shards"] for one in found] == [2, 2, 2]
    wait_until(lambda: not shards_of(tmp_path))


KILLED = """
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
model, optimizer = mh.prepare(model, optimizer, strategy="downpour")
for step in range(10_000):
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    if step == 5 and rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_shard_ends_with_its_workers(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path, KILLED, ["alpha"] * 2)
    assert ranks.processes[0].wait(60) == -9
    for process in ranks.processes:
        process.communicate(timeout=60)
    wait_until(lambda: not shards_of(tmp_path))
