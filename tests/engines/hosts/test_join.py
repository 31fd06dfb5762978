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
        host_processes = self.agent._processes
        assert isinstance(host_processes, NotesCrew)
        return host_processes

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
    host_processes = driver.launch()
    assert (host_processes.process_indices, host_processes.host, host_processes.program) == ([2, 3], "b", b"program")
    assert host_processes.shared["folder"] == host_processes.shared["path"][0] == os.getcwd()
    assert host_processes.shared["environment"] == {**os.environ, "MANYHANDS_STRATEGY": "easgd"}
    assert host_processes.shared["threads"] == 3  # what this host offers, since the run does not say
    assert host_processes.network["hosts"] == [[0, 1], [2, 3]]
    assert host_processes.network["listen"] == "10.0.0.2"
    assert Secret.from_json(host_processes.network["secret"]) == SECRET
    driver.end()
    assert driver.error is None
    assert host_processes.notes == [("end", 0.0)]
    assert driver.output[-1] == "the run is done"


@pytest.mark.parametrize(("own", "workers"), [("/here", "/here"), (None, "/drivers")])
def test_a_cache_folder_of_this_hosts_own_is_kept(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, own: str | None, workers: str
) -> None:
    monkeypatch.delenv("MANYHANDS_CACHE", raising=False)
    if own is not None:
        monkeypatch.setenv("MANYHANDS_CACHE", own)
    host_processes = driver.launch(MANYHANDS_CACHE="/drivers")
    assert host_processes.shared["environment"]["MANYHANDS_CACHE"] == workers
    driver.end()


def test_messages_both_ways(driver: Driver) -> None:
    host_processes = driver.launch()
    driver.post.send({"type": "to_process", "process_index": 3, "body": {"type": "answer", "value": 1}})
    driver.post.send({"type": "signal", "number": 15})
    driver.post.send({"type": "signal_to", "number": 19, "process_indices": [3]})
    host_processes.say(2, {"type": "started"})
    assert driver.message().body == {"type": "from_process", "process_index": 2, "body": {"type": "started"}}
    driver.post.send({"type": "end", "grace_s": 0.5})
    assert driver.message().body == {"type": "idle"}
    assert host_processes.notes == [(3, {"type": "answer", "value": 1}), 15, (19, [3]), ("end", 0.5)]
    driver.end()


def test_workers_that_are_started_later_and_a_group_of_them(driver: Driver) -> None:
    host_processes = driver.launch()
    driver.post.send({"type": "start_worker", "worker_id": 5, "faults": ""})
    driver.post.send({"type": "form", "generation": 1, "hosts": [[0], [2, 5]], "names": ["a", "b"]})
    driver.post.send({"type": "end", "grace_s": 0.5})
    assert driver.message().body == {"type": "idle"}
    assert host_processes.notes[:2] == [(5, ""), (1, [[0], [2, 5]], ["a", "b"])]
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
    host_processes = driver.launch()
    host_processes.say(2, {"type": "value", "value": {"a": torch.ones(2)}})
    message = driver.message()
    assert message.body["body"] == {"type": "value", "value": {"dict": {"a": {"tensor": 0}}}}
    assert torch.equal(message.tensors[0], torch.ones(2))
    host_processes.say(3, {"type": "value", "value": {1}})
    body = driver.message().body["body"]
    assert (body["type"], body["family"], body["rank"]) == ("error", "BadInput", 3)
    assert "returned is a set, and workers on another host cannot return that" in body["message"]
    driver.end("it failed")
    assert "failed: it failed" in str(driver.error)


@pytest.mark.parametrize("data", [b"bytes", b""])
def test_rows_leave_as_a_header_and_bytes(data: bytes, driver: Driver) -> None:
    host_processes = driver.launch()
    host_processes.say(2, {"type": "rows", "number": 7, "rows": 3, "data": bytearray(data)})
    message = driver.message()
    assert message.body["body"] == {"type": "rows", "number": 7, "rows": 3}
    assert message.tensors[0].numpy().tobytes() == data
    driver.end()


def test_a_value_of_too_many_bytes_is_the_workers_error(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    host_processes = driver.launch()
    monkeypatch.setattr("manyhands.engines.hosts.message_channel.MAX_TENSOR_BYTES", 1000)
    host_processes.say(2, {"type": "value", "value": torch.ones(1000)})
    body = driver.message().body["body"]
    assert (body["type"], body["family"], body["rank"]) == ("error", "BadInput", 2)
    driver.end("it failed")


def test_a_module_that_is_not_here_is_explained(driver: Driver) -> None:
    host_processes = driver.launch()
    host_processes.say(
        2, {"type": "error", "error": "ModuleNotFoundError", "phase": "start", "message": "No module named 'mine'"}
    )
    message = driver.message().body["body"]["message"]
    assert message.startswith("No module named 'mine' (this host needs it too")
    driver.end()


def test_a_dead_fork_server_is_told(driver: Driver) -> None:
    host_processes = driver.launch()
    host_processes.error = ManyhandsError("it was killed")
    assert driver.message().body == {"type": "failed", "message": "it was killed"}
    driver.end("it was killed")


def test_a_driver_that_is_gone_ends_this_hosts_workers(driver: Driver) -> None:
    host_processes = driver.launch()
    driver.post.close()
    driver.end(None)
    assert "is gone" in str(driver.error)
    assert host_processes.notes == [("end", 0.0)]


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


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"workers": 0}, "workers must be a whole number"),
        ({"address": "10.0.0.1"}, "an address must be host:port"),
        ({"ports": "x"}, "ports must be"),
        ({"wait_s": -1}, "wait_s must be"),
        ({"address": "10.0.0.1:7000", "tls": False}, "10.0.0.1 can be reached .* add --plain-network"),
        ({"address": "somewhere:7000", "tls": False}, "without TLS anybody on that network"),
        ({"listen": "10.0.0.2", "tls": False}, "10.0.0.2 can be reached .* add --plain-network"),
    ],
)
def test_what_cannot_be_is_refused_at_construction(fields: Body, words: str) -> None:
    with pytest.raises(BadInput, match=words):
        Join(**{"address": "127.0.0.1:7000", "workers": 1, **fields})


@pytest.mark.parametrize("address", ["127.0.0.1:7000", "[::1]:7000", "localhost:7000"])
def test_without_tls_on_loopback(address: str) -> None:
    assert not Join(address=address, workers=1, tls=False).tls


def test_without_credentials_nobody_joins(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("MANYHANDS_CREDENTIALS", raising=False)
    with pytest.raises(BadInput, match="set MANYHANDS_CREDENTIALS to its path"):
        join(Join(address="127.0.0.1:7000", workers=1))
    monkeypatch.setenv("MANYHANDS_CREDENTIALS", str(tmp_path / "run.pem"))
    with pytest.raises(BadInput, match="no such file appeared within 0 s"):
        join(Join(address="127.0.0.1:7000", workers=1, wait_s=0.1))
