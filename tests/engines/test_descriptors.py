from __future__ import annotations

import resource

import pytest

from manyhands.engines import descriptors
from manyhands.errors import BadInput


class Limits:
    """The system's limit of descriptors, for a test."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, soft: int, hard: int) -> None:
        self.now, self.history = (soft, hard), [soft]
        monkeypatch.setattr(descriptors.resource, "getrlimit", lambda _: self.now)
        monkeypatch.setattr(descriptors.resource, "setrlimit", lambda _, pair: self.set(pair))

    def set(self, pair: tuple[int, int]) -> None:
        self.now = pair
        self.history.append(pair[0])


def test_the_limit_is_raised_where_it_must_and_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    enough = Limits(monkeypatch, 1024, 4096)
    with descriptors.room_for_descriptors(4):
        assert enough.history == [1024]
    with descriptors.room_for_descriptors(2000):
        assert 2064 <= enough.now[0] <= 4096
    assert enough.now == (1024, 4096)
    none = Limits(monkeypatch, resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    with descriptors.room_for_descriptors(2000):
        assert len(none.history) == 1
    Limits(monkeypatch, 1024, 1024)
    with pytest.raises(BadInput, match="the limit is 1024: raise it"), descriptors.room_for_descriptors(2000):
        pass


def test_a_process_of_ours_takes_what_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    system = Limits(monkeypatch, 256, 4096)
    descriptors.raise_limit_of_descriptors()
    assert system.now == (4096, 4096)
