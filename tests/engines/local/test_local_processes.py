import os
import select
import signal
import socket
from collections.abc import Iterator
from typing import Any, cast

import pytest

from manyhands.engines.local.fork_client import Spawner
from manyhands.engines.local.messages import ControlMessage, ControlSocket
from manyhands.engines.local.processes import LocalProcesses
from manyhands.engines.local.serialization import serialize
from manyhands.errors import ManyhandsError


class Forked:
    """A spawner whose fork server is the test: the other ends of all lines lie in `there`."""

    def __init__(self) -> None:
        self.wire, server = ControlSocket.pair()
        self.server = ControlSocket(server)
        self.there: dict[int, ControlSocket] = {}
        self.asking: dict[int, ControlSocket] = {}
        self.shared: dict[str, Any] = {}
        self.signals: list[tuple[list[int], int]] = []

    def launch(self, shared: dict[str, Any], program: int) -> None:
        self.shared = shared

    def fork(self, process_index: int, descriptors: list[int], own: dict[str, Any]) -> None:
        line, questions, *_ = descriptors
        self.there[process_index] = ControlSocket(socket.socket(fileno=os.dup(line)))
        self.asking[process_index] = ControlSocket(socket.socket(fileno=os.dup(questions)))

    def receive(self) -> list[ControlMessage]:
        return self.wire.receive()

    def signal(self, process_indices: list[int], number: int) -> None:
        self.signals.append((process_indices, number))

    def died(self) -> int:
        return -9

    def end_run(self, grace_s: float) -> None:
        for wire in [self.wire, self.server, *self.there.values(), *self.asking.values()]:
            wire.close()


@pytest.fixture
def forked() -> Forked:
    return Forked()


@pytest.fixture
def host(forked: Forked) -> Iterator[LocalProcesses]:
    host = LocalProcesses(cast(Spawner, forked), [0, 1, -1], timeout_s=5.0, host="alpha")
    host.start({"threads": 3}, -1)
    yield host
    host.end(0.0)


def test_last_words_come_before_the_news_of_the_end_and_questions_after_what_was_said(
    forked: Forked, host: LocalProcesses
) -> None:
    """CASE 21: the exit alone would say that it died without a reason. They may come after its line was looked at."""
    forked.there[0].send({"type": "beat"})
    forked.asking[0].send({"type": "ask"})
    assert host.receive() == [(0, {"type": "beat"}), (0, {"type": "ask"})]
    forked.server.send({"type": "exited", "process_index": 1, "status": 1})
    forked.there[1].send({"type": "error", "message": "weights"})
    forked.there[1].close()
    came: list[tuple[int, dict[str, Any]]] = []
    host._hear_server(came)
    assert came == [
        (1, {"type": "error", "message": "weights"}),
        (1, {"type": "exited", "status": 1, "phase": None, "step": None, "detail": ""}),
    ]
    assert host.receive() == []


def test_answers_and_stops_go_where_they_are_read_and_whoever_is_gone_is_told_nothing(
    forked: Forked, host: LocalProcesses
) -> None:
    forked.there[0].close()
    host.send(0, {"type": "stop", "reason": "callback"})
    host.send(1, {"type": "stop", "reason": "callback"})
    host.send(1, {"type": "leased", "value": None})
    assert [message.body for message in forked.there[1].receive()] == [{"type": "stop", "reason": "callback"}]
    assert [message.body for message in forked.asking[1].receive()] == [{"type": "leased", "value": None}]


def test_a_value_comes_as_itself_unless_it_cannot_be_rebuilt(forked: Forked, host: LocalProcesses) -> None:
    for value in ({"loss": [1.0, 2.0]}, Fragile()):
        fd = serialize(value, "the value")
        forked.there[0].send({"type": "value"}, (fd,))
        os.close(fd)
        if isinstance(value, dict):
            assert host.receive() == [(0, {"type": "value", "value": value})]
    with pytest.raises(ManyhandsError, match=r"worker 0 returned cannot be rebuilt here \(ZeroDivisionError"):
        host.receive()


class Fragile:
    def __reduce__(self) -> Any:
        return divmod, (1, 0)


def test_one_descriptor_tells_of_all(forked: Forked, host: LocalProcesses) -> None:
    (ready,) = host.filenos()
    assert not select.select([ready], [], [], 0)[0]
    forked.there[-1].send({"type": "beat"})
    assert select.select([ready], [], [], 0)[0]
    assert host.receive() == [(-1, {"type": "beat"})]
    forked.there[-1].close()
    assert host.receive() == []
    assert not select.select([ready], [], [], 0)[0]


def test_signals_are_for_workers_and_stacks_for_all(forked: Forked, host: LocalProcesses) -> None:
    host.signal(signal.SIGTERM)
    assert host.stacks() == {0: "", 1: "", -1: ""}
    assert forked.signals == [([0, 1], signal.SIGTERM), ([0, 1, -1], signal.SIGUSR1)]
    assert forked.shared == {"threads": 3, "process_indices": [0, 1, -1]}
