"""Workers that a launcher started: by torchrun itself; and as it starts them, on one host, and on two of one machine.

Each launch answers what several tests ask.
"""

import hashlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from driver_script import wait_until
from host_process import HostProcess, Say
from torch.utils.data import DataLoader, TensorDataset

import manyhands as mh
import plain
from manyhands.engines.local.engine import Local
from manyhands.engines.torchrun import engine
from manyhands.kernels import Factors
from manyhands.own_loop.launch import launch
from manyhands.transport.credentials import Credentials

pytestmark = pytest.mark.slow
SOURCE = Path(__file__).resolve().parents[3] / "src"
Found = list[dict[str, Any]]


def free_port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


class Ranks:
    """Processes as a launcher starts them, each on the host of its name."""

    def __init__(self, program: Callable[[int], object], hosts: str, **variables: str) -> None:
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "WORLD_SIZE": str(len(hosts)), **variables}
        self.processes = [
            HostProcess(
                as_rank,
                program,
                host,
                variables={
                    **place,
                    "RANK": str(rank),
                    "LOCAL_RANK": str(hosts[:rank].count(host)),
                    "LOCAL_WORLD_SIZE": str(hosts.count(host)),
                },
            )
            for rank, host in enumerate(hosts)
        ]

    def found(self) -> Found:
        """What the program returned on each rank, once all, and their shards, have ended."""
        ended = [process.end(110) for process in self.processes]
        assert [code for code, _ in ended] == [0] * len(ended), ended
        wait_until(lambda: not any(process.processes() for process in self.processes))
        return [json.loads(said.splitlines()[-1]) for _, said in ended]

    def close(self) -> None:
        for process in self.processes:
            process.close()


def as_rank(say: Say, program: Callable[[int], object], host: str) -> None:
    engine.host_identity = lambda: host
    say(json.dumps(program(int(os.environ["RANK"]))))


@pytest.fixture(scope="module")
def ranks() -> Iterator[Callable[..., Ranks]]:
    started: list[Ranks] = []

    def start(program: Callable[[int], object], hosts: str, **variables: str) -> Ranks:
        started.append(Ranks(program, hosts, **variables))
        return started[-1]

    yield start
    for one in started:
        one.close()


@pytest.fixture(scope="module")
def credentials(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("credentials") / "run.pem"
    Credentials.create().save(path)
    return str(path)


def prepared(strategy: str | None = None) -> dict[str, Any]:
    """A loop of one's own on a prepared model."""
    torch.manual_seed(0)
    model: Any = plain.mlp()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.01)
    loader: Any = DataLoader(TensorDataset(*plain.rows(39), torch.arange(39)), batch_size=12, shuffle=True)
    model, optimizer, loader = mh.prepare(model, optimizer, loader, strategy=strategy)
    rows: list[int] = []
    for _ in range(2):
        for a, b, numbers in loader:
            optimizer.zero_grad()
            plain.cross_entropy(model, (a, b)).backward()
            optimizer.step()
            rows += numbers.tolist()
    worker = mh.worker()
    shards = worker.server.shards if worker is not None and worker.server is not None else 0
    return {"rows": rows, "parameters": plain.flat(model).tolist(), "shards": shards}


def launched(strategy: str, rank: int) -> dict[str, Any]:
    return launch(prepared, strategy=strategy)[rank]


def tables(strategy: str, **options: Any) -> list[Any]:
    random = np.random.default_rng(0)
    users, items = random.integers(0, 50, 2000), random.integers(0, 40, 2000)
    data = {"users": users, "items": items, "ratings": random.normal(size=2000) + users % 3}
    options |= {"train_data": data, "validation_data": data, "batch_size": 200, "epochs": 2}
    run = mh.train(kernel=Factors(users=50, items=40, rank=4), rate=0.1, strategy=strategy, **options)
    content = b"".join(table.tobytes() for table in run.model.tables().values())
    return [hashlib.sha256(content).hexdigest(), run.metrics, run.rows["total"]]


def check_rows(found: Found, shards: int) -> None:
    """Each row once in each of two epochs, and all ranks have the same parameters."""
    assert sorted(row for one in found for row in one["rows"]) == sorted([*range(39)] * 2)
    assert all(one["parameters"] == found[0]["parameters"] for one in found)
    assert [one["shards"] for one in found] == [shards] * len(found)


def close(one: Any, other: Any) -> None:
    one, other = (torch.as_tensor(value, dtype=torch.float64) for value in (one, other))
    torch.testing.assert_close(one, other, rtol=0, atol=1e-10)


# -- launchers themselves ---------------------------------------------------------------------------------------------------

PROGRAM = """
import json, os
from pathlib import Path
import torch
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

found = [launches()]
torch.distributed.init_process_group("gloo")
found.append(launches())
torch.distributed.destroy_process_group()
Path(os.environ["RANK"] + ".json").write_text(json.dumps(found))

def fails(worker):
    if worker.rank == 1:
        raise KeyError("weights")
    worker.group.barrier()

engine_of("auto").launch(fails, LaunchSpec(workers=2, timeout_s=20))
"""


def test_workers_of_one_host_share_memory_and_an_error_ends_all_ranks_and_is_shown(tmp_path: Path) -> None:
    """Without a process group, and with one that is there already, which stays."""
    (tmp_path / "program.py").write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", "program.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(SOURCE), "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=110,
    )
    for rank in range(2):
        assert (tmp_path / f"{rank}.json").exists(), done.stderr
        for own_group, (values, seen, initialized) in enumerate(json.loads((tmp_path / f"{rank}.json").read_text())):
            assert values[rank] == ["SharedMemoryGroup", rank, 2, [0.5] * 5, 4.0, 1]
            assert values[1 - rank] is None
            assert seen == ([[0, 10], [1, 11]] if rank == 0 else [])
            assert initialized == bool(own_group)
    assert done.returncode != 0
    assert "failed in phase start at step 0: KeyError: 'weights'" in done.stderr
    assert "PeerLost: worker 1 on" in done.stderr
    assert not list(tmp_path.glob("manyhands*"))


MPI_PROGRAM = """
import json
import torch
from manyhands.engines import engine_of
from manyhands.engines.base import LaunchSpec

def agree(worker):
    vector = torch.full((1000,), worker.rank + 1.0)
    worker.group.mean_(vector)
    return [worker.rank, worker.size, worker.local_rank, vector[0].item()]

engine = engine_of("auto")
values = engine.launch(agree, LaunchSpec(workers=engine.default_workers(), timeout_s=60))
print(json.dumps([engine.name, engine.own_rank(), values[engine.own_rank()]]), flush=True)
"""


@pytest.mark.nightly
def test_mpiruns_processes_are_one_run(tmp_path: Path) -> None:
    if not shutil.which("mpirun") or b"Open MPI" not in subprocess.check_output(["mpirun", "--version"]):
        pytest.skip("needs Open MPI's mpirun")
    script = tmp_path / "script.py"
    script.write_text(MPI_PROGRAM)
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    place = ["-x", "MASTER_ADDR=127.0.0.1", "-x", f"MASTER_PORT={free_port()}"]
    done = subprocess.run(
        ["mpirun", *root, "--oversubscribe", "-n", "2", *place, sys.executable, str(script)],
        capture_output=True,
        text=True,
        timeout=90,
        env={**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    output = sorted(json.loads(line) for line in done.stdout.splitlines() if line.startswith("["))
    assert output == [["torchrun", 0, [0, 2, 0, 1.5]], ["torchrun", 1, [1, 2, 1, 1.5]]]


# -- one host ----------------------------------------------------------------------------------------------------------


def on_one_host(rank: int) -> dict[str, Any]:
    strategies = ("rotate:blocks=4", "local-sgd:period=3", "hogwild")
    return {
        "hogwild": launched("hogwild", rank),
        "tables": {strategy: tables(strategy) for strategy in strategies},
        "downpour": prepared("downpour:bound=0"),
    }


def test_a_server_leases_and_tables_on_one_host(ranks: Callable[..., Ranks], local: Local) -> None:
    found = ranks(on_one_host, "aa").found()
    check_rows([one["hogwild"] for one in found], shards=0)
    check_rows([one["downpour"] for one in found], shards=1)
    wanted = launch(prepared, "downpour:bound=0", workers=2, strategy="downpour:bound=0", engine=local)
    close(found[0]["downpour"]["parameters"], wanted[0]["parameters"])
    first, second = (one["tables"] for one in found)
    assert first == second
    assert all(total == 4000 for _, _, total in first.values())
    assert tables("rotate:blocks=4", engine=local, workers=2) == first["rotate:blocks=4"]


def killed(rank: int) -> None:
    model: torch.nn.Module = torch.nn.Linear(3, 1)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.01)
    model, optimizer = mh.prepare(model, optimizer, strategy="downpour")
    for step in range(10_000):
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 5 and rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)


def test_a_shard_ends_with_its_workers(ranks: Callable[..., Ranks]) -> None:
    first, second = ranks(killed, "aa").processes
    assert first.end()[0] == -signal.SIGKILL
    assert second.end()[0]
    wait_until(lambda: not first.processes() and not second.processes())


# -- two hosts ---------------------------------------------------------------------------------------------------------


def on_two_hosts(rank: int) -> dict[str, Any]:
    found: dict[str, Any] = {"refused": []}
    credentials = os.environ.pop("MANYHANDS_CREDENTIALS")
    for strategy in ("downpour", "update-sharing", "hogwild"):
        try:
            launched(strategy, rank)
        except mh.BadInput as error:
            found["refused"].append(f"{type(error).__name__}: {error}")
    os.environ["MANYHANDS_CREDENTIALS"] = credentials
    for strategy in ("quorum", "update-sharing", "gossip"):
        found[strategy] = launched(strategy, rank)
    for epochs in (1, 2):
        run = mh.train(plain.task(epochs=epochs), strategy="downpour:bound=0", run_dir="run", resume=epochs == 2)
    found["trained"] = {"rows": run.rows["total"], "parameters": plain.flat(run.model).tolist()}
    found["downpour"] = prepared("downpour:warmup=2")
    return found


@pytest.fixture(scope="module")
def two_hosts(ranks: Callable[..., Ranks], tmp_path_factory: pytest.TempPathFactory, credentials: str) -> Found:
    """Of three ranks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("two_hosts"))
        started = ranks(on_two_hosts, "aab", MANYHANDS_CREDENTIALS=credentials)
    return started.found()


def test_in_step_it_is_what_other_engines_train(local: Local, two_hosts: Found) -> None:
    """In a loop of one's own; and a declared task, which is resumed."""
    found = [one["quorum"] for one in two_hosts]
    check_rows(found, shards=1)
    wanted = launch(prepared, "quorum", workers=3, strategy="quorum", engine=local)
    close(found[0]["parameters"], wanted[0]["parameters"])
    trained = [one["trained"] for one in two_hosts]
    assert trained == [trained[0]] * 3
    assert trained[0]["rows"] == 78
    of = mh.train(plain.task(), strategy="downpour:bound=0", engine=local, workers=3)
    close(trained[0]["parameters"], of.parameters)


def test_each_row_once(two_hosts: Found) -> None:
    """Without a server, and with one that has a shard on each host."""
    for strategy, shards in (("update-sharing", 0), ("gossip", 0), ("downpour", 2)):
        check_rows([one[strategy] for one in two_hosts], shards)


def test_what_two_hosts_cannot_do_is_refused_on_both(two_hosts: Found) -> None:
    """Without credentials, and hogwild, which is for one machine."""
    for one in two_hosts:
        server, messages, hogwild = one["refused"]
        assert "BadInput: a parameter server (rule add) over 2 hosts needs credentials" in server
        assert "BadInput: an exchange of messages over 2 hosts needs credentials" in messages
        assert "MANYHANDS_CREDENTIALS is not set there" in server
        assert hogwild.startswith("Unsupported: ")
        assert "machine" in hogwild
