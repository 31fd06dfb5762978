"""The driver's side of server shards with copies: what it starts, stops, tells and connects. No process."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from scripted_hosts import Scripted

from manyhands.engines.driver.shard_copies import PATIENCE_S, ShardCopies


class Shards(ShardCopies):
    """Of one shard with two copies, processes -1 and -2, unless said otherwise; workers 0 and 1."""

    def __init__(self, shards: int = 1, copies: int = 2) -> None:
        self.host, self.did, self.told_closed = Scripted("alpha", []), list[Any](), list[Any]()
        hosts: Any = dict.fromkeys(range(-4, 3), self.host)
        super().__init__(
            shards,
            copies,
            hosts,
            start=lambda index: self.did.append(("start", index)),
            stop=lambda index: self.did.append(("stop", index)),
            report=lambda shard, copies, lost: self.did.append(("copies", shard, copies, lost)),
            lost=lambda shard, index: self.did.append(("lost", shard, index)),
            closed=lambda worker_id, pushes: self.told_closed.append((worker_id, *pushes)),
        )
        self.act(0.0)

    def complete(self) -> Shards:
        """Both copies are there, and in step."""
        for index in (-1, -2):
            self.started(index)
        self.copied(-1, 0)
        self.act(0.0)
        return self.forget()

    def forget(self) -> Shards:
        self.host.sent.clear()
        self.did.clear()
        return self

    def lose(self, *indices: int) -> Shards:
        for index in indices:
            self.gone(index)
        self.act(0.0)
        return self

    def views(self) -> list[tuple[int, int, int | None, int | None]]:
        """(who is told, primary, backup, recruit)"""
        found = [(index, body["view"]) for index, body in self.host.sent if body["type"] == "view"]
        told = ((index, view["primary"], view["backup"], view["recruit"]) for index, view in found)
        return sorted(told, key=lambda one: one[0])

    def workers(self, now: float = 0.0) -> list[tuple[int, int, int]]:
        """(worker id, view, the process that it is connected to) by then."""
        self.act(now)
        return [(a, body["view"], b) for (a, body), (b, _) in pairwise(self.host.sent) if body["type"] == "connected"]


def test_a_backup_takes_the_lost_primarys_place_and_a_new_copy_is_started() -> None:
    shards = Shards().complete().lose(-1)
    assert shards.did == [("copies", 0, 1, -1), ("start", -1)]
    assert shards.views() == [(-2, -2, None, None)]
    shards.forget().started(-1)
    shards.act(0.0)
    assert shards.views() == [(-2, -2, None, -1), (-1, -2, None, -1)]
    shards.copied(-2, 3)
    shards.act(0.0)
    assert shards.did == [("copies", 0, 2, None)]


def test_a_backup_that_is_gone_as_soon_as_its_link_is_broken_is_replaced() -> None:
    shards = Shards().complete()
    shards.backup_lost(-1, 0)
    shards.lose(-2)  # both came at once
    assert [one for one in shards.did if one[0] in ("stop", "start")] == [("stop", -2), ("start", -2)]
    shards.started(-2)
    shards.act(0.0)
    assert (-2, -1, None, -2) in shards.views()


def test_a_copy_is_not_started_beside_its_own_process() -> None:
    shards = Shards().complete()
    shards.stopped(-2)
    shards.act(0.0)
    assert ("start", -2) not in shards.did
    shards.gone(-2)
    assert shards.did[-1] == ("start", -2)


def test_a_shard_without_any_copy_is_lost() -> None:
    """Before anybody is let in, a lost primary is only started again, three times."""
    assert Shards().complete().lose(-1, -2).did[-1] == ("lost", 0, -2)
    shards = Shards()
    shards.connect(0, 0, 0.0)
    shards.started(-1)
    assert shards.lose(-1).did == [("start", -1)]
    assert shards.workers() == []
    for _ in range(2):
        shards.started(-1)
        shards.gone(-1)
    shards.act(0.0)
    assert shards.did[-1][0] == "lost"


def test_workers_are_let_in_once_there_are_two_copies_and_go_to_the_newest_view() -> None:
    shards = Shards()
    shards.connect(0, 0, 0.0)
    assert shards.workers() == []
    shards.copied(-1, 0)
    assert shards.workers() == [(0, 1, -1)]
    shards.forget().connect(0, 0, 1.0)  # its connection is gone
    assert shards.workers(1.0) == []
    shards.gone(-1)
    assert shards.workers(1.1) == [(0, 2, -2)]


def test_a_worker_whose_connection_alone_broke_gets_another_to_the_same_primary() -> None:
    shards = Shards().complete()
    shards.connect(0, 0, 1.0)
    shards.act(1.0)
    shards.forget().connect(0, 0, 5.0)
    assert shards.workers(5.0 + PATIENCE_S / 2) == []
    assert shards.workers(5.0 + PATIENCE_S) == [(0, 1, -1)]


@pytest.mark.parametrize("number", [1, 2])
def test_a_lost_worker_is_fenced_at_all_shards_before_another_takes_its_place(number: int) -> None:
    shards = Shards(number, copies=1)
    for shard in range(number):
        shards.connect(1, shard, 0.0)
    shards.act(0.0)
    shards.forget()
    shards.fence(1)
    shards.fence(1)
    fence = {"type": "fence", "worker_id": 1, "process": 0}
    assert shards.host.sent == [(-1 - shard, fence) for shard in range(number)]
    shards.connect(1, 0, 1.0)  # the next process
    assert shards.workers(9.0) == []
    for shard in range(number):
        shards.connection_closed(-1 - shard, 1, 7 + shard, 2)
    shards.act(9.0)
    assert shards.told_closed == [(1, [7, 8][:number], [2, 2][:number])]
    assert shards.host.sent[-2][1] == {"type": "connected", "view": 0, "process": 1, "address": None}


def test_a_new_primary_is_told_whom_to_fence() -> None:
    shards = Shards().complete()
    shards.connect(1, 0, 0.0)
    shards.act(0.0)
    shards.fence(1)
    assert (-2, {"type": "fence", "worker_id": 1, "process": 0}) in shards.forget().lose(-1).host.sent
    shards.connection_closed(-2, 1, 4, -1)
    assert shards.told_closed == [(1, [4], [-1])]


def test_all_copies_are_told_the_end() -> None:
    shards = Shards().complete()
    shards.finish()
    assert sorted(shards.host.sent) == [(-2, {"type": "finish"}), (-1, {"type": "finish"})]
    shards.forget().backup_lost(-1, 0)  # one of them ends before the other
    shards.gone(-2)
    assert (shards.did, shards.host.sent) == ([], [])


def test_workers_of_other_hosts_are_told_where_the_primary_listens() -> None:
    shards, beta = Shards().complete(), Scripted("beta", [])
    shards._host_of = {**shards._host_of, 1: beta}  # type: ignore[dict-item]
    shards.connect(1, 0, 0.0)
    shards.act(0.0)
    assert beta.sent == []
    shards.listens(-1, ["10.0.0.1", 7000])
    shards.act(0.0)
    answer = {"type": "connected", "view": 1, "process": 0, "address": ["10.0.0.1", 7000]}
    assert beta.sent == [(1, answer)]
    assert shards.host.sent == []
