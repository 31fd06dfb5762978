from __future__ import annotations

import pytest

from manyhands.engines.driver.run_monitor import (
    START_S,
    Failed,
    Failure,
    Hung,
    ProcessFinished,
    RunMonitor,
    how_it_ended,
)


def started(size: int = 2, timeout_s: float = 10.0) -> RunMonitor:
    monitor = RunMonitor(size, timeout_s, now=0.0)
    for rank in range(size):
        monitor.started(rank, now=0.0)
    return monitor


def failure(rank: int, secondary: bool = False) -> Failure:
    return Failure(rank=rank, phase="compute", step=3, message=f"from {rank}", secondary=secondary)


def test_finished_once_all_returned() -> None:
    monitor = started()
    monitor.returned(0, 1.0)
    assert monitor.verdict(1.0) is None
    monitor.returned(1, 1.0)
    assert monitor.verdict(1.0) == ProcessFinished()


def test_exit_after_the_value_is_no_failure() -> None:
    monitor = started(1)
    monitor.returned(0, 1.0)
    monitor.exited(0, 0, "here", 1.0)
    assert monitor.verdict(1.0) == ProcessFinished()


def test_death_names_rank_host_phase_and_step() -> None:
    """CASE 21."""
    monitor = started()
    monitor.beat(1, "compute", 12, 0.0, now=5.0)
    monitor.exited(1, -11, "alpha", 5.1)
    verdict = monitor.verdict(5.1)
    assert isinstance(verdict, Failed)
    assert verdict.failure.message == "worker 1 on alpha was killed by signal 11 (SIGSEGV) in phase compute at step 12"


def test_first_error_wins() -> None:
    monitor = started(3)
    monitor.raised(failure(2), 1.0)
    monitor.raised(failure(0), 1.0)
    assert monitor.verdict(1.0) == Failed(failure(2))


def test_lost_peer_waits_for_the_root_cause() -> None:
    monitor = started(3)
    monitor.raised(failure(0, secondary=True), 1.0)
    assert monitor.verdict(1.4) is None
    monitor.raised(failure(2), 1.45)
    assert monitor.verdict(1.45) == Failed(failure(2))


def test_lost_peer_is_told_when_no_cause_comes() -> None:
    monitor = started(3)
    monitor.raised(failure(0, secondary=True), 1.0)
    monitor.raised(failure(1, secondary=True), 1.1)
    assert monitor.verdict(1.5) == Failed(failure(0, secondary=True))


def test_hang_blames_the_stalest_that_does_not_wait() -> None:
    monitor = started(3)
    monitor.beat(0, "exchange", 7, 0.0, now=1.0)
    monitor.beat(1, "compute", 7, 0.0, now=2.0)
    monitor.beat(2, "compute", 8, 0.0, now=11.5)
    assert monitor.verdict(10.9) is None
    for rank, idle_s in ((0, 10.5), (1, 9.5)):
        monitor.beat(rank, monitor.processes[rank].phase, 7, idle_s, now=11.5)
    assert monitor.verdict(12.0) == Hung(1, 10.0)


def test_idle_seconds_of_a_heartbeat_count() -> None:
    monitor = started(1)
    monitor.beat(0, "compute", 1, idle_s=9.0, now=20.0)
    assert monitor.verdict(20.9) is None
    assert monitor.verdict(21.0) == Hung(0, 10.0)


def test_all_waiting_is_a_hang_too() -> None:
    monitor = started()
    monitor.beat(0, "exchange", 7, 0.0, now=1.0)
    monitor.beat(1, "wait", 7, 0.0, now=2.0)
    for rank, idle_s in ((0, 10.5), (1, 9.5)):
        monitor.beat(rank, monitor.processes[rank].phase, 7, idle_s, now=11.5)
    assert monitor.verdict(12.0) == Hung(0, 11.0)


@pytest.mark.parametrize("phase", ["start", "validation", "checkpoint", "exchange", "user"])
def test_who_sends_no_heartbeat_is_blamed_before_those_that_wait_for_it(phase: str) -> None:
    """All are in the same phase: in those where workers meet, the phase alone does not tell who waits."""
    monitor = started(3)
    for rank in range(3):
        monitor.beat(rank, phase, 4, 0.0, now=1.0)
    monitor.beat(1, phase, 4, 1.0, now=2.0)  # its last; the others have stood still for longer
    for rank in (0, 2):
        monitor.beat(rank, "exchange" if phase == "user" else phase, 4, 10.5, now=11.5)
    assert monitor.verdict(11.5) == Hung(1, 10.5, silent_s=9.5)


def test_of_several_silent_ones_the_longest_silent_is_blamed() -> None:
    """On busy cores others' heartbeats are late, too, and they have waited for it for longer than it has stood still."""
    monitor = started(3)
    for rank, idle_s, now in ((1, 0.0, 1.0), (0, 7.5, 8.0), (2, 10.9, 11.4)):
        monitor.beat(rank, "checkpoint", 4, idle_s, now=now)
    assert monitor.verdict(11.5) == Hung(1, 10.5, silent_s=10.5)


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


def test_user_code_may_take_long_unless_somebody_waits_for_it() -> None:
    monitor = started()
    for rank in (0, 1):
        monitor.beat(rank, "user", 0, 0.0, now=1.0)
    assert monitor.verdict(1000.0) is None
    monitor.beat(0, "exchange", 0, 0.0, now=1000.0)
    assert monitor.verdict(1009.0) is None
    monitor.beat(0, "exchange", 0, 9.5, now=1009.5)
    monitor.beat(1, "user", 0, 1008.5, now=1009.5)
    assert monitor.verdict(1010.0) == Hung(1, 1009.0)


def test_stale_work_is_blamed_before_older_user_code() -> None:
    monitor = started(3)
    monitor.beat(0, "user", 0, 0.0, now=1.0)
    monitor.beat(1, "compute", 4, 0.0, now=2.0)
    monitor.beat(2, "exchange", 4, 0.0, now=1.5)
    for rank, idle_s in ((0, 10.5), (1, 9.5), (2, 10.0)):
        monitor.beat(rank, monitor.processes[rank].phase, 4, idle_s, now=11.5)
    assert monitor.verdict(12.0) == Hung(1, 10.0)


def test_deadline_begins_when_the_process_is_there() -> None:
    monitor = RunMonitor(1, timeout_s=1.0, now=0.0)
    assert monitor.verdict(START_S - 1) is None
    assert monitor.verdict(START_S) == Hung(0, START_S)
    monitor.started(0, START_S)
    assert monitor.verdict(START_S + 0.9) is None


def test_the_drivers_own_work_is_excused() -> None:
    monitor = started(1)
    monitor.excuse(30.0)
    assert monitor.verdict(39.9) is None
    assert monitor.verdict(40.0) == Hung(0, 10.0, silent_s=10.0)


def test_table_has_a_row_a_worker() -> None:
    monitor = started()
    monitor.beat(0, "compute", 41, 0.0, now=2.0)
    monitor.returned(1, 1.0)
    rows = [[cell.strip() for cell in row.split("|")] for row in monitor.table(14.5).splitlines()]
    assert rows == [
        ["rank", "last step", "phase", "seconds since progress", "since a heartbeat"],
        ["0", "41", "compute", "12.5", "12.5"],
        ["1", "0", "returned", "", ""],
    ]


def served(servers: int = 1) -> RunMonitor:
    """Two workers and so many shards, all started."""
    monitor = RunMonitor(2, 10.0, now=0.0, servers=servers)
    for process_index in monitor.processes:
        monitor.started(process_index, now=0.0)
    return monitor


def test_a_dead_shard_is_named_with_its_host() -> None:
    """CASE 21"""
    monitor = served(servers=2)
    monitor.exited(-2, -9, "alpha", 1.0, ("wait", 0), "its stack")
    verdict = monitor.verdict(1.0)
    assert isinstance(verdict, Failed)
    assert verdict.failure.message.startswith("server shard 1 on alpha was killed by signal 9 (SIGKILL")
    assert (verdict.failure.rank, verdict.failure.detail) == (-2, "its stack")


def test_a_shards_death_is_the_cause_of_lost_peers() -> None:
    monitor = served()
    monitor.raised(failure(0, secondary=True), 1.0)
    monitor.raised(failure(1, secondary=True), 1.1)
    monitor.exited(-1, 0, "alpha", 1.2)
    verdict = monitor.verdict(1.2)
    assert isinstance(verdict, Failed)
    assert verdict.failure.rank == -1


def test_an_idle_shard_hangs_nobody() -> None:
    monitor = served()
    for now in (5.0, 50.0):
        monitor.beat(-1, "wait", 0, idle_s=now, now=now)
        for rank in (0, 1):
            monitor.beat(rank, "compute", int(now), 0.0, now=now)
    assert monitor.verdict(50.0) is None


def test_an_idle_shard_is_not_blamed_for_a_hang_of_all_workers() -> None:
    monitor = served()
    for rank in (0, 1):
        monitor.beat(rank, "exchange", 3, 0.0, now=1.0 + rank)
    monitor.beat(-1, "wait", 0, idle_s=12.0, now=11.5)
    assert monitor.verdict(11.5) == Hung(0, 10.5, silent_s=10.5)


def test_a_shard_that_is_not_heard_is_a_hang() -> None:
    """It was stopped, say: the workers wait for it, and it is the one that does not answer."""
    monitor = served()
    monitor.beat(-1, "wait", 0, idle_s=0.0, now=1.0)
    for rank in (0, 1):
        monitor.beat(rank, "exchange", 3, 0.0, now=2.0)
    for rank in (0, 1):
        monitor.beat(rank, "exchange", 3, 8.9, now=10.9)
    assert monitor.verdict(11.0) == Hung(-1, 10.0, silent_s=10.0)


def test_the_run_is_finished_when_all_workers_are_and_shards_had_their_time() -> None:
    monitor = served()
    for rank in (0, 1):
        monitor.returned(rank, 3.0)
    assert monitor.verdict(3.9) is None
    assert monitor.verdict(4.0) == ProcessFinished()
    monitor.returned(-1, 3.1)
    assert monitor.verdict(3.1) == ProcessFinished()


def test_shards_that_left_first_finish_nothing() -> None:
    monitor = served()
    monitor.returned(-1, 1.0)
    monitor.exited(-1, 0, "alpha", 1.0)
    monitor.returned(0, 1.0)
    assert monitor.verdict(9.0) is None


def test_what_befalls_one_that_has_returned_is_no_failure() -> None:
    monitor = started()
    monitor.returned(1, 1.0)
    monitor.raised(failure(1), 2.0)
    assert monitor.verdict(2.0) is None


def test_shards_are_rows_of_the_table() -> None:
    monitor = served()
    assert [row.split("|")[0].strip() for row in monitor.table(1.0).splitlines()] == [
        "rank",
        "0",
        "1",
        "server shard 0",
    ]


@pytest.mark.parametrize(
    ("status", "words"),
    [(0, "exit code 0 before it returned"), (-9, "SIGKILL; if nobody killed it"), (-64, "signal 64")],
)
def test_how_it_ended(status: int, words: str) -> None:
    assert words in how_it_ended(status)


def led(workers: int = 3) -> RunMonitor:
    """Ranks 0 and 1 must return, the last need not."""
    names = "chief 0", "worker 0", "ps 0"
    monitor = RunMonitor(workers, 10.0, now=0.0, awaited={0, 1}, names=names.__getitem__)
    for rank in range(workers):
        monitor.started(rank, now=0.0)
    return monitor


def test_who_need_not_return_has_a_second_after_those_who_must() -> None:
    monitor = led()
    monitor.returned(0, 1.0)
    assert monitor.verdict(5.0) is None
    monitor.returned(1, 5.0)
    assert monitor.verdict(5.9) is None
    assert monitor.verdict(6.0) == ProcessFinished()
    monitor.returned(2, 5.5)
    assert monitor.verdict(5.5) == ProcessFinished()


def test_the_return_of_who_need_not_ends_nothing() -> None:
    monitor = led()
    monitor.returned(2, 1.0)
    assert monitor.verdict(5.0) is None


def test_what_befalls_who_need_not_return_after_the_others_is_no_failure() -> None:
    """Before they are known to have returned, too: hosts' messages overtake each other."""
    monitor = led()
    monitor.returned(0, 1.0)
    monitor.raised(failure(2), 1.1)
    assert monitor.verdict(1.5) is None
    monitor.returned(1, 1.55)
    assert monitor.verdict(1.55) == ProcessFinished()


def test_a_death_of_who_need_not_return_is_the_cause_of_what_follows() -> None:
    monitor = led()
    monitor.exited(2, -9, "alpha", 1.0)
    monitor.raised(failure(0), 1.2)
    assert monitor.verdict(1.4) is None
    verdict = monitor.verdict(1.5)
    assert isinstance(verdict, Failed)
    assert verdict.failure.message.startswith("ps 0 on alpha was killed by signal 9")


def test_a_failure_of_who_must_return_is_told_at_once() -> None:
    monitor = led()
    monitor.raised(failure(1), 1.0)
    assert monitor.verdict(1.0) == Failed(failure(1))
