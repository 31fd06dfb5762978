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


def test_enough_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    system = Limits(monkeypatch, 1024, 4096)
    with descriptors.room_for_descriptors(4):
        assert system.history == [1024]


def test_raised_within_and_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    system = Limits(monkeypatch, 1024, 4096)
    with descriptors.room_for_descriptors(2000):
        assert 2064 <= system.now[0] <= 4096
    assert system.now == (1024, 4096)


def test_too_low_a_hard_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    Limits(monkeypatch, 1024, 1024)
    with pytest.raises(BadInput, match="the limit is 1024: raise it"), descriptors.room_for_descriptors(2000):
        pass


def test_no_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    system = Limits(monkeypatch, resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    with descriptors.room_for_descriptors(2000):
        assert len(system.history) == 1


def test_a_process_of_ours_takes_what_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    system = Limits(monkeypatch, 256, 4096)
    descriptors.raise_limit_of_descriptors()
    assert system.now == (4096, 4096)
