"""The stand-in's virtual times and bytes are those of the model with all its numbers."""

from __future__ import annotations

import gc

import pytest
import torch
from both_ways import HOSTS, Measured, by_stand_in, in_full, task

from manyhands.comm.codecs import CODECS
from manyhands.strategies import CATALOGUE
from manyhands.tasks.digits_task import digits
from slow_cases import slow_after

UNKNOWN = {"solo", "hogwild", "update-sharing", "rotate"}
"""One worker; shared memory; messages as long as their values make them; kernels alone."""
EXACT = 1e-9  # of times: sums of the same numbers in another order
ALL = (
    "allreduce",
    "allreduce:overlap=true",
    "local-sgd:period=4,optimizer_state=kept",
    "local-sgd:period=4,optimizer_state=reset",
    "diloco:period=5",
    "diloco:period=5,compress=topk:0.01",
    "diloco:period=4,via=server",
    "diloco:period=4,via=server,bound=0",
    "gossip",
    "gossip:graph=ring,period=2",
    "gossip:weights=push-sum",
    "gossip:graph=pairs",
    "ensemble",
    "downpour",
    "downpour:push_every=2,pull_every=3,rule=adagrad,bound=2",
    "downpour:compress=topk:0.01",
    "downpour:compress=bf16",
    "agn",
    "dynsgd",
    "distance",
    "easgd",
    "easgd:via=group",
    "eamsgd",
    "quorum",
    "quorum:compress=int8",
    "allreduce:compress=bf16",
    "allreduce:compress=topk:0.01",
    "allreduce:compress=onebit",
    "allreduce:compress=qsgd:4",
    "allreduce:compress=int8",
    "allreduce:compress=powersgd:2",
)
ALL = (
    *ALL,
    *(name for name in CATALOGUE if name not in {spec.partition(":")[0] for spec in ALL} | UNKNOWN),
)


def test_every_strategy_and_every_codec_of_fixed_length_is_here() -> None:
    assert {spec.partition(":")[0] for spec in ALL} == set(CATALOGUE) - UNKNOWN
    assert {spec.partition("compress=")[2].partition(":")[0] for spec in ALL} - {""} == set(CODECS) - {"threshold"}


def assert_same(stands: Measured, full: Measured) -> None:
    assert [(rank, sent) for rank, _, sent in stands] == [(rank, sent) for rank, _, sent in full]
    assert [when for _, when, _ in stands] == pytest.approx([when for _, when, _ in full], rel=EXACT)


@pytest.mark.parametrize("spec", slow_after(12, ALL))
def test_every_workers_every_step_takes_as_long_and_sends_as_much(spec: str) -> None:
    """13 steps: more than an epoch, which is 10 of them."""
    given = task()
    assert_same(by_stand_in(given, spec, 4, 13, servers=2), in_full(given, spec, 4, 13, servers=2))


@pytest.mark.parametrize(
    "spec", ["allreduce", "diloco:period=4", "downpour", "easgd", "gossip", "allreduce:compress=topk:0.01"]
)
def test_of_digits_too(spec: str) -> None:
    given = digits()
    assert_same(by_stand_in(given, spec, 4, 10, servers=2), in_full(given, spec, 4, 10, servers=2))


@pytest.mark.parametrize("network", ["latency=1ms,bandwidth=1Gbit", "latency=1ms,bandwidth=1Gbit,duplex=shared", HOSTS])
@pytest.mark.parametrize("workers", [2, 3, 5])
def test_messages_long_enough_to_travel_another_way(network: str, workers: int) -> None:
    """Above 1 MiB sockets send round a ring; the stand-in's 128 bytes would be swapped directly."""
    given = task(width=4000)
    full = in_full(given, "allreduce", workers, 4, network=network)
    assert_same(by_stand_in(given, "allreduce", workers, 4, network=network), full)


def test_workers_that_share_their_parameters() -> None:
    given, network = task(), "workers_per_host=all,local_latency=1us,local_bandwidth=10Gbit"
    assert_same(
        by_stand_in(given, "hogwild", 3, 13, network=network), in_full(given, "hogwild", 3, 13, network=network)
    )


@pytest.mark.parametrize("collective", ["ring", "tree", "cheapest"])
@pytest.mark.parametrize("spec", ["allreduce", "allreduce:compress=topk:0.1"])
def test_every_kind_of_collective(collective: str, spec: str) -> None:
    given, network = task(), f"lan,collective={collective}"
    assert_same(by_stand_in(given, spec, 5, 4, network=network), in_full(given, spec, 5, 4, network=network))


def test_slices_that_overlap_are_one_after_the_other() -> None:
    """The model has three of them."""
    given = task(width=14000)
    full = in_full(given, "allreduce:overlap=true", 3, 3)
    assert_same(by_stand_in(given, "allreduce:overlap=true", 3, 3), full)


def test_models_of_other_numbers() -> None:
    def model() -> torch.nn.Module:
        return torch.nn.Linear(64, 70).double()

    given = task().with_fields(model=model, loss=lambda model, batch: model(batch[0].double()).square().mean())
    for spec in ("allreduce", "local-sgd:period=2,optimizer_state=kept", "downpour:compress=topk:0.01"):
        assert_same(by_stand_in(given, spec, 3, 5), in_full(given, spec, 3, 5))


def test_averaging_the_optimizers_state_differs_by_words_once() -> None:
    """At the first average all say which parameters have state: a list, of one parameter or of all. Then nothing differs."""
    given = task()
    full, stands = (way(given, "local-sgd:period=4", 4, 13) for way in (in_full, by_stand_in))
    assert [sent for _, _, sent in stands] == [sent for _, _, sent in full]
    assert [when for _, when, _ in stands] == pytest.approx([when for _, when, _ in full], rel=1e-4)
    steps = {rank: ([t for r, t, _ in stands if r == rank], [t for r, t, _ in full if r == rank]) for rank in range(4)}
    for ours, theirs in steps.values():
        assert ours[9] - ours[5] == pytest.approx(theirs[9] - theirs[5], rel=EXACT)


def test_sgd_has_no_state_to_average() -> None:
    given = task(optimizer=torch.optim.SGD)
    assert_same(by_stand_in(given, "local-sgd:period=4", 4, 13), in_full(given, "local-sgd:period=4", 4, 13))


def test_fragments_are_taken_for_equally_long() -> None:
    """Over whole periods they send the same, and take as long where none waits for another."""
    given = task()
    full, stands = (way(given, "diloco:streaming=4,period=8", 4, 20) for way in (in_full, by_stand_in))
    assert sum(sent for *_, sent in stands) == pytest.approx(sum(sent for *_, sent in full), rel=0.02)
    assert max(when for _, when, _ in stands) == pytest.approx(max(when for _, when, _ in full), rel=0.01)


def test_powersgd_over_a_server() -> None:
    given = task()
    assert_same(
        by_stand_in(given, "downpour:compress=powersgd:2", 4, 13), in_full(given, "downpour:compress=powersgd:2", 4, 13)
    )


@pytest.mark.parametrize(("spec", "servers"), [("downpour", 3), ("downpour:compress=powersgd:2", 2)])
def test_shards_that_differ_are_taken_for_alike_where_they_merge_and_decode(spec: str, servers: int) -> None:
    given = task()
    full, stands = (way(given, spec, 4, 13, servers=servers) for way in (in_full, by_stand_in))
    assert sum(sent for *_, sent in stands) == sum(sent for *_, sent in full)
    assert max(when for _, when, _ in stands) == pytest.approx(max(when for _, when, _ in full), rel=0.01)


def test_nothing_of_the_process_is_changed() -> None:
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    by_stand_in(task(), "allreduce", 2, 2)
    assert (torch.get_num_threads(), gc.isenabled()) == (threads, True)
    assert torch.equal(torch.get_rng_state(), state)
