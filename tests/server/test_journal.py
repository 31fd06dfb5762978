"""What a worker says of its pulls and pushes."""

from manyhands.server.client import PushJournal
from manyhands.server.pushes import Applied, Dropped, Held


def test_lists_since_the_last_time():
    output = PushJournal()
    assert output.take() == {}
    output.pulled([3, 4])
    output.pushed([Applied(5, 1), Applied(7, 2)], 1.0)
    output.pushed([Held(6, 0)], 2.0)
    assert output.take() == {"pulls": [[3, 4]], "pushes": [[5, 7], [6]], "staleness": [2, 0]}
    assert output.take() == {}


def test_what_changed_nothing_is_none():
    """Dropped, or of weight 0: neither made a version, nor does its staleness count."""
    output = PushJournal()
    output.pushed([Dropped(3)], 1.0)
    output.pushed([Applied(3, 9)], 0.0)
    assert output.take() == {"pushes": [None, None], "behind": [0]}
