"""What Membership decides: deadlines, order and messages. That it keeps its rules, test_membership_chaos.py searches through."""

from __future__ import annotations

from itertools import product
from typing import Any

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
TWO, APART = {0: "alpha", 1: "alpha"}, {0: "alpha", 1: "beta"}
NOBODY = "no worker is left that has the model's state"


class Members(Membership):
    """What the driver hears, by default at 1 s."""

    def asks(self, *ids: int, of: int = 0, now: float = 1.0, blank: bool = False) -> Members:
        """These ask for a place after generation `of`."""
        for worker_id in ids:
            self.requested(worker_id, of, blank, now)
        return self

    def comes(self, *ids: int, now: float = 1.0) -> Members:
        """New processes ask for their first place."""
        return self.asks(*ids, of=-1, blank=True, now=now)

    def dies(self, *ids: int, now: float = 1.0) -> Members:
        for worker_id in ids:
            self.lost(worker_id, "death", now)
        return self

    def leaves(self, *ids: int) -> Members:
        self.leave_announced(list(ids), 1.0)
        return self

    def does(self, now: float = 1.0) -> list[Action]:
        """What is to be done but for reports; and that it is given once."""
        actions = [action for action in self.decide(now) if not isinstance(action, Report)]
        assert self.decide(now) == []
        return actions

    def says(self, now: float = 1.0) -> list[str]:
        return [action.message for action in self.decide(now) if isinstance(action, Report)]


def starting(workers: dict[int, str] | None = None, replica: int = 1, **rules: Any) -> Members:
    survive = Survive(**({"max_losses": "any"} | rules))
    return Members(survive, workers or ALPHA, 0.0, timeout_s=30.0, replica=replica)


def running(workers: dict[int, str] | None = None, replica: int = 1, **rules: Any) -> Members:
    """In generation 0, all with state, and each with a step."""
    m, ids = starting(workers, replica, **rules), tuple(workers or ALPHA)
    for worker_id in ids:
        m.started(worker_id, 0.0)
    assert m.comes(*ids, now=0.0).decide(0.0) == [Form(0, ids)]
    for worker_id in ids:
        m.stepped(worker_id, 0.0, 1)
    return m


# -- the first generation --------------------------------------------------------------------------------------------


def test_a_restarted_run_goes_on_with_the_next_generation() -> None:
    m = Members(Survive(), {0: "alpha"}, 0.0, generation=5)
    assert m.generation == -1
    assert m.comes(0).does() == [Form(5, (0,))]
    assert m.asks(0, of=5).does() == [Form(6, (0,))]


def test_a_first_generation_waits_for_processes_that_load() -> None:
    for starts, deadline in ((True, 32.0), (False, START_S)):
        m = starting(TWO, replace=False).comes(0)
        if starts:
            m.started(1, 2.0)
        assert m.next_deadline() == deadline
        assert m.does(deadline - 0.1) == []
        assert m.does(deadline) == [StopWorker(1)]


# -- rule 1: all live members, one of them with state ------------------------------------------------------------------


def test_a_death_inside_the_first_collective_does_not_end_the_run() -> None:
    """All are blank still, so nobody has made a step: there is nothing to lose. Without a member of the first generation nobody
    knows."""
    m = starting({0: "alpha", 1: "alpha", 2: "beta"}, replace=False).comes(0, 1, 2)
    assert m.does() == [Form(0, (0, 1, 2))]
    assert m.dies(2).asks(0, 1, blank=True).does() == [Form(1, (0, 1))]
    assert m.asks(0, 1, of=1).does() == [Form(2, (0, 1))]
    assert isinstance(m.dies(0).asks(1, of=2, blank=True).does()[-1], FailRun)
    m = starting({0: "alpha"}).comes(0)
    m.does()
    assert m.dies(0).does() == [FailRun(NOBODY, 0, "death")]


# -- rule 2: who has not requested is not lost -------------------------------------------------------------------------


def test_one_timeout_bounds_a_recovery_whatever_befalls_within() -> None:
    """torchtitan#2899: the timeouts of what is nested add up. Here whatever happens within ends by the first one's."""
    m = running().dies(3, now=10.0)
    assert m.does(10.0) == [StartWorker(3, "beta")]
    m.asks(0, now=10.1).accused(0, 1, 15.0)
    m.dies(3, now=20.0).dies(2, now=30.0).host_joined("gamma", 1, 35.0)  # 3 is a replacement
    m.does(35.0)
    assert m.next_deadline() == 40.0  # and not that of any that began later
    m.does(40.0)
    m.gone(1, 40.0)
    assert Form(1, (0,)) in m.does(40.0)


# -- rule 3: fencing -------------------------------------------------------------------------------------------------


def test_a_lost_worker_is_stopped_and_has_ended_itself_after_silence_s() -> None:
    m = running(replace=False, silence_s=4)
    m.lost(3, "silence", 1.0)
    assert m.asks(0, 1, 2, 3).does(4.9) == [StopWorker(3)]  # what a lost process asks for is dropped
    assert m.next_deadline() == 5.0
    assert m.does(5.0) == [Form(1, (0, 1, 2))]
    m = running(replace=False)
    m.gone(3, 1.0)  # without a loss that is a death, which needs no fence
    assert m.asks(0, 1, 2).does() == [Form(1, (0, 1, 2))]
    assert m.losses[0]["cause"] == "death"


# -- joins and replacements --------------------------------------------------------------------------------------------


def test_members_go_on_without_the_replacement_until_it_requests() -> None:
    for steps in (True, False):
        m = running().dies(3).asks(0, 1, 2)
        assert m.does() == [Form(1, (0, 1, 2)), StartWorker(3, "beta")]
        m.started(3, 2.0)
        assert m.does(2.0) == []
        assert m.comes(3, 3).does() == [Interrupt(1, (0, 1, 2))]
        assert m.asks(0, 1, 2, of=1).does() == [Form(2, (0, 1, 2, 3))]
        if steps:
            m.stepped(3, 3.0, 840)
        else:
            m.finished(0, 3.0)  # it was back for the last steps alone
        assert m.says(3.0) == [f"worker 3 is back: 4 of 4 workers{' from step 840' if steps else ''}"]


def test_rule_8_a_worker_lost_three_times_before_its_first_step_is_not_started_again() -> None:
    m = running().dies(3).asks(0, 1, 2)  # after its first step
    assert Form(1, (0, 1, 2)) in m.does()
    for _ in range(2):
        assert m.dies(3).does() == [StartWorker(3, "beta")]
        assert m.phase == "running"
    assert m.dies(3).says()[-1] == "worker 3 was lost 3 times before its first step: it is not started again"
    assert m.does() == []
    m = running()  # a step sets the count back
    for _ in range(3):
        m.dies(3).does()
    assert m.comes(3).does() == []  # while others gather it is taken along
    assert m.asks(0, 1, 2).does() == [Form(1, (0, 1, 2, 3))]
    m.stepped(3, 1.0)
    for _ in range(3):
        assert m.dies(3, now=2.0).does(2.0) == [StartWorker(3, "beta")]


# -- the budget --------------------------------------------------------------------------------------------------------

PLACE: dict[str, Any] = {"place": ("exchange", 812), "detail": "killed by signal 9"}
LOST = "worker 3 on beta lost (killed by signal 9) during exchange of step 812"


def test_one_loss_too_many_ends_the_run_and_names_the_first() -> None:
    m = running(max_losses=1)
    m.lost(2, "silence", 1.0)
    m.lost(3, "death", 2.0, **PLACE)
    message = f"{LOST}: loss 2, and max_losses is 1, the first was worker 2 (no sign of life)"
    assert m.does()[-1] == FailRun(message, 2, "silence")
    assert m.does(99.0) == []
    assert m.phase == "failed"
    m = running(max_losses=0, max_restarts=1).dies(3)  # it starts again where it may
    assert m.does() == [RestartRun("worker 3 on beta lost (its process ended): loss 1, and max_losses is 0")]
    assert m.phase == "restarting"


def test_a_loss_is_reported_with_what_goes_on() -> None:
    for most, budget in ((3, "loss 1 of 3"), ("any", "loss 1")):
        m = running(max_losses=most)
        m.lost(3, "death", 4.0, **PLACE)
        assert m.says() == [f"{LOST}: continuing with 3 of 4 workers, {budget}"]
        assert m.losses == [{"worker_id": 3, "host": "beta", "cause": "death", "step": 812, "seconds": 4.0}]


# -- rule 7: exceptions ------------------------------------------------------------------------------------------------

ERROR = ("ValueError", "train.py:31")


def test_the_same_error_at_the_same_line_is_the_programs_own_and_another_is_another_loss() -> None:
    for second, who in ((3, "worker 1, then worker 3"), (1, "worker 1, twice,")):
        m = running(max_restarts=3)
        m.lost(1, "error", 1.0, error=ERROR)
        m.gone(1, 1.0)
        assert m.does() == [StopWorker(1), StartWorker(1, "alpha")]
        m.lost(second, "error", 2.0, error=ERROR)
        message = f"{who} raised the same ValueError at train.py:31: it follows the rows, not the worker"
        assert m.does(2.0)[-1] == FailRun(message, 1, "error")
    for error in (("ValueError", "train.py:32"), ("KeyError", "train.py:31"), None):
        m = running()
        m.lost(1, "error", 1.0, error=ERROR)
        m.lost(3, "error", 1.0, error=error)
        assert m.does() == [StopWorker(1), StopWorker(3)], error


# -- min_workers -------------------------------------------------------------------------------------------------------


def test_with_fewer_than_min_workers_it_waits_until_a_host_comes_or_the_run_ends() -> None:
    few = "2 workers are left, min_workers is 3"
    for restarts in (0, 1):
        m = running(replace=False, min_workers=3, max_restarts=restarts).dies(2, 3)
        assert m.does() == []
        m.asks(0, 1, now=2.0)
        assert m.says(2.0) == [f"{few}: waiting up to 600 s for others"]
        assert (m.phase, m.next_deadline()) == ("waiting", 602.0)
        assert m.does(601.9) == []
        message = f"{few}, none joined within 600 s"
        assert m.does(602.0) == [RestartRun(message) if restarts else FailRun(message, 2, "death")]
    m = running(APART, replace=False, min_workers=2).dies(1).asks(0)
    assert m.does() == []
    m.host_joined("gamma", 1, 9.0)
    assert m.does(9.0) == [StartWorker(1, "gamma")]
    assert m.comes(1, now=10.0).does(10.0) == [Form(1, (0, 1))]


# -- hosts -------------------------------------------------------------------------------------------------------------


def test_workers_of_a_lost_host_are_started_where_there_is_room() -> None:
    m = running()
    m.host_joined("gamma", 3, 0.5)
    assert m.does(0.5) == []  # all places are taken: it waits as a spare
    m.host_lost("beta", 1.0)
    m.gone(2, 1.0)
    m.gone(3, 1.0)
    assert m.does()[2:] == [StartWorker(2, "gamma"), StartWorker(3, "gamma")]
    assert m.dies(0, now=2.0).does(2.0) == [StartWorker(0, "alpha")]  # at home, though gamma has room


def test_a_joining_host_fills_free_places_lost_ids_first() -> None:
    m = running(max_workers=6, replace=False).dies(1)
    m.host_joined("gamma", 4, 2.0)
    assert m.does(2.0) == [StartWorker(1, "gamma"), StartWorker(4, "gamma"), StartWorker(5, "gamma")]
    assert m.asks(0, 2, 3).comes(4).does(3.0) == [Form(1, (0, 2, 3, 4))]
    m.stepped(4, 4.0, 20)
    assert m.says(4.0) == ["worker 4 on gamma has joined: 4 of 6 workers from step 20"]


def test_a_host_may_join_again_after_its_cooldown() -> None:
    for times, cooldown_s in ((1, 10), (2, 20), (3, 40), (7, 640), (9, 640)):
        m = running(APART)
        for _ in range(times):
            m.host_lost("beta", 0.0)
        m.gone(1, 0.0)
        m.host_joined("beta", 1, 1.0)
        assert m.asks(0).does() == [StopWorker(1), Form(1, (0,))]
        assert m.does(cooldown_s - 0.1) == []
        assert m.next_deadline() == cooldown_s
        assert m.does(cooldown_s) == [StartWorker(1, "beta")]
    m = running(APART, cooldown_s=1, max_workers=4)  # before its workers are fenced it has the room that it offers
    m.host_lost("beta", 0.0)
    m.host_joined("beta", 1, 2.0)
    assert m.does(2.0) == [StopWorker(1), StartWorker(2, "beta")]
    assert m.does(10.0) == []


# -- leaves ------------------------------------------------------------------------------------------------------------


def test_a_leave_is_no_loss_and_members_are_interrupted() -> None:
    m = running(max_losses=0).leaves(3)
    assert m.does() == [Interrupt(0, (0, 1, 2, 3))]
    assert m.asks(0, 1, 2).does() == []  # it may still compute
    assert m.asks(3).does() == [Release((3,)), Form(1, (0, 1, 2))]
    m.gone(3, 2.0)
    assert m.does(2.0) == m.losses == []
    for end in ("death", "hang"):  # it may end as it likes
        m = running(max_losses=0).leaves(3)
        m.does()
        m.asks(0, 1, 2).lost(3, end, 2.0)  # type: ignore[arg-type]
        m.gone(3, 2.0)
        assert m.does(2.0)[-1] == Form(1, (0, 1, 2))
        assert m.losses == []
    for waits in (True, False):  # one that is no member interrupts nobody
        m = running().dies(3)
        m.does()
        if waits:
            m.comes(3)
        assert m.leaves(3).does() == [Release((3,)) if waits else StopWorker(3)]


def test_a_host_that_leaves_is_no_loss_and_may_join_again_at_once() -> None:
    """Nothing is started there meanwhile."""
    m = running({0: "alpha", 1: "beta", 2: "beta"}, max_losses=0, max_workers=4)
    m.host_joined("beta", 1, 0.5)
    m.host_left("beta", 1.0)
    assert m.does() == [Interrupt(0, (0, 1, 2))]
    assert m.asks(0, 1, 2).does() == [Release((1,)), Release((2,)), Form(1, (0,))]
    m.gone(1, 2.0)
    m.gone(2, 2.0)
    assert m.does(2.0) == []
    m.host_lost("beta", 2.5)
    assert (m.losses, m._host_losses) == ([], {})
    m.host_joined("beta", 1, 3.0)
    assert m.does(3.0) == [StartWorker(1, "beta")]


# -- rule 6: accusations -----------------------------------------------------------------------------------------------


def accuse(m: Members, *pairs: tuple[int, int], now: float) -> list[Action]:
    """Both ends of each pair request, and all who are interrupted."""
    for by, of in pairs:
        m.accused(by, of, now)
        m.asks(by, of=m.generation, now=now)
    actions = m.does(now)
    for action in actions:
        if isinstance(action, StopWorker):
            m.gone(action.worker_id, now)
    return actions + m.asks(*m.members, of=m.generation, now=now).does(now)


def test_after_an_accusation_the_same_members_form_a_new_generation() -> None:
    m = running()
    assert accuse(m, (1, 2), (2, 1), now=1.0) == [Interrupt(0, (0, 3)), Form(1, (0, 1, 2, 3))]
    assert m.losses == []
    m.accused(1, 3, 2.0)
    m.accused(3, 1, 2.0)
    assert m.says(2.0) == ["worker 1 lost its connection to worker 3: all connect again"]


def test_the_same_pair_again_within_a_minute_parts_it() -> None:
    """Later, or another pair, parts nobody."""
    for first, second, leaves in (
        ([(1, 2), (2, 1)], [(1, 2), (2, 1)], 2),  # a tie: the higher worker id
        ([(1, 2)], [(2, 1)], 2),
        ([(2, 1)], [(2, 1)], 1),
        ([(2, 1), (3, 1)], [(1, 2), (2, 1)], 1),
        (
            [(1, 2), (0, 1)],
            [(1, 2), (0, 1)],
            2,
        ),  # who accuses one that left because of the broken pair does not part, too
    ):
        m = running()
        accuse(m, *first, now=1.0)
        assert accuse(m, *second, now=1.0 + ACCUSED_S).count(StopWorker(leaves)) == 1
        assert [(loss["worker_id"], loss["cause"]) for loss in m.losses] == [(leaves, "link")]
    m = running()
    for pair, now in (((1, 2), 1.0), ((1, 3), 2.0), ((1, 2), 1.1 + ACCUSED_S)):
        accuse(m, pair, now=now)
    assert m.losses == []


# -- rule 9: a group that breaks without a loss -----------------------------------------------------------------------


def breaks(m: Members, now: float) -> list[Action]:
    """All members ask for a place in the next generation, though nobody was lost."""
    return m.asks(*m.members, of=m.generation, now=now).does(now)


def test_rule_9_a_group_that_breaks_without_a_loss_and_without_a_step_ends_the_run() -> None:
    for restarts, steps_first in product((0, 1), (False, True)):
        m, now = running(max_restarts=restarts), 20.0
        if steps_first:
            assert isinstance(breaks(m, now)[0], Form)
            m.stepped(2, now, 2)
        for number in range(STALLED_GENERATIONS):
            now += 20.0
            assert breaks(m, now) == [Form(1 + steps_first + number, (0, 1, 2, 3))]
            m.stepped(0, now, 1)  # the step that it had, once more
        (end,) = breaks(m, now + 20.0)
        assert isinstance(end, RestartRun if restarts else FailRun)
        for words in ("4 workers formed a group 3 times in 60 s", "no step", "nobody was lost"):
            assert words in end.message  # type: ignore[union-attr]


def test_rule_9_counts_anew_after_a_step_and_with_other_members() -> None:
    for befalls in ("step", "loss", "joiner"):
        m = running(replace=False, max_workers=5)
        for now in (20.0, 40.0, 60.0):
            assert isinstance(breaks(m, now)[0], Form)
        match befalls:
            case "step":
                m.stepped(0, 60.0, 2)
            case "loss":
                m.dies(3, now=60.0)
            case "joiner":
                m.host_joined("gamma", 1, 60.0)
                assert m.does(60.0) == [StartWorker(4, "gamma")]
                m.comes(4, now=60.0)
        assert isinstance(breaks(m, 80.0)[-1], Form), befalls
    m = running()  # many within timeout_s end nothing
    for number in range(29):
        assert isinstance(breaks(m, 20.0 + number)[0], Form)


# -- rule 5: the end ---------------------------------------------------------------------------------------------------


def test_the_result_is_not_taken_of_a_lost_worker() -> None:
    m = running()
    m.lost(0, "silence", 1.0)
    m.finished(0, 2.0)
    assert m.phase == "gathering"


# -- rule 10: several workers hold a replica -------------------------------------------------------------------------------

FOUR = dict.fromkeys(range(4), "alpha")


def test_rule_10_a_replica_that_loses_a_worker_is_ended_and_started_anew() -> None:
    m = running(FOUR, 2).dies(3)
    assert m.does() == [StopWorker(2), StartWorker(3, "alpha")]
    assert m.asks(0, 1).does() == []  # it may still run
    m.gone(2, 1.0)
    assert m.does() == [Form(1, (0, 1)), StartWorker(2, "alpha")]
    assert [loss["worker_id"] for loss in m.losses] == [3]
    assert m.comes(2).does() == []  # half a replica interrupts nobody
    assert m.comes(3).does() == [Interrupt(1, (0, 1))]
    assert m.asks(0, 1, of=1).does() == [Form(2, (0, 1, 2, 3))]


def test_rule_10_half_a_replica_is_no_generation_and_has_no_state() -> None:
    """Of one that loses a worker before it was in a group, the others wait; min_workers counts those of whole ones."""
    m = starting(FOUR, 2).comes(0, 1, 2).dies(3)
    assert m.does() == [Form(0, (0, 1)), StartWorker(3, "alpha")]
    m = running(FOUR, 2, min_workers=3, replace=False).dies(3)
    m.gone(2, 1.0)
    m.asks(0, 1).decide(1.0)
    assert m.phase == "waiting"
    m = running(FOUR, 2).dies(1, 2)
    m.gone(0, 1.0)
    m.gone(3, 1.0)
    (end,) = [action for action in m.does() if isinstance(action, FailRun)]
    assert end.message == "no whole replica of 2 workers is left that has the model's state"


def test_rule_10_at_the_end_workers_of_one_replica_end_one_after_the_other() -> None:
    m = running(FOUR, 2)
    m.finished(0, 1.0)
    assert m.dies(2).does() == m.losses == []


def test_a_slow_worker_leaves_where_that_neither_ends_the_run_nor_has_it_wait() -> None:
    rules: dict[str, Any] = {"slow": 3.0}
    assert running(**rules).spares(0, 3.0)
    assert running(FOUR, 2, **rules).spares(0, 4.0)  # a whole replica stays
    for m, factor in (
        (running(), 9.0),
        (running(**rules), 2.9),
        (running(**rules, max_losses=0), 4.0),
        (running(**rules, min_workers=4), 4.0),
        (running(TWO, 2, **rules), 4.0),
        (running(**rules).leaves(0), 4.0),
        (running(**rules).dies(1), 4.0),  # while others gather
    ):
        assert not m.spares(0, factor), m.rules


def test_rule_10_with_a_leave_its_replica_leaves() -> None:
    m = running(FOUR, 2).leaves(3)
    assert m.does() == [Interrupt(0, (0, 1, 2, 3))]
    assert m.asks(3).does() == [StopWorker(2), Release((3,))]
    m.gone(2, 1.0)
    assert Form(1, (0, 1)) in m.asks(0, 1).does()
    assert m.losses == []
