"""Waiting for the hosts of a run: how it ends, in which order the hosts lie, and what each is told."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from manyhands.engines.base import Observer
from manyhands.engines.hosts.join_listener import JoinedHosts, JoinListener
from manyhands.engines.hosts.processes import RemoteProcesses
from manyhands.engines.hosts.roster import Offer, Roster
from manyhands.errors import BadInput, ManyhandsError, Preempted
from manyhands.signals import PREEMPTED
from manyhands.transport.listener import Listener


@dataclass
class Host:
    """A joined host's processes, without a connection."""

    is_here: bool = True
    left: list[str] = field(default_factory=list)
    assigned: tuple[Any, ...] = ()

    def here(self) -> bool:
        return self.is_here

    def leave(self, text: str, preempted: bool = False) -> None:
        self.left.append(text)

    def assign(self, process_indices: list[int], name: str, network: dict[str, Any]) -> None:
        self.assigned = (process_indices, name, network)


class Stopped(Observer):
    def __init__(self, reason: str) -> None:
        self.reason = reason

    def stopping(self) -> str:
        return self.reason


@pytest.fixture
def silent() -> Iterator[Listener]:
    """A listener to which nobody comes."""
    descriptor = os.eventfd(0)
    yield cast(Listener, descriptor)
    os.close(descriptor)


def joined(*hosts: Host) -> JoinedHosts:
    return JoinedHosts(hosts=cast(list[RemoteProcesses], list(hosts)))


def test_the_waiting_ends(silent: Listener) -> None:
    """Because of who does not come, with what to do; because of a stop; and of what the engine finds."""
    roster = Roster(4, [Offer("alpha", 1)])
    with pytest.raises(ManyhandsError) as raised:
        JoinListener(silent, roster, joined(), print, late=lambda: f"start {roster.missing} more").wait(Observer(), 0.0)
    assert str(raised.value) == "waited 0 s for the other hosts; workers that are here: 1 of 4 (alpha 1); start 3 more"

    for reason, error in ((PREEMPTED, Preempted), ("asked", ManyhandsError)):
        with pytest.raises(error) as raised:
            JoinListener(silent, Roster(2), joined(), print, "the executors").wait(Stopped(reason), 60.0)
        assert type(raised.value) is error
        assert f"({reason}) while waiting for the executors" in str(raised.value)

    def fails() -> None:
        raise BadInput("the job failed")

    with pytest.raises(BadInput, match="the job failed"):
        JoinListener(silent, Roster(2), joined(), print).wait(Observer(), 60.0, fails)


def test_a_host_that_leaves_before_the_start_gives_its_place_back(silent: Listener) -> None:
    gone, stays = Host(is_here=False), Host()
    roster = Roster(5, [Offer("driver", 1), Offer("gone", 2), Offer("stays", 1)])
    hosts, lines = joined(gone, stays), list[str]()

    def until_said() -> None:
        if lines:
            raise BadInput("enough")

    with pytest.raises(BadInput, match="enough"):
        JoinListener(silent, roster, hosts, lines.append).wait(Observer(), 60.0, until_said)
    assert lines == ["gone left before the run began; workers that are here: 2 of 5 (driver 1, stays 1)"]
    assert (gone.left, stays.left) == ([""], [])
    assert roster.missing == 3


@pytest.mark.parametrize("own", [0, 1])
def test_hosts_lie_in_the_order_that_they_gave_behind_the_drivers_own(silent: Listener, own: int) -> None:
    """Each gets its ranks; shards go to the run's first host, which the driver's own is where it has workers."""
    last, first = Host(), Host()
    offers = [*[Offer("driver", 1, order=9)][:own], Offer("last", 2, order=1), Offer("first", 1, order=0)]
    roster, hosts = Roster(3 + own, offers), joined(last, first)
    JoinListener(silent, roster, hosts, print).wait(Observer(), 0.0)
    assert [offer.host for offer in roster.offers] == [*["driver"][:own], "first", "last"]
    assert cast(list[Any], hosts.hosts) == [first, last]
    hosts.assign(roster, [-1, -2])
    network = {"hosts": [[0], [1], [2, 3]] if own else [[0], [1, 2]], "names": [offer.host for offer in roster.offers]}
    assert first.assigned == ([own, *([] if own else [-1, -2])], "first", network)
    assert last.assigned == ([own + 1, own + 2], "last", network)
