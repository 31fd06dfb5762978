"""Lines of events on a disk that may be full, written by drivers that may be killed."""

from pathlib import Path

import pytest

from manyhands.errors import ManyhandsError
from manyhands.event_log import EventLog, read, steps_that_count
from manyhands.events import Event


def step(tick: int, rank: int = 0) -> Event:
    return Event(type="step", tick=tick, rank=rank)


def write(path: Path, *events: Event) -> None:
    log = EventLog(path)
    for event in events:
        log.write(event)
    log.close()


def test_events_come_back_in_order_and_a_second_launch_appends(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    write(path, Event(type="start"), step(0))
    write(path, Event(type="start", tick=1), step(1))
    assert [(e.type, e.tick) for e in read(path)] == [("start", 0), ("step", 0), ("start", 1), ("step", 1)]


def test_steps_reach_the_disk_once_a_second_and_rare_events_at_once(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    log = EventLog(path)
    log.poll(100.0)
    log.write(step(0))
    log.poll(100.9)
    assert path.read_text() == ""
    log.poll(101.0)
    assert len(list(read(path))) == 1
    log.write(step(1))
    log.write(Event(type="epoch"))
    assert len(list(read(path))) == 3
    log.close()


@pytest.mark.parametrize("half", ['{"type":"st', "x" * 10_000])
def test_a_half_line_is_left_out_and_cut_off_by_the_next_launch(tmp_path: Path, half: str) -> None:
    path = tmp_path / "events.jsonl"
    write(path, step(0))
    with path.open("a") as file:
        file.write(half)
    assert [e.tick for e in read(path)] == [0]
    write(path, step(1))
    assert [e.tick for e in read(path)] == [0, 1]


def test_a_file_that_is_one_half_line_is_emptied(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text("{")
    write(path, step(0))
    assert [e.tick for e in read(path)] == [0]


def test_a_full_disk_is_one_error_that_says_how_to_go_on() -> None:
    log = EventLog(Path("/dev/full"))
    log.write(step(0))
    with pytest.raises(ManyhandsError, match=r"cannot write /dev/full: No space left.*resume=True"):
        log.flush()
    log.write(step(1))
    log.close()  # says nothing again


def test_steps_that_a_resumed_launch_did_again_count_once(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    write(path, Event(type="start"), step(0), step(1), step(2), Event(type="start", tick=1), step(1), step(2), step(3))
    assert [e.tick for e in steps_that_count(path)] == [0, 1, 2, 3]
    assert [e.tick for e in steps_that_count(path, before_tick=2)] == [0, 1]


def test_of_a_leased_epoch_that_was_interrupted_the_slices_still_to_do_do_not_count(tmp_path: Path) -> None:
    def leased(index: int, part: int, epoch: int = 1) -> Event:
        return Event(type="step", tick=4 * epoch + index, rank=0, values={"epoch": epoch, "lease": [index, part, 0]})

    path = tmp_path / "events.jsonl"
    left = (1, [[1, 4], [0, 2]])
    made = [leased(3, 0, epoch=0), leased(0, 0), leased(3, 1), leased(2, 1)]
    lost = [leased(0, 1), leased(1, 0), leased(1, 1)]  # made by a launch that went on from `left`, and made again
    write(path, Event(type="start"), *made, Event(type="start", tick=8, values={"left": left}), *lost)
    assert steps_that_count(path, 8, left) == made
    write(path, Event(type="start", tick=8, values={"left": left}), *lost, leased(0, 0, epoch=2))
    assert [(e.tick, e.values["lease"][1]) for e in steps_that_count(path)] == [
        (e.tick, e.values["lease"][1]) for e in [*made, *lost, leased(0, 0, epoch=2)]
    ]
    assert len(steps_that_count(path, before_tick=8)) == len(made) + len(lost)
