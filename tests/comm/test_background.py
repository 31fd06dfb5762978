"""The thread behind started means: in order, beside the caller, errors with their own handle."""

import threading

from manyhands.comm.background import Background
from manyhands.comm.group import MeanResult
from manyhands.errors import ManyhandsError
from refusals import refused


def test_what_is_started_is_done_in_order_and_beside_the_caller():
    background, gate, seen = Background("test"), threading.Event(), []

    def work(number):
        gate.wait(10)
        seen.append((number, threading.current_thread().name))
        return MeanResult(float(number), 0)

    handles = [background.start(lambda number=number: work(number)) for number in range(3)]
    assert background.busy
    assert seen == []
    gate.set()
    assert [handle.wait().weight for handle in reversed(handles)] == [2, 1, 0]
    assert seen == [(0, "test"), (1, "test"), (2, "test")]
    assert not background.busy
    assert background.close(10)


def test_draining_waits_for_what_is_under_way_and_an_error_is_its_handles():
    background, gate = Background("test"), threading.Event()

    def fails():
        gate.wait(10)
        raise ManyhandsError("no")

    failed, good = background.start(fails), background.start(lambda: MeanResult(1.0, 2))
    threading.Timer(0.02, gate.set).start()
    background.drain()
    assert failed.over
    assert not background.busy
    for _ in range(2):
        refused("no", failed.wait, kind=ManyhandsError)
    assert good.wait() == good.wait() == MeanResult(1.0, 2)
    assert background.close(10)


def test_closing_one_that_never_began_and_one_that_hangs():
    assert Background("test").close(0)
    background, gate = Background("test"), threading.Event()
    background.start(lambda: MeanResult(0.0, int(gate.wait(10))))
    assert not background.close(0.01)
    gate.set()
    assert background.close(10)
