"""The part of the conformance suite of servers about single rules, and about codecs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from manyhands.comm.codecs import Codec, codec_of
from manyhands.comm.reducing import naive_mean
from manyhands.server.base import Encoded, Pushed, Server, ServerSpec
from manyhands.server.shard_ranges import parts_of
from manyhands.testing.clients import (
    ADD,
    MOMENTUM,
    RULES,
    D,
    OpenServers,
    center_of,
    expect_equal,
    expect_near,
    pulled,
    run_clients,
    training,
)
from manyhands.testing.group_suite import CheckFailed, checks_of, expect, expect_refused, vector


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
            expect(
                servers[0].drain_journal()["pushes"] == [[1], [2]],
                "a quorum has one shard, whose versions are its steps",
            )


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
            expect(
                late.answer is not None and torch.equal(late.answer, mean), f"the mean of step {step}: {late.answer}"
            )
            servers[2].tick()
        pushes = run_clients([servers[2], servers[0]], lambda rank, server: server.push(vector(rank, D)))
        expect(all(pushed.applied for pushed in pushes), "a worker that caught up was dropped")
        expect(
            servers[2].drain_journal()["pushes"] == [None, None, [3]], "dropped pushes are None in a worker's journal"
        )


def check_weight_zero(open_servers: OpenServers) -> None:
    """A push of weight 0 changes nothing in any rule, including NaN; rules that answer answer it. (CASE 27)"""
    nothing = torch.full((D,), math.nan, dtype=torch.float64)
    for rule, options in RULES.items():
        with training(open_servers, ServerSpec(rule=rule, options=options), 2, 2, vector(5, D)) as (a, b):
            pulled(a)
            pulled(b)
            pushed = a.push(nothing, 0.0)
            if rule == "elastic":
                expect_equal(_answer(pushed), torch.zeros(D, dtype=torch.float64), "the elastic difference of nothing")
            expect_equal(center_of(a), vector(5, D), f"the center after a push of weight 0, rule {rule}")
            b.push(vector(1, D))
            expect(b.drain_journal()["staleness"] == [0], f"a push of weight 0 made another worker stale, rule {rule}")
            expect(bool(center_of(a).isfinite().all()), f"a push of weight 0 changed the rule's state, rule {rule}")
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
                counts = a.ledger.as_dict()["push"]
                expect(
                    counts == {"bytes": sent, "messages": 2 * shards}, f"{text}: sent {counts}, expected {sent} bytes"
                )


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
        expect(
            server.drain_journal()["pushes"] == [[1, 1], [2, 2]],
            "a refused push is in the worker's journal, or one is missing",
        )
    with training(open_servers, ADD, 1, 2) as (server,):
        expect_refused(lambda: server.push(good), "an encoded push to a server without a codec")


def encode(codec: Codec, update: Tensor, shards: int) -> Encoded:
    """Encode an update as one payload for each shard."""
    return Encoded(tuple(codec.encode(part) for part in parts_of(update, shards)), len(update), update.dtype)


RULES_SUITE: dict[str, Callable[[OpenServers], None]] = checks_of(globals())
"""All checks by name, in the order in which they are written above."""
