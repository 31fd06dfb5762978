"""A run on two "hosts" of one machine: everything but the wire between them is real."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from driver_script import Script, wait_until
from joined_run import Joiner, Run, joined_by

from manyhands.engines.base import Engine, LaunchSpec, Observer
from manyhands.engines.hosts import roster
from manyhands.engines.hosts.engine import Hosts
from manyhands.engines.hosts.secret import Secret
from manyhands.errors import BadInput, WorkerFailed
from manyhands.events import Event
from manyhands.server.base import ServerSpec
from manyhands.testing.engine_suite import ENGINE_SUITE
from manyhands.transport.address import parse_address
from manyhands.transport.channel import ChannelClosed
from manyhands.transport.credentials import Credentials
from manyhands.transport.listener import connect

pytestmark = pytest.mark.usefixtures("credentials", "nothing_is_left")


def agree(worker: Any) -> dict[str, Any]:
    """Collectives of all kinds, and who this is."""
    vector = worker.group.allocate(1000, torch.float64)
    vector.fill_(worker.rank + 1.0)
    total = worker.group.mean_(vector, weight=worker.rank + 1.0, bits=1 << worker.rank)
    return {
        "rank": (worker.rank, worker.local_rank, worker.size),
        "mean": vector[:2].clone(),
        "total": (total.weight, total.bits),
        "all": worker.group.all_gather_json(worker.rank),
    }


@pytest.mark.slow
def test_two_workers_here_and_two_that_join() -> None:
    values = Run(Hosts(local_workers=2), joined_by(2)).launch(agree, LaunchSpec(workers=4, timeout_s=30))
    assert [value["rank"] for value in values] == [(0, 0, 4), (1, 1, 4), (2, 0, 4), (3, 1, 4)]
    for value in values:
        assert torch.allclose(value["mean"], torch.full((2,), 3.0, dtype=torch.float64))
        assert value["total"] == (10.0, 0b1111)
        assert value["all"] == [0, 1, 2, 3]


def test_one_worker_a_host_and_unauthenticated_peers_at_the_door(tmp_path: Path) -> None:
    """Wrong credentials, another version, too many workers: each is refused with its reason, and the run goes on."""
    reasons: list[str] = []

    def begin(address: str) -> list[Joiner]:
        place = parse_address(address)
        stranger = Secret(credentials=Credentials.create())
        own = Secret.load(tmp_path / "run.pem", tls=True)
        other = {**roster.hello(1), "versions": {**roster.versions(), "torch": "1.0"}}
        for secret, output in [(stranger, roster.hello(1)), (own, other), (own, roster.hello(3))]:
            with pytest.raises(ChannelClosed) as refused:
                connect(place, output, **secret.proof, peer="the driver", timeout_s=5)
            reasons.append(str(refused.value))
        return joined_by(1, 1)(address)

    run = Run(Hosts(local_workers=1), begin)
    values = run.launch(agree, LaunchSpec(workers=3, timeout_s=30))
    assert [value["rank"] for value in values] == [(0, 0, 3), (1, 0, 3), (2, 0, 3)]
    assert all(value["all"] == [0, 1, 2] for value in values)
    assert "need the same credentials" in reasons[0]
    assert "versions differ" in reasons[1]
    assert "torch 1.0" in reasons[1]
    assert "join with --workers 2" in reasons[2]
    assert [joiner.error for joiner in run.joined] == [None, None]
    assert run.output[-1].startswith("workers that are here: 3 of 3")


def serve(worker: Any) -> list[float]:
    """Every worker adds its rank + 1 to the center, in its own time."""
    center, server = torch.zeros(1000), worker.server
    server.initialize(center)
    server.activate()
    server.pull(center)
    server.push(torch.full_like(center, worker.rank + 1.0))
    server.tick()
    server.deactivate()
    worker.group.barrier()
    server.center(center)
    worker.group.barrier()
    server.close()
    return [center[0].item(), center[-1].item()]


@pytest.mark.slow
def test_workers_of_both_hosts_reach_every_shard_of_the_server() -> None:
    plan = LaunchSpec(workers=3, timeout_s=30, server=ServerSpec(rule="add"), servers=2)
    assert Run(Hosts(local_workers=1), joined_by(2)).launch(serve, plan) == [[6.0, 6.0]] * 3


class Joined(Engine):
    """Engine `hosts`, with a joiner for all but one of the workers: as the conformance suite wants it."""

    name = "hosts"

    def launch(self, program: Callable[[Any], Any], plan: LaunchSpec) -> list[Any]:
        return Run(Hosts(local_workers=1), joined_by(plan.workers - 1)).launch(program, plan)


@pytest.mark.slow
@pytest.mark.parametrize(("check", "workers"), [("group", 3), ("groups_of_some", 5), ("stopping", 2), ("bad_input", 2)])
def test_the_conformance_suite(check: str, workers: int) -> None:
    """The other checks are the tests of this file."""
    ENGINE_SUITE[check](Joined(), workers=workers)


class Listening(Observer):
    def __init__(self) -> None:
        self.events: list[Event] = []

    def event(self, event: Event) -> None:
        self.events.append(event)

    def answer(self, event: Event) -> dict[str, Any]:
        return {"heard": event.values["what"]}


def talk(worker: Any) -> Any:
    worker.emit("note", n=worker.rank)
    return worker.ask("question", what=worker.rank)["heard"]


@pytest.mark.slow
def test_without_tls_the_run_says_so_and_events_and_questions_pass() -> None:
    listening = Listening()
    run = Run(Hosts(local_workers=1, tls=False), joined_by(1, tls=False))
    assert run.launch(talk, LaunchSpec(workers=2, timeout_s=30, observer=listening)) == [0, 1]
    assert sorted(event.values["n"] for event in listening.events if event.type == "note") == [0, 1]
    (warning,) = [event.values["message"] for event in listening.events if event.type == "warning"]
    assert "WITHOUT TLS" in warning


def fail_on_1(worker: Any) -> None:
    if worker.rank == 1:
        raise KeyError("lost")
    worker.group.barrier()


WAITING = """
import signal
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup has it ignored
from manyhands.engines.base import LaunchSpec
from manyhands.engines.hosts.engine import Hosts

engine = Hosts(local_workers=1, wait_s=60)
engine.announcer.say = lambda text: print("waiting", flush=True)
engine.launch(print, LaunchSpec(workers=2))
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGHUP])
def test_no_key_outlives_a_driver_that_is_killed_while_it_waits(
    number: int, script: Callable[..., Script], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "tmp"
    own.mkdir()
    monkeypatch.setenv("TMPDIR", str(own))
    monkeypatch.delenv("MANYHANDS_CREDENTIALS")
    driver = script(WAITING)
    assert driver.line() == "waiting"
    (key,) = own.glob("*/*.pem")
    assert key.parent.stat().st_mode & 0o777 == 0o700
    driver.process.send_signal(number)
    wait_until(lambda: not list(own.iterdir()))
    wait_until(lambda: not driver.processes())


@pytest.mark.slow
def test_an_error_there_is_raised_here() -> None:
    run = Run(Hosts(local_workers=1), joined_by(1))
    with pytest.raises(WorkerFailed, match=r"worker 1 on .*KeyError: 'lost'") as failed:
        run.launch(fail_on_1, LaunchSpec(workers=2, timeout_s=30))
    assert (failed.value.rank, failed.value.error) == (1, "KeyError")
    assert "fail_on_1" in failed.value.detail
    assert "failed: worker 1 on" in str(run.joined[0].error)


class Odd:
    pass


@pytest.mark.slow
def test_a_value_that_does_not_travel() -> None:
    with pytest.raises(
        BadInput, match="the value that worker 1 returned is a Odd, and workers on another host cannot return that"
    ):
        Run(Hosts(local_workers=1), joined_by(1)).launch(lambda worker: Odd(), LaunchSpec(workers=2, timeout_s=30))
