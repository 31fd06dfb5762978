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
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from itertools import permutations
from typing import Any, TypeVar

import torch
from torch import Tensor

from manyhands.comm.codecs import Codec, codec_of
from manyhands.comm.reducing import naive_mean
from manyhands.server.base import Encoded, Pushed, Server, ServerSpec
from manyhands.server.pushes import Push
from manyhands.server.rules import make_rule
from manyhands.server.shard_ranges import parts_of
from manyhands.testing.group_suite import CheckFailed, checks_of, expect, expect_refused, vector
from manyhands.testing.threads import ScriptedTurns

OpenServers = Callable[[ServerSpec, int, int], AbstractContextManager[list[Server]]]
T = TypeVar("T")
D = 7
MOMENT_S = 0.05
DEADLINE_S = 30.0

MOMENTUM = {"optimizer": "SGD", "rate": 0.7, "momentum": 0.9, "nesterov": True}
RULES: dict[str, dict[str, Any]] = {
    "add": {},
    "staleness": {},
    "distance": {"rate": 0.1},
    "elastic": {"alpha": 0.3},
    "adagrad": {"rate": 0.1},
    "outer": MOMENTUM,
}
"""Every rule that changes the center, with options."""

ADD = ServerSpec(rule="add")
ADD_IN_STEP = ServerSpec(rule="add", bound=0)


@contextmanager
def training(
    open_servers: OpenServers, spec: ServerSpec, workers: int, shards: int = 1, center: Tensor | None = None
) -> Iterator[list[Server]]:
    """A server with a first center (default: zeros [D]) and all workers active."""
    with open_servers(spec, workers, shards) as servers:
        servers[0].initialize(torch.zeros(D, dtype=torch.float64) if center is None else center)
        for server in servers:
            server.activate()
        yield servers


def run_clients(servers: Sequence[Server], program: Callable[[int, Server], T]) -> list[T]:
    """Run the program for each worker in its own thread. Returns their results in rank order."""
    with ThreadPoolExecutor(len(servers)) as pool:
        futures = [pool.submit(program, rank, server) for rank, server in enumerate(servers)]
        return [future.result(DEADLINE_S) for future in futures]


@contextmanager
def started(action: Callable[[], T]) -> Iterator[Future[T]]:
    """Run the action in a thread; wait for it on exit."""
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(action)


def expect_waits(future: Future[Any], what: str) -> None:
    """Expect that the call has not returned yet."""
    try:
        future.result(MOMENT_S)
    except TimeoutError:
        return
    raise CheckFailed(f"{what}: expected to wait, but it returned")


def pulled(server: Server, like: Tensor | None = None) -> Tensor:
    into = torch.full((D,), math.nan, dtype=torch.float64) if like is None else torch.full_like(like, math.nan)
    server.pull(into)
    return into


def center_of(server: Server, n: int = D) -> Tensor:
    into = torch.full((n,), math.nan, dtype=torch.float64)
    server.center(into)
    return into


def expect_equal(got: Tensor, wanted: Tensor, what: str) -> None:
    """Expect the same bits."""
    expect(torch.equal(got, wanted), f"{what}: got {got.tolist()}, expected {wanted.tolist()}")


def expect_near(got: Tensor, wanted: Tensor, limit: float, what: str) -> None:
    """Expect a largest difference of at most `limit`."""
    error = float((got - wanted).abs().max())
    expect(error <= limit, f"{what}: off by {error} where {limit} is allowed")


# -- all servers -------------------------------------------------------------------------------------------------------


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


def check_exchange_beside(open_servers: OpenServers) -> None:
    """A push and a pull that go on beside the caller are what both are in its turn, and the pull sees the push."""
    for shards, bound in ((1, None), (3, None), (2, 2)):
        with training(open_servers, replace(ADD, bound=bound), 2, shards) as (first, second):
            pulled(first)
            second.push(vector(1, D))
            expect(first.finish_exchange() is None, "an exchange is finished that nobody started")
            into = torch.full((D,), math.nan, dtype=torch.float64)
            first.start_exchange(vector(0, D), into=into)
            first.tick()
            exchanged = first.finish_exchange()
            expect(exchanged is not None and exchanged.pulled, "no center has come")
            expect(bool(exchanged and exchanged.pushed and exchanged.pushed.applied), "nothing was pushed")
            expect_near(into, vector(0, D) + vector(1, D), 1e-15, "the center after both pushes")
            expect(first.pushes == 1, f"push number {first.pushes} after one push")
            expect([*first.pulled] == [2] * shards, f"the versions that came are {first.pulled}")
            expect(first.finish_exchange() is None, "an exchange is finished twice")
            first.start_exchange(into=into)
            exchanged = first.finish_exchange()  # without a tick in between
            expect(exchanged is not None and exchanged.pushed is None, "a pull alone has pushed")
            journal = {"pulls": [[0] * shards, *[[2] * shards] * 2], "pushes": [[2] * shards], "staleness": [1]}
            expect(first.drain_journal() == journal, "the journal of an exchange beside the caller")


def check_exchange_of_an_answer(open_servers: OpenServers) -> None:
    """What a rule answers comes with the exchange."""
    x = vector(0, D)
    with training(open_servers, ServerSpec(rule="elastic"), 1, 2) as (server,):
        server.start_exchange(x, 0.25)
        server.tick()
        exchanged = server.finish_exchange()
        expect(exchanged is not None and exchanged.pushed is not None, "nothing was pushed")
        assert exchanged is not None
        assert exchanged.pushed is not None
        expect_near(_answer(exchanged.pushed), 0.25 * x, 1e-15, "the elastic difference")
        expect_near(center_of(server), 0.25 * x, 1e-15, "the center that moved by it")


def check_staleness_since(open_servers: OpenServers) -> None:
    """An update is as stale as the center on which it is based, whatever was pulled since; own versions do not count."""
    with training(open_servers, ADD, 2) as (first, second):
        into, update = pulled(first), vector(0, D)

        def exchange(since: Sequence[int]) -> None:
            first.start_exchange(update, into=into, since=since)
            first.tick()
            first.finish_exchange()

        exchange([0])  # version 1
        second.push(update)
        exchange([0])  # 3, whose gradient was computed before the first exchange was over
        second.push(update)
        exchange([1])  # 5: versions 2 and 4 are the other's
        first.push(update, since=[3])  # 6
        first.push(update)  # 7, since the pull of 5
        staleness = first.drain_journal()["staleness"]
        expect(staleness == [0, 1, 2, 1, 0], f"staleness {staleness}, expected [0, 1, 2, 1, 0]")


def check_gate_of_an_exchange(open_servers: OpenServers) -> None:
    """The step's tick goes along with what it began: whoever is too far ahead waits at its end."""
    with training(open_servers, replace(ADD, bound=1), 2) as (first, second):
        first.start_exchange(vector(0, D))
        first.tick()
        first.finish_exchange()

        def ahead() -> None:
            first.start_exchange(vector(0, D))
            first.tick()
            first.finish_exchange()

        with started(ahead) as late:
            expect_waits(late, "a worker two ticks ahead under bound 1")
            second.tick()
            late.result(DEADLINE_S)


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
        wanted = vector(0, D) + vector(1, D) + vector(2, D)
        expect_equal(center_of(servers[0]), wanted, "the center when all were deactivated")
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
        RULE_SUITE["shards_agree"](open_servers, ServerSpec(rule=rule, options=options))


def check_capture(open_servers: OpenServers) -> None:
    """A server restored from a snapshot, with another number of shards, continues as if it had not been interrupted."""
    for rule, options in RULES.items():
        RULE_SUITE["capture"](open_servers, ServerSpec(rule=rule, options=options))


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


# -- single rules, and codecs ------------------------------------------------------------------------------------------


def quorum(backups: int) -> ServerSpec:
    """The spec of strategy `quorum`."""
    return ServerSpec(rule="quorum", bound=16, options={"backups": backups}, one_shard=True)


def check_elastic(open_servers: OpenServers) -> None:
    """The answer is alpha·weight times the difference to the previous center, by which the center moved."""
    for shards in (1, 3):
        spec = ServerSpec(rule="elastic", options={"alpha": 0.25})
        with training(open_servers, spec, 2, shards) as (a, b):
            pushed = a.push(vector(0, D), 2.0, 5)
            expect_equal(_answer(pushed), 0.5 * vector(0, D), "the first elastic difference")
            expect((pushed.weight, pushed.bits) == (2.0, 5), f"weight and bits of the answer: {pushed}")
            center = center_of(a)
            expect_equal(center, 0.5 * vector(0, D), "the center after an elastic push")
            difference = 0.25 * (vector(1, D) - center)
            expect_equal(_answer(b.push(vector(1, D))), difference, "the second elastic difference")
            expect_equal(center_of(a), center + difference, "the center after two elastic pushes")


def check_elastic_in_step(open_servers: OpenServers) -> None:
    """At bound 0 all are compared with the same center; answers arrive when all have pushed in the tick or finished it."""

    def program(rank: int, server: Server) -> Tensor:
        pushes = rank < 2  # the third worker finishes its tick without a push, at any time
        answer = _answer(server.push(vector(rank, D))).clone() if pushes else torch.zeros(D, dtype=torch.float64)
        server.tick()
        return answer

    with training(open_servers, ServerSpec(rule="elastic", bound=0, options={"alpha": 0.25}), 3, 2) as servers:
        for rank, answer in enumerate(run_clients(servers, program)):
            expect_equal(answer, 0.25 * vector(rank, D) * (rank < 2), f"worker {rank}'s elastic difference")
        expect_equal(center_of(servers[0]), 0.25 * vector(0, D) + 0.25 * vector(1, D), "the center after the round")


def _answer(pushed: Pushed) -> Tensor:
    expect(pushed.applied, "a push was dropped")
    if pushed.answer is None:
        raise CheckFailed("a rule that answers gave no answer")
    return pushed.answer


def check_quorum_mean(open_servers: OpenServers) -> None:
    """All get the same weighted mean, total weight and OR of bits; with one worker nothing is multiplied. (CASE 24)"""
    for workers in (1, 3):
        weights = [1.0, 2.5, 0.5][:workers]
        wanted = vector(0, D) if workers == 1 else naive_mean([vector(r, D) for r in range(workers)], weights)

        def program(rank: int, server: Server, weights: Sequence[float] = weights, wanted: Tensor = wanted) -> None:
            for _ in range(2):
                pushed = server.push(vector(rank, D), weights[rank], 1 << rank)
                expect_equal(_answer(pushed), wanted, f"worker {rank}'s mean")
                got = (pushed.weight, pushed.bits)
                expect(got == (sum(weights), (1 << len(weights)) - 1), f"weight and bits of the mean: {got}")
                server.tick()

        with training(open_servers, quorum(0), workers, 3) as servers:
            run_clients(servers, program)
            journal = servers[0].drain_journal()["pushes"]
            expect(journal == [[1], [2]], "a quorum has one shard, whose versions are its steps")


def check_quorum_late(open_servers: OpenServers) -> None:
    """A step does not wait for its backups; a late push is dropped and answered with the mean of the missed step."""

    def in_time(rank: int, server: Server) -> list[Tensor]:
        means = []
        for step in range(2):
            means.append(_answer(server.push(vector(rank, D, seed=step))).clone())
            server.tick()
        return means

    with training(open_servers, quorum(1), 3) as servers:
        means = run_clients(servers[:2], in_time)[0]
        expect_equal(means[1], naive_mean([vector(r, D, seed=1) for r in range(2)], [1.0, 1.0]), "the mean of two")
        for step, mean in enumerate(means):
            late = servers[2].push(torch.full((D,), math.nan, dtype=torch.float64), 0.0 if step else 1.0, 8)
            got = (late.applied, late.weight, late.bits, late.behind)
            expect(got == (False, 2.0, 0, 1 - step), f"applied, weight, bits and behind of a late push: {got}")
            right = late.answer is not None and torch.equal(late.answer, mean)
            expect(right, f"the mean of step {step}: {late.answer}")
            servers[2].tick()
        pushes = run_clients([servers[2], servers[0]], lambda rank, server: server.push(vector(rank, D)))
        expect(all(pushed.applied for pushed in pushes), "a worker that caught up was dropped")
        journal = servers[2].drain_journal()["pushes"]
        expect(journal == [None, None, [3]], "dropped pushes are None in a worker's journal")


def check_weight_zero(open_servers: OpenServers) -> None:
    """A push of weight 0 changes nothing in any rule, including NaN; rules that answer answer it. (CASE 27)"""
    for rule, options in RULES.items():
        RULE_SUITE["weight_zero"](open_servers, ServerSpec(rule=rule, options=options))
    nothing = torch.full((D,), math.nan, dtype=torch.float64)
    with training(open_servers, ServerSpec(rule="elastic", options=RULES["elastic"]), 1, 2, vector(5, D)) as (server,):
        pulled(server)
        zeros = torch.zeros(D, dtype=torch.float64)
        expect_equal(_answer(server.push(nothing, 0.0)), zeros, "the elastic difference of nothing")
    with training(open_servers, quorum(0), 2) as servers:
        got = run_clients(servers, lambda rank, server: server.push(vector(0, D) if rank else nothing, float(rank), 2))
        for pushed in got:
            expect_equal(_answer(pushed), vector(0, D), "the mean of a worker and one without rows")
            expect(pushed.weight == 1.0, f"the weight of a worker and one without rows is {pushed.weight}")


def check_round_without_weight(open_servers: OpenServers) -> None:
    """A round of total weight 0 leaves center, momentum and sums as they were. (CASE 27)"""
    for rule, options in (("outer", MOMENTUM), ("adagrad", {"rate": 0.1})):
        centers = []
        for weights in ([1.0, 1.0], [1.0, 0.0, 0.0, 1.0]):

            def program(rank: int, server: Server, weights: Sequence[float] = weights) -> None:
                for weight in weights:
                    server.push(vector(rank, D), weight)
                    server.tick()

            with training(open_servers, ServerSpec(rule=rule, bound=0, options=options), 2, 2) as servers:
                run_clients(servers, program)
                centers.append(center_of(servers[0]))
        expect_equal(centers[1], centers[0], f"rule {rule} with two rounds without weight between two others")


def check_outer_is_of_the_mean(open_servers: OpenServers) -> None:
    """A round of the outer optimizer is one step along the weighted mean; with rate 1 it adds the mean. (CASE 24)"""
    weights = [1.0, 3.0, 0.0]
    spec = ServerSpec(rule="outer", bound=0, options={"rate": 1.0})
    with training(open_servers, spec, 3, 2, vector(7, D)) as servers:
        run_clients(servers, lambda rank, server: (server.push(vector(rank, D), weights[rank]), server.tick()))
        wanted = vector(7, D) + naive_mean([vector(rank, D) for rank in range(3)], weights)
        expect_near(center_of(servers[0]), wanted, 1e-15, "the center after one outer step")


def check_stale_updates_weigh_less(open_servers: OpenServers) -> None:
    """An update of staleness 3 enters with weight 1/4. (CASE 12)"""
    for shards in (1, 2):
        with training(open_servers, ServerSpec(rule="staleness"), 2, shards) as (a, b):
            pulled(a)
            for _ in range(3):
                pulled(b)
                b.push(torch.zeros(D, dtype=torch.float64))
            a.push(vector(0, D))
            expect_equal(center_of(a), vector(0, D) / 4, "the center after an update of staleness 3")
            expect(a.drain_journal()["staleness"] == [3], "the staleness after three pushes of another worker is not 3")


def check_downpour_alone(open_servers: OpenServers) -> None:
    """One worker, push and pull every 5, on a quadratic: equals sequential SGD; with Adagrad it does not. (CASE 7)"""
    curvature, rate = torch.tensor([1.0, 2.0, 5.0], dtype=torch.float64), 0.1
    start = torch.tensor([3.0, -2.0, 1.0], dtype=torch.float64)
    sequential = start * (1 - rate * curvature) ** 50
    for rule, options in (("add", {}), ("adagrad", {"rate": rate})):
        with training(open_servers, ServerSpec(rule=rule, options=options), 1, 2, start) as (server,):
            for _ in range(10):
                parameters, gradients = pulled(server, start), torch.zeros_like(start)
                for _ in range(5):
                    gradient = curvature * parameters
                    parameters -= rate * gradient
                    gradients += gradient
                    server.tick()
                server.push(-rate * gradients if rule == "add" else gradients)
            error = float((center_of(server, 3) - sequential).abs().max())
        if rule == "add":
            expect(error <= 1e-15, f"downpour with one worker is off sequential SGD by {error}")
        else:
            expect(error > 1e-3, "with Adagrad on the server, downpour cannot equal sequential SGD")


def check_encoded_pushes(open_servers: OpenServers) -> None:
    """An encoded push changes the center as its decoded values do; the ledger has its payloads' bytes. (CASE 17)"""
    for text in ("topk:0.3", "onebit", "threshold:0.5", "int8"):
        codec = codec_of(text)
        assert codec is not None
        spec = ServerSpec(rule="staleness", compress=text)
        for shards in (1, 3, D + 1):
            with training(open_servers, spec, 2, shards, vector(5, D)) as (a, b):
                expect(a.shards == shards, f"a server of {shards} shards reports {a.shards}")
                wanted, sent = vector(5, D), 0
                pulled(b)
                for turn, server in enumerate((a, b, a)):
                    encoded = encode(codec, vector(turn, D), shards)
                    sent += sum(len(part) for part in encoded.parts) if server is a else 0
                    expect(server.push(encoded).applied, "an encoded push was not applied")
                    parts = zip(encoded.parts, parts_of(wanted, shards), strict=True)
                    update = torch.cat([codec.decode(part, len(like), torch.float64) for part, like in parts])
                    wanted += update / (1 if turn == 0 else 2)
                    server.drain_journal()
                expect_near(center_of(a), wanted, 1e-15, f"the center after encoded pushes, {text} on {shards} shards")
                counts, wanted_counts = a.ledger.as_dict()["push"], {"bytes": sent, "messages": 2 * shards}
                expect(counts == wanted_counts, f"{text}: sent {counts}, expected {sent} bytes")


def check_encoded_pushes_of_another_kind(open_servers: OpenServers) -> None:
    """Invalid payloads raise BadInput and change nothing; a server without a codec refuses all."""
    codec = codec_of("topk:0.3")
    assert codec is not None
    with training(open_servers, ServerSpec(rule="add", compress="topk:0.3"), 1, 2) as (server,):
        good = encode(codec, vector(0, D), 2)
        for parts in (good.parts[:1], (good.parts[0], good.parts[1][:-1]), (good.parts[0], good.parts[1].repeat(9))):
            expect_refused(lambda parts=parts: server.push(Encoded(parts, D, torch.float64)), "another payload")  # type: ignore[misc]
        server.push(good)
        server.push(vector(1, D))
        journal = server.drain_journal()["pushes"]
        expect(journal == [[1, 1], [2, 2]], "a refused push is in the worker's journal, or one is missing")
    with training(open_servers, ADD, 1, 2) as (server,):
        expect_refused(lambda: server.push(good), "an encoded push to a server without a codec")


def encode(codec: Codec, update: Tensor, shards: int) -> Encoded:
    """Encode an update as one payload for each shard."""
    return Encoded(tuple(codec.encode(part) for part in parts_of(update, shards)), len(update), update.dtype)


SERVER_SUITE: dict[str, Callable[[OpenServers], None]] = checks_of(globals())
"""All checks by name, in the order in which they are written above."""


# -- a rule --------------------------------------------------------------------------------------------------------------


def rule_shards_agree(open_servers: OpenServers, spec: ServerSpec) -> None:
    """Any number of shards, also more than elements, gives the same center bit for bit: element i depends on elements i."""
    centers = []
    for shards in (1, 3, D + 1):
        with training(open_servers, spec, 2, shards, vector(5, D)) as servers:
            for turn, rank in enumerate((0, 1, 1, 0, 0)):
                if turn < 3:
                    pulled(servers[rank])
                servers[rank].push(vector(turn, D))
            centers.append(center_of(servers[0]))
    for center in centers[1:]:
        expect_equal(center, centers[0], f"the center of several shards and of one, rule {spec.rule}")


def rule_capture(open_servers: OpenServers, spec: ServerSpec) -> None:
    """A server restored from a snapshot, with another number of shards, continues as if it had not been interrupted:
    what the rule remembers is in its `vectors` and `numbers`."""
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
        expect_equal(pulled(a), snapshot.vectors["center"], f"the restored center, rule {spec.rule}")
        a.push(vector(9, D))
        expect_equal(center_of(b), wanted, f"the center of a server that was restored, rule {spec.rule}")
        expect(a.drain_journal()["pushes"] == [[4, 4]], "the versions of a restored server do not go on")


def rule_weight_zero(open_servers: OpenServers, spec: ServerSpec) -> None:
    """A push of weight 0 changes nothing, including NaN. (CASE 27)"""
    nothing = torch.full((D,), math.nan, dtype=torch.float64)
    with training(open_servers, spec, 2, 2, vector(5, D)) as (a, b):
        pulled(a)
        pulled(b)
        a.push(nothing, 0.0)
        expect_equal(center_of(a), vector(5, D), f"the center after a push of weight 0, rule {spec.rule}")
        b.push(vector(1, D))
        expect(b.drain_journal()["staleness"] == [0], f"a push of weight 0 made another worker stale, rule {spec.rule}")
        expect(bool(center_of(a).isfinite().all()), f"a push of weight 0 changed the rule's state, rule {spec.rule}")


def rule_in_step(open_servers: OpenServers, spec: ServerSpec) -> None:
    """At bound 0 the pushes of a tick are one version, the same bits in whatever order they come."""
    answers = make_rule(spec).answers  # then a push waits for the others
    centers = []
    for order in [(0, 1, 2)] if answers else permutations(range(3)):
        turns = ScriptedTurns(order)

        def program(rank: int, server: Server, turns: ScriptedTurns = turns) -> None:
            with nullcontext() if answers else turns.take(rank):
                server.push(vector(rank, D), rank + 1.0)
            server.tick()
            server.deactivate()

        with training(open_servers, replace(spec, bound=0), 3, 2, vector(5, D)) as servers:
            for server in servers:
                pulled(server)
            run_clients(servers, program)
            centers.append(center_of(servers[0]))
            versions = [server.drain_journal()["pushes"] for server in servers]
            expect(versions == [[[1, 1]]] * 3, f"the pushes of a tick made the versions {versions}, rule {spec.rule}")
    for center in centers[1:]:
        expect_equal(center, centers[0], f"the center when pushes come in another order, rule {spec.rule}")


def rule_leaves_the_old_center_whole(open_servers: OpenServers, spec: ServerSpec) -> None:
    """`merge` reads `old` and writes `new`, which may be one memory: readers of `old` see no half of the next."""
    found = []
    for apart in (True, False):
        rule, old = make_rule(spec), vector(5, D)
        rule.start(old)
        for worker in range(2):
            rule.look(worker)
        center = vector(5, D) if rule.keeps_pulled else None
        new = torch.full_like(old, math.nan) if apart else old
        rule.merge(old, new, [Push(worker, vector(worker, D), 1.0, pulled=center) for worker in range(2)])
        if apart:
            expect_equal(old, vector(5, D), f"the old center after a merge into other memory, rule {spec.rule}")
        found.append(new)
    expect_equal(found[1], found[0], f"the next center, written over the old one and beside it, rule {spec.rule}")


RULE_SUITE: dict[str, Callable[[OpenServers, ServerSpec], None]] = checks_of(globals(), "rule_")
"""The conformance suite of a server rule that changes the center: check(open_servers, spec) for each. A rule of the
user's own is listed first, `manyhands.engines.own_rules.list_rule(spec)`."""
