"""Reading ahead: one thread, two batches deep."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")

DEPTH = 2  # one batch in hand, one being read: more only helps where reading times vary widely
CHECK_S = 1.0  # between looks whether the thread still lives
CLOSE_S = 10.0  # for the item under way when the consumer closes


@dataclass
class _Shared(Generic[T]):
    """What the two threads share, under `changed`."""

    items: deque[T] = field(default_factory=deque)
    changed: threading.Condition = field(default_factory=threading.Condition)
    closed: bool = False  # the consumer wants no more
    done: bool = False  # the producer gives no more
    error: BaseException | None = None  # why, if it failed


def prefetch(items: Generator[T, None, None], depth: int = DEPTH) -> Generator[T, None, None]:
    """The same items in the same order, read up to `depth` ahead by a thread.

    The thread starts with the first `next()`. An exception of `items` comes out where its item would have, with its own
    traceback. Closing (or dropping) the generator ends the thread, which closes `items`; an item under way is
    waited for up to CLOSE_S, then TimeoutError. A consumer waits as long as an item takes: it is the run's `timeout_s`
    that ends a read which never comes back.
    """
    shared: _Shared[T] = _Shared()
    thread = threading.Thread(target=_produce, args=(items, shared, depth), name="manyhands-prefetch", daemon=True)
    thread.start()
    try:
        yield from _consume(shared, thread)
    finally:
        with shared.changed:
            shared.closed = True
            shared.changed.notify_all()
        thread.join(CLOSE_S)
        if thread.is_alive():
            raise TimeoutError(
                f"reading ahead did not end within {CLOSE_S:g} s of being closed: the item under way takes longer"
            )


def _produce(items: Generator[T, None, None], shared: _Shared[T], depth: int) -> None:
    try:
        for item in items:
            with shared.changed:
                shared.changed.wait_for(lambda: shared.closed or len(shared.items) < depth)
                if shared.closed:
                    return
                shared.items.append(item)
                shared.changed.notify_all()
    except BaseException as error:  # noqa: BLE001 - not swallowed: the consumer raises it
        shared.error = error
    finally:
        items.close()
        with shared.changed:
            shared.done = True
            shared.changed.notify_all()


def _consume(shared: _Shared[T], thread: threading.Thread) -> Iterator[T]:
    while True:
        with shared.changed:
            while not (shared.items or shared.done):
                shared.changed.wait(CHECK_S)
                if not (thread.is_alive() or shared.items or shared.done):
                    raise RuntimeError("the reading thread ended without a word")
            if not shared.items:
                break
            item = shared.items.popleft()
            shared.changed.notify_all()
        yield item
    if shared.error is not None:
        raise shared.error
