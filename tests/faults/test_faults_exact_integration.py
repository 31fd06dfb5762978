"""A worker is lost in each phase of a run: the result is one worker's, and each row and step counts once."""

from __future__ import annotations

import pytest
from fault_harness import EPOCHS, GLOBAL_ROWS, STEPS, Strike, Trial, equal, fired, recorded_once

from manyhands.recording.run import Run

PHASES = {
    "join": "kill={}@step:0:join",
    "first step": "kill={}@step:0",
    "compute": "kill={}@step:4",
    "exchange": "kill={}@step:4:exchange",
    "commit": "kill={}@step:4:commit",
    "first commit": "kill={}@step:0:commit",
    "epoch's last step": "kill={}@step:5:exchange",
    "epoch's last commit": "kill={}@step:5:commit",
    "save": "kill={}@step:3:save",
    "last step": "kill={}@step:8:exchange",
    "last commit": "kill={}@step:8:commit",
    "last save": "kill={}@step:9:save",
}
PLACES = {
    "first collective": Strike(0, "before join"),
    "started": Strike(0, "after tell start"),
    "joined": Strike(0, "after join"),
    "validation": Strike(0, "before evaluate validation", call=2),
    "validated": Strike(0, "before ask validation", call=2),
    "validation told": Strike(0, "after ask validation", call=2),
    "epoch": Strike(0, "before ask epoch", call=2),
    "epoch told": Strike(0, "after ask epoch", call=2),
    "in a save": Strike(0, "before tell sync", call=2),
    "synced": Strike(0, "after tell sync", call=2),
    "saved": Strike(0, "after save", call=2),
    "last epoch told": Strike(0, "after ask epoch", call=3),
    "outcome": Strike(0, "before outcome"),
    "test": Strike(0, "before evaluate test"),
    "gathered": Strike(0, "after outcome"),
    "delivery": Strike(0, "deliver"),
}
FAST = {("join", 0), ("exchange", 0), ("commit", 1), ("validation told", 0), ("gathered", 0)}


def cases() -> list[object]:
    found = []
    for when in [*PHASES, *PLACES]:
        for worker_id in (1, 0) if when != "started" else (0,):
            marks = [] if (when, worker_id) in FAST else [pytest.mark.slow]
            found.append(pytest.param(when, worker_id, id=f"{when}-{worker_id}", marks=marks))
    return found


@pytest.mark.parametrize(("when", "worker_id"), cases())
def test_killed(when: str, worker_id: int, trial: Trial, one_worker: Run) -> None:
    fault: str | Strike
    if when in PHASES:
        fault = PHASES[when].format(worker_id)
        run = trial.train(faults=fault, run_dir=trial.run_dir)
    else:
        place = PLACES[when]
        fault = Strike(worker_id, place.place, call=place.call)
        run = trial.train(fault, run_dir=trial.run_dir)
    lost = [(one["worker_id"], one["cause"]) for one in run.losses]
    if when == "delivery" and worker_id == 1:  # it is released by then: nobody needs it, which is no loss
        assert lost == []
    else:
        fired(run, fault)
        if when != "gathered" or worker_id == 0 or lost:  # worker 1 may be released by then
            assert lost == [(worker_id, "death")]
    equal(run, one_worker)
    recorded_once(run, trial.seen, trial.run_dir, GLOBAL_ROWS)
    assert trial.seen.validations == [(epoch + 1, 3 * (epoch + 1)) for epoch in range(EPOCHS)]
    assert trial.seen.epochs == [epoch + 1 for epoch in range(EPOCHS)]
    assert trial.seen.order.count("start") == 1
    assert trial.seen.ends == ["end"]
    assert run.history[-1]["tick"] == STEPS - 1
