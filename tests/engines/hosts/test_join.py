"""A joined host: the driver's view of it at one end of the line, its agent at the other, and processes that only take notes;
or a test at either end, for what neither of them would say."""

import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from driver_script import wait_until
from scripted_hosts import Scripted
from typing_extensions import override

from manyhands.engines.hosts import join as join_module
from manyhands.engines.hosts.join import Agent, Join, join
from manyhands.engines.hosts.message_channel import MessageChannel
from manyhands.engines.hosts.processes import RemoteProcesses
from manyhands.engines.hosts.secret import Secret
from manyhands.engines.local.serialization import deserialize, serialize
from manyhands.errors import BadInput, ManyhandsError, Preempted, WorkerFailed
from manyhands.transport.channel import Channel
from refusals import all_refused

Body = dict[str, Any]
SECRET = Secret(token=b"t" * 32)
STARTED = {"type": "started"}


class Crew(Scripted):
    """Instead of LocalProcesses: who listens hears that there is something to receive."""

    def __init__(self, spawner: Any, process_indices: list[int], timeout_s: float, host: str, network: Body) -> None:
        super().__init__(host, process_indices)
        self.network, self.pages = network, {2: ("validation", 7)}
        self.read, self.write = os.pipe()

    @override
    def start(self, shared: Body, program: int) -> None:
        super().start(shared, program)
        self.program = deserialize(program, mapped=True)

    @override
    def filenos(self) -> list[int]:
        return [self.read]

    @override
    def says(self, process_index: int, type: str, **body: Any) -> None:
        super().says(process_index, type, **body)
        os.write(self.write, b".")

    @override
    def start_worker(self, worker_id: int, faults: str) -> None:
        self.process_indices.append(worker_id)
        self.did.append((worker_id, faults))


class Line:
    """The driver's view of workers 2 and 3 on beta; `far` is the other end of its channel."""

    def __init__(self) -> None:
        here, self.far = (Channel(sock, peer="the driver", timeout_s=5.0) for sock in socket.socketpair())
        self.post = MessageChannel(here)
        self.driver = RemoteProcesses(self.post, "beta")
        self.driver.assign([2, 3], "beta", {"hosts": [[0, 1], [2, 3]], "names": ["alpha", "beta"]})

    def start(self, **shared: Any) -> None:
        program = serialize({"data": torch.arange(50_000)}, "the program")
        own = {"path": ["/here"], "folder": "/here", "environment": {"HOME": "/root"}}
        self.driver.start({"size": 4, "timeout_s": 9.0, "threads": None, **own, **shared}, program)
        os.close(program)

    def received(self, count: int) -> list[tuple[int, Body]]:
        came: list[tuple[int, Body]] = []

        def enough() -> bool:
            came.extend(self.driver.receive())
            return len(came) >= count

        wait_until(enough, 5)
        return came


class Joined(Line):
    """With an agent at the other end."""

    def __init__(self) -> None:
        super().__init__()
        self.output: list[str] = []
        self.error: BaseException | None = None
        own = {"MANYHANDS_CACHE": "/here", "MANYHANDS_STRATEGY": "sync"}
        offer = Join(address="127.0.0.1:1", workers=2, listen="10.0.0.2", threads=3, variables=own)
        self.agent = Agent(offer, SECRET, None, self.output.append)  # type: ignore[arg-type]
        self.thread = threading.Thread(target=self._serve, args=(MessageChannel(self.far, self.agent.memory_for),))
        self.thread.start()

    def _serve(self, post: MessageChannel) -> None:
        try:
            self.agent.serve(post)
        except ManyhandsError as error:
            self.error = error

    def launch(self, **shared: Any) -> Crew:
        self.start(**shared)
        assert self.driver.stacks() == {2: "stack of 2", 3: "stack of 3"}
        assert self.driver.where() == {2: ("validation", 7)}
        crew = self.agent._processes
        assert isinstance(crew, Crew)
        return crew

    def ended(self) -> str:
        """The agent's error."""
        self.thread.join(5)
        assert not self.thread.is_alive()
        return str(self.error or "")


Joining = Callable[[], Joined]


@pytest.fixture
def joining(monkeypatch: pytest.MonkeyPatch) -> Iterator[Joining]:
    monkeypatch.setattr(join_module, "LocalProcesses", Crew)
    made: list[Joined] = []

    def join() -> Joined:
        made.append(Joined())
        return made[-1]

    yield join
    for one in made:
        one.post.close()
        one.thread.join(5)


@pytest.fixture
def joined(joining: Joining) -> Joined:
    return joining()


class WithAgent(Line):
    """A test in the agent's place."""

    def __init__(self) -> None:
        super().__init__()
        self.agent = MessageChannel(self.far)

    def bodies(self, count: int = 1) -> list[Body]:
        found: list[Body] = []
        while len(found) < count:
            found += [message.body for message in self.agent.wait(5.0)]
        return found

    def says(self, process_index: int, body: Any, tensors: list[torch.Tensor] | None = None) -> None:
        self.agent.send({"type": "from_process", "process_index": process_index, "body": body}, tensors or [])


@pytest.fixture
def line() -> Iterator[WithAgent]:
    made = WithAgent()
    yield made
    made.driver.leave("")
    made.agent.close()


# -- both ends ---------------------------------------------------------------------------------------------------------


def test_the_program_arrives_and_a_host_has_a_place_of_its_own(joined: Joined, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver's variables travel; its cache folder is for hosts that have none."""
    monkeypatch.setenv("MANYHANDS_CACHE", "/drivers")
    monkeypatch.setenv("MANYHANDS_STRATEGY", "easgd")
    crew = joined.launch()
    assert (crew.process_indices, crew.host) == ([2, 3], "beta")
    assert torch.equal(crew.program["data"], torch.arange(50_000))
    assert crew.shared["folder"] == crew.shared["path"][0] == os.getcwd()
    assert crew.shared["environment"] == {**os.environ, "MANYHANDS_CACHE": "/here"}
    assert crew.shared["threads"] == 3  # what this host offers, since the run does not say
    assert crew.network["hosts"] == [[0, 1], [2, 3]]
    assert crew.network["listen"] == "10.0.0.2"
    assert Secret.from_json(crew.network["secret"]) == SECRET
    joined.driver.leave("")
    assert joined.ended() == ""
    assert crew.did == ["start", "stacks", ("end", 0.0)]
    assert joined.output[-1] == "the run is done"


def test_orders_and_what_processes_say_go_both_ways(joined: Joined) -> None:
    """Also of a worker that is started later. Values and rows come with their tensors; each host's end is awaited."""
    crew, driver = joined.launch(), joined.driver
    driver.send(3, {"type": "answer", "value": 1})
    driver.signal(15)
    driver.signal(19, [3])
    driver.start_worker(5, "kill=5@step:5")
    driver.form(1, [(0,), (2, 5)], ["alpha", "beta"])
    beat = {"type": "beat", "phase": "compute", "step": 7, "idle_s": 0.0, "events": []}
    rows = {"type": "rows", "number": 4, "part": 0, "last": True, "parts": 0, "rows": 3}
    said: list[tuple[int, Body]] = [
        (2, beat),
        (2, {"type": "value", "value": {"a": torch.ones(2)}}),
        (2, {**rows, "data": bytearray(b"bytes")}),
        (2, {**rows, "data": bytearray(b"")}),
        (2, {"type": "exited", "status": 0, "phase": None, "step": None, "detail": ""}),
    ]
    for process_index, body in said:
        crew.says(process_index, **body)
    came = joined.received(5)
    assert came[0] == (2, beat)
    assert torch.equal(came[1][1]["value"]["a"], torch.ones(2))
    assert [bytes(body.pop("data")) for _, body in came[2:4]] == [b"bytes", b""]
    assert came[2:4] == [(2, rows)] * 2
    assert came[4][1]["type"] == "exited"
    driver.end(0.5)
    driver.end(0.5)  # idempotent
    assert crew.sent == [(3, {"type": "answer", "value": 1})]
    formed = ("form", 1, [[0], [2, 5]], ["alpha", "beta"])
    assert crew.did == ["start", "stacks", 15, (19, 3), (5, "kill=5@step:5"), formed, ("end", 0.5)]
    driver.leave("")
    assert joined.ended() == ""


def test_errors_of_workers_and_of_what_starts_them(joined: Joined, monkeypatch: pytest.MonkeyPatch) -> None:
    """A value that does not travel, or of too many bytes, is the worker's; a module that is not here is explained."""
    crew = joined.launch()
    crew.says(3, "value", value={1})
    ((_, body),) = joined.received(1)
    assert (body["type"], body["family"], body["rank"]) == ("error", "BadInput", 3)
    assert "returned is a set, and workers on another host cannot return that" in body["message"]
    monkeypatch.setattr("manyhands.engines.hosts.message_channel.MAX_TENSOR_BYTES", 1000)
    crew.says(2, "value", value=torch.ones(1000))
    ((_, body),) = joined.received(1)
    assert (body["type"], body["family"], body["rank"]) == ("error", "BadInput", 2)
    missing = {**body, "error": "ModuleNotFoundError", "phase": "start", "message": "No module named 'mine'"}
    crew.says(2, **missing)
    ((_, body),) = joined.received(1)
    assert body["message"].startswith("No module named 'mine' (this host needs it too")
    crew.error = WorkerFailed("the fork server was killed", rank=-1, host="beta", phase="start", step=0)
    with pytest.raises(WorkerFailed, match="the fork server was killed") as failed:
        joined.received(1)
    assert failed.value.host == "beta"
    joined.driver.leave("it failed")
    assert "failed: it failed" in joined.ended()


def test_a_driver_that_is_gone_ends_this_hosts_workers(joining: Joining) -> None:
    joined = joining()
    crew = joined.launch()
    joined.post.close()
    assert "is gone" in joined.ended()
    assert crew.did == ["start", "stacks", ("end", 0.0)]
    early = joining()
    early.post.close()
    assert "left before the run began" in early.ended()


def test_whoever_is_asked_to_end_ends_with_75(joining: Joining) -> None:
    """This host, before the run and in it; or another one of the run."""
    early, here = joining(), joining()
    early.agent._ask_to_end("preempted")
    early.ended()
    here.launch()
    assert not here.driver.preempted
    here.agent._ask_to_end("preempted")
    wait_until(lambda: here.received(0) == [] and here.driver.preempted)
    here.driver.leave("")
    here.ended()
    asked = [early, here]
    for error in ("", "asked to stop (preempted) while waiting for the other hosts"):
        asked.append(joining())
        asked[-1].launch()
        asked[-1].driver.leave(error, preempted=True)
        assert error in asked[-1].ended()
    for joined in asked:
        assert isinstance(joined.error, Preempted)
        assert joined.error.exit_code == 75


def test_a_group_that_cannot_be_ends_this_hosts_workers(joining: Joining) -> None:
    for hosts, names in (([[0], [2, 7]], ["a", "beta"]), ([[0], [2]], ["a"]), ([[2], [2]], ["beta", "a"])):
        joined = joining()
        joined.launch()
        joined.driver.form(1, hosts, names)
        assert "use the same version of manyhands on all hosts" in joined.ended(), (hosts, names)


# -- a test in the agent's place ---------------------------------------------------------------------------------------


def test_the_drivers_own_places_do_not_travel(line: WithAgent, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MANYHANDS_STRATEGY", "local-sgd")
    monkeypatch.setenv("MANYHANDS_CREDENTIALS", "/secret")
    line.start()
    (body,) = line.bodies()
    places = {"process_indices": [2, 3], "network": line.driver.network}
    assert body["shared"] == {"size": 4, "timeout_s": 9.0, "threads": None, **places}
    assert body["variables"]["MANYHANDS_STRATEGY"] == "local-sgd"
    assert "MANYHANDS_CREDENTIALS" not in body["variables"]


def test_workers_that_are_not_of_this_host_are_not_heard(line: WithAgent) -> None:
    line.says(0, {"type": "value", "value": 1})
    line.says(2, STARTED)
    assert line.received(1) == [(2, STARTED)]


def test_what_makes_no_sense_names_its_host(line: WithAgent) -> None:
    rows = {"type": "rows", "number": 4, "part": 0, "last": True, "parts": 0, "rows": 3}
    cases: list[tuple[Any, list[torch.Tensor]]] = [
        (None, []),
        ({"type": "beat"}, []),
        ({"type": "beat", "phase": [], "step": 0, "idle_s": 0, "events": []}, []),
        ({"type": "lost"}, []),
        ({"type": "value", "value": {"tensor": 0}}, []),
        (rows, []),
        (rows, [torch.ones(3)]),
        (rows, [torch.ones(3, dtype=torch.uint8)] * 2),
    ]
    for body, tensors in cases:
        line.says(3, body, tensors)
        words = "host beta sent a message that cannot be read: worker 3 sent "
        with pytest.raises(WorkerFailed, match=words) as raised:
            line.received(1)
        assert (raised.value.rank, raised.value.host) == (3, "beta"), body


def test_answers_that_are_none_and_what_comes_before_one_is_kept(line: WithAgent) -> None:
    line.agent.send({"type": "from_process"})
    line.agent.send({"type": "stacks", "stacks": [], "where": {"2": "x", "3": ["compute", -1]}})
    assert line.driver.stacks() == {2: "", 3: ""}
    assert line.driver.where() == {}
    line.says(2, STARTED)
    line.agent.send({"type": "stacks", "stacks": {"2": "here"}, "where": {"2": ["validation", 4], "9": ["x", 1]}})
    assert line.driver.stacks() == {2: "here", 3: ""}
    assert line.driver.where() == {2: ("validation", 4)}
    assert line.received(1) == [(2, STARTED)]
    line.agent.send({"type": "failed", "message": ["\x1b[2J"]})
    with pytest.raises(WorkerFailed, match="x1b") as raised:
        line.received(1)
    assert "\x1b" not in str(raised.value)


def test_the_end_waits_until_the_host_is_empty_unless_it_is_silent(
    line: WithAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = threading.Thread(target=line.driver.end, args=(0.5,))
    ended.start()
    assert line.bodies() == [{"type": "end", "grace_s": 0.5}]
    assert ended.is_alive()
    line.agent.send({"type": "idle"})
    ended.join(5)
    assert not ended.is_alive()
    assert line.driver.silent_s() < 5.0
    monkeypatch.setattr(line.post, "silent_s", lambda: 7.0)
    monkeypatch.setattr(line.post, "wait", lambda timeout_s: pytest.fail("it waits"))
    assert line.driver.stacks() == {2: "", 3: ""}


def test_a_host_that_is_gone_is_told_of_each_of_its_workers(line: WithAgent) -> None:
    line.says(2, {"type": "beat", "phase": "exchange", "step": 9, "idle_s": 0.0, "events": []})
    line.agent.close()
    lost = line.received(3)[1:]
    assert [(process_index, body["type"]) for process_index, body in lost] == [(2, "lost"), (3, "lost")]
    assert [(body["phase"], body["step"]) for _, body in lost] == [("exchange", 9), ("start", 0)]
    assert all(body["why"].startswith("its host is gone: ") for _, body in lost)
    assert line.driver.receive() == []
    line.driver.send(2, {"type": "stop", "reason": ""})  # passed over
    line.driver.end(0.0)


def test_a_host_that_is_abandoned_is_told_why_and_lost(line: WithAgent) -> None:
    assert line.driver.abandon("it makes no sense")
    assert line.bodies() == [{"type": "over", "error": "it makes no sense", "preempted": False}]
    assert [body["type"] for _, body in line.received(2)] == ["lost", "lost"]
    line.driver.end(0.5)  # asks nobody


# -- before there is a line --------------------------------------------------------------------------------------------


def test_what_cannot_be_is_refused_at_construction() -> None:
    cases: list[tuple[Body, str]] = [
        ({"workers": 0}, "workers must be a whole number"),
        ({"address": "10.0.0.1"}, "an address must be host:port"),
        ({"ports": "x"}, "ports must be"),
        ({"wait_s": -1}, "wait_s must be"),
        ({"address": "10.0.0.1:7000", "tls": False}, "10.0.0.1 can be reached .* add --plain-network"),
        ({"address": "somewhere:7000", "tls": False}, "without TLS anybody on that network"),
        ({"listen": "10.0.0.2", "tls": False}, "10.0.0.2 can be reached .* add --plain-network"),
    ]
    all_refused(lambda fields: Join(**{"address": "127.0.0.1:7000", "workers": 1, **fields}), cases)
    for address in ("127.0.0.1:7000", "[::1]:7000", "localhost:7000"):
        assert not Join(address=address, workers=1, tls=False).tls


def test_without_credentials_nobody_joins(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("MANYHANDS_CREDENTIALS", raising=False)
    with pytest.raises(BadInput, match="set MANYHANDS_CREDENTIALS to its path"):
        join(Join(address="127.0.0.1:7000", workers=1))
    monkeypatch.setenv("MANYHANDS_CREDENTIALS", str(tmp_path / "run.pem"))
    with pytest.raises(BadInput, match="no such file appeared within 0 s"):
        join(Join(address="127.0.0.1:7000", workers=1, wait_s=0.1))
