"""Engine `inside`: several workers make the same call; here they are threads."""

from typing import Any

import pytest
import torch
from heard import Heard
from typing_extensions import override

from manyhands.data.leases import Segment
from manyhands.engines.base import LaunchSpec, Observer
from manyhands.engines.driver.run_monitor import USER
from manyhands.engines.nested import Nested, NestedDriverClient
from manyhands.engines.single_process import InProcessDriverClient
from manyhands.errors import BadInput, Unsupported
from manyhands.events import Event
from manyhands.server.base import ServerSpec
from manyhands.testing.threads import together
from manyhands.worker import SoloDriverClient, Worker
from refusals import all_refused


class Outer(SoloDriverClient):
    """The launcher's line, whom a run's own events, questions and rows do not concern."""

    def __init__(self, reason: str = "") -> None:
        self.places: list[tuple[str, int]] = []
        self.should_stop = lambda: reason  # type: ignore[method-assign]

    def _none(self, *_: Any) -> Any:
        raise AssertionError("it does not concern the launcher")

    emit = ask = collect = lease = _none

    @override
    def progress(self, phase: str, step: int) -> None:
        self.places.append((phase, step))


def inside(worker: Worker, program: Any, **plan: Any) -> list[Any]:
    return Nested(worker=worker).launch(program, LaunchSpec(**{"workers": worker.size, **plan}))


def test_each_rank_gets_its_own_value_in_its_place() -> None:
    found = together(3, lambda worker: inside(worker, lambda inner: inner.rank * 10 + inner.size))
    assert found == [[3, None, None], [None, 13, None], [None, None, 23]]


def test_events_of_all_ranks_reach_the_first_at_collect() -> None:
    def program(worker: Worker) -> list[list[tuple[int | None, int]]]:
        observer = Heard()

        def run(inner: Worker) -> list[list[tuple[int | None, int]]]:
            heard = []
            for step in (1, 2):
                inner.emit("step", step=step)
                heard.append(observer.steps)
                inner.driver.collect(inner.group)
                heard.append(observer.steps)
            return heard

        worker.driver = Outer()
        return inside(worker, run, observer=observer)[worker.rank]  # type: ignore[no-any-return]

    events = [(0, 1), (1, 1), (0, 2), (1, 2)]
    assert together(2, program) == [[events[:n] for n in (1, 2, 3, 4)], [[]] * 4]


def test_the_launcher_and_this_process_may_ask_for_a_stop_on_any_rank() -> None:
    """SIGTERM comes to whom it comes; it is obeyed at once, not at the next tenth of a second."""
    for rank in (0, 1):
        for launcher, own, expected in (("a", "", "a"), ("", "b", "b"), ("a", "b", "a"), ("", "", "")):
            observer = Heard()
            line = NestedDriverClient(rank, InProcessDriverClient(observer, poll_s=0), Outer(launcher))
            assert line.should_stop() == launcher
            observer.reason = own
            assert line.should_stop() == expected, (rank, launcher, own)


def test_a_question_goes_to_the_observer_and_rows_are_not_leased() -> None:
    line = NestedDriverClient(0, InProcessDriverClient(Heard(stop="asked")), Outer())
    assert line.ask(Event(type="epoch")) == {"stop": "asked"}
    with pytest.raises(Unsupported, match="at their own pace need an engine that starts the workers"):
        line.lease(Segment(epoch=0, first=0, until=1, parts=1), 0)


def test_what_the_observer_raises_is_known_as_its_own() -> None:
    class Full(Observer):
        def event(self, event: Event) -> None:
            raise OSError("disk full")

    here = InProcessDriverClient(Full())
    with pytest.raises(OSError, match="disk full") as raised:
        NestedDriverClient(0, here, SoloDriverClient()).emit(Event(type="step"))
    assert here.observers_error is raised.value


def test_the_launcher_hears_of_progress_and_of_the_end() -> None:
    """After the run, and after an error with which the script may go on, it is the user's own code again, which may take as
    long as it likes; after another error the launcher knows where."""
    outer = Outer()
    inside(Worker(driver=outer), lambda inner: inner.driver.progress("compute", 7))
    assert outer.places == [("compute", 7), (USER, 7)]
    for error, left in ((BadInput("no"), (USER, 7)), (KeyError("no"), ("compute", 7))):
        outer = Outer()

        def program(inner: Worker, error: Exception = error) -> None:
            inner.driver.progress("compute", 7)
            raise error

        with pytest.raises(type(error)) as raised:
            inside(Worker(driver=outer), program)
        assert raised.value is error
        assert outer.places[-1] == left


def test_each_run_counts_its_own_traffic_after_an_error_too() -> None:
    def send(worker: Worker, fails: bool = False) -> int:
        worker.group.ledger.add("mean_", 100, messages=2)
        if fails:
            raise KeyError
        return worker.group.ledger.total_bytes

    worker = Worker()
    worker.group.ledger.add("barrier", 1)
    assert [inside(worker, send)[0] for _ in range(2)] == [100, 100]
    with pytest.raises(KeyError):
        inside(worker, lambda inner: send(inner, fails=True))
    assert worker.group.ledger.as_dict() == {
        "barrier": {"bytes": 1, "messages": 1},
        "mean_": {"bytes": 300, "messages": 6},
    }


def test_what_the_launcher_decides_cannot_be_asked_for() -> None:
    words = r"workers=3 was given inside a run with workers=1: leave.* out[\s\S]*engine=\"local\", workers=1"
    cases: list[tuple[dict[str, Any], str]] = [
        ({"workers": 3}, words),
        ({"device": "cuda"}, "device='cuda' inside a run: leave device out, this worker has cpu already"),
        ({"threads_per_worker": 2}, "threads_per_worker=2 .* inside a run: .*manyhands run --threads-per-worker"),
        ({"server": ServerSpec(rule="add")}, "needs an engine that starts it"),
    ]
    worker = Worker(device=torch.device("cpu"))
    all_refused(lambda plan: inside(worker, pytest.fail, **plan), cases, (BadInput, Unsupported))
