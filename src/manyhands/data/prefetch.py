"""Reading ahead: one thread, two batches deep."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Generator
from typing import TypeVar

T = TypeVar("T")

DEPTH = 2  # one batch in hand, one being read: more only helps where reading times vary widely
CHECK_S = 1.0  # between looks whether the thread still lives
CLOSE_S = 10.0  # for the item under way when the consumer closes


def prefetch(items: Generator[T, None, None], depth: int = DEPTH) -> Generator[T, None, None]:
    """The same items in the same order, read up to `depth` ahead by a thread.

    The thread starts with the first `next()`. An exception of `items` comes out where its item would have, with its own
    traceback. Closing (or dropping) the generator ends the thread, which closes `items`; an item under way is
    waited for up to CLOSE_S, then TimeoutError. A consumer waits as long as an item takes: it is the run's `timeout_s`
    that ends a read which never comes back.
    """
    ready: deque[T] = deque()
    changed = threading.Condition()  # of all that the two threads share
    closed = False  # the consumer wants no more
    done = False  # the thread gives no more
    error: BaseException | None = None  # why, if it failed

    def produce() -> None:
        nonlocal done, error
        try:
            for item in items:
                with changed:
                    changed.wait_for(lambda: closed or len(ready) < depth)
                    if closed:
                        return
                    ready.append(item)
                    changed.notify_all()
        except BaseException as problem:  # noqa: BLE001 - not swallowed: the consumer raises it
            error = problem
        finally:
            items.close()
            with changed:
                done = True
                changed.notify_all()

    thread = threading.Thread(target=produce, name="manyhands-prefetch", daemon=True)
    thread.start()
    try:
        while True:
            with changed:
                while not (ready or done):
                    changed.wait(CHECK_S)
                    if not (thread.is_alive() or ready or done):
                        raise RuntimeError("the reading thread ended without a word")
                if not ready:
                    break
                item = ready.popleft()
                changed.notify_all()
            yield item
        if error is not None:
            raise error
    finally:
        with changed:
            closed = True
            changed.notify_all()
        thread.join(CLOSE_S)
        if thread.is_alive():
            raise TimeoutError(
                f"reading ahead did not end within {CLOSE_S:g} s of being closed: the item under way takes longer"
            )
