import sys

import pytest
import torch
from heard import Heard

from manyhands.engines import single_process
from manyhands.engines.base import LaunchSpec
from manyhands.engines.local.engine import Local
from manyhands.engines.single_process import InProcessDriverClient
from manyhands.errors import BadInput, PeerLost
from manyhands.events import Event
from manyhands.worker import Worker

ONE = LaunchSpec(workers=1)


def test_threads_hold_for_the_run_and_the_callers_number_stays() -> None:
    """Whoever set it computes the same bits with one worker as in a loop of their own."""
    before = torch.get_num_threads()
    asked = LaunchSpec(workers=1, threads_per_worker=before + 1)
    assert Local().launch(lambda worker: torch.get_num_threads(), asked) == [before + 1]
    assert torch.get_num_threads() == before
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            assert Local().launch(lambda worker: (torch.get_num_threads(), worker.threads), ONE) == [(count, count)]
            assert torch.get_num_threads() == count
    finally:
        torch.set_num_threads(before)


def test_one_rank_of_a_host_keeps_its_threads_and_several_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(single_process, "threads_per_worker", lambda workers: 8 // workers)
    cases = ((1, None), (2, None), (2, 3), (1, 3))
    found = [single_process.threads_in_callers_process(workers, wanted) for workers, wanted in cases]
    assert found == [torch.get_num_threads(), 4, 3, 3]


def test_other_ends_pass() -> None:
    for error in (BadInput("no"), PeerLost(1, "here", "mean", 2, 3.0), KeyboardInterrupt()):

        def program(worker: Worker, error: BaseException = error) -> None:
            raise error

        with pytest.raises(type(error)) as caught:
            Local().launch(program, ONE)
        assert caught.value is error
    with pytest.raises(SystemExit):
        Local().launch(lambda worker: sys.exit(3), ONE)


# -- the connection to a driver in this process


def test_the_observer_is_asked_ten_times_a_second_and_a_reason_to_stop_stays() -> None:
    observer, now = Heard(step=2), 0.0
    line = InProcessDriverClient(observer, clock=lambda: now)
    line.emit(Event(type="step", step=1))
    assert line.ask(Event(type="lease", step=2)) == {"step": 2}
    assert observer.events == [Event(type="step", step=1)]
    for tick in range(1000):  # ten seconds
        now = tick / 100
        assert line.should_stop() == ""
    assert 90 <= observer.polls <= 101
    observer.reason, now = "callback", 20.0
    assert line.should_stop() == "callback"
    observer.reason, now = "", 25.0
    assert line.should_stop() == "callback"
