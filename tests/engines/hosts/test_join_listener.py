"""Who may join; waiting for the hosts of a run: how it ends, in which order the hosts lie, and what each is told."""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from manyhands.engines.base import Observer
from manyhands.engines.hosts.join_listener import JoinedHosts, JoinListener
from manyhands.engines.hosts.processes import RemoteProcesses
from manyhands.engines.hosts.roster import Offer, Roster, free_name, hello
from manyhands.errors import BadInput, ManyhandsError, Preempted
from manyhands.signals import PREEMPTED
from manyhands.transport.listener import Listener


def roster() -> Roster:
    return Roster(4, [Offer("alpha", 2)])


def test_who_may_join() -> None:
    """Whoever has the same versions, and no more workers than are missing, unless members may change."""
    assert roster().refusal(hello(2)) == roster().refusal(hello(1)) == ""
    wanted = "this run needs 2 more of its 4 workers, and this host offers 3: join with --workers 2"
    assert wanted in roster().refusal(hello(3))
    assert "offers 3" in Roster(2, [Offer("alpha", 1)]).refusal(hello(3))
    assert Roster(2, [Offer("alpha", 1)], takes_part_of_offers=True).refusal(hello(3)) == ""
    full = roster()
    full.offers.append(Offer("beta", 2))
    assert full.refusal(hello(1)).startswith("this run has all of its workers already (4)")

    for name in ("python", "torch", "manyhands"):
        other = hello(1)
        other["versions"][name] = "0.0"
        assert re.search(f"versions differ.*{name} 0.0", roster().refusal(other))
    nonsense: dict[str, tuple[Any, ...]] = {"purpose": ("ring", None), "workers": (0, True, "2"), "host": (7, "")}
    for name, values in {**nonsense, "versions": ([],)}.items():
        for value in values:
            assert roster().refusal({**hello(1), name: value}), (name, value)


def test_ranks_are_contiguous_on_every_host_and_hosts_of_one_name_are_told_apart() -> None:
    four = Roster(5, [Offer("alpha", 2), Offer("beta", 1), Offer("gamma", 2)])
    assert four.process_indices() == [[0, 1], [2], [3, 4]]
    assert four.missing == 0
    same = Roster(4, [Offer("alpha", 2), Offer("alpha", 1)])
    assert same.names() == ["alpha (1)", "alpha (2)"]
    assert same.text() == "workers that are here: 3 of 4 (alpha (1) 2, alpha (2) 1)"


def test_a_hosts_name_commands_no_terminal_and_forges_no_line() -> None:
    output = {**hello(1), "host": "beta\x1b[2J\nWARNING: all is well" + "x" * 1000}
    assert roster().refusal(output) == ""
    assert Roster.name_of(output).startswith("beta?[2J?WARNING: all is well")
    assert len(Roster.name_of(output)) == 64
    refused = roster().refusal({**output, "versions": {"python\x1b[1m": "3\n"}})
    assert "python?[1m 3?" in refused


def test_a_host_that_joins_later_has_a_name_of_its_own() -> None:
    for names, name in (
        (["alpha"], "beta"),
        (["alpha", "beta"], "beta (2)"),
        (["beta (1)", "beta (2)"], "beta (3)"),
        (["beta (1)"], "beta (2)"),  # the one that had it is lost
        (["beta", "beta (2)"], "beta (3)"),
    ):
        assert free_name("beta", names) == name, names


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

    stopped = Observer()
    for reason, error in ((PREEMPTED, Preempted), ("asked", ManyhandsError)):
        stopped.stopping = lambda reason=reason: reason  # type: ignore[method-assign]
        with pytest.raises(error) as raised:
            JoinListener(silent, Roster(2), joined(), print, "the executors").wait(stopped, 60.0)
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
