"""Other frameworks' clusters on real processes: torch.distributed, roles that never return, errors, kills."""

import logging
import os
import re
import signal
import socket
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from driver_script import wait_until

from manyhands.engines.cluster import Cluster
from manyhands.engines.local.engine import Local
from manyhands.errors import BadInput, WorkerFailed


def forever() -> None:
    """Longer than a test may take: who is not ended fails it."""
    threading.Event().wait(1000)


def listening(address: str) -> socket.socket:
    """As a framework listens at a process's own address."""
    host, _, port = address.rpartition(":")
    return socket.create_server((host, int(port)))


def ddp(cluster: Cluster, rows: int) -> tuple[int, float, list[float]]:
    """A plain DDP program: its gradient is that of all rows."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1, bias=False))
    own = torch.arange(2.0 * rows).view(rows, 2)[dist.get_rank() :: dist.get_world_size()]
    model(own).mean().backward()
    total = torch.tensor(float(dist.get_rank() + 1))
    dist.all_reduce(total)
    found = dist.get_rank(), float(total), model.module.weight.grad[0].tolist()
    del model  # before its group: torch's destructors hang now and then otherwise, see docs/clusters.md
    dist.destroy_process_group()
    return found


def test_a_ddp_program_runs_unchanged(local: Local) -> None:
    found = local.run(ddp, 4, workers=1, roles={"chief": 1})
    mean = torch.arange(8.0).view(4, 2).mean(0).tolist()
    assert found == {"chief": [(0, 3.0, mean)], "worker": [(1, 3.0, mean)]}


@pytest.mark.slow
def test_who_serves_for_ever_is_ended_and_no_port_is_left(local: Local, tmp_path: Path) -> None:
    def program(cluster: Cluster) -> Any:
        with listening(cluster.address):
            (tmp_path / cluster.role).write_text(str(os.getpid()))
            while cluster.role == "worker" and len(list(tmp_path.iterdir())) < 3:
                time.sleep(0.01)
            if cluster.role != "worker":
                forever()
        return dict(cluster.addresses)

    found = local.run(program, workers=1, roles={"ps": 1, "evaluator": 1})
    assert (found["ps"], found["evaluator"]) == ([None], [None])
    (addresses,) = found["worker"]
    assert [len(addresses[role]) for role in ("worker", "ps", "evaluator")] == [1, 1, 1]
    for address in (address for held in addresses.values() for address in held):
        listening(address).close()
    assert not any(Path("/proc", path.read_text()).exists() for path in tmp_path.iterdir())


def raises() -> None:
    raise KeyError("of the user")


def dies() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_what_ends_one_ends_all_under_its_roles_name(local: Local) -> None:
    """Also one for whose return nobody waits."""
    raised = r"failed in phase user.*KeyError: 'of the user'\n\nTraceback"
    for end, role, index, words in ((raises, "worker", 1, raised), (dies, "evaluator", 0, "was killed by signal 9")):

        def program(cluster: Cluster, end: Callable[[], None] = end, place: Any = (role, index)) -> None:
            if (cluster.role, cluster.index) == place:
                end()
            forever()

        with pytest.raises(WorkerFailed, match=rf"^{role} {index} on \S+ {words}"):
            local.run(program, workers=2, roles={"chief": 1, "evaluator": 1})


def test_bad_input_says_whose_it_is(local: Local) -> None:
    def program(cluster: Cluster) -> None:
        if cluster.role == "ps":
            raise BadInput("give another folder")
        forever()

    with pytest.raises(BadInput, match="^give another folder") as raised:
        local.run(program, workers=1, roles={"ps": 1})
    assert raised.value.__notes__[0].startswith("raised by ps 0 on ")


@pytest.mark.slow
def test_tensorboard_beside_the_chief(local: Local, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Alone, as long as the run takes, at the address that is told."""
    pytest.importorskip("tensorboard")

    def boards() -> list[int]:
        wanted = [str(tmp_path / "logs"), "tensorboard.main"]
        lines = {path.parent.name: path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline")}
        return [int(pid) for pid, line in lines.items() if all(word.encode() in line for word in wanted)]

    def program(cluster: Cluster) -> tuple[int, int]:
        wait_until((url := tmp_path / "url").exists, 60)
        with urllib.request.urlopen(url.read_text(), timeout=30) as page:
            seen = len(boards()), page.status
        (tmp_path / f"seen {cluster.index}").touch()
        wait_until(lambda: len(list(tmp_path.glob("seen *"))) == 2, 60)  # it ends with the chief
        return seen

    class Heard(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if found := re.fullmatch(r"TensorBoard: (http://127\.0\.0\.1:\d+/)", record.getMessage()):
                (tmp_path / "part").write_text(found[1])
                (tmp_path / "part").rename(tmp_path / "url")

    logger, heard = logging.getLogger("manyhands"), Heard()
    logger.addHandler(heard)
    try:
        with caplog.at_level(logging.WARNING, "manyhands"):
            found = local.run(program, workers=2, tensorboard=str(tmp_path / "logs"))
    finally:
        logger.removeHandler(heard)
    assert found["worker"] == [(1, 200)] * 2
    assert boards() == []
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen((tmp_path / "url").read_text(), timeout=30)
