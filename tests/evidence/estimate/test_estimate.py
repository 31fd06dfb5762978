"""Estimates on clusters small enough to be worked out by hand."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from both_ways import task
from torch.utils.data import IterableDataset

import manyhands as mh
from manyhands.engines.sim.compute import Compute
from manyhands.engines.sim.network import SimNetworkSpec
from manyhands.engines.sim.profile import Profile
from manyhands.errors import BadInput, UnknownName
from manyhands.evidence.estimate.estimate import DEFAULT, Estimate, Estimates, estimate
from manyhands.strategies import strategy_of

NUMBERS = 64 * 40 + 64 + 416 + 32  # D' of `task()`: each parameter fills up to a multiple of 32
BYTES = 4 * NUMBERS
ALPHA, BITS = 1e-3, 1e6  # latency, bit/s
RING = f"latency={ALPHA},bandwidth={BITS},collective=ring"
ROW, STEP = 1e-2, 5e-2


def profile(**more: object) -> Profile:
    values = {
        "networks": {"local": SimNetworkSpec(workers_per_host=1)},
        "compute": Compute(row=ROW, step=STEP),
        "task": "wide",
        "workers": 2,
        "batch_sizes": (6, 12),
        "errors": {"allreduce": 0.1, "local-sgd:period=4": -0.2},
        **more,
    }
    return Profile(**values)


def of(strategy: str, workers: int = 4, network: str = RING, given: mh.Task | None = None, **more: Any) -> Estimate:
    options = {"workers": [workers], "strategies": [strategy], "network": network, "profile": profile()} | more
    (only,) = estimate(given or task(optimizer=torch.optim.SGD), **options).estimates
    return only


# -- by hand -------------------------------------------------------------------------------------------------------------


def test_allreduce_on_a_ring_is_computing_and_two_rounds_of_pieces() -> None:
    found = of("allreduce")
    mean = 2 * 3 * (ALPHA + BYTES / 4 * 8 / BITS)
    compute = STEP + 6 * ROW
    assert found.step.seconds == pytest.approx(compute + mean, rel=0.01)  # an epoch's end has words, of 10 steps
    assert found.compute == pytest.approx(compute / (compute + mean), rel=0.01)
    assert found.exchange == pytest.approx(mean / (compute + mean), rel=0.01)
    assert found.bytes_per_step == 2 * BYTES * 3 / 4
    assert (found.batch_size, found.staleness) == (24, None)
    alone = 24 / (STEP + 24 * ROW)  # one worker of the profile
    assert found.rows_per_s == pytest.approx(24 / found.step.seconds)
    assert found.speed_up == pytest.approx(found.rows_per_s / alone)
    assert found.efficiency == pytest.approx(found.speed_up / 4)
    found = of("allreduce", network="free", given=task(batch_size=None, batch_size_per_worker=6))
    assert found.efficiency == pytest.approx(1)  # nothing is lost
    assert found.rows_per_s == pytest.approx(24 / (STEP + 6 * ROW))
    assert (found.compute, found.exchange, found.wait) == pytest.approx((1, 0, 0))


def test_local_sgd_pays_for_a_mean_every_fourth_step() -> None:
    """240 rows are 60 steps of 4: 15 rounds an epoch, none of which its end cuts short; with one step an epoch, a mean each."""
    network, mean = f"bandwidth={BITS},collective=ring", 2 * 3 * BYTES / 4 * 8 / BITS
    found = of("local-sgd:period=4", network=network, given=task(optimizer=torch.optim.SGD, batch_size=4))
    assert found.step.seconds == pytest.approx(STEP + ROW + mean / 4, rel=0.01)
    assert found.bytes_per_step == pytest.approx(2 * BYTES * 3 / 4 / 4, rel=0.01)
    short = of("local-sgd:period=4", network=network, given=task(optimizer=torch.optim.SGD, batch_size=240))
    assert short.step.seconds == pytest.approx(STEP + 60 * ROW + mean, rel=0.01)


def test_downpour_of_one_worker_pulls_and_pushes_over_its_card() -> None:
    """Each is there and back: a latency both ways, the vector one way, the shard's seconds; and a lease."""
    network = f"latency={ALPHA},bandwidth={BITS},servers=own"
    computing = profile(compute=Compute(row=ROW, step=STEP, lease=0.02, merge=1e-6))
    found = of("downpour", workers=1, network=network, profile=computing)
    call = 2 * ALPHA + BYTES * 8 / BITS + BYTES * 1e-6
    assert found.step.seconds == pytest.approx(STEP + 24 * ROW + 2 * call + 0.02, rel=0.02)
    assert (found.bytes_per_step, found.staleness) == (2 * BYTES, 0)


@pytest.mark.slow
def test_more_shards_share_the_load() -> None:
    one, two = (of("downpour", 8, servers=servers, network=f"bandwidth={BITS}") for servers in (1, 2))
    assert 1.5 < one.step.seconds / two.step.seconds < 2.1
    assert 0 < one.staleness < 8


@pytest.mark.slow
def test_error_bars_lie_around_the_time() -> None:
    """Four workers where two were calibrated, 6 rows each, which were: one doubling."""
    for spec, error, tried in (("allreduce", 0.1, True), ("local-sgd:period=4", 0.25, True), ("gossip", 0.25, False)):
        found = of(spec)
        besides = 0.0 if tried else 1 - found.compute
        factor = (1 + error) ** 2 * (1 + besides)
        assert (found.bars.tried, found.bars.doublings) == (tried, pytest.approx(1))
        assert (found.bars.factor, found.bars.error, found.bars.besides) == pytest.approx((factor, error, besides))
        for span in (found.step, found.training):
            assert (span.low, span.high) == pytest.approx((span.seconds / factor, span.seconds * factor))
    # `period=8` is local SGD's default, which calibration leaves out of the name
    assert of("local-sgd:period=8", profile=profile(errors={"local-sgd": 0.1})).bars.tried
    bare = estimate(task(), profile=profile(errors={}), workers=[2], strategies=["allreduce"])
    assert (bare.estimates[0].step.low, bare.estimates[0].bars) == (None, None)
    assert any("No error bars" in note for note in bare.notes)


def test_the_whole_training_is_its_epochs_or_its_steps() -> None:
    class Stream(IterableDataset):
        def __iter__(self) -> object:
            return iter([(torch.zeros(64), torch.tensor(0))])

    for fields, steps in (({"epochs": 3}, 30), ({"epochs": 3, "max_steps": 7}, 7)):
        found = of("allreduce", **fields)
        assert found.steps == steps
        assert found.training.seconds == pytest.approx(steps * found.step.seconds)
        assert found.bytes_in_training == pytest.approx(steps * found.bytes_per_step)
    found = of("allreduce", given=task(train_data=Stream()))
    assert found.step is not None
    assert (found.steps, found.training, found.bytes_in_training) == (None, None, None)
    assert of("downpour", given=task(train_data=Stream(), max_steps=9)).steps == 9
    assert of("allreduce", steps=30).simulated_steps == 30


def test_jitter_makes_all_wait_for_the_slowest() -> None:
    calm, noisy = of("allreduce", network="free"), of("allreduce", network="free", compute="jitter=lognormal:0.3")
    assert noisy.step.seconds > 1.1 * calm.step.seconds
    assert noisy.wait > 0.1
    assert 0 < noisy.spread < 0.02


# -- what cannot be ----------------------------------------------------------------------------------------------------


def test_what_is_impossible_is_a_row_with_the_reason() -> None:
    found = estimate(task(), profile=profile(), workers=[2, 4], strategies=["solo", "allreduce", "hogwild"])
    refused = {(one.strategy, one.workers): one.refused for one in found.estimates}
    assert list(refused) == [(name, workers) for workers in (2, 4) for name in ("solo", "allreduce", "hogwild")]
    assert "solo runs on one worker" in refused["solo", 2]
    assert refused["allreduce", 2] == ""
    assert "one machine" in refused["hogwild", 2]
    only = next(one for one in found.estimates if one.refused)
    assert (only.step, only.rows_per_s, only.training) == (None, None, None)
    for strategy, more, why in (
        ("allreduce:compress=threshold:0.1", {}, "only training shows"),
        ("update-sharing", {}, "depend on the updates' values"),
        ("quorum", {"servers": 2}, "needs a server with one shard"),
        ("quorum:backups=4", {}, "backups=4 must be less than workers="),
        ("diloco:period=20", {"steps": 30, "given": task(batch_size=6)}, "too few exchanges .*steps: 34"),
        ("allreduce", {"compute": "9=5x"}, "worker 9 has a factor"),
        ("allreduce", {"network": "host9=latency:1ms"}, "host9 does not exist"),
    ):
        one = of(strategy, **more)
        assert one.step is None
        assert re.search(why, one.refused), one.refused


def test_what_no_strategy_could_take_is_an_error() -> None:
    said: list[str] = []
    few = {"workers": [2, 64, 512], "strategies": ["allreduce"], "say": said.append}
    for options, error, words in (
        ({"strategies": ["alreduce"]}, UnknownName, "no strategy"),
        ({"workers": [0]}, BadInput, "workers must be a whole number"),
        ({"servers": 0}, BadInput, "servers must be a whole number"),
        ({"steps": 7}, BadInput, "steps must be a whole number of at least 8"),
        ({"profile": "nowhere.json"}, BadInput, "cannot be read"),
        ({"network": "speed=1"}, BadInput, "network has no option"),
        (few, BadInput, "batch_size=24 .*64 or 512 workers.*--batch-size-per-worker.*--workers 2"),
    ):
        with pytest.raises(error, match=words):
            estimate(task(), **({"profile": profile()} | options))
    assert not any("allreduce" in line for line in said)  # nothing was simulated


# -- notes -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_notes_say_what_a_number_does_not_rest_on() -> None:
    given: dict[str, Any] = {"workers": [4], "strategies": ["allreduce"]}
    close = estimate(task(), profile=profile(task="chars"), **given)
    assert "of task chars, not of wide" in close.notes[0]
    assert "latency and bandwidth of sockets" in close.notes[1]
    assert estimate(task(), profile=profile(), network="lan", **given).notes == ()
    inside = profile(networks={"local": SimNetworkSpec(workers_per_host=4)})
    assert estimate(task(), profile=inside, **given).notes == ()
    (note,) = of("allreduce", given=task(batch_size=480)).notes
    assert re.search("240 rows, and a batch 480", note)
    assert of("local-sgd:period=4,warmup=30").notes == ("its warmup is left out",)
    noisy = of("allreduce", network="free", compute="jitter=exponential", steps=10, given=task(batch_size=4))
    assert "known to" in noisy.notes[0]
    rare = of("local-sgd:period=end", network="free")
    assert rare.efficiency == pytest.approx(24 / (4 * (STEP + 6 * ROW)) * (STEP + 24 * ROW) / 24)
    assert re.match(r"no exchange was due in [0-9]+ steps", rare.notes[0])


# -- the whole ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_defaults_over_several_numbers_of_workers_and_the_progress_lines(tmp_path: Path) -> None:
    path, lines = tmp_path / "p.json", list[str]()
    profile().save(path)
    given = task(batch_size=None, batch_size_per_worker=6)
    found = estimate(given, profile=path, workers=[2, 4, 2], network="lan", say=lines.append)
    assert len({strategy_of(spec).name for spec in DEFAULT}) == 6
    names = ("allreduce", "local-sgd", "diloco", "downpour", "easgd", "gossip")
    assert [(one.workers, one.strategy) for one in found.estimates] == [(n, name) for n in (2, 4) for name in names]
    assert all(not one.refused for one in found.estimates)
    assert lines[:2] == ["the model's shape", "1 of 12: allreduce on 2 workers"]
    assert len(lines) == 13
    assert (found.parameters, found.rows, found.task) == (64 * 40 + 40 + 400 + 10, 240, "wide")
    assert found.network == SimNetworkSpec.parse("lan")


def test_json_has_every_number_and_is_the_same_every_time() -> None:
    def once() -> Estimates:
        strategies, compute = ["downpour", "solo"], "jitter=lognormal:0.2"
        return estimate(task(), profile=profile(), workers=[2], strategies=strategies, compute=compute, network="lan")

    found = once()
    assert found == once()
    document = json.loads(found.to_json())
    assert document["format"] == 1
    assert document["profile"]["errors"] == {"allreduce": 0.1, "local-sgd:period=4": -0.2}
    assert (document["network"], document["servers"]) == (str(found.network), 1)
    first, second = document["estimates"]
    (one, other) = found.estimates
    assert first["step"] == {"seconds": one.step.seconds, "low": one.step.low, "high": one.step.high}
    assert (first["bars"]["factor"], first["speed_up"], first["refused"]) == (one.bars.factor, one.speed_up, "")
    assert (second["refused"], second["step"]) == (other.refused, None)
