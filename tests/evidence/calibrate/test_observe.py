"""Ticks read off the workers' events."""

import pytest

from manyhands.errors import BadInput
from manyhands.events import Event
from manyhands.evidence.calibrate.observe import WARM, block_of, blocks, merged, steps_for, tick_seconds, tick_time
from manyhands.strategies.local_sgd import LocalSGD


def step(tick: int, time_s: float, rank: int = 0, **values: object) -> Event:
    known = {"epoch": 0, "rows": 4, "wait_s": 0.0, "round": False}
    return Event(type="step", time_s=time_s, rank=rank, tick=tick, step=tick, values=known | values)


def rounds_every(period: int, steps: int) -> list[Event]:
    return [step(tick, float(tick), round=(tick + 1) % period == 0 or tick == steps - 1) for tick in range(steps)]


def test_a_workers_tick_is_between_two_events_without_its_wait() -> None:
    """An event is sent when the next tick ends: the times of two neighbours tell the length of the tick after them."""
    seconds = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0]
    ends = [sum(seconds[: n + 1]) for n in range(len(seconds))]
    events = [step(tick, ends[tick + 1], wait_s=0.25) for tick in range(len(seconds) - 1)]
    assert tick_seconds(events) == {4: pytest.approx([second - 0.25 for second in seconds[WARM + 2 : -1]])}
    events = [
        step(tick, float(tick), rank, rows=rank * 3, epoch=tick // (WARM + 3))
        for tick in range(WARM + 6)
        for rank in (0, 1)
    ]
    assert tick_seconds(events) == {3: [1.0, 1.0]}
    assert merged([{4: [1.0], 2: [0.5]}, {4: [3.0]}]) == {4: [[1.0], [3.0]], 2: [[0.5]]}


def test_a_turn_is_the_mean_of_the_ticks_that_most_are_like() -> None:
    """Its rows' seconds say what a lease took, where there are leases."""
    shorter = {WARM + 5: 1}
    events = [step(tick, tick * 3.0, wait_s=1.0, input_s=0.5, rows=shorter.get(tick, 4)) for tick in range(WARM + 8)]
    found = tick_time(events)
    assert (found.seconds, found.input_s, found.leased) == (pytest.approx(2.0), pytest.approx(0.5), False)
    assert tick_time([*events, step(WARM + 8, 99.0, input_s=0.5, lease=[0, 0, 0])]).leased


def test_a_block_is_whole_rounds() -> None:
    strategy = LocalSGD()
    assert block_of([step(tick, 0.0, round=True) for tick in range(20)], strategy) == 8
    assert block_of(rounds_every(5, 30), strategy) == 10
    assert block_of(rounds_every(12, 40), strategy) == 12
    assert block_of([step(tick, 0.0) for tick in range(20)], strategy) == 8  # nothing is exchanged, ever


@pytest.mark.parametrize("period", [14, 50])
def test_too_few_rounds_are_an_error_with_a_remedy(period: int) -> None:
    with pytest.raises(BadInput, match=r"local-sgd.* steps: 26.*--steps"):
        block_of(rounds_every(period, 26), LocalSGD())


def test_blocks_are_of_global_batches_and_end_with_the_slowest_part() -> None:
    """Two workers: one takes two seconds a tick; the other is late, most of all at the first tick that counts."""
    late = [1.5 if tick == WARM else 0.5 for tick in range(steps_for(16))]
    for first, second in ((0, 1), (1, 0)):
        events = [
            step(tick, tick * 2.0 + (late[tick] if rank else 0.0), rank)
            for tick in range(len(late))
            for rank in (first, second)
        ]
        assert blocks(events, 2, every=8) == pytest.approx([(16 - 1) / 8, 2.0])
    events = [step(tick, float(tick)) for tick in range(WARM + 16)]
    early = step(len(events), events[-1].time_s)
    assert blocks([*events, early], 1, every=8) == pytest.approx([1.0])
