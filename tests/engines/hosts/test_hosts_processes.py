"""The driver's view of a joined host, with a test at the other end of the line."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from manyhands.engines.hosts.message_channel import HostMessage, MessageChannel
from manyhands.engines.hosts.processes import RemoteProcesses
from manyhands.engines.local.serialization import deserialize, serialize
from manyhands.errors import WorkerFailed
from manyhands.transport.channel import Channel

Body = dict[str, Any]


class Line:
    """The processes of workers 2 and 3 on beta, and its agent's end."""

    def __init__(self) -> None:
        here, there = (Channel(sock, peer="the other", timeout_s=5.0) for sock in socket.socketpair())
        self.there, self.agent = RemoteProcesses(MessageChannel(here), "beta"), MessageChannel(there)
        self.there.assign([2, 3], "beta", {"hosts": [[0, 1], [2, 3]], "names": ["alpha", "beta"]})

    def message(self) -> HostMessage:
        (message,) = self.agent.wait(5.0)
        return message

    def output(self, process_index: int, body: Body, tensors: list[torch.Tensor] | None = None) -> None:
        self.agent.send({"type": "from_process", "process_index": process_index, "body": body}, tensors or [])

    def received(self, count: int) -> list[tuple[int, Body]]:
        came: list[tuple[int, Body]] = []
        for _ in range(500):
            came += self.there.receive()
            if len(came) >= count:
                break
            threading.Event().wait(0.01)
        return came


@pytest.fixture
def line() -> Iterator[Line]:
    made = Line()
    yield made
    made.there.leave("")
    made.agent.close()


def test_the_program_arrives_and_the_drivers_own_places_do_not(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MANYHANDS_STRATEGY", "local-sgd")
    monkeypatch.setenv("MANYHANDS_CREDENTIALS", "/secret")
    program = serialize({"data": torch.arange(50_000)}, "the program")
    shared = {"size": 4, "path": ["/here"], "folder": "/here", "environment": {"HOME": "/root"}, "threads": None}
    line.there.start(shared, program)
    message = line.message()
    assert message.body["shared"] == {
        "size": 4,
        "threads": None,
        "process_indices": [2, 3],
        "network": line.there.network,
    }
    assert message.body["variables"]["MANYHANDS_STRATEGY"] == "local-sgd"
    assert "MANYHANDS_CREDENTIALS" not in message.body["variables"]
    copy = os.memfd_create("copy")
    os.write(copy, message.tensors[0].numpy().tobytes())
    assert torch.equal(deserialize(copy, mapped=True)["data"], torch.arange(50_000))
    os.close(copy)
    os.close(program)


def test_what_a_seat_says_is_carried_in_order(line: Line) -> None:
    beat = {"type": "beat", "phase": "compute", "step": 7, "idle_s": 0.0, "events": []}
    line.output(2, beat)
    line.output(3, {"type": "value", "value": {"dict": {"a": {"tensor": 0}}}}, [torch.ones(2)])
    line.output(2, {"type": "exited", "status": 0, "phase": None, "step": None, "detail": ""})
    first, second, third = line.received(3)
    assert first == (2, beat)
    assert torch.equal(second[1]["value"]["a"], torch.ones(2))
    assert third[1]["type"] == "exited"


ROWS = {"type": "rows", "number": 4, "part": 0, "last": True, "parts": 0, "rows": 3}


def test_delivered_rows_come_with_their_bytes(line: Line) -> None:
    line.output(2, ROWS, [torch.tensor([1, 2, 3], dtype=torch.uint8)])
    ((index, body),) = line.received(1)
    assert (index, bytes(body.pop("data")), body) == (2, b"\x01\x02\x03", ROWS)
    for tensors in ([], [torch.ones(3)], [torch.ones(3, dtype=torch.uint8)] * 2):
        line.output(2, ROWS, tensors)
        with pytest.raises(WorkerFailed, match=f"worker 2 sent rows in {len(tensors)} tensors: expected one of bytes"):
            line.received(1)


def test_a_worker_of_another_host_is_not_heard_and_one_that_is_started_later_is(line: Line) -> None:
    line.output(0, {"type": "value", "value": 1})
    line.output(2, {"type": "started"})
    assert line.received(1) == [(2, {"type": "started"})]
    line.there.start_worker(7, "")
    line.output(7, {"type": "started"})
    assert line.received(1) == [(7, {"type": "started"})]


def test_what_makes_no_sense_names_its_host(line: Line) -> None:
    line.output(2, {"type": "value", "value": {"tensor": 0}})
    with pytest.raises(WorkerFailed, match="host beta .* worker 2 sent .*cannot be read"):
        line.received(1)
    beat = {"type": "beat", "phase": [], "step": 0, "idle_s": 0, "events": []}
    for body in (None, {"type": "beat"}, beat, {"type": "lost"}):
        line.agent.send({"type": "from_process", "process_index": 3, "body": body})
        words = "host beta sent a message that cannot be read: worker 3 sent "
        with pytest.raises(WorkerFailed, match=words) as raised:
            line.received(1)
        assert (raised.value.rank, raised.value.host) == (3, "beta"), body


def test_an_answer_without_what_was_asked_for_is_none(line: Line) -> None:
    line.agent.send({"type": "from_process"})
    line.agent.send({"type": "stacks", "stacks": [], "where": {"2": "x", "3": ["compute", -1]}})
    assert line.there.stacks() == {2: "", 3: ""}
    assert line.there.where() == {}
    line.agent.send({"type": "failed", "message": ["\x1b[2J"]})
    with pytest.raises(WorkerFailed, match="x1b") as raised:
        line.received(1)
    assert "\x1b" not in str(raised.value)


def test_orders_reach_the_agent(line: Line) -> None:
    line.there.send(3, {"type": "stop", "reason": "x"})
    line.there.signal(15)
    line.there.signal(19, [3])
    line.there.start_worker(3, "kill=3@step:5")
    line.there.form(1, [(0, 1), (3,)], ["alpha", "beta"])
    bodies: list[Body] = []
    while len(bodies) < 5:
        bodies += [message.body for message in line.agent.wait(5.0)]
    assert bodies == [
        {"type": "to_process", "process_index": 3, "body": {"type": "stop", "reason": "x"}},
        {"type": "signal", "number": 15},
        {"type": "signal_to", "number": 19, "process_indices": [3]},
        {"type": "start_worker", "worker_id": 3, "faults": "kill=3@step:5"},
        {"type": "form", "generation": 1, "hosts": [[0, 1], [3]], "names": ["alpha", "beta"]},
    ]


def test_stacks_are_asked_for_and_what_comes_before_them_is_kept(line: Line) -> None:
    line.output(2, {"type": "started"})
    line.agent.send({"type": "stacks", "stacks": {"2": "here"}, "where": {"2": ["validation", 4], "9": ["x", 1]}})
    assert line.there.stacks() == {2: "here", 3: ""}
    assert line.there.where() == {2: ("validation", 4)}
    assert line.received(1) == [(2, {"type": "started"})]


def test_the_end_waits_until_the_host_is_empty(line: Line) -> None:
    ended = threading.Thread(target=line.there.end, args=(0.5,))
    ended.start()
    assert line.message().body == {"type": "end", "grace_s": 0.5}
    assert ended.is_alive()
    line.agent.send({"type": "idle"})
    ended.join(5)
    assert not ended.is_alive()
    line.there.end(0.5)  # idempotent: asks nobody
    line.there.leave("what went wrong")
    assert line.message().body == {"type": "over", "error": "what went wrong", "preempted": False}


def test_nothing_is_awaited_from_a_silent_host(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    assert line.there.silent_s() < 5.0
    monkeypatch.setattr(line.there._post, "silent_s", lambda: 7.0)
    monkeypatch.setattr(line.there._post, "wait", lambda timeout_s: pytest.fail("it waits"))
    assert line.there.stacks() == {2: "", 3: ""}
    line.there.end(0.5)


def test_a_host_that_is_gone_is_told_of_each_of_its_workers(line: Line) -> None:
    line.output(2, {"type": "beat", "phase": "exchange", "step": 9, "idle_s": 0.0, "events": []})
    line.agent.close()
    lost = line.received(3)[1:]
    assert [(process_index, body["type"]) for process_index, body in lost] == [(2, "lost"), (3, "lost")]
    assert [(body["phase"], body["step"]) for _, body in lost] == [("exchange", 9), ("start", 0)]
    assert all(body["why"].startswith("its host is gone: ") for _, body in lost)
    assert line.there.receive() == []
    line.there.send(2, {"type": "stop", "reason": ""})  # passed over
    line.there.end(0.0)


def test_a_host_that_is_abandoned_is_told_why_and_lost(line: Line) -> None:
    line.output(2, {"type": "started"})
    assert line.received(1)
    assert line.there.abandon("it makes no sense")
    assert line.message().body == {"type": "over", "error": "it makes no sense", "preempted": False}
    assert [body["type"] for _, body in line.received(2)] == ["lost", "lost"]
    line.there.end(0.5)  # asks nobody


def test_a_host_that_was_asked_to_end_and_a_dead_fork_server_there(line: Line) -> None:
    line.agent.send({"type": "preempted"})
    line.output(2, {"type": "started"})
    assert not line.there.preempted
    line.received(1)
    assert line.there.preempted
    line.agent.send({"type": "failed", "message": "the fork server on beta was killed"})
    with pytest.raises(WorkerFailed, match="the fork server on beta") as failed:
        line.received(1)
    assert failed.value.host == "beta"
