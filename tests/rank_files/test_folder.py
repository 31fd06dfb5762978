from __future__ import annotations

import signal
import threading

from manyhands.rank_files.folder import as_given, is_as_given, pause


def test_it_is_this_threads_alone_and_nests() -> None:
    elsewhere: list[bool] = []
    with as_given(), as_given():
        thread = threading.Thread(target=lambda: elsewhere.append(is_as_given()))
        thread.start()
        thread.join()
        assert is_as_given()
    assert elsewhere == [False]
    assert not is_as_given()


def test_a_signal_handler_during_a_pause_is_the_scripts() -> None:
    seen: list[bool] = []
    before = signal.signal(signal.SIGALRM, lambda *_: seen.append(is_as_given()))
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.01)
        with as_given():
            while not seen:
                pause(0.01)
            assert is_as_given()
    finally:
        signal.signal(signal.SIGALRM, before)
    assert seen == [False]
