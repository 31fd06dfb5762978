"""Control bits: what a worker knows of the others' rows at the end of a tick."""

from manyhands.replica.control_bits import MORE, ControlBits
from manyhands.worker import Worker


def test_rows_left_is_what_came_and_between_exchanges_true() -> None:
    worker = Worker(clock=lambda: 0.0)
    control = ControlBits()
    control.more = False  # this worker has no rows, and it is alone
    assert not control.rows_left(worker)  # the first tick is one at which bits are swapped alone
    assert control.rows_left(worker)  # the next one is a second later: nothing is known
    assert not control.rows_left(worker, exchanged=True)  # nothing came with the exchange of this tick
    control.received |= MORE
    assert control.rows_left(worker, exchanged=True)
