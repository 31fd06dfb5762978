"""The conformance suite of servers: the guarantees of `Server`, as checks for any implementation.

    for name, check in SERVER_SUITE.items():
        check(open_servers)

`open_servers(spec, workers, shards)` is a context manager that gives the clients of a new server, one for each worker,
in rank order, and ends the server on exit. A check raises CheckFailed. The order of calls is scripted: calls that do
not wait are made from one thread, calls that wait from one thread each. No check relies on sleeping; a call that must
wait is observed for a moment, in which a correct one cannot return.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from itertools import permutations

import torch
from torch import Tensor

from manyhands.server.base import Server, ServerSpec
from manyhands.testing.clients import (
    ADD,
    DEADLINE_S,
    RULES,
    D,
    OpenServers,
    center_of,
    expect_equal,
    expect_waits,
    pulled,
    run_clients,
    started,
    training,
)
from manyhands.testing.group_suite import checks_of, expect, expect_refused, vector
from manyhands.testing.rules_suite import RULES_SUITE
from manyhands.testing.threads import ScriptedTurns

ADD_IN_STEP = ServerSpec(rule="add", bound=0)


def check_first_offer_wins(open_servers: OpenServers) -> None:
    """The first center is kept, later ones change nothing, and the caller's memory is not kept."""
    for shards in (1, 3):
        with open_servers(ADD, 3, shards) as servers:
            first = vector(1, D)
            servers[1].initialize(first)
            first.fill_(math.nan)
            servers[0].initialize(vector(0, D))
            for server in servers:
                server.activate()
                expect_equal(center_of(server), vector(1, D), "the center after two offers")
                expect_equal(pulled(server), vector(1, D), "a pull after two offers")


def check_pull_waits_for_the_first_center(open_servers: OpenServers) -> None:
    """A pull before there is a center waits for the first one."""
    with open_servers(ADD, 2, 2) as servers:
        servers[1].activate()
        with started(lambda: pulled(servers[1])) as early:
            expect_waits(early, "a pull before there is a center")
            servers[0].initialize(vector(0, D))
            expect_equal(early.result(DEADLINE_S), vector(0, D), "a pull that waited for the first center")


def check_versions_and_staleness(open_servers: OpenServers) -> None:
    """Each push is a version of every shard; staleness counts other workers' versions since the pull, never own ones."""
    for shards in (1, 3):
        with training(open_servers, ADD, 2, shards) as (a, b):
            one = torch.ones(D, dtype=torch.float64)
            pulled(a)
            pulled(b)
            for _ in range(2):
                expect(b.push(one).applied, "a push of rule add was not applied")
            a.push(one)
            a.push(one)
            pulled(b)
            b.push(one)

            def row(*versions: int, shards: int = shards) -> list[list[int]]:
                return [[version] * shards for version in versions]

            expected = {"pulls": row(0), "pushes": row(3, 4), "staleness": [2, 2]}
            journal = a.drain_journal()
            expect(journal == expected, f"the first worker's journal is {journal}, expected {expected}")
            expected = {"pulls": row(0, 4), "pushes": row(1, 2, 5), "staleness": [0, 0, 0]}
            journal = b.drain_journal()
            expect(journal == expected, f"the second worker's journal is {journal}, expected {expected}")
            expect(a.drain_journal() == {}, "the journal was not drained")
            expect_equal(center_of(a), 5 * one, "the center after five pushes")


def check_center_is_not_seen(open_servers: OpenServers) -> None:
    """`center` returns the newest version, and affects neither the journal nor the staleness."""
    for shards in (1, 2):
        with training(open_servers, ADD, 2, shards) as (a, b):
            one = torch.ones(D, dtype=torch.float64)
            pulled(a)
            b.push(one)
            expect_equal(center_of(a), one, "the center after a push")
            a.push(one)
            journal = a.drain_journal()
            expect(journal["staleness"] == [1], "reading the center changed the staleness")
            expect(len(journal["pulls"]) == 1, "reading the center is in the journal as a pull")


def check_update_may_be_reused(open_servers: OpenServers) -> None:
    """The caller may reuse its tensor after a push, also if the push is held."""
    for spec in (ADD, ADD_IN_STEP):
        with training(open_servers, spec, 1, 2) as (server,):
            update = vector(1, D)
            server.push(update)
            update.fill_(math.nan)
            server.tick()
            expect_equal(center_of(server), vector(1, D), f"the center after a push whose tensor was reused, {spec}")


def check_exactly_once(open_servers: OpenServers) -> None:
    """Concurrent pushes of many threads are each applied once, and each makes its own version."""
    workers, pushes = 3, 40

    def program(rank: int, server: Server) -> list[list[int]]:
        into = torch.empty(D, dtype=torch.float64)
        for _ in range(pushes):
            server.pull(into)
            server.push(torch.full((D,), float(1 << 10 * rank), dtype=torch.float64))
            server.tick()
        versions: list[list[int]] = server.drain_journal()["pushes"]
        return versions

    with training(open_servers, ADD, workers, 2) as servers:
        rows = [row for rows in run_clients(servers, program) for row in rows]
        wanted = torch.full((D,), float(sum(pushes << 10 * rank for rank in range(workers))), dtype=torch.float64)
        expect_equal(center_of(servers[0]), wanted, "the center after pushes of three threads")
        for shard in range(2):
            made = sorted(row[shard] for row in rows)
            expect(made == list(range(1, workers * pushes + 1)), f"the versions of shard {shard} are {made}")


def check_gate(open_servers: OpenServers) -> None:
    """A worker that finished c ticks continues when the slowest finished c - bound, not before. (CASE 11)"""
    for bound in (0, 1, 3):
        with training(open_servers, ServerSpec(rule="add", bound=bound), 2, 2) as (fast, slow):
            for tick in range(bound):
                expect(fast.tick(tick) == tick, "a tick that does not wait returns its own bits")
            for _ in range(2):
                with started(fast.tick) as waiting:
                    expect_waits(waiting, f"tick {bound + 1} ahead of a worker at bound {bound}")
                    slow.tick()
                    waiting.result(DEADLINE_S)
            expect(fast.waited_s > 0, "time at the gate is not in waited_s")


def check_gap(open_servers: OpenServers) -> None:
    """With workers of any speed, the gap of finished ticks never exceeds bound + 1. (CASE 11)"""
    workers, ticks, bound = 3, 30, 2
    finished, lock, gaps = [0] * workers, threading.Lock(), [0]

    def program(rank: int, server: Server) -> None:
        into = torch.empty(D, dtype=torch.float64)
        for _ in range(ticks):
            for _ in range(1 + 4 * rank):
                server.pull(into)
            with lock:  # counted before the server knows: the gap is never measured too small
                finished[rank] += 1
                gaps.append(max(finished) - min(finished))
            server.tick()
        server.deactivate()

    with training(open_servers, ServerSpec(rule="add", bound=bound), workers, 2) as servers:
        run_clients(servers, program)
    expect(max(gaps) <= bound + 1, f"a gap of {max(gaps)} finished ticks at bound {bound}")


def check_deactivate_frees(open_servers: OpenServers) -> None:
    """A deactivated worker delays no other, may deactivate twice, and activates again with as many ticks as the slowest."""
    with training(open_servers, ServerSpec(rule="add", bound=1), 2, 2) as (a, b):
        a.tick()
        with started(a.tick) as waiting:
            expect_waits(waiting, "the second tick ahead of a worker at bound 1")
            b.deactivate()
            waiting.result(DEADLINE_S)
        for _ in range(3):
            a.tick()
        b.deactivate()
        b.activate()
        a.tick()
        with started(a.tick) as waiting:
            expect_waits(waiting, "the second tick ahead of a worker that began again")
            b.tick()
            waiting.result(DEADLINE_S)


def check_in_step(open_servers: OpenServers) -> None:
    """Bound 0 has the bits of the synchronous form of the rule, in any order of pushes. (CASE 11)

    Staleness is 0, and control bits are OR-ed.
    """
    workers, ticks = 3, 2

    def update(rank: int, tick: int, center: Tensor) -> Tensor:
        return vector(rank, D, torch.float32, seed=tick) - center * 0.3

    wanted = [vector(9, D, torch.float32)]
    for tick in range(ticks):
        center = wanted[-1].clone()
        for rank in range(workers):
            center += update(rank, tick, wanted[-1])
        wanted.append(center)
    for rule in ("add", "staleness"):
        for order in permutations(range(workers)):
            turns = [ScriptedTurns(order) for _ in range(ticks)]

            def program(rank: int, server: Server, turns: list[ScriptedTurns] = turns) -> list[int]:
                for tick in range(ticks):
                    mine = pulled(server, wanted[0])
                    expect_equal(mine, wanted[tick], f"worker {rank}'s center in tick {tick}")
                    with turns[tick].take(rank):
                        server.push(update(rank, tick, mine))
                    bits = server.tick(1 << rank)
                    expect(bits == 0b111, f"the OR of all workers' bits is {bits:b}, expected 111")
                staleness: list[int] = server.drain_journal()["staleness"]
                return staleness

            spec = ServerSpec(rule=rule, bound=0)
            with training(open_servers, spec, workers, 2, wanted[0]) as servers:
                staleness = run_clients(servers, program)
                expect(staleness == [[0] * ticks] * workers, f"at bound 0 the staleness is {staleness}")
                expect_equal(pulled(servers[0], wanted[0]), wanted[-1], "the center after the ticks")


def check_last_pushes_of_a_segment(open_servers: OpenServers) -> None:
    """At bound 0, pushes after the last tick and before parking are one version too, applied in rank order."""
    with training(open_servers, ADD_IN_STEP, 3, 2) as servers:
        for rank in (2, 0, 1):
            servers[rank].push(vector(rank, D))
            servers[rank].deactivate()
        expect_equal(
            center_of(servers[0]), vector(0, D) + vector(1, D) + vector(2, D), "the center when all were deactivated"
        )
        expect(servers[2].drain_journal()["pushes"] == [[1, 1]], "three pushes of one round made other versions than 1")


def check_traffic(open_servers: OpenServers) -> None:
    """A push has D·b bytes, and so has a pull; each is one message for each shard. (CASE 9)"""
    for shards in (1, 3):
        with training(open_servers, ServerSpec(rule="add", bound=1), 1, shards) as (server,):
            before = {name: dict(counts) for name, counts in server.ledger.as_dict().items()}
            for _ in range(4):
                pulled(server)
                server.push(vector(0, D))
                server.tick()
            for operation in ("push", "pull"):
                was = before.get(operation, {"bytes": 0, "messages": 0})
                moved = {name: count - was[name] for name, count in server.ledger.as_dict()[operation].items()}
                wanted = {"bytes": 4 * D * 8, "messages": 4 * shards}
                expect(moved == wanted, f"4 times {operation} on {shards} shards moved {moved}, expected {wanted}")


def check_shards_agree(open_servers: OpenServers) -> None:
    """Any number of shards, also more than elements, gives the same center bit for bit, with every rule."""
    for rule, options in RULES.items():
        centers = []
        for shards in (1, 3, D + 1):
            with training(open_servers, ServerSpec(rule=rule, options=options), 2, shards, vector(5, D)) as servers:
                for turn, rank in enumerate((0, 1, 1, 0, 0)):
                    if turn < 3:
                        pulled(servers[rank])
                    servers[rank].push(vector(turn, D))
                centers.append(center_of(servers[0]))
        for center in centers[1:]:
            expect_equal(center, centers[0], f"the center of several shards and of one, rule {rule}")


def check_capture(open_servers: OpenServers) -> None:
    """A server restored from a snapshot, with another number of shards, continues as if it had not been interrupted."""
    for rule, options in RULES.items():
        spec = ServerSpec(rule=rule, options=options)
        with training(open_servers, spec, 2, 3, vector(5, D)) as (a, _):
            for turn in range(3):
                a.push(vector(turn, D))
            a.deactivate()
            snapshot = a.capture()
            expect(bool(snapshot.numbers), "a snapshot without numbers: the version is missing")
            expect_equal(snapshot.vectors["center"], center_of(a), "the center of a snapshot")
            a.activate()
            pulled(a)
            a.push(vector(9, D))
            wanted = center_of(a)
        with open_servers(spec, 2, 2) as (a, b):
            b.restore(snapshot)
            a.initialize(vector(0, D))
            a.activate()
            expect_equal(pulled(a), snapshot.vectors["center"], f"the restored center, rule {rule}")
            a.push(vector(9, D))
            expect_equal(center_of(b), wanted, f"the center of a server that was restored, rule {rule}")
            expect(a.drain_journal()["pushes"] == [[4, 4]], "the versions of a restored server do not go on")


def check_dtypes(open_servers: OpenServers) -> None:
    """Center and pushes of every floating dtype."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        with training(open_servers, ADD, 1, 2, vector(0, D, dtype)) as (server,):
            server.push(vector(1, D, dtype))
            expect_equal(pulled(server, vector(0, D, dtype)), vector(0, D, dtype) + vector(1, D, dtype), f"{dtype}")


def check_refusals(open_servers: OpenServers) -> None:
    """Wrong input raises BadInput and changes nothing: the server stays usable."""
    with training(open_servers, ADD, 1, 2) as (server,):
        one = torch.ones(D, dtype=torch.float64)
        expect_refused(lambda: server.push(torch.ones(D + 1, dtype=torch.float64)), "a push of another length")
        expect_refused(lambda: server.push(one.float()), "a push of another dtype")
        expect_refused(lambda: server.push(one, -1.0), "a negative weight")
        expect_refused(lambda: server.push(one, math.nan), "a weight of NaN")
        expect_refused(lambda: server.push(one, 1.0, -1), "negative bits")
        expect_refused(lambda: server.pull(torch.ones(D - 1, dtype=torch.float64)), "a pull into another length")
        server.push(one)
        expect_equal(center_of(server), one, "the center after refusals")
        expect(server.drain_journal()["pushes"] == [[1, 1]], "a refused push is in the worker's journal")


def check_close(open_servers: OpenServers) -> None:
    """Closing twice is allowed."""
    with training(open_servers, ADD, 2, 2) as servers:
        for server in servers:
            server.deactivate()
            server.close()
            server.close()


SERVER_SUITE: dict[str, Callable[[OpenServers], None]] = checks_of(globals()) | RULES_SUITE
"""All checks by name: those above in order, then those of the rules."""
