"""When a run starts again from its newest checkpoint, and when it ends: the rules alone."""

from manyhands.engines.driver.restarts import Restarts

ERROR = ("ValueError", "train.py:31")


def test_as_often_as_asked_for_and_no_more() -> None:
    restarts = Restarts(2)
    assert restarts.refusal(100) == ""
    assert restarts.text() == "restart 1 of 2 from step 100"
    assert restarts.left == 1
    assert restarts.refusal(200) == ""
    assert "max_restarts is 2" in restarts.refusal(300)
    assert restarts.made == [100, 200]
    assert "max_restarts is 0" in Restarts(0).refusal(100)


def test_three_restarts_from_one_checkpoint_are_the_last() -> None:
    restarts = Restarts(10)
    assert [restarts.refusal(step) for step in (0, 0, 8, 8, 8)] == [""] * 5
    assert "3 times from step 8 without a checkpoint" in restarts.refusal(8)
    assert restarts.refusal(9) == ""  # it came further meanwhile


def test_the_programs_own_error_is_not_retried() -> None:
    """Another one, or the same at another line, is."""
    restarts = Restarts(10)
    assert restarts.refusal(8, ERROR) == ""
    assert restarts.refusal(16, ("KeyError", "train.py:31")) == ""
    assert restarts.refusal(24, ("ValueError", "train.py:32")) == ""
    assert restarts.refusal(32) == ""
    assert "ValueError at train.py:31 came again" in restarts.refusal(40, ERROR)
    assert len(restarts.made) == 4


def test_those_of_a_driver_that_was_killed_count() -> None:
    for made, refused in (([], False), ([8], False), ([0, 8, 8], False), ([8, 8, 8], True)):
        restarts = Restarts(9, list(made))
        assert bool(restarts.refusal(8)) is refused, made
        assert restarts.left == 9 - len(made) - (not refused), made
