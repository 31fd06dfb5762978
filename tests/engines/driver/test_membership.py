from __future__ import annotations

from typing import Any

import pytest

from manyhands.engines.driver.membership import (
    ACCUSED_S,
    STALLED_GENERATIONS,
    Action,
    FailRun,
    Form,
    Interrupt,
    Membership,
    Release,
    Report,
    RestartRun,
    StartWorker,
    StopWorker,
)
from manyhands.engines.driver.run_monitor import START_S
from manyhands.engines.survive import Survive

ALPHA = {0: "alpha", 1: "alpha", 2: "beta", 3: "beta"}


def starting(workers: dict[int, str] | None = None, **rules: Any) -> Membership:
    return Membership(Survive(**({"max_losses": "any"} | rules)), workers or ALPHA, 0.0, timeout_s=30.0)


def running(workers: dict[int, str] | None = None, **rules: Any) -> Membership:
    """In generation 0, all with state, and each with a step."""
    membership = starting(workers, **rules)
    for worker_id in workers or ALPHA:
        membership.started(worker_id, 0.0)
        membership.requested(worker_id, -1, True, 0.0)
    assert membership.decide(0.0) == [Form(0, tuple(workers or ALPHA))]
    for worker_id in workers or ALPHA:
        membership.stepped(worker_id, 0.0, 1)
    return membership


def request(
    membership: Membership, *worker_ids: int, generation: int = 0, now: float = 1.0, blank: bool = False
) -> None:
    for worker_id in worker_ids:
        membership.requested(worker_id, generation, blank, now)


def do(membership: Membership, now: float = 1.0) -> list[Action]:
    """What is to be done but for reports; and that it is given once."""
    actions = [action for action in membership.decide(now) if not isinstance(action, Report)]
    assert membership.decide(now) == []
    return actions


def reports(membership: Membership, now: float = 1.0) -> list[str]:
    return [action.message for action in membership.decide(now) if isinstance(action, Report)]


# -- the first generation --------------------------------------------------------------------------------------------


def test_the_first_generation_is_formed_when_all_have_requested() -> None:
    membership = starting()
    assert (membership.phase, membership.generation, membership.members) == ("forming", -1, (0, 1, 2, 3))
    request(membership, 3, 1, 0, generation=-1, blank=True)
    assert do(membership) == []
    request(membership, 2, generation=-1, blank=True)
    assert do(membership) == [Form(0, (0, 1, 2, 3))]
    assert (membership.phase, membership.generation, membership.members) == ("running", 0, (0, 1, 2, 3))


def test_a_worker_lost_before_is_a_loss_and_nobody_waits_for_its_replacement() -> None:
    membership = starting(max_losses=1)
    request(membership, 0, 1, 2, generation=-1, blank=True)
    membership.lost(3, "death", 1.0)
    assert do(membership) == [Form(0, (0, 1, 2)), StartWorker(3, "beta")]
    assert [loss["worker_id"] for loss in membership.losses] == [3]


def test_a_restarted_run_goes_on_with_the_next_generation() -> None:
    membership = Membership(Survive(), {0: "alpha"}, 0.0, generation=5)
    assert membership.generation == -1
    request(membership, 0, generation=-1, blank=True)
    assert do(membership) == [Form(5, (0,))]
    request(membership, 0, generation=5)
    assert do(membership) == [Form(6, (0,))]


@pytest.mark.parametrize(("starts", "deadline"), [(True, 32.0), (False, START_S)])
def test_a_first_generation_waits_for_processes_that_load(starts: bool, deadline: float) -> None:
    membership = starting({0: "alpha", 1: "alpha"}, replace=False)
    request(membership, 0, generation=-1, blank=True)
    if starts:
        membership.started(1, 2.0)
    assert membership.next_deadline() == deadline
    assert do(membership, deadline - 0.1) == []
    assert do(membership, deadline) == [StopWorker(1)]


def test_all_that_are_there_at_first_may_be_lost() -> None:
    """Then the first generation is formed of those in their places."""
    membership = starting({0: "alpha", 1: "alpha"}, min_workers=2)
    membership.lost(0, "death", 1.0)
    membership.lost(1, "death", 1.0)
    assert do(membership) == [StartWorker(0, "alpha"), StartWorker(1, "alpha")]
    assert membership.phase == "waiting"
    request(membership, 0, 1, generation=-1, blank=True)
    assert do(membership) == [Form(0, (0, 1))]


# -- rule 1: all live members, one of them with state ------------------------------------------------------------------


def test_the_next_generation_waits_for_all_live_members() -> None:
    membership = running(replace=False)
    membership.lost(3, "death", 1.0)
    assert do(membership) == []
    assert membership.phase == "gathering"
    request(membership, 0, 2)
    assert do(membership) == []
    request(membership, 1)
    assert do(membership) == [Form(1, (0, 1, 2))]


def test_peers_may_notice_before_the_driver() -> None:
    membership = running(replace=False)
    request(membership, 0, 1, 2)
    assert do(membership) == []
    assert membership.phase == "gathering"
    membership.lost(3, "death", 1.0)
    assert do(membership) == [Form(1, (0, 1, 2))]


@pytest.mark.parametrize("restarts", [0, 1])
def test_nobody_starts_anew_when_all_with_state_are_lost(restarts: int) -> None:
    membership = running({0: "alpha", 1: "alpha"}, max_restarts=restarts)
    membership.lost(0, "death", 1.0)
    do(membership)
    request(membership, 0, generation=-1, blank=True)
    assert do(membership) == []  # worker 1 lives
    membership.lost(1, "death", 1.0)
    message = "no worker is left that has the model's state"
    assert do(membership) == [RestartRun(message) if restarts else FailRun(message, 0, "death")]
    assert membership.phase == ("restarting" if restarts else "failed")
    assert membership.next_deadline() is None


def test_a_member_that_is_still_blank_does_not_count_as_one_with_state() -> None:
    membership = running({0: "alpha", 1: "alpha"})
    membership.lost(0, "death", 1.0)
    request(membership, 1, blank=True)
    assert isinstance(do(membership)[-1], FailRun)


def test_a_death_inside_the_first_collective_does_not_end_the_run() -> None:
    """All are blank still, so nobody has made a step: there is nothing to lose."""
    membership = starting({0: "alpha", 1: "alpha", 2: "beta"}, replace=False)
    request(membership, 0, 1, 2, generation=-1, blank=True)
    assert do(membership) == [Form(0, (0, 1, 2))]
    membership.lost(2, "death", 1.0)
    request(membership, 0, 1, blank=True)
    assert do(membership) == [Form(1, (0, 1))]
    request(membership, 0, 1, generation=1)
    assert do(membership) == [Form(2, (0, 1))]
    membership.lost(0, "death", 1.0)
    request(membership, 1, generation=2, blank=True)
    assert isinstance(do(membership)[-1], FailRun)


def test_without_a_member_of_the_first_generation_nobody_knows_whether_steps_were_made() -> None:
    membership = starting({0: "alpha"})
    request(membership, 0, generation=-1, blank=True)
    do(membership)
    membership.lost(0, "death", 1.0)
    assert do(membership) == [FailRun("no worker is left that has the model's state", 0, "death")]


# -- rule 2: who has not requested is not lost -------------------------------------------------------------------------


def test_a_member_that_has_not_requested_is_lost_after_timeout_s() -> None:
    membership = running({0: "alpha", 1: "alpha", 2: "beta"}, replace=False)
    membership.lost(2, "death", 1.0)
    request(membership, 0, now=5.0)
    assert do(membership, 5.0) == []
    assert membership.next_deadline() == 31.0
    assert do(membership, 30.9) == []
    assert do(membership, 31.0) == [StopWorker(1)]
    assert membership.losses[1] == {"worker_id": 1, "host": "alpha", "cause": "hang", "step": 1, "seconds": 31.0}
    membership.gone(1, 31.5)
    assert do(membership, 31.5) == [Form(1, (0,))]


def test_one_timeout_bounds_a_recovery_whatever_befalls_within() -> None:
    """torchtitan#2899: the timeouts of what is nested add up. Here whatever happens within ends by the first one's."""
    membership = running(replace=True)
    membership.lost(3, "death", 10.0)
    assert do(membership, 10.0) == [StartWorker(3, "beta")]
    request(membership, 0, now=10.1)
    membership.accused(0, 1, 15.0)
    membership.lost(3, "death", 20.0)  # its replacement
    membership.lost(2, "death", 30.0)
    membership.host_joined("gamma", 1, 35.0)
    do(membership, 35.0)
    assert membership.next_deadline() == 40.0  # and not that of any that began later
    do(membership, 40.0)
    membership.gone(1, 40.0)
    assert Form(1, (0,)) in do(membership, 40.0)


# -- rule 3: fencing -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cause", ["hang", "silence", "error", "slow", "memory"])
def test_a_lost_worker_is_stopped_and_gone_before_the_next_generation(cause: Any) -> None:
    membership = running(replace=False)
    membership.lost(3, cause, 1.0)
    request(membership, 0, 1, 2)
    assert do(membership) == [StopWorker(3)]
    assert membership.next_deadline() == 11.0
    membership.gone(3, 2.0)
    assert do(membership, 2.0) == [Form(1, (0, 1, 2))]


def test_a_worker_elsewhere_has_ended_itself_after_silence_s() -> None:
    membership = running(replace=False, silence_s=4)
    membership.lost(3, "silence", 1.0)
    request(membership, 0, 1, 2)
    assert do(membership, 4.9) == [StopWorker(3)]
    assert do(membership, 5.0) == [Form(1, (0, 1, 2))]


def test_a_death_needs_no_fence_and_gone_is_a_death() -> None:
    membership = running(replace=False)
    membership.gone(3, 1.0)
    request(membership, 0, 1, 2)
    assert do(membership) == [Form(1, (0, 1, 2))]
    assert membership.losses[0]["cause"] == "death"


def test_a_lost_worker_is_replaced_only_once_it_is_gone() -> None:
    membership = running()
    membership.lost(3, "hang", 1.0)
    assert do(membership) == [StopWorker(3)]
    membership.lost(3, "death", 2.0)  # of the same process
    assert do(membership, 2.0) == [StartWorker(3, "beta")]
    assert len(membership.losses) == 1


# -- rule 4: requests and interrupts of a generation -------------------------------------------------------------------


def test_requests_of_older_generations_are_dropped_and_repeated_ones_are_harmless() -> None:
    membership = running({0: "alpha", 1: "alpha"})
    request(membership, 0, 1, 0, 1)
    assert do(membership) == [Form(1, (0, 1))]
    request(membership, 0, 1, generation=0)
    request(membership, 0, 1, generation=-1, blank=True)
    assert do(membership) == []
    assert membership.phase == "running"


def test_what_a_lost_process_asks_for_is_dropped() -> None:
    membership = running(replace=False)
    membership.lost(3, "hang", 1.0)
    request(membership, 0, 1, 2, 3)
    membership.gone(3, 1.0)
    assert do(membership)[-1] == Form(1, (0, 1, 2))


def test_each_member_is_interrupted_once_a_generation() -> None:
    membership = running()
    membership.leave_announced([3], 1.0)
    assert do(membership) == [Interrupt(0, (0, 1, 2, 3))]
    membership.accused(0, 1, 1.0)
    membership.leave_announced([2], 1.0)
    assert do(membership) == []


# -- joins and replacements --------------------------------------------------------------------------------------------


def test_members_go_on_without_the_replacement_until_it_requests() -> None:
    membership = running()
    membership.lost(3, "death", 1.0)
    request(membership, 0, 1, 2)
    assert do(membership) == [Form(1, (0, 1, 2)), StartWorker(3, "beta")]
    membership.started(3, 2.0)
    assert do(membership, 2.0) == []
    request(membership, 3, generation=-1, blank=True)
    request(membership, 3, generation=-1, blank=True)
    assert do(membership) == [Interrupt(1, (0, 1, 2))]
    request(membership, 0, 1, 2, generation=1)
    assert do(membership) == [Form(2, (0, 1, 2, 3))]
    membership.stepped(3, 3.0, 840)
    assert reports(membership, 3.0) == ["worker 3 is back: 4 of 4 workers from step 840"]


def test_who_was_back_for_the_last_steps_alone_is_reported_too() -> None:
    membership = running()
    membership.lost(3, "death", 1.0)
    request(membership, 0, 1, 2)
    do(membership)
    request(membership, 3, generation=-1, blank=True)
    do(membership)
    request(membership, 0, 1, 2, generation=1)
    do(membership)
    membership.finished(0, 3.0)
    assert reports(membership, 3.0) == ["worker 3 is back: 4 of 4 workers"]


def test_a_joiner_that_requests_while_others_gather_is_taken_along() -> None:
    membership = running()
    membership.lost(3, "death", 1.0)
    assert do(membership) == [StartWorker(3, "beta")]
    request(membership, 3, generation=-1, blank=True)
    assert do(membership) == []
    request(membership, 0, 1, 2)
    assert do(membership) == [Form(1, (0, 1, 2, 3))]


def test_a_joiner_that_is_lost_changes_nothing_for_members() -> None:
    membership = running()
    membership.lost(3, "death", 1.0)
    request(membership, 0, 1, 2)
    do(membership)
    membership.lost(3, "death", 2.0)
    assert do(membership, 2.0) == [StartWorker(3, "beta")]
    assert membership.phase == "running"
    assert len(membership.losses) == 2


def test_without_replace_nothing_is_started_in_a_lost_ones_place() -> None:
    membership = running(replace=False)
    membership.lost(3, "death", 1.0)
    request(membership, 0, 1, 2)
    assert do(membership) == [Form(1, (0, 1, 2))]


def test_rule_8_a_worker_lost_three_times_before_its_first_step_is_not_started_again() -> None:
    membership = running()
    membership.lost(3, "death", 1.0)  # after its first step
    request(membership, 0, 1, 2)
    assert do(membership)[-1] == StartWorker(3, "beta")
    for _ in range(2):
        membership.lost(3, "death", 1.0)
        assert do(membership) == [StartWorker(3, "beta")]
    membership.lost(3, "death", 1.0)
    assert reports(membership)[-1] == "worker 3 was lost 3 times before its first step: it is not started again"
    assert do(membership) == []


def test_one_that_is_refused_is_no_loss_and_is_not_started_again() -> None:
    membership = running(max_losses=1)
    membership.lost(3, "death", 1.0)
    request(membership, 0, 1, 2)
    assert do(membership) == [Form(1, (0, 1, 2)), StartWorker(3, "beta")]
    membership.started(3, 1.0)
    membership.requested(3, -1, True, 1.0)
    assert do(membership) == [Interrupt(1, (0, 1, 2))]
    request(membership, 0, 1, 2, generation=1)
    assert do(membership) == [Form(2, (0, 1, 2, 3))]
    membership.refused(3, 2.0, "another program")
    assert do(membership, 2.0) == [StopWorker(3)]
    request(membership, 0, 1, 2, generation=2, now=2.0)
    assert do(membership, 2.0) == [Form(3, (0, 1, 2))]
    membership.gone(3, 2.0)
    membership.refused(3, 2.0, "twice")
    assert do(membership, 60.0) == []
    membership.host_joined("gamma", 1, 60.0)
    assert do(membership, 60.0) == [StartWorker(4, "gamma")]
    assert len(membership.losses) == 1


def test_a_step_sets_the_count_of_early_losses_back() -> None:
    membership = running()
    for _ in range(3):
        membership.lost(3, "death", 1.0)
        do(membership)
    request(membership, 0, 1, 2)
    request(membership, 3, generation=-1, blank=True)
    assert do(membership) == [Form(1, (0, 1, 2, 3))]
    membership.stepped(3, 1.0)
    for _ in range(3):
        membership.lost(3, "death", 2.0)
        assert do(membership, 2.0) == [StartWorker(3, "beta")]


# -- the budget --------------------------------------------------------------------------------------------------------


def test_one_loss_too_many_ends_the_run_and_names_the_first() -> None:
    membership = running(max_losses=1)
    membership.lost(2, "silence", 1.0)
    membership.lost(3, "death", 2.0, place=("exchange", 812), detail="killed by signal 9")
    message = (
        "worker 3 on beta lost (killed by signal 9) during exchange of step 812: loss 2, and max_losses is 1, the "
        "first was worker 2 (no sign of life)"
    )
    assert do(membership)[-1] == FailRun(message, 2, "silence")
    assert do(membership, 99.0) == []
    assert membership.phase == "failed"


def test_it_starts_again_where_it_may() -> None:
    membership = running(max_losses=0, max_restarts=1)
    membership.lost(3, "death", 1.0)
    assert do(membership) == [RestartRun("worker 3 on beta lost (its process ended): loss 1, and max_losses is 0")]
    assert membership.phase == "restarting"


@pytest.mark.parametrize(("most", "budget"), [(3, "loss 1 of 3"), ("any", "loss 1")])
def test_a_loss_is_reported_with_what_goes_on(most: Any, budget: str) -> None:
    membership = running(max_losses=most)
    membership.lost(3, "death", 4.0, place=("exchange", 812), detail="killed by signal 9")
    assert reports(membership) == [
        "worker 3 on beta lost (killed by signal 9) during exchange of step 812: continuing with 3 of 4 workers, "
        + budget
    ]
    assert membership.losses == [{"worker_id": 3, "host": "beta", "cause": "death", "step": 812, "seconds": 4.0}]


# -- rule 7: exceptions ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("second", "who"), [(3, "worker 1, then worker 3"), (1, "worker 1, twice,")])
def test_the_same_error_at_the_same_line_is_the_programs_own(second: int, who: str) -> None:
    membership = running(max_restarts=3)
    membership.lost(1, "error", 1.0, error=("ValueError", "train.py:31"))
    membership.gone(1, 1.0)
    assert do(membership) == [StopWorker(1), StartWorker(1, "alpha")]
    membership.lost(second, "error", 2.0, error=("ValueError", "train.py:31"))
    message = f"{who} raised the same ValueError at train.py:31: it follows the rows, not the worker"
    assert do(membership, 2.0)[-1] == FailRun(message, 1, "error")


@pytest.mark.parametrize("error", [("ValueError", "train.py:32"), ("KeyError", "train.py:31"), None])
def test_another_error_is_another_loss(error: Any) -> None:
    membership = running()
    membership.lost(1, "error", 1.0, error=("ValueError", "train.py:31"))
    membership.lost(3, "error", 1.0, error=error)
    assert do(membership) == [StopWorker(1), StopWorker(3)]


# -- min_workers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("restarts", [0, 1])
def test_with_fewer_than_min_workers_it_waits_and_then_ends(restarts: int) -> None:
    membership = running(replace=False, min_workers=3, max_restarts=restarts)
    membership.lost(2, "death", 1.0)
    membership.lost(3, "death", 1.0)
    assert do(membership) == []
    request(membership, 0, 1, now=2.0)
    assert reports(membership, 2.0) == ["2 workers are left, min_workers is 3: waiting up to 600 s for others"]
    assert membership.phase == "waiting"
    assert membership.next_deadline() == 602.0
    assert do(membership, 601.9) == []
    message = "2 workers are left, min_workers is 3, none joined within 600 s"
    assert do(membership, 602.0) == [RestartRun(message) if restarts else FailRun(message, 2, "death")]


def test_a_host_that_comes_ends_the_wait() -> None:
    membership = running({0: "alpha", 1: "beta"}, replace=False, min_workers=2)
    membership.lost(1, "death", 1.0)
    request(membership, 0)
    assert do(membership) == []
    membership.host_joined("gamma", 1, 9.0)
    assert do(membership, 9.0) == [StartWorker(1, "gamma")]
    request(membership, 1, generation=-1, blank=True, now=10.0)
    assert do(membership, 10.0) == [Form(1, (0, 1))]


# -- hosts -------------------------------------------------------------------------------------------------------------


def test_a_lost_host_loses_all_workers_there() -> None:
    membership = running()
    membership.host_lost("beta", 1.0)
    request(membership, 0, 1)
    assert do(membership) == [StopWorker(2), StopWorker(3)]
    assert [(loss["worker_id"], loss["cause"]) for loss in membership.losses] == [(2, "host"), (3, "host")]
    assert do(membership, 11.0) == [Form(1, (0, 1))]  # fenced; there is no room for them elsewhere


def test_lost_ones_are_started_on_another_host_with_room() -> None:
    membership = running()
    membership.host_joined("gamma", 3, 0.5)
    assert do(membership, 0.5) == []  # all places are taken: it waits as a spare
    membership.host_lost("beta", 1.0)
    membership.gone(2, 1.0)
    membership.gone(3, 1.0)
    assert do(membership)[2:] == [StartWorker(2, "gamma"), StartWorker(3, "gamma")]
    membership.lost(0, "death", 2.0)
    assert do(membership, 2.0) == [StartWorker(0, "alpha")]  # at home, though gamma has room


def test_a_joining_host_fills_free_places_lost_ids_first() -> None:
    membership = running(max_workers=6, replace=False)
    membership.lost(1, "death", 1.0)
    membership.host_joined("gamma", 4, 2.0)
    assert do(membership, 2.0) == [StartWorker(1, "gamma"), StartWorker(4, "gamma"), StartWorker(5, "gamma")]
    request(membership, 0, 2, 3)
    request(membership, 4, generation=-1, blank=True)
    assert do(membership, 3.0) == [Form(1, (0, 2, 3, 4))]
    membership.stepped(4, 4.0, 20)
    assert reports(membership, 4.0) == ["worker 4 on gamma has joined: 4 of 6 workers from step 20"]


def test_one_joiner_causes_one_change() -> None:
    membership = running({0: "alpha"}, max_workers=3)
    membership.host_joined("gamma", 2, 1.0)
    assert do(membership) == [StartWorker(1, "gamma"), StartWorker(2, "gamma")]
    request(membership, 1, generation=-1, blank=True)
    assert do(membership) == [Interrupt(0, (0,))]
    request(membership, 2, generation=-1, blank=True)
    assert do(membership) == []
    request(membership, 0)
    assert do(membership) == [Form(1, (0, 1, 2))]


@pytest.mark.parametrize(("times", "cooldown_s"), [(1, 10), (2, 20), (3, 40), (7, 640), (9, 640)])
def test_a_host_may_join_again_after_its_cooldown(times: int, cooldown_s: float) -> None:
    membership = running({0: "alpha", 1: "beta"})
    for _ in range(times):
        membership.host_lost("beta", 0.0)
    membership.gone(1, 0.0)
    membership.host_joined("beta", 1, 1.0)
    request(membership, 0)
    assert do(membership, 1.0) == [StopWorker(1), Form(1, (0,))]
    assert do(membership, cooldown_s - 0.1) == []
    assert membership.next_deadline() == cooldown_s
    assert do(membership, cooldown_s) == [StartWorker(1, "beta")]


def test_a_host_that_joins_again_before_its_workers_are_fenced_has_the_room_that_it_offers() -> None:
    membership = running({0: "alpha", 1: "beta"}, cooldown_s=1, max_workers=4)
    membership.host_lost("beta", 0.0)
    membership.host_joined("beta", 1, 2.0)
    assert do(membership, 2.0) == [StopWorker(1), StartWorker(2, "beta")]
    assert do(membership, 10.0) == []


# -- leaves ------------------------------------------------------------------------------------------------------------


def test_a_leave_is_no_loss_and_members_are_interrupted() -> None:
    membership = running(max_losses=0)
    membership.leave_announced([3], 1.0)
    assert do(membership) == [Interrupt(0, (0, 1, 2, 3))]
    request(membership, 0, 1, 2)
    assert do(membership) == []  # it may still compute
    request(membership, 3)
    assert do(membership) == [Release((3,)), Form(1, (0, 1, 2))]
    membership.gone(3, 2.0)
    assert do(membership, 2.0) == []
    assert membership.losses == []


@pytest.mark.parametrize("end", ["death", "hang"])
def test_whoever_announced_a_leave_may_end_as_it_likes(end: Any) -> None:
    membership = running(max_losses=0)
    membership.leave_announced([3], 1.0)
    do(membership)
    request(membership, 0, 1, 2)
    membership.lost(3, end, 2.0)
    membership.gone(3, 2.0)
    assert do(membership, 2.0)[-1] == Form(1, (0, 1, 2))
    assert membership.losses == []


def test_a_host_that_leaves_in_order_may_join_again_at_once() -> None:
    membership = running()
    membership.leave_announced([2, 3], 1.0)
    request(membership, 0, 1, 2, 3)
    assert do(membership) == [Release((2,)), Release((3,)), Form(1, (0, 1))]
    membership.gone(2, 2.0)
    membership.gone(3, 2.0)
    membership.host_lost("beta", 2.0)
    membership.host_joined("beta", 2, 3.0)
    assert do(membership, 3.0) == [StartWorker(2, "beta"), StartWorker(3, "beta")]


@pytest.mark.parametrize(("waits", "answer"), [(True, Release((3,))), (False, StopWorker(3))])
def test_a_leave_of_one_that_is_no_member_interrupts_nobody(waits: bool, answer: Action) -> None:
    membership = running()
    membership.lost(3, "death", 1.0)
    do(membership)
    if waits:
        request(membership, 3, generation=-1, blank=True)
    membership.leave_announced([3], 1.0)
    assert do(membership) == [answer]


# -- rule 6: accusations -----------------------------------------------------------------------------------------------


def accuse(membership: Membership, *pairs: tuple[int, int], now: float) -> list[Action]:
    """Both ends of each pair request, and all who are interrupted."""
    for by, of in pairs:
        membership.accused(by, of, now)
        request(membership, by, generation=membership.generation, now=now)
    actions = do(membership, now)
    for action in actions:
        if isinstance(action, StopWorker):
            membership.gone(action.worker_id, now)
    request(membership, *membership.members, generation=membership.generation, now=now)
    return actions + do(membership, now)


def test_after_an_accusation_the_same_members_form_a_new_generation() -> None:
    membership = running()
    assert accuse(membership, (1, 2), (2, 1), now=1.0) == [Interrupt(0, (0, 3)), Form(1, (0, 1, 2, 3))]
    assert membership.losses == []
    membership.accused(1, 3, 2.0)
    membership.accused(3, 1, 2.0)
    assert reports(membership, 2.0) == ["worker 1 lost its connection to worker 3: all connect again"]


@pytest.mark.parametrize(
    ("first", "second", "leaves"),
    [
        ([(1, 2), (2, 1)], [(1, 2), (2, 1)], 2),  # a tie: the higher worker id
        ([(1, 2)], [(2, 1)], 2),
        ([(2, 1)], [(2, 1)], 1),
        ([(2, 1), (3, 1)], [(1, 2), (2, 1)], 1),
    ],
)
def test_the_same_pair_again_within_a_minute_parts_it(first: Any, second: Any, leaves: int) -> None:
    membership = running()
    accuse(membership, *first, now=1.0)
    actions = accuse(membership, *second, now=1.0 + ACCUSED_S)
    assert actions.count(StopWorker(leaves)) == 1
    assert [(loss["worker_id"], loss["cause"]) for loss in membership.losses] == [(leaves, "link")]


def test_later_than_a_minute_or_another_pair_parts_nobody() -> None:
    membership = running()
    accuse(membership, (1, 2), now=1.0)
    accuse(membership, (1, 3), now=2.0)
    accuse(membership, (1, 2), now=1.1 + ACCUSED_S)
    assert membership.losses == []


def test_at_most_one_leaves_a_generation_for_an_accusation() -> None:
    """Members that accuse one which has left its group because of the broken pair do not part, too."""
    membership = running()
    accuse(membership, (1, 2), (0, 1), now=1.0)
    accuse(membership, (1, 2), (0, 1), now=2.0)
    assert [loss["worker_id"] for loss in membership.losses] == [2]


def test_accusations_of_the_dead_and_of_strangers_are_dropped() -> None:
    membership = running()
    membership.lost(3, "death", 1.0)
    do(membership)
    membership.accused(1, 3, 1.0)
    membership.accused(3, 1, 1.0)
    membership.accused(1, 1, 1.0)
    assert do(membership) == []


# -- rule 9: a group that breaks without a loss -----------------------------------------------------------------------


def break_without_a_loss(membership: Membership, now: float) -> list[Action]:
    """All members ask for a place in the next generation, though nobody was lost."""
    request(membership, *membership.members, generation=membership.generation, now=now)
    return do(membership, now)


@pytest.mark.parametrize("steps_first", [False, True])
@pytest.mark.parametrize("restarts", [0, 1])
def test_rule_9_a_group_that_breaks_without_a_loss_and_without_a_step_ends_the_run(
    restarts: int, steps_first: bool
) -> None:
    membership = running(max_restarts=restarts)
    now = 20.0
    if steps_first:
        assert isinstance(break_without_a_loss(membership, now)[0], Form)
        membership.stepped(2, now, 2)
    for number in range(STALLED_GENERATIONS):
        now += 20.0
        assert break_without_a_loss(membership, now) == [Form(1 + steps_first + number, (0, 1, 2, 3))]
        membership.stepped(0, now, 1)  # the step that it had, once more
    end, *others = break_without_a_loss(membership, now + 20.0)
    assert others == []
    assert isinstance(end, RestartRun if restarts else FailRun)
    for words in ("4 workers formed a group 3 times in 60 s", "no step", "nobody was lost"):
        assert words in end.message  # type: ignore[union-attr]


@pytest.mark.parametrize("befalls", ["step", "loss", "joiner"])
def test_rule_9_counts_anew_after_a_step_and_with_other_members(befalls: str) -> None:
    membership = running(replace=False, max_workers=5)
    for now in (20.0, 40.0, 60.0):
        assert isinstance(break_without_a_loss(membership, now)[0], Form)
    match befalls:
        case "step":
            membership.stepped(0, 60.0, 2)
        case "loss":
            membership.lost(3, "death", 60.0)
        case "joiner":
            membership.host_joined("gamma", 1, 60.0)
            assert do(membership, 60.0) == [StartWorker(4, "gamma")]
            membership.requested(4, -1, True, 60.0)
    assert isinstance(break_without_a_loss(membership, 80.0)[-1], Form)


def test_rule_9_many_breaks_within_timeout_s_end_nothing() -> None:
    membership = running()
    for number in range(29):
        assert isinstance(break_without_a_loss(membership, 20.0 + number)[0], Form)


# -- rule 5: the end ---------------------------------------------------------------------------------------------------


def test_once_the_result_is_there_whoever_waits_is_released() -> None:
    membership = running()
    request(membership, 1, 3)
    assert do(membership) == []
    membership.finished(0, 2.0)
    assert do(membership, 2.0) == [Release((1, 3))]
    assert (membership.phase, membership.next_deadline()) == ("finishing", None)
    request(membership, 2, 2, now=3.0)
    assert do(membership, 3.0) == [Release((2,))]


def test_blank_workers_are_stopped_at_the_end_and_losses_are_no_news() -> None:
    membership = running(max_losses=2)
    membership.lost(2, "death", 1.0)
    membership.lost(3, "death", 1.0)
    do(membership)
    request(membership, 3, generation=-1, blank=True)
    membership.finished(0, 2.0)
    assert do(membership, 2.0) == [Release((3,)), StopWorker(2)]
    membership.lost(0, "death", 3.0)
    membership.lost(1, "hang", 3.0)
    membership.host_lost("beta", 3.0)
    membership.host_joined("gamma", 3, 3.0)
    membership.leave_announced([1], 3.0)
    assert set(do(membership, 3.0)) <= {StopWorker(1), StopWorker(2), StopWorker(3)}
    assert len(membership.losses) == 2


def test_if_the_first_one_dies_before_the_next_delivers() -> None:
    membership = running(replace=False)
    request(membership, 1, 2, 3)
    assert do(membership) == []
    membership.lost(0, "death", 2.0)
    assert do(membership, 2.0) == [Form(1, (1, 2, 3))]
    membership.finished(1, 3.0)
    request(membership, 2, 3, generation=1, now=3.0)
    assert do(membership, 3.0) == [Release((2,)), Release((3,))]


def test_a_result_of_a_lost_worker_is_not_taken() -> None:
    membership = running()
    membership.lost(0, "silence", 1.0)
    membership.finished(0, 2.0)
    assert membership.phase == "gathering"


def test_a_host_that_leaves_is_no_loss_and_nothing_is_started_there_any_more() -> None:
    """Nor does it cool down: another host's workers take the places, and it may join again at once."""
    membership = running({0: "alpha", 1: "beta", 2: "beta"}, max_losses=0, max_workers=4)
    membership.host_joined("beta", 1, 0.5)
    membership.host_left("beta", 1.0)
    assert do(membership) == [Interrupt(0, (0, 1, 2))]
    request(membership, 0, 1, 2)
    assert do(membership) == [Release((1,)), Release((2,)), Form(1, (0,))]
    for worker_id in (1, 2):
        membership.gone(worker_id, 2.0)
    assert do(membership, 2.0) == []
    membership.host_lost("beta", 2.5)
    assert (membership.losses, membership._host_losses) == ([], {})
    membership.host_joined("beta", 1, 3.0)
    assert do(membership, 3.0) == [StartWorker(1, "beta")]


# -- several workers hold a replica ----------------------------------------------------------------------------------------


def of_replicas(workers: int = 4, **rules: Any) -> Membership:
    """As `running`, of replicas of two workers."""
    membership = Membership(
        Survive(**({"max_losses": "any"} | rules)),
        dict.fromkeys(range(workers), "alpha"),
        0.0,
        timeout_s=30.0,
        replica=2,
    )
    request(membership, *range(workers), generation=-1, blank=True)
    assert do(membership) == [Form(0, tuple(range(workers)))]
    for worker_id in range(workers):
        membership.stepped(worker_id, 0.0, 1)
    return membership


def test_rule_10_a_replica_that_loses_a_worker_is_ended_and_started_anew() -> None:
    membership = of_replicas()
    membership.lost(3, "death", 1.0)
    assert do(membership) == [StopWorker(2), StartWorker(3, "alpha")]
    request(membership, 0, 1)
    assert do(membership) == []  # it may still run
    membership.gone(2, 1.0)
    assert do(membership) == [Form(1, (0, 1)), StartWorker(2, "alpha")]
    assert [loss["worker_id"] for loss in membership.losses] == [3]
    request(membership, 2, generation=-1, blank=True)
    assert do(membership) == []  # half a replica interrupts nobody
    request(membership, 3, generation=-1, blank=True)
    assert do(membership) == [Interrupt(1, (0, 1))]
    request(membership, 0, 1, generation=1)
    assert do(membership) == [Form(2, (0, 1, 2, 3))]


def test_rule_10_half_a_replica_is_no_generation() -> None:
    """Of one that loses a worker before it was in a group, the others wait."""
    membership = Membership(Survive(max_losses="any"), dict.fromkeys(range(4), "alpha"), 0.0, replica=2)
    request(membership, 0, 1, 2, generation=-1, blank=True)
    membership.lost(3, "death", 1.0)
    assert do(membership) == [Form(0, (0, 1)), StartWorker(3, "alpha")]


@pytest.mark.parametrize("restarts", [0, 1])
def test_rule_10_without_a_whole_replica_nobody_has_the_state(restarts: int) -> None:
    membership = of_replicas(max_restarts=restarts)
    membership.lost(1, "death", 1.0)
    membership.lost(2, "death", 1.0)
    for worker_id in (0, 3):
        membership.gone(worker_id, 1.0)
    (end,) = [action for action in do(membership) if isinstance(action, RestartRun | FailRun)]
    assert isinstance(end, RestartRun if restarts else FailRun)
    assert end.message == "no whole replica of 2 workers is left that has the model's state"


def test_rule_10_min_workers_counts_those_of_whole_replicas() -> None:
    membership = of_replicas(min_workers=3, replace=False)
    membership.lost(3, "death", 1.0)
    membership.gone(2, 1.0)
    request(membership, 0, 1)
    membership.decide(1.0)
    assert membership.phase == "waiting"


def test_rule_10_at_the_end_workers_of_one_replica_end_one_after_the_other() -> None:
    membership = of_replicas()
    membership.finished(0, 1.0)
    membership.lost(2, "death", 1.0)
    assert do(membership) == []
    assert membership.losses == []


@pytest.mark.parametrize(("workers", "spared"), [(4, True), (2, False)])
def test_rule_10_a_slow_worker_leaves_where_a_whole_replica_stays(workers: int, spared: bool) -> None:
    assert of_replicas(workers, slow=3.0).spares(0, 4.0) is spared


def test_rule_10_with_a_leave_its_replica_leaves() -> None:
    membership = of_replicas()
    membership.leave_announced([3], 1.0)
    assert do(membership) == [Interrupt(0, (0, 1, 2, 3))]
    request(membership, 3)
    assert do(membership) == [StopWorker(2), Release((3,))]
    membership.gone(2, 1.0)
    request(membership, 0, 1)
    assert Form(1, (0, 1)) in do(membership)
    assert membership.losses == []
