"""The agent of a joined host, with a test in the driver's place and processes that only take notes."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from refused_cases import all_refused

from manyhands.engines.hosts import join as join_module
from manyhands.engines.hosts.join import Agent, Join, join
from manyhands.engines.hosts.message_channel import HostMessage, MessageChannel
from manyhands.engines.hosts.secret import Secret
from manyhands.errors import BadInput, ManyhandsError, Preempted
from manyhands.transport.channel import Channel

Body = dict[str, Any]
SECRET = Secret(token=b"t" * 32)


class NotesCrew:
    """Instead of a LocalCrew: says what the test lays into `says`, and writes down what it is told."""

    def __init__(self, spawner: Any, process_indices: list[int], timeout_s: float, host: str, network: Body) -> None:
        self.process_indices, self.host, self.network = process_indices, host, network
        self.notes: list[Any] = []
        self.says: list[tuple[int, Body]] = []
        self.error: Exception | None = None
        self.read, self.write = os.pipe()

    def start(self, shared: Body, program: int) -> None:
        self.shared, self.program = shared, os.pread(program, 1000, 0)

    def filenos(self) -> list[int]:
        return [self.read]

    def say(self, process_index: int, body: Body) -> None:
        self.says.append((process_index, body))
        os.write(self.write, b".")

    def receive(self) -> list[tuple[int, Body]]:
        if self.error is not None:
            raise self.error
        output, self.says = self.says, []
        return output

    def send(self, process_index: int, body: Body) -> None:
        self.notes.append((process_index, body))

    def signal(self, number: int, process_indices: Any = None) -> None:
        self.notes.append(number if process_indices is None else (number, process_indices))

    def start_worker(self, worker_id: int, faults: str) -> None:
        self.process_indices.append(worker_id)
        self.notes.append((worker_id, faults))

    def form(self, generation: int, hosts: list[list[int]], names: list[str]) -> None:
        self.notes.append((generation, hosts, names))

    def stacks(self) -> dict[int, str]:
        return {2: "stack"}

    def where(self) -> dict[int, tuple[str, int]]:
        return {2: ("validation", 7)}

    def end(self, grace_s: float) -> None:
        self.notes.append(("end", grace_s))


class Driver:
    """The other end: `post` is the driver's."""

    def __init__(self) -> None:
        here, there = (Channel(sock, peer="the driver", timeout_s=5.0) for sock in socket.socketpair())
        self.post = MessageChannel(here)
        self.output: list[str] = []
        offer = Join(address="127.0.0.1:1", workers=2, listen="10.0.0.2", threads=3)
        self.agent = Agent(offer, SECRET, None, self.output.append)  # type: ignore[arg-type]
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._serve, args=(MessageChannel(there, self.agent.memory_for),))
        self.thread.start()

    def _serve(self, post: MessageChannel) -> None:
        try:
            self.agent.serve(post)
        except ManyhandsError as error:
            self.error = error

    def launch(self, **variables: str) -> NotesCrew:
        shared = {
            "size": 4,
            "process_indices": [2, 3],
            "timeout_s": 9.0,
            "network": {"hosts": [[0, 1], [2, 3]], "names": ["a", "b"]},
            "threads": None,
        }
        variables = {"MANYHANDS_STRATEGY": "easgd", **variables}
        body = {"type": "launch", "host": "b", "shared": shared, "variables": variables, "silence_s": 5.0}
        self.post.send(body, [torch.frombuffer(bytearray(b"program"), dtype=torch.uint8)])
        self.post.send({"type": "stacks"})
        assert self.message().body == {"type": "stacks", "stacks": {"2": "stack"}, "where": {"2": ["validation", 7]}}
        crew = self.agent._processes
        assert isinstance(crew, NotesCrew)
        return crew

    def message(self) -> HostMessage:
        (message,) = self.post.wait(5.0)
        return message

    def end(self, error: str | None = "", **more: Any) -> None:
        if error is not None:
            self.post.send({"type": "over", "error": error, "preempted": False, **more})
        self.thread.join(5)
        assert not self.thread.is_alive()
        self.post.close()


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    monkeypatch.setattr(join_module, "LocalProcesses", NotesCrew)
    made = Driver()
    yield made
    made.post.close()
    made.thread.join(5)


def test_this_hosts_own_place_and_the_drivers_program(driver: Driver) -> None:
    crew = driver.launch()
    assert (crew.process_indices, crew.host, crew.program) == ([2, 3], "b", b"program")
    assert crew.shared["folder"] == crew.shared["path"][0] == os.getcwd()
    assert crew.shared["environment"] == {**os.environ, "MANYHANDS_STRATEGY": "easgd"}
    assert crew.shared["threads"] == 3  # what this host offers, since the run does not say
    assert crew.network["hosts"] == [[0, 1], [2, 3]]
    assert crew.network["listen"] == "10.0.0.2"
    assert Secret.from_json(crew.network["secret"]) == SECRET
    driver.end()
    assert driver.error is None
    assert crew.notes == [("end", 0.0)]
    assert driver.output[-1] == "the run is done"


@pytest.mark.parametrize(("own", "workers"), [("/here", "/here"), (None, "/drivers")])
def test_a_cache_folder_of_this_hosts_own_is_kept(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, own: str | None, workers: str
) -> None:
    monkeypatch.delenv("MANYHANDS_CACHE", raising=False)
    if own is not None:
        monkeypatch.setenv("MANYHANDS_CACHE", own)
    crew = driver.launch(MANYHANDS_CACHE="/drivers")
    assert crew.shared["environment"]["MANYHANDS_CACHE"] == workers
    driver.end()


def test_messages_both_ways(driver: Driver) -> None:
    """Among them, that a worker is started later, and that it is in a group."""
    crew = driver.launch()
    driver.post.send({"type": "to_process", "process_index": 3, "body": {"type": "answer", "value": 1}})
    driver.post.send({"type": "signal", "number": 15})
    driver.post.send({"type": "signal_to", "number": 19, "process_indices": [3]})
    driver.post.send({"type": "start_worker", "worker_id": 5, "faults": ""})
    driver.post.send({"type": "form", "generation": 1, "hosts": [[0], [2, 5]], "names": ["a", "b"]})
    crew.say(2, {"type": "started"})
    assert driver.message().body == {"type": "from_process", "process_index": 2, "body": {"type": "started"}}
    driver.post.send({"type": "end", "grace_s": 0.5})
    assert driver.message().body == {"type": "idle"}
    told = [(3, {"type": "answer", "value": 1}), 15, (19, [3]), (5, ""), (1, [[0], [2, 5]], ["a", "b"]), ("end", 0.5)]
    assert crew.notes == told
    driver.end()


@pytest.mark.parametrize(
    ("hosts", "names"), [([[0], [2, 7]], ["a", "b"]), ([[0], [2]], ["a"]), ([[2], [2]], ["b", "a"])]
)
def test_a_group_that_cannot_be_ends_this_hosts_workers(hosts: Any, names: Any, driver: Driver) -> None:
    driver.launch()
    driver.post.send({"type": "form", "generation": 1, "hosts": hosts, "names": names})
    driver.end(None)
    assert "use the same version of manyhands on all hosts" in str(driver.error)


def test_values_leave_as_json_and_tensors(driver: Driver) -> None:
    crew = driver.launch()
    crew.say(2, {"type": "value", "value": {"a": torch.ones(2)}})
    message = driver.message()
    assert message.body["body"] == {"type": "value", "value": {"dict": {"a": {"tensor": 0}}}}
    assert torch.equal(message.tensors[0], torch.ones(2))
    crew.say(3, {"type": "value", "value": {1}})
    body = driver.message().body["body"]
    assert (body["type"], body["family"], body["rank"]) == ("error", "BadInput", 3)
    assert "returned is a set, and workers on another host cannot return that" in body["message"]
    driver.end("it failed")
    assert "failed: it failed" in str(driver.error)


def test_rows_leave_as_a_header_and_bytes(driver: Driver) -> None:
    crew = driver.launch()
    for data in (b"bytes", b""):
        crew.say(2, {"type": "rows", "number": 7, "rows": 3, "data": bytearray(data)})
        message = driver.message()
        assert message.body["body"] == {"type": "rows", "number": 7, "rows": 3}
        assert message.tensors[0].numpy().tobytes() == data
    driver.end()


def test_errors_of_workers_and_of_what_starts_them(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """A value of too many bytes is the worker's; a module that is not here is explained; a dead fork server is told."""
    crew = driver.launch()
    monkeypatch.setattr("manyhands.engines.hosts.message_channel.MAX_TENSOR_BYTES", 1000)
    crew.say(2, {"type": "value", "value": torch.ones(1000)})
    body = driver.message().body["body"]
    assert (body["type"], body["family"], body["rank"]) == ("error", "BadInput", 2)
    missing = {"type": "error", "error": "ModuleNotFoundError", "phase": "start", "message": "No module named 'mine'"}
    crew.say(2, missing)
    message = driver.message().body["body"]["message"]
    assert message.startswith("No module named 'mine' (this host needs it too")
    crew.error = ManyhandsError("it was killed")
    assert driver.message().body == {"type": "failed", "message": "it was killed"}
    driver.end("it was killed")


def test_a_driver_that_is_gone_ends_this_hosts_workers(driver: Driver) -> None:
    crew = driver.launch()
    driver.post.close()
    driver.end(None)
    assert "is gone" in str(driver.error)
    assert crew.notes == [("end", 0.0)]


def test_a_driver_that_leaves_before_the_run(driver: Driver) -> None:
    driver.post.close()
    driver.end(None)
    assert "left before the run began" in str(driver.error)


def test_asked_to_end_before_the_run(driver: Driver) -> None:
    driver.agent._ask_to_end("preempted")
    driver.end(None)
    assert isinstance(driver.error, Preempted)


def test_asked_to_end_in_the_run(driver: Driver) -> None:
    driver.launch()
    driver.agent._ask_to_end("preempted")
    assert driver.message().body == {"type": "preempted"}
    driver.end()
    assert isinstance(driver.error, Preempted)


@pytest.mark.parametrize("error", ["", "asked to stop (preempted) while waiting for the other hosts"])
def test_a_run_that_was_asked_to_end_elsewhere_ends_here_with_75(driver: Driver, error: str) -> None:
    driver.launch()
    driver.end(error, preempted=True)
    assert isinstance(driver.error, Preempted)
    assert driver.error.exit_code == 75
    assert error in str(driver.error)


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
