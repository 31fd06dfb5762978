from __future__ import annotations

from manyhands.engines.driver.rendezvous import Rendezvous


def test_the_last_to_come_gets_all_values_in_order() -> None:
    meetings = Rendezvous()
    assert meetings.come(2, "ring", [0, 2, -1], "c") is None
    assert meetings.come(-1, "ring", [0, 2, -1], None) is None
    assert meetings.come(0, "ring", [0, 2, -1], "a") == ["a", "c", None]


def test_meetings_of_other_names_are_apart_and_names_may_be_used_again() -> None:
    meetings = Rendezvous()
    assert meetings.come(0, "a", [0, 1], 1) is None
    assert meetings.come(1, "b", [0, 1], 2) is None
    assert meetings.come(1, "a", [0, 1], 3) == [1, 3]
    assert meetings.come(0, "a", [0, 1], 4) is None
    assert meetings.come(1, "a", [0, 1], 5) == [4, 5]
