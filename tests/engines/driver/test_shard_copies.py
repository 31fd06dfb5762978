"""The driver's side of server shards with copies: what it starts, stops, tells and connects. No process."""

from __future__ import annotations

from typing import Any

import pytest

from manyhands.engines.driver.shard_copies import PATIENCE_S, ShardCopies


class Host:
    """All processes are here; what is sent to them is kept."""

    host = "alpha"

    def __init__(self) -> None:
        self.sent: list[tuple[int, dict[str, Any]]] = []
        self.connected: list[tuple[tuple[int, dict[str, Any]], tuple[int, dict[str, Any]]]] = []

    def send(self, process_index: int, body: dict[str, Any]) -> None:
        self.sent.append((process_index, body))

    def connect(self, first: tuple[int, dict[str, Any]], second: tuple[int, dict[str, Any]]) -> None:
        self.connected.append((first, second))


class Shards:
    """Of one shard with two copies, processes -1 and -2, unless said otherwise; workers 0 and 1."""

    def __init__(self, shards: int = 1, copies: int = 2) -> None:
        self.host, self.did, self.closed = Host(), list[Any](), list[Any]()
        hosts: Any = dict.fromkeys(range(-4, 3), self.host)
        self.copies = ShardCopies(
            shards,
            copies,
            hosts,
            start=lambda index: self.did.append(("start", index)),
            stop=lambda index: self.did.append(("stop", index)),
            report=lambda shard, copies, lost: self.did.append(("copies", shard, copies, lost)),
            lost=lambda shard, index: self.did.append(("lost", shard, index)),
            closed=lambda worker_id, pushes: self.closed.append((worker_id, *pushes)),
        )
        self.act()

    def act(self, now: float = 0.0) -> None:
        self.copies.act(now)

    def complete(self) -> Shards:
        """Both copies are there, and in step."""
        for index in (-1, -2):
            self.copies.started(index)
        self.copies.copied(-1, 0)
        self.act()
        self.forget()
        return self

    def forget(self) -> None:
        self.host.sent.clear()
        self.host.connected.clear()
        self.did.clear()

    def views(self) -> list[tuple[int, int, int | None, int | None]]:
        """(who is told, primary, backup, recruit)"""
        orders = [*self.host.sent, *(end for pair in self.host.connected for end in pair)]
        found = [(index, body["view"]) for index, body in orders if body["type"] == "view"]
        return [(index, view["primary"], view["backup"], view["recruit"]) for index, view in found]

    def workers(self) -> list[tuple[int, int, int]]:
        """(worker id, view, the process that it is connected to)"""
        return [(a, body["view"], b) for (a, body), (b, _) in self.host.connected if body["type"] == "connected"]


def test_a_backup_takes_the_lost_primarys_place_and_a_new_copy_is_started() -> None:
    shards = Shards().complete()
    shards.copies.gone(-1)
    shards.act()
    assert shards.did == [("copies", 0, 1, -1), ("start", -1)]
    assert shards.views() == [(-2, -2, None, None)]
    shards.forget()
    shards.copies.started(-1)
    shards.act()
    assert sorted(shards.views()) == [(-2, -2, None, -1), (-1, -2, None, -1)]
    shards.copies.copied(-2, 3)
    shards.act()
    assert shards.did == [("copies", 0, 2, None)]


def test_a_backup_that_is_gone_as_soon_as_its_link_is_broken_is_replaced() -> None:
    shards = Shards().complete()
    shards.copies.backup_lost(-1, 0)
    shards.copies.gone(-2)  # both came at once
    shards.act()
    assert [one for one in shards.did if one[0] in ("stop", "start")] == [("stop", -2), ("start", -2)]
    shards.copies.started(-2)
    shards.act()
    assert (-2, -1, None, -2) in shards.views()


def test_a_copy_is_not_started_beside_its_own_process() -> None:
    shards = Shards().complete()
    shards.copies.stopped(-2)
    shards.act()
    assert ("start", -2) not in shards.did
    shards.copies.gone(-2)
    assert shards.did[-1] == ("start", -2)


def test_a_shard_without_any_copy_is_lost() -> None:
    shards = Shards().complete()
    shards.copies.gone(-1)
    shards.copies.gone(-2)
    shards.act()
    assert shards.did[-1] == ("lost", 0, -2)


def test_before_anybody_is_let_in_a_lost_primary_is_only_started_again() -> None:
    shards = Shards()
    shards.copies.connect(0, 0, 0.0)
    shards.copies.started(-1)
    shards.copies.gone(-1)
    shards.act()
    assert shards.did == [("start", -1)]
    assert shards.workers() == []
    for _ in range(2):
        shards.copies.started(-1)
        shards.copies.gone(-1)
    shards.act()
    assert shards.did[-1][0] == "lost"


def test_workers_are_let_in_once_there_are_two_copies_and_go_to_the_newest_view() -> None:
    shards = Shards()
    shards.copies.connect(0, 0, 0.0)
    shards.act()
    assert shards.workers() == []
    shards.copies.copied(-1, 0)
    shards.act()
    assert shards.workers() == [(0, 1, -1)]
    shards.forget()
    shards.copies.connect(0, 0, 1.0)  # its connection is gone
    shards.act(1.0)
    assert shards.workers() == []
    shards.copies.gone(-1)
    shards.act(1.1)
    assert shards.workers() == [(0, 2, -2)]


def test_a_worker_whose_connection_alone_broke_gets_another_to_the_same_primary() -> None:
    shards = Shards().complete()
    shards.copies.connect(0, 0, 1.0)
    shards.act(1.0)
    shards.forget()
    shards.copies.connect(0, 0, 5.0)
    shards.act(5.0 + PATIENCE_S / 2)
    assert shards.workers() == []
    shards.act(5.0 + PATIENCE_S)
    assert shards.workers() == [(0, 1, -1)]


@pytest.mark.parametrize("shards", [1, 2])
def test_a_lost_worker_is_fenced_at_all_shards_before_another_takes_its_place(shards: int) -> None:
    run = Shards(shards, copies=1)
    for shard in range(shards):
        run.copies.connect(1, shard, 0.0)
    run.act()
    run.forget()
    run.copies.fence(1)
    run.copies.fence(1)
    fence = {"type": "fence", "worker_id": 1, "process": 0}
    assert run.host.sent == [(-1 - shard, fence) for shard in range(shards)]
    run.copies.connect(1, 0, 1.0)  # the next process
    run.act(9.0)
    assert run.workers() == []
    for shard in range(shards):
        run.copies.connection_closed(-1 - shard, 1, 7 + shard, 2)
    run.act(9.0)
    assert run.closed == [(1, [7, 8][:shards], [2, 2][:shards])]
    assert run.host.connected[0][0][1] == {"type": "connected", "view": 0, "process": 1, "address": None}


def test_a_new_primary_is_told_whom_to_fence() -> None:
    shards = Shards().complete()
    shards.copies.connect(1, 0, 0.0)
    shards.act()
    shards.copies.fence(1)
    shards.forget()
    shards.copies.gone(-1)
    shards.act()
    assert (-2, {"type": "fence", "worker_id": 1, "process": 0}) in shards.host.sent
    shards.copies.connection_closed(-2, 1, 4, -1)
    assert shards.closed == [(1, [4], [-1])]


def test_all_copies_are_told_the_end() -> None:
    shards = Shards().complete()
    shards.copies.finish()
    assert sorted(shards.host.sent) == [(-2, {"type": "finish"}), (-1, {"type": "finish"})]
    shards.forget()
    shards.copies.backup_lost(-1, 0)  # one of them ends before the other
    shards.copies.gone(-2)
    assert (shards.did, shards.host.sent) == ([], [])


def test_workers_of_other_hosts_are_told_where_the_primary_listens() -> None:
    shards = Shards().complete()
    beta: Any = Host()
    shards.copies._host_of = {**shards.copies._host_of, 1: beta}
    shards.copies.connect(1, 0, 0.0)
    shards.act()
    assert beta.sent == []
    shards.copies.listens(-1, ["10.0.0.1", 7000])
    shards.act()
    answer = {"type": "connected", "view": 1, "process": 0, "address": ["10.0.0.1", 7000]}
    assert beta.sent == [(1, answer)]
    assert shards.host.connected == []
