"""What a loss, a leave and a join cost, in worker-seconds, against sums by hand."""

import pytest

from manyhands.recording.goodput import Goodput


def test_a_run_without_losses_uses_all() -> None:
    found = Goodput(4, 1.0).result(11.0)
    assert found == {"goodput": 1.0, "wall_s": 10.0, "absent_s": 0.0, "paused_s": 0.0, "repeated_s": 0.0}


def test_a_loss_costs_the_step_the_pause_and_the_absence() -> None:
    goodput = Goodput(4, 0.0)
    goodput.lost(10.0)  # 0.5 s after the newest step
    goodput.formed(10.2, 3, 9.5)
    goodput.formed(13.0, 4, 12.9)  # it is back: three wait while it joins
    found = goodput.result(20.0)
    assert found["absent_s"] == pytest.approx(3.0)  # one worker from 10 to 13
    assert found["repeated_s"] == pytest.approx(3 * 0.5)
    assert found["paused_s"] == pytest.approx(3 * 0.2 + 3 * 0.1)
    assert found["goodput"] == pytest.approx(1 - (3.0 + 1.5 + 0.9) / 80)


def test_two_losses_at_once_are_one_pause_and_who_leaves_in_order_has_nothing_repeated() -> None:
    goodput = Goodput(4, 0.0)
    goodput.lost(10.0)
    goodput.lost(10.1)
    goodput.formed(10.3, 2, 10.0)
    found = goodput.result(10.3)
    assert found["paused_s"] == pytest.approx(2 * 0.3)
    assert found["absent_s"] == pytest.approx(0.1 + 2 * 0.2)
    assert found["repeated_s"] == 0.0
    goodput = Goodput(2, 0.0)
    goodput.formed(5.0, 1, 4.9)
    found = goodput.result(10.0)
    assert (found["repeated_s"], found["absent_s"], found["paused_s"]) == pytest.approx((0.0, 5.0, 0.1))
    goodput = Goodput(2, 0.0)
    goodput.formed(5.0, 4, 5.0)
    assert goodput.result(10.0)["absent_s"] == 0.0


def test_a_restart_costs_all_since_the_checkpoint_and_until_the_next_start_once() -> None:
    goodput = Goodput(4, 0.0)
    goodput.stopped(10.0)  # the checkpoint's newest step was complete at 7
    goodput.resumed(12.0, 4, 7.0)
    found = goodput.result(20.0)
    assert found["repeated_s"] == pytest.approx(4 * 3.0)
    assert found["paused_s"] == pytest.approx(4 * 2.0)
    assert found["absent_s"] == 0.0
    assert found["goodput"] == pytest.approx(1 - 20.0 / 80)
    goodput = Goodput(4, 0.0)
    goodput.lost(8.0)
    goodput.formed(9.0, 3, 8.0)  # three paused for a second, one is absent from 8 on
    goodput.stopped(10.0)
    goodput.resumed(11.0, 4, 7.0)
    found = goodput.result(11.0)
    assert found["absent_s"] == pytest.approx(2.0)
    assert found["paused_s"] == pytest.approx(3.0 + 4.0)
    assert found["repeated_s"] == pytest.approx(4 * 1.0 + 3 * 1.0)  # from 7 to 8, and from 9 to 10
    goodput = Goodput(2, 1.0)
    goodput.stopped(6.0)
    goodput.stopped(7.0)  # the next one failed before it began
    goodput.resumed(9.0, 2, 0.0)
    found = goodput.result(9.0)
    assert (found["repeated_s"], found["paused_s"]) == (pytest.approx(10.0), pytest.approx(6.0))
