"""A parameter server and leases where a launcher started the workers: on one host, and on two."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import manyhands as mh
import plain
from manyhands.engines.local.engine import Local
from manyhands.own_loop.launch import launch
from manyhands.transport.credentials import Credentials

TESTS = Path(__file__).resolve().parents[2]

LOOP = """
    import json, os, sys
    from pathlib import Path
    import torch
    import manyhands as mh
    import plain
    from manyhands.engines.torchrun import engine

    rank, host = os.environ["RANK"], os.environ.get("ON_HOST", "alpha")
    engine.host_identity = lambda: host  # two "hosts" on one machine

    def train(strategy):
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
        return rows, plain.flat(model).tolist()

    if __name__ == "__main__":
        rows, parameters = train(sys.argv[1])
        worker = mh.worker()
        known = {"rows": rows, "parameters": parameters, "group": type(worker.group).__name__}
        known["shards"] = 0 if worker.server is None else worker.server.shards
        Path(f"{rank}.json").write_text(json.dumps(known))
"""


class Ranks:
    """Processes as a launcher starts them."""

    def __init__(self, folder: Path, text: str, *arguments: str, hosts: list[str], **environment: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        (folder / "program.py").write_text(textwrap.dedent(text))
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
                "PYTHONPATH": os.pathsep.join([str(TESTS.parent / "src"), str(TESTS)]),
                "TMPDIR": folder,
            }
            self.processes.append(
                subprocess.Popen(
                    [sys.executable, "program.py", *arguments],
                    cwd=folder,
                    env={**os.environ, **{name: str(value) for name, value in place.items()}, **environment},
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            )

    def end(self) -> list[str]:
        """What each printed."""
        return [process.communicate(timeout=90)[0] for process in self.processes]

    def found(self) -> list[dict[str, Any]]:
        """By rank, once all have ended well."""
        for process, output in zip(self.processes, self.end(), strict=True):
            assert process.returncode == 0, output
        return [json.loads((self.folder / f"{rank}.json").read_text()) for rank in range(len(self.processes))]


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


def all_end(folder: Path) -> bool:
    deadline = time.monotonic() + 10
    while (left := shards_of(folder)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not left


def rows_of(found: list[dict[str, Any]]) -> list[int]:
    return sorted(row for one in found for row in one["rows"])


@pytest.fixture
def credentials(tmp_path: Path) -> str:
    path = tmp_path / "run.pem"
    Credentials.create().save(path)
    return str(path)


def expected(local: Local, folder: Path, strategy: str) -> torch.Tensor:
    """The same loop on workers that an engine started."""
    space: dict[str, Any] = {"__name__": "program"}
    exec(textwrap.dedent(LOOP).replace('os.environ["RANK"]', '"0"'), space)
    found = launch(space["train"], strategy, workers=2, strategy=strategy, engine=local)
    return torch.tensor(found[0][1], dtype=torch.float64)


def test_each_row_once_at_own_pace(tmp_path: Path) -> None:
    found = Ranks(tmp_path, LOOP, "downpour", hosts=["alpha"] * 2).found()
    assert rows_of(found) == sorted([*range(39)] * 2)
    assert found[0]["parameters"] == found[1]["parameters"]
    assert [one["shards"] for one in found] == [1, 1]
    assert all_end(tmp_path)
    assert not list(tmp_path.glob("manyhands*"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy", ["downpour:bound=0", "easgd:bound=0,period=2", "quorum", "diloco:via=server,period=2,bound=0"]
)
@pytest.mark.parametrize("hosts", [["alpha", "alpha"], ["alpha", "beta"]])
def test_in_step_it_is_what_other_engines_train(
    local: Local, tmp_path: Path, credentials: str, strategy: str, hosts: list[str]
) -> None:
    found = Ranks(tmp_path, LOOP, strategy, hosts=hosts, MANYHANDS_CREDENTIALS=credentials).found()
    assert rows_of(found) == sorted([*range(39)] * 2)
    wanted = expected(local, tmp_path, strategy)
    for one in found:
        torch.testing.assert_close(torch.tensor(one["parameters"], dtype=torch.float64), wanted, rtol=0, atol=1e-10)
        assert one["shards"] == (1 if strategy == "quorum" else len(set(hosts)))


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["downpour:warmup=2", "easgd", "gossip", "dynsgd", "update-sharing"])
def test_each_row_once_on_two_hosts(tmp_path: Path, credentials: str, strategy: str) -> None:
    hosts = ["alpha", "alpha", "beta"]
    found = Ranks(tmp_path, LOOP, strategy, hosts=hosts, MANYHANDS_CREDENTIALS=credentials).found()
    assert rows_of(found) == sorted([*range(39)] * 2)
    for one in found:
        assert one["parameters"] == found[0]["parameters"]
        assert one["shards"] == (0 if strategy in ("gossip", "update-sharing") else 2)
    assert all_end(tmp_path)


@pytest.mark.slow
def test_hogwild_is_for_one_host(tmp_path: Path) -> None:
    found = Ranks(tmp_path, LOOP, "hogwild", hosts=["alpha"] * 2).found()
    assert rows_of(found) == sorted([*range(39)] * 2)
    (tmp_path / "two").mkdir()
    for output in Ranks(tmp_path / "two", LOOP, "hogwild", hosts=["alpha", "beta"]).end():
        assert "Unsupported: " in output
        assert "machine" in output


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "what"), [("downpour", "a parameter server (rule add)"), ("update-sharing", "an exchange of messages")]
)
def test_hosts_without_credentials_are_refused_and_nothing_is_started(tmp_path: Path, strategy: str, what: str) -> None:
    ranks = Ranks(tmp_path, LOOP, strategy, hosts=["alpha", "beta"])
    for output in ranks.end():
        assert f"BadInput: {what} over 2 hosts needs credentials" in output
        assert "MANYHANDS_CREDENTIALS is not set there" in output
    assert [process.returncode for process in ranks.processes] == [1, 1]
    assert not shards_of(tmp_path)


KILLED = """
    import os, signal
    import torch
    import manyhands as mh

    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model, optimizer = mh.prepare(model, optimizer, strategy="downpour")
    for step in range(10_000):
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 5 and os.environ["RANK"] == os.environ["VICTIM"]:
            os.kill(os.getpid(), signal.SIGKILL)
        if step > 5 and os.environ["RANK"] == "2":
            os.kill(os.getpid(), signal.SIGKILL)  # as torchrun does with the others
"""


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_shard_ends_with_its_workers(tmp_path: Path, victim: int) -> None:
    ranks = Ranks(tmp_path, KILLED, hosts=["alpha"] * 2, VICTIM=str(victim))
    assert ranks.processes[victim].wait(60) == -9
    if victim:
        ranks.processes[0].kill()
    ranks.processes[1].wait(60)
    ranks.end()
    assert all_end(tmp_path)


OF_ONES_OWN = """
    import os, sys
    from pathlib import Path
    import torch
    import manyhands as mh

    def pushes():
        server, center = mh.worker().server, torch.zeros(3)
        server.initialize(center)
        server.activate()
        server.push(torch.full((3,), float(mh.worker().rank + 1)))
        server.deactivate()
        mh.worker().group.barrier()
        server.center(center)
        return center.tolist()

    values = mh.launch(pushes, servers=1)
    Path(os.environ["RANK"] + ".json").write_text(repr(values[int(os.environ["RANK"])]))
"""


@pytest.mark.slow
def test_code_of_ones_own_has_a_server(tmp_path: Path) -> None:
    assert Ranks(tmp_path, OF_ONES_OWN, hosts=["alpha"] * 2).found() == [[3.0] * 3] * 2


TRAIN = """
    import json, os, sys
    from pathlib import Path
    import manyhands as mh
    import plain
    from manyhands.engines.torchrun import engine

    rank, host = os.environ["RANK"], os.environ["ON_HOST"]
    engine.host_identity = lambda: host

    if __name__ == "__main__":
        for epochs, more in ((1, {}), (2, {"resume": True})):
            run = mh.train(plain.task(epochs=epochs), strategy=sys.argv[1], run_dir="run", **more)
        known = {"rows": run.rows["total"], "workers": run.rows["workers"], "parameters": plain.flat(run.model).tolist()}
        Path(f"{rank}.json").write_text(json.dumps(known))
"""


@pytest.mark.slow
@pytest.mark.parametrize("hosts", [["alpha", "alpha"], ["alpha", "beta"]])
def test_a_declared_task_is_trained_and_resumed(tmp_path: Path, credentials: str, hosts: list[str]) -> None:
    found = Ranks(tmp_path, TRAIN, "downpour", hosts=hosts, MANYHANDS_CREDENTIALS=credentials).found()
    assert found[0]["rows"] == 78
    assert found[0]["parameters"] == found[1]["parameters"]
    assert all_end(tmp_path)


@pytest.mark.slow
def test_a_declared_task_in_step_is_what_other_engines_train(local: Local, tmp_path: Path, credentials: str) -> None:
    hosts = ["alpha", "beta"]
    found = Ranks(tmp_path, TRAIN, "downpour:bound=0", hosts=hosts, MANYHANDS_CREDENTIALS=credentials).found()
    run = mh.train(plain.task(epochs=2), strategy="downpour:bound=0", engine=local, workers=2)
    wanted = plain.flat(run.model)
    torch.testing.assert_close(torch.tensor(found[0]["parameters"], dtype=torch.float64), wanted, rtol=0, atol=1e-10)
