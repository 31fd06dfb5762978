"""The sockets between a worker and its driver, and what a worker says over them."""

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from manyhands.comm.solo import SoloGroup
from manyhands.data.leases import End, Lease, Segment
from manyhands.engines.local.heartbeat import ProcessDriverClient
from manyhands.engines.local.messages import Closed, ControlSocket
from manyhands.errors import ManyhandsError
from manyhands.events import Event

Sockets = tuple[ControlSocket, ControlSocket]


@pytest.fixture
def sockets() -> Iterator[Sockets]:
    here, there = ControlSocket.pair()
    with closing(here), closing(ControlSocket(there)) as other:
        yield here, other


def test_messages_arrive_in_order_whatever_their_size_and_before_the_end(sockets: Sockets) -> None:
    a, b = sockets
    b.sock.settimeout(60)
    assert b.receive(wait=False) == []  # returns at once
    assert not b.readable(0)
    assert not b.hung_up()
    sent = [{"i": i, "text": "x" * (i * 500)} for i in range(20)]
    for message in sent:
        a.send(message)
    a.close()
    got: list[Any] = []
    while len(got) < len(sent):
        got += [message.body for message in b.receive()]
    assert got == sent
    assert b.hung_up()
    with pytest.raises(Closed):
        b.receive()


class Pair:
    """A worker's line whose driver is the test; heartbeats come only when the test lets them."""

    def __init__(self) -> None:
        self.driver, there = ControlSocket.pair()
        self.answering, asking = ControlSocket.pair()
        self.line = ProcessDriverClient(ControlSocket(there), ControlSocket(asking), timeout_s=5.0)
        self.wire = self.line._wire

    def sent(self) -> list[dict[str, Any]]:
        return [message.body for message in self.driver.receive()]


@pytest.fixture
def pair() -> Iterator[Pair]:
    pair = Pair()
    yield pair
    for wire in (pair.driver, pair.answering, pair.wire, pair.line._questions):
        wire.close()


def test_a_message_carries_place_and_events_before_it(pair: Pair) -> None:
    pair.line.progress("compute", 4)
    pair.line.emit(Event(type="step", step=3))
    pair.line.emit(Event(type="step", step=4))
    pair.line.last({"type": "error"})
    beat, last = pair.sent()
    assert (beat["type"], beat["phase"], beat["step"]) == ("beat", "compute", 4)
    assert [Event(**event).step for event in beat["events"]] == [3, 4]
    assert last == {"type": "error"}


def test_idle_seconds_begin_anew_with_progress_and_a_compiler_at_work_is_a_phase(pair: Pair) -> None:
    pair.line._seen_at -= 100.0
    pair.line._send(None)
    pair.line.progress("compute", 7)
    pair.line._send(None)
    before, after = pair.sent()
    assert before["idle_s"] >= 100.0
    assert after["idle_s"] < 50.0
    pair.line.compiling(1)
    assert pair.line.where() == ("compile", 7)
    pair.line.compiling(-1)
    assert pair.line.where() == ("compute", 7)
    pair.driver.send({"type": "stop", "reason": "callback"})
    pair.line._read()
    assert pair.line.should_stop() == "callback"


def test_a_question_comes_after_all_that_was_emitted_and_collect_sends_it_at_once(pair: Pair) -> None:
    pair.line.emit(Event(type="step", step=3))
    pair.answering.send({"type": "answer", "value": {"rows": 5}})
    assert pair.line.ask(Event(type="epoch")) == {"rows": 5}
    assert [message.body["event"]["type"] for message in pair.answering.receive()] == ["epoch"]
    pair.line.emit(Event(type="step", step=4))
    pair.line.collect(SoloGroup())
    assert [Event(**event).step for beat in pair.sent() for event in beat["events"]] == [3, 4]
    with pytest.raises(TypeError, match="not JSON serializable"):
        pair.line.emit(Event(type="step", values={"loss": object()}))


SEGMENT = Segment(epoch=1, first=0, until=3, parts=2, left=[[0, 3], [1, 2]])


def test_a_lease_goes_ahead_of_events_and_whoever_is_told_to_wait_waits_for_it(pair: Pair) -> None:
    pair.line.emit(Event(type="step", step=3))
    pair.answering.send({"type": "leased", "value": {"index": 4, "part": 1, "handed": 9}})
    assert pair.line.lease(SEGMENT, 1) == Lease(index=4, part=1, handed=9)
    (question,) = [message.body for message in pair.answering.receive()]
    assert (question["type"], Segment(**question["segment"]), question["replica"]) == ("lease", SEGMENT, 1)
    assert not pair.driver.readable(0)
    pair.answering.send({"type": "leased", "value": None})
    pair.answering.send({"type": "leased", "value": {"reason": "callback", "left": [[1, 2]]}})
    assert pair.line.lease(SEGMENT, 1) == End(reason="callback", left=[[1, 2]])


def test_a_meeting_brings_everybodys_value_and_a_driver_that_does_not_answer_is_named(pair: Pair) -> None:
    pair.answering.send({"type": "complete", "name": "ring", "values": [None, ["10.0.0.2", 4711]]})
    assert pair.line.rendezvous("ring", [0, 1], None) == [None, ["10.0.0.2", 4711]]
    (question,) = [message.body for message in pair.answering.receive()]
    assert question == {"type": "arrive", "name": "ring", "process_indices": [0, 1], "value": None}
    pair.line._timeout_s = 0.01
    with pytest.raises(ManyhandsError, match="did not answer the rendezvous 'ring' within 0 s"):
        pair.line.rendezvous("ring", [0, 1], None)
