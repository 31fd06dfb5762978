from typing import Any

import pytest

from manyhands.engines.driver.run_monitor import START_S, Failed, Failure, Hung, ProcessFinished, RunMonitor

FINISHED = ProcessFinished()


def started(size: int = 2, servers: int = 0, **options: Any) -> RunMonitor:
    """All have started at 0; the limit is 10 s."""
    monitor = RunMonitor(size, 10.0, now=0.0, servers=servers, **options)
    for process_index in monitor.processes:
        monitor.started(process_index, now=0.0)
    return monitor


def failure(rank: int, secondary: bool = False) -> Failure:
    return Failure(rank=rank, phase="compute", step=3, message=f"from {rank}", secondary=secondary)


def told(monitor: RunMonitor, now: float) -> Failure:
    verdict = monitor.verdict(now)
    assert isinstance(verdict, Failed)
    return verdict.failure


# -- the end, and failures ---------------------------------------------------------------------------------------------


def test_a_lost_peer_waits_for_the_root_cause_and_the_first_error_wins() -> None:
    monitor = started(3)
    monitor.raised(failure(0, secondary=True), 1.0)
    monitor.raised(failure(1, secondary=True), 1.1)
    assert monitor.verdict(1.4) is None
    assert monitor.verdict(1.5) == Failed(failure(0, secondary=True))  # no cause has come
    monitor.raised(failure(2), 1.45)
    monitor.raised(failure(1), 1.45)
    assert monitor.verdict(1.45) == Failed(failure(2))


# -- hangs -------------------------------------------------------------------------------------------------------------

# workers and shards; what is heard: (who, phase, step, idle seconds, when); then verdicts: (when, what)
HANGS: dict[str, tuple[tuple[int, int], list[tuple[int, str, int, float, float]], list[tuple[float, Any]]]] = {
    "the stalest that does not wait": (
        (3, 0),
        [(2, "compute", 8, 0.0, 11.5), (0, "exchange", 7, 10.5, 11.5), (1, "compute", 7, 9.5, 11.5)],
        [(10.9, None), (12.0, Hung(1, 10.0))],
    ),
    "all waiting": (
        (2, 0),
        [(0, "exchange", 7, 10.5, 11.5), (1, "wait", 7, 9.5, 11.5)],
        [(12.0, Hung(0, 11.0))],
    ),
    # on busy cores others' heartbeats are late, too, and they have waited for it for longer than it has stood still
    "of several silent ones the longest silent": (
        (3, 0),
        [(1, "checkpoint", 4, 0.0, 1.0), (0, "checkpoint", 4, 7.5, 8.0), (2, "checkpoint", 4, 10.9, 11.4)],
        [(11.5, Hung(1, 10.5, silent_s=10.5))],
    ),
    "user code that nobody waits for": (
        (2, 0),
        [(0, "user", 0, 0.0, 1.0), (1, "user", 0, 0.0, 1.0)],
        [(1000.0, None)],
    ),
    "user code that somebody waits for": (
        (2, 0),
        [(0, "user", 0, 0.0, 1.0), (1, "user", 0, 0.0, 1.0), (0, "exchange", 0, 9.5, 1009.5), (1, "user", 0, 1008.5, 1009.5)],
        [(1009.5, None), (1010.0, Hung(1, 1009.0))],
    ),
    "stale work before older user code": (
        (3, 0),
        [(0, "user", 0, 10.5, 11.5), (1, "compute", 4, 9.5, 11.5), (2, "exchange", 4, 10.0, 11.5)],
        [(12.0, Hung(1, 10.0))],
    ),
    # all are in the same phase: in those where workers meet, the phase alone does not tell who waits
    **{
        f"who sends no heartbeat in {phase}, before those that wait for it": (
            (3, 0),
            [(1, phase, 4, 1.0, 2.0), *((rank, "exchange" if phase == "user" else phase, 4, 10.5, 11.5) for rank in (0, 2))],
            [(11.5, Hung(1, 10.5, silent_s=9.5))],
        )
        for phase in ("start", "validation", "checkpoint", "exchange", "user")
    },
    "an idle shard hangs nobody": (
        (2, 1),
        [(-1, "wait", 0, 50.0, 50.0), (0, "compute", 50, 0.0, 50.0), (1, "compute", 50, 0.0, 50.0)],
        [(50.0, None)],
    ),
    "an idle shard is not blamed for a hang of all workers": (
        (2, 1),
        [(0, "exchange", 3, 0.0, 1.0), (1, "exchange", 3, 0.0, 2.0), (-1, "wait", 0, 12.0, 11.5)],
        [(11.5, Hung(0, 10.5, silent_s=10.5))],
    ),
    # it was stopped, say: the workers wait for it, and it is the one that does not answer
    "a shard that is not heard": (
        (2, 1),
        [(-1, "wait", 0, 0.0, 1.0), (0, "exchange", 3, 8.9, 10.9), (1, "exchange", 3, 8.9, 10.9)],
        [(11.0, Hung(-1, 10.0, silent_s=10.0))],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", HANGS)
def test_who_hangs(case: str) -> None:
    sizes, beats, verdicts = HANGS[case]
    monitor = started(*sizes)
    for who, phase, step, idle_s, now in beats:
        monitor.beat(who, phase, step, idle_s, now=now)
    for now, wanted in verdicts:
        assert monitor.verdict(now) == wanted, now


def test_of_several_silent_ones_the_status_pages_tell_who_waits() -> None:
    """Their last heartbeats were sent from `compute`; the pages, which stopped processes leave behind, are newer."""
    monitor = started(3)
    for rank, idle_s in ((0, 0.3), (1, 0.2), (2, 0.1)):
        monitor.beat(rank, "compute", 7, idle_s, now=1.0)
    assert monitor.verdict(11.0) == Hung(0, 10.3, silent_s=10.0)
    for rank, phase in enumerate(["exchange", "validation", "exchange"]):
        monitor.found(rank, phase, 8)
    assert monitor.verdict(11.0) == Hung(1, 10.2, silent_s=10.0)
    assert (monitor.processes[1].phase, monitor.processes[1].step) == ("validation", 8)


def test_compiling_is_progress_while_heartbeats_come() -> None:
    monitor = started()
    monitor.beat(0, "exchange", 0, 0.0, now=1.0)
    for now in range(2, 40):
        monitor.beat(1, "compile", 0, float(now), now=float(now))
        assert monitor.verdict(float(now)) is None
    assert monitor.verdict(49.0) == Hung(1, 49.0, silent_s=10.0)


def test_deadline_begins_when_the_process_is_there_and_the_drivers_own_work_is_excused() -> None:
    monitor = RunMonitor(1, timeout_s=1.0, now=0.0)
    assert monitor.verdict(START_S - 1) is None
    assert monitor.verdict(START_S) == Hung(0, START_S)
    monitor.started(0, START_S)
    assert monitor.verdict(START_S + 0.9) is None
    monitor = started(1)
    monitor.excuse(30.0)
    assert monitor.verdict(39.9) is None
    assert monitor.verdict(40.0) == Hung(0, 10.0, silent_s=10.0)


def test_table_has_a_row_a_process() -> None:
    monitor = started(servers=1)
    monitor.beat(0, "compute", 41, 0.0, now=2.0)
    monitor.returned(1, 1.0)
    rows = [[cell.strip() for cell in row.split("|")] for row in monitor.table(14.5).splitlines()]
    assert rows[:3] == [
        ["rank", "last step", "phase", "seconds since progress", "since a heartbeat"],
        ["0", "41", "compute", "12.5", "12.5"],
        ["1", "0", "returned", "", ""],
    ]
    assert [row[0] for row in rows[3:]] == ["server shard 0"]


# -- shards, and others that need not return -----------------------------------------------------------------------------


def test_a_dead_shard_is_named_with_its_host_as_the_cause_of_lost_peers() -> None:
    """CASE 21"""
    monitor = started(servers=2)
    monitor.raised(failure(0, secondary=True), 1.0)
    monitor.exited(-2, -9, "alpha", 1.0, ("wait", 0), "its stack")
    found = told(monitor, 1.0)
    assert found.message.startswith("server shard 1 on alpha was killed by signal 9 (SIGKILL")
    assert (found.rank, found.detail) == (-2, "its stack")
    monitor = started(servers=1)
    monitor.raised(failure(1, secondary=True), 1.1)
    monitor.exited(-1, 0, "alpha", 1.2)
    assert told(monitor, 1.2).rank == -1


def test_the_run_is_finished_when_all_workers_are_and_shards_had_their_time() -> None:
    monitor = started(servers=1)
    for rank in (0, 1):
        monitor.returned(rank, 3.0)
    monitor.raised(failure(0), 3.5)  # no failure of one that has returned
    assert monitor.verdict(3.9) is None
    assert monitor.verdict(4.0) == FINISHED
    monitor.returned(-1, 3.1)
    assert monitor.verdict(3.1) == FINISHED
    monitor = started(servers=1)  # shards that left first finish nothing
    monitor.returned(-1, 1.0)
    monitor.exited(-1, 0, "alpha", 1.0)
    monitor.returned(0, 1.0)
    assert monitor.verdict(9.0) is None


def led() -> RunMonitor:
    """Ranks 0 and 1 must return, the last need not."""
    return started(3, awaited={0, 1}, names=("chief 0", "worker 0", "ps 0").__getitem__)


def test_who_need_not_return_has_a_second_after_those_who_must() -> None:
    monitor = led()
    monitor.returned(0, 1.0)
    assert monitor.verdict(5.0) is None
    monitor.returned(1, 5.0)
    assert monitor.verdict(5.9) is None
    assert monitor.verdict(6.0) == FINISHED
    monitor.returned(2, 5.5)
    assert monitor.verdict(5.5) == FINISHED
    monitor = led()
    monitor.returned(2, 1.0)  # which ends nothing
    assert monitor.verdict(5.0) is None


def test_what_befalls_who_need_not_return_is_a_cause_unless_the_others_have() -> None:
    """Before they are known to have returned, too: hosts' messages overtake each other."""
    monitor = led()
    monitor.returned(0, 1.0)
    monitor.raised(failure(2), 1.1)
    assert monitor.verdict(1.5) is None
    monitor.returned(1, 1.55)
    assert monitor.verdict(1.55) == FINISHED
    monitor = led()
    monitor.exited(2, -9, "alpha", 1.0)
    monitor.raised(failure(0), 1.2)
    assert monitor.verdict(1.4) is None
    assert told(monitor, 1.5).message.startswith("ps 0 on alpha was killed by signal 9")
    monitor = led()
    monitor.raised(failure(1), 1.0)  # who must return: at once
    assert monitor.verdict(1.0) == Failed(failure(1))
