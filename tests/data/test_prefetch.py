"""data/prefetch.py: order, errors, prompt ends."""

import threading
import traceback

import numpy as np
import pytest
import torch

from manyhands.data.feed import DEPTH, _bytes_of, prefetch


def threads():
    return [thread for thread in threading.enumerate() if thread.name == "manyhands-prefetch"]


def items(n, record, fail_at=None):
    try:
        for i in range(n):
            if i == fail_at:
                raise KeyError(f"row {i}")
            record.append((i, threading.current_thread().name))
            yield i
    finally:
        record.append("closed")


def test_the_same_items_in_order_from_another_thread():
    record = []
    assert list(prefetch(items(20, record))) == list(range(20))
    assert {entry[1] for entry in record if entry != "closed"} == {"manyhands-prefetch"}
    assert record[-1] == "closed"
    assert threads() == []


def test_nothing_starts_before_the_first_item_is_wanted():
    record = []
    ahead = prefetch(items(3, record))
    ahead.close()
    assert record == []
    assert threads() == []


def test_no_more_than_the_depth_is_read_ahead():
    reached = threading.Event()
    record = []

    def counted():
        for i in range(100):
            record.append(i)
            if i == DEPTH + 1:
                reached.set()
            yield i

    ahead = prefetch(counted())
    assert next(ahead) == 0
    assert reached.wait(5)  # one taken, DEPTH waiting, one in the thread's hand
    ahead.close()
    assert record == list(range(DEPTH + 2))


def test_an_error_comes_where_its_item_would_have_with_its_own_traceback():
    record = []
    ahead = prefetch(items(9, record, fail_at=3))
    assert [next(ahead) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(KeyError, match="row 3") as caught:
        next(ahead)
    assert "items" in [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert threads() == []


@pytest.mark.parametrize("taken", [1, 2, 5])
def test_closing_early_ends_the_thread_and_closes_the_items(taken):
    record = []
    ahead = prefetch(items(1000, record))
    for _ in range(taken):
        next(ahead)
    ahead.close()
    assert record[-1] == "closed"
    assert threads() == []


def test_dropping_it_is_closing_it():
    record = []
    ahead = prefetch(items(1000, record))
    next(ahead)
    del ahead
    assert record[-1] == "closed"
    assert threads() == []


def test_what_batches_take_is_seen_also_where_they_hold_objects():
    """Texts, bytes of images and rows of JSON, of which thousands would be read ahead otherwise."""
    assert _bytes_of(torch.zeros(10, 4)) == 160
    for column in (
        [b"x" * 1000] * 5,
        ["x" * 1000] * 5,
        np.array(["x" * 1000] * 5, object),
        [{"text": "x" * 1000}] * 5,
        [np.zeros(1000, np.uint8)] * 5,
        [["x" * 500, "y" * 500]] * 5,
    ):
        assert 5000 <= _bytes_of(column) <= 7000
    assert 80 <= _bytes_of(list(range(10))) <= 400
    assert _bytes_of([]) < 100
