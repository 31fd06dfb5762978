"""A run on two "hosts" of one machine: everything but the wire between them is real."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from driver_script import Script, wait_until
from joined_run import Joiner, Run, joined_by, one_leaves
from whole_program import Listening, check_everything, everything

from manyhands.engines.base import LaunchSpec
from manyhands.engines.hosts import roster
from manyhands.engines.hosts.engine import Hosts
from manyhands.engines.hosts.secret import Secret
from manyhands.server.base import ServerSpec
from manyhands.transport.address import parse_address
from manyhands.transport.channel import ChannelClosed
from manyhands.transport.credentials import Credentials
from manyhands.transport.listener import connect

pytestmark = pytest.mark.slow


@dataclass
class Ran:
    run: Run
    listening: Listening
    values: list[dict[str, Any]] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """Two workers here and two that join, over TLS, with a server of two shards; before them come three who may not join."""
    path = tmp_path_factory.mktemp("hosts") / "run.pem"

    def begin(address: str) -> list[Joiner]:
        place = parse_address(address)
        stranger = Secret(credentials=Credentials.create())
        own = Secret.load(path, tls=True)
        other = {**roster.hello(1), "versions": {**roster.versions(), "torch": "1.0"}}
        for secret, output in [(stranger, roster.hello(1)), (own, other), (own, roster.hello(3))]:
            with pytest.raises(ChannelClosed) as refused:
                connect(place, output, **secret.proof, peer="the driver", timeout_s=5)
            ran.reasons.append(str(refused.value))
        return joined_by(2)(address)

    ran = Ran(Run(Hosts(local_workers=2), begin), Listening(4))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MANYHANDS_CREDENTIALS", str(path))
        spec = LaunchSpec(workers=4, server=ServerSpec(rule="add"), servers=2, threads_per_worker=1, timeout_s=30)
        ran.values = ran.run.launch(everything, replace(spec, observer=ran.listening))
    return ran


def test_two_workers_here_and_two_that_join_work_as_one_group_with_a_server(ran: Ran) -> None:
    assert [value["place"] for value in ran.values] == [(0, 0, 4, 1), (1, 1, 4, 1), (2, 0, 4, 1), (3, 1, 4, 1)]
    check_everything(ran.values, ran.listening)
    assert [joiner.error for joiner in ran.run.joined] == [None]
    assert ran.run.output[-1].startswith("workers that are here: 4 of 4")


def test_unauthenticated_peers_at_the_door_are_refused_and_the_run_goes_on(ran: Ran) -> None:
    """Wrong credentials, another version, too many workers: each hears its reason."""
    stranger, other, many = ran.reasons
    assert "need the same credentials" in stranger
    assert "versions differ" in other
    assert "torch 1.0" in other
    assert "join with --workers 2" in many


@pytest.mark.usefixtures("credentials", "nothing_is_left")
def test_a_worker_that_finishes_first_leaves_its_peers_at_work() -> None:
    """It leads its host, which is linked with the first one by a ring."""
    run = Run(Hosts(local_workers=1), joined_by(2))
    assert run.launch(one_leaves, LaunchSpec(workers=3, timeout_s=30)) == [0.0, 1.0, 5.0]


@pytest.mark.usefixtures("credentials", "nothing_is_left")
def test_roles_of_a_joined_host_have_its_own_addresses_and_give_rows_back() -> None:
    """Two hosts, both this one, by two of its addresses; the second joins with the command itself."""
    joined: list[subprocess.Popen[bytes]] = []

    def begin(address: str) -> list[Joiner]:
        command = "from manyhands.cli.commands import main; main()"
        options = ["join", address, "--workers", "2", "--listen", "127.0.0.2"]
        joined.append(subprocess.Popen([sys.executable, "-c", command, *options], stderr=subprocess.DEVNULL))
        return []

    def program(cluster: Any) -> Any:  # by value: the joined host does not have this file
        if cluster.role == "ps":
            threading.Event().wait(100)
        for rows in cluster.rows(7, shuffle=False):
            cluster.emit(rows * 2)
        hosts = [cluster.addresses[role][0].rpartition(":")[0] for role in ("worker", "ps")]
        return hosts, [os.environ[name] for name in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE")]

    run = Run(Hosts(local_workers=1), begin)
    try:
        found = run.during(lambda: run.engine.run(program, workers=2, roles={"ps": 1}, rows=np.arange(50.0)))
        assert np.array_equal(found.pop("rows"), np.arange(50.0) * 2)
        hosts = ["127.0.0.1", "127.0.0.2"]
        assert found == {"worker": [(hosts, ["0", "0", "1"]), (hosts, ["1", "0", "1"])], "ps": [None]}
        assert joined[0].wait(30) == 0
    finally:
        for process in joined:
            process.kill()
            process.wait()


WAITING = """
from manyhands.engines.base import LaunchSpec
from manyhands.engines.hosts.engine import Hosts

engine = Hosts(local_workers=1, wait_s=60)
engine.announcer.say = lambda text: print("waiting", flush=True)
engine.launch(print, LaunchSpec(workers=2))
"""


def test_no_key_outlives_a_driver_that_is_killed_while_it_waits(
    script: Callable[..., Script], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "tmp"
    own.mkdir()
    monkeypatch.setenv("TMPDIR", str(own))
    monkeypatch.delenv("MANYHANDS_CREDENTIALS", raising=False)
    driver = script(WAITING)
    assert driver.line() == "waiting"
    (key,) = own.glob("*/*.pem")
    assert key.parent.stat().st_mode & 0o777 == 0o700
    driver.process.send_signal(signal.SIGKILL)
    wait_until(lambda: not list(own.iterdir()))
    wait_until(lambda: not driver.processes())
