"""The stand-in's virtual times and bytes are those of the model with all its numbers."""

import gc
from typing import Any

import pytest
import torch
from both_ways import HOSTS, Measured, by_stand_in, in_full, task

import manyhands as mh
from manyhands.comm.codecs import CODECS
from manyhands.strategies import CATALOGUE
from slow_cases import slow_after

UNKNOWN = {"solo", "hogwild", "update-sharing", "rotate"}
"""One worker; shared memory; messages as long as their values make them; kernels alone."""
EXACT = 1e-9  # of times: sums of the same numbers in another order
FAST = ("allreduce", "diloco:period=5,compress=topk:0.01", "gossip", "downpour:compress=bf16", "easgd:via=group")
SLOW = (
    *("allreduce:overlap=true", "local-sgd:period=4,optimizer_state=kept", "local-sgd:period=4,optimizer_state=reset"),
    *(
        "diloco:period=4,via=server,bound=0",
        "gossip:graph=pairs",
        "gossip:graph=ring,period=2",
        "gossip:weights=push-sum",
    ),
    *("ensemble", "downpour:push_every=2,pull_every=3,rule=adagrad,bound=2", "downpour:compress=topk:0.01", "agn"),
    *("dynsgd", "distance", "easgd", "eamsgd", "quorum:compress=int8", "allreduce:compress=bf16"),
    *(f"allreduce:compress={codec}" for codec in ("onebit", "qsgd:4", "int8", "powersgd:2")),
)
ALL = (*FAST, *SLOW)
ALL = (*ALL, *(name for name in CATALOGUE if name not in {spec.partition(":")[0] for spec in ALL} | UNKNOWN))


def test_every_strategy_and_every_codec_of_fixed_length_is_here() -> None:
    assert {spec.partition(":")[0] for spec in ALL} == set(CATALOGUE) - UNKNOWN
    assert {spec.partition("compress=")[2].partition(":")[0] for spec in ALL} - {""} == set(CODECS) - {"threshold"}


def assert_same(stands: Measured, full: Measured) -> None:
    assert [(rank, sent) for rank, _, sent in stands] == [(rank, sent) for rank, _, sent in full]
    assert [when for _, when, _ in stands] == pytest.approx([when for _, when, _ in full], rel=EXACT)


def both_ways(given: mh.Task, spec: str, workers: int, steps: int, **more: Any) -> None:
    assert_same(by_stand_in(given, spec, workers, steps, **more), in_full(given, spec, workers, steps, **more))


@pytest.mark.parametrize("spec", slow_after(len(FAST), ALL))
def test_every_workers_every_step_takes_as_long_and_sends_as_much(spec: str) -> None:
    """13 steps: more than an epoch, which is 10 of them."""
    both_ways(task(), spec, 4, 13, servers=2)


@pytest.mark.parametrize(
    ("spec", "workers", "network"),
    [
        pytest.param("allreduce", 5, "latency=1ms,bandwidth=1Gbit,duplex=shared", marks=pytest.mark.slow),
        ("allreduce", 3, HOSTS),
        pytest.param("allreduce:overlap=true", 3, HOSTS, marks=pytest.mark.slow),
    ],
)
def test_messages_long_enough_to_travel_another_way(spec: str, workers: int, network: str) -> None:
    """Above 1 MiB sockets send round a ring; the stand-in's 128 bytes would be swapped. Of slices that overlap there are 3."""
    both_ways(task(width=14000 if "overlap" in spec else 4000), spec, workers, 3, network=network)


def test_every_kind_of_collective_and_workers_that_share_their_parameters() -> None:
    for collective, spec in (("ring", "allreduce"), ("tree", "allreduce:compress=topk:0.1"), ("cheapest", "allreduce")):
        both_ways(task(), spec, 5, 4, network=f"lan,collective={collective}")
    shared = "workers_per_host=all,local_latency=1us,local_bandwidth=10Gbit"
    both_ways(task(), "hogwild", 3, 11, network=shared)


def test_other_models_and_optimizers() -> None:
    def model() -> torch.nn.Module:
        return torch.nn.Linear(64, 70).double()

    given = task().with_fields(model=model, loss=lambda model, batch: model(batch[0].double()).square().mean())
    both_ways(given, "local-sgd:period=2,optimizer_state=kept", 3, 5)
    both_ways(given, "downpour:compress=topk:0.01", 3, 5)
    both_ways(task(optimizer=torch.optim.SGD), "local-sgd:period=4", 4, 5)  # no state to average


def test_averaging_the_optimizers_state_differs_by_words_once() -> None:
    """At the first average all say which parameters have state: a list, of one parameter or of all. Then nothing differs."""
    full, stands = (way(task(), "local-sgd:period=2", 2, 5) for way in (in_full, by_stand_in))
    assert [sent for _, _, sent in stands] == [sent for _, _, sent in full]
    assert [when for _, when, _ in stands] == pytest.approx([when for _, when, _ in full], rel=1e-4)
    for rank in range(2):
        ours, theirs = ([when for r, when, _ in one if r == rank] for one in (stands, full))
        assert ours[4] - ours[2] == pytest.approx(theirs[4] - theirs[2], rel=EXACT)


def test_fragments_and_shards_that_differ_are_taken_for_alike() -> None:
    """Over whole periods they send the same, and take as long where none waits for another."""
    for spec, servers, off in (("diloco:streaming=4,period=8", 1, 0.02), ("downpour:compress=powersgd:2", 2, 0.0)):
        steps = 20 if servers == 1 else 13
        full, stands = (way(task(), spec, 4, steps, servers=servers) for way in (in_full, by_stand_in))
        assert sum(sent for *_, sent in stands) == pytest.approx(sum(sent for *_, sent in full), rel=off), spec
        assert max(when for _, when, _ in stands) == pytest.approx(max(when for _, when, _ in full), rel=0.01), spec


def test_nothing_of_the_process_is_changed() -> None:
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    by_stand_in(task(), "allreduce", 2, 2)
    assert (torch.get_num_threads(), gc.isenabled()) == (threads, True)
    assert torch.equal(torch.get_rng_state(), state)
