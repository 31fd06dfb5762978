"""Lines of events on a disk that may be full, written by drivers that may be killed."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from step_events import step

import manyhands as mh
from manyhands.checkpoint.paths import AnyPath, RemotePath
from manyhands.errors import BadInput, ManyhandsError
from manyhands.events import Event
from manyhands.recording import event_log
from manyhands.recording.event_log import EventLog, left_at, read


def steps_that_count(path: AnyPath, *place: Any, **named: Any) -> list[Event]:
    return [event for event, _ in event_log.steps_that_count([path], *place, **named)]


def write(path: AnyPath, *events: Event) -> None:
    log = EventLog(path)
    for event in events:
        log.write(event)
    log.close()


def test_steps_reach_the_disk_once_a_second_and_rare_events_at_once(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    log = EventLog(path)
    log.poll(100.0)
    log.write(step(0, 0))
    log.poll(100.9)
    assert path.read_text() == ""
    log.poll(101.0)
    assert len(list(read(path))) == 1
    log.write(step(0, 1))
    log.write(Event(type="epoch"))
    assert len(list(read(path))) == 3
    log.close()


def test_a_half_line_is_left_out_and_cut_off_by_the_next_launch(tmp_path: Path) -> None:
    for i, half in enumerate(['{"type":"st', "x" * 10_000]):
        path = tmp_path / f"events{i}.jsonl"
        write(path, step(0, 0))
        with path.open("a") as file:
            file.write(half)
        assert [e.tick for e in read(path)] == [0]
        write(path, step(0, 1))
        assert [e.tick for e in read(path)] == [0, 1]
    path.write_text("{")  # a file that is one half line is emptied
    write(path, step(0, 0))
    assert [e.tick for e in read(path)] == [0]


def test_a_full_disk_and_a_failure_elsewhere_are_one_error_that_says_how_to_go_on(
    elsewhere: RemotePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = EventLog(Path("/dev/full"))
    log.write(step(0, 0))
    with pytest.raises(ManyhandsError, match=r"cannot write /dev/full: No space left.*resume=True"):
        log.flush()
    log.write(step(0, 1))
    log.close()  # says nothing again
    log = EventLog(elsewhere)

    def refused(*_: object, **options: object) -> None:
        raise PermissionError("not yours")

    with monkeypatch.context() as patched:
        patched.setattr("fsspec.implementations.memory.MemoryFileSystem._open", refused)
        log.write(Event(type="checkpoint"))
        with pytest.raises(ManyhandsError, match=r"events.jsonl.partial: PermissionError: not yours.*resume=True"):
            log.sync()
    log.close()  # says nothing again
    assert not elsewhere.exists()


def test_steps_that_a_resumed_launch_did_again_count_once(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    write(path, Event(type="start"), step(0, 0), step(0, 1), step(0, 2))
    write(path, Event(type="start", tick=1), step(0, 1), step(0, 2), step(0, 3))  # appends
    assert [(e.type, e.tick) for e in read(path)][3:5] == [("step", 2), ("start", 1)]
    assert [e.tick for e in steps_that_count(path)] == [0, 1, 2, 3]
    assert [e.tick for e in steps_that_count(path, before_tick=2)] == [0, 1]


def test_of_a_leased_epoch_that_was_interrupted_the_slices_still_to_do_do_not_count(tmp_path: Path) -> None:
    def leased(index: int, part: int, epoch: int = 1) -> Event:
        return step(0, 4 * epoch + index, epoch=epoch, lease=[index, part, 0])

    path = tmp_path / "events.jsonl"
    left = (1, [[1, 4], [0, 2]])
    made = [leased(3, 0, epoch=0), leased(0, 0), leased(3, 1), leased(2, 1)]
    lost = [leased(0, 1), leased(1, 0), leased(1, 1)]  # made by a launch that went on from `left`, and made again
    write(path, Event(type="start"), *made, Event(type="start", tick=8, values={"left": left}), *lost)
    assert steps_that_count(path, 8, left) == made
    write(path, Event(type="start", tick=8, values={"left": left}), *lost, leased(0, 0, epoch=2))
    counted, wanted = (
        [(e.tick, e.values["lease"][1]) for e in events]
        for events in (steps_that_count(path), [*made, *lost, leased(0, 0, epoch=2)])
    )
    assert counted == wanted
    assert len(steps_that_count(path, before_tick=8)) == len(made) + len(lost)


def test_a_line_that_is_no_event_is_left_out_and_told(tmp_path: Path) -> None:
    for i, line in enumerate(
        [
            *("null", "[]", '"x"', "7", "{", "[" * 100_000, "{}", '{"type": 7}', '{"type": "step"}'),
            *('{"type": "step", "tick": -1}', '{"type": "step", "rank": 1e9}', '{"type": "end", "other": 1}'),
            *(step(0, **bad).to_json() for bad in ({"rows": "4"}, {"bytes": 10**400}, {"lease": [0, -1, 0]})),
            *(step(rank, tick).to_json() for rank, tick in ((10**9, 0), (0, 10**30))),
            Event(type="step", rank=0, values={"loss": 1.0}).to_json(),
            Event(type="start", rank=0, values={"left": [0, [1]]}).to_json(),
        ]
    ):
        path = tmp_path / f"events{i}.jsonl"
        write(path, step(0, 0))
        with path.open("a") as file:
            file.write(line + "\n")
        write(path, step(0, 1))
        told: list[str] = []
        assert [e.tick for e in steps_that_count(path, warn=told.append)] == [0, 1], line[:80]
        (warning,) = told
        assert re.search("cannot be read are ignored: 1;.*line 2", warning)
        with pytest.raises(BadInput, match="damaged in line 2"):
            steps_that_count(path)


def test_each_ranks_own_file_counts_as_far_as_its_launch_got(tmp_path: Path) -> None:
    """Four ranks made ticks 0 to 2; two went on from tick 1."""
    starts = {
        n: Event(type="start", tick=tick, values={"launch": n, "workers": w}) for n, tick, w in ((1, 0, 4), (2, 1, 2))
    }
    write(tmp_path / "events.jsonl", starts[1], step(0, 0), step(0, 1), step(0, 2), starts[2], step(0, 1), step(0, 2))
    for rank in (1, 2, 3):
        again = [starts[2], step(rank, 1), step(rank, 2)] if rank == 1 else []
        path = tmp_path / event_log.file_of(rank)
        write(path, starts[1], step(rank, 0), step(rank, 1), step(rank, 2), *again)
    counted = list(event_log.steps_that_count(event_log.files_in(tmp_path)))
    assert sorted((e.tick, e.rank, workers) for e, workers in counted) == [
        *((0, rank, 4) for rank in range(4)),
        *((tick, rank, 2) for tick in (1, 2) for rank in range(2)),
    ]
    assert [row["rows"] for row in mh.read_history(tmp_path)] == [16, 8, 8]


@pytest.fixture
def elsewhere(tmp_path: Path) -> Iterator[RemotePath]:
    folder = RemotePath(f"memory:/{tmp_path}")
    yield folder / "events.jsonl"
    folder.remove()


def ticks(path: AnyPath) -> list[int]:
    return [event.tick for event in read(path)]


def test_elsewhere_it_is_put_when_it_is_synced_and_at_the_end(elsewhere: RemotePath) -> None:
    log = EventLog(elsewhere)
    log.poll(100.0)
    log.write(step(0, 0))
    log.poll(101.0)
    assert not elsewhere.exists()
    log.write(Event(type="checkpoint", tick=1))
    log.sync()
    assert ticks(elsewhere) == [0, 1]
    log.write(step(0, 2))
    log.poll(103.0)
    assert ticks(elsewhere) == [0, 1]
    log.close()
    log.close()
    assert ticks(elsewhere) == [0, 1, 2]


def test_elsewhere_a_second_launch_appends_and_what_was_to_replace_it_is_not_lost(elsewhere: RemotePath) -> None:
    """Where a file system cannot replace a file, a launch may be killed when the old one is gone."""
    assert left_at(elsewhere) is None
    write(elsewhere.with_name("events.jsonl.partial"), step(0, 0), step(0, 1))
    assert left_at(elsewhere) == elsewhere.with_name("events.jsonl.partial")
    write(elsewhere, step(0, 2))
    assert left_at(elsewhere) == elsewhere
    elsewhere.write_bytes(elsewhere.read_bytes() + b'{"type":"st')
    write(elsewhere, step(0, 3))
    assert ticks(elsewhere) == [0, 1, 2, 3]
