from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from manyhands.comm.solo import SoloGroup
from manyhands.engines.control import Wire
from manyhands.engines.heartbeat import DriverLine
from manyhands.events import Event


class Pair:
    """A worker's line whose driver is the test; heartbeats come only when the test lets them."""

    def __init__(self) -> None:
        self.driver, there = Wire.pair()
        self.line = DriverLine(Wire(there), timeout_s=5.0)
        self.wire = self.line._wire

    def sent(self) -> list[dict[str, Any]]:
        return [message.body for message in self.driver.receive()]


@pytest.fixture
def pair() -> Iterator[Pair]:
    pair = Pair()
    yield pair
    pair.driver.close()
    pair.wire.close()


def test_a_message_carries_place_and_events_before_it(pair: Pair) -> None:
    pair.line.progress("compute", 4)
    pair.line.emit(Event(type="step", step=3))
    pair.line.emit(Event(type="step", step=4))
    pair.line.last({"type": "error"})
    beat, last = pair.sent()
    assert (beat["type"], beat["phase"], beat["step"]) == ("beat", "compute", 4)
    assert [Event(**event).step for event in beat["events"]] == [3, 4]
    assert last == {"type": "error"}


def test_idle_seconds_begin_anew_with_progress(pair: Pair) -> None:
    pair.line._seen_at -= 100.0
    pair.line._send(None)
    pair.line.progress("compute", 1)
    pair.line._send(None)
    before, after = pair.sent()
    assert before["idle_s"] >= 100.0
    assert after["idle_s"] < 1.0


def test_a_compiler_at_work_is_a_phase(pair: Pair) -> None:
    pair.line.progress("compute", 7)
    pair.line.compiling(1)
    assert pair.line.where() == ("compile", 7)
    pair.line.compiling(-1)
    assert pair.line.where() == ("compute", 7)


def test_answers_and_stop_are_heard(pair: Pair) -> None:
    pair.driver.send({"type": "answer", "value": {"rows": 5}})
    pair.driver.send({"type": "stop", "reason": "callback"})
    pair.line._read()
    assert pair.line.ask(Event(type="lease")) == {"rows": 5}
    assert [body["type"] for body in pair.sent()] == ["beat", "ask"]
    assert pair.line.should_stop() == "callback"


def test_an_event_that_is_no_json_raises_at_once(pair: Pair) -> None:
    with pytest.raises(TypeError, match="not JSON serializable"):
        pair.line.emit(Event(type="step", values={"loss": object()}))


def test_collect_has_nothing_to_do(pair: Pair) -> None:
    pair.line.collect(SoloGroup())
    assert not pair.driver.readable(0)
