"""Spinning pauses where it fails again and again, and not for peers that are late."""

from manyhands.comm.ring.spinning import Spinning


def test_it_goes_on_while_it_finds():
    spinning = Spinning(100)
    for _ in range(10):
        assert spinning.looks() == 100
        spinning.slept(1e-4)
        spinning.slept(1e-4)
        assert spinning.looks() == 100
        spinning.found()


def test_three_short_sleeps_in_a_row_make_it_pause_for_a_while():
    spinning = Spinning(100)
    for _ in range(3):
        assert spinning.looks() == 100
        spinning.slept(1e-4)
    for _ in range(64):
        assert spinning.looks() == 1
        spinning.slept(1e-4)
    assert spinning.looks() == 100


def test_late_peers_do_not_count():
    spinning = Spinning(100)
    for _ in range(100):
        spinning.slept(0.5)
    assert spinning.looks() == 100
