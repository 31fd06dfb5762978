"""Fitting, on samples whose constants are known; samples, read off the workers' events; constants of codecs."""

import math
import random
import statistics
from dataclasses import replace

import pytest
import torch

from manyhands.comm.codecs import CODECS, Hints, codec_of
from manyhands.comm.compressed import compressed_mean_
from manyhands.engines.sim.compute import Coding
from manyhands.engines.sim.costs import Costs
from manyhands.engines.sim.engine import Sim
from manyhands.engines.sim.network import ALL, NetworkState, SimNetworkSpec
from manyhands.errors import BadInput
from manyhands.events import Event
from manyhands.evidence.calibrate import coding
from manyhands.evidence.calibrate.coding import SETTINGS, CodecTimes, _EchoGroup, codings, time_codecs
from manyhands.evidence.calibrate.fit import fit_compute, lognormal, step_seconds, two_terms
from manyhands.evidence.calibrate.measure import (
    LEAST_LARGEST,
    TimedCollective,
    bandwidth_of,
    fit_group,
    sizes_of,
    timed_collectives,
)
from manyhands.evidence.calibrate.observe import (
    WARM,
    RunSetup,
    block_of,
    blocks,
    merged,
    steps_for,
    tick_seconds,
    tick_time,
)
from manyhands.strategies.local_sgd import LocalSGD
from manyhands.worker import Worker
from plain import task


def test_two_terms_weigh_errors_by_size_and_no_constant_is_negative() -> None:
    """An error of a tenth counts the same at 1 µs and at 1 s; with absolute errors the small ones would not count at all."""
    sizes = [1e3, 1e4, 1e5, 1e6, 1e7, 1e8]
    noise = random.Random(1)
    ys = [(2e-5 + 1e-9 * size) * (1 + 0.02 * noise.uniform(-1, 1)) for size in sizes]
    found = two_terms([(1.0, size) for size in sizes], ys)
    assert found.first == pytest.approx(2e-5, rel=0.03)
    assert found.second == pytest.approx(1e-9, rel=0.03)
    assert found.worst < 0.03
    falling = two_terms([(1.0, 1.0), (1.0, 2.0)], [2.0, 1.0])
    assert (falling.first > 0, falling.second) == (True, 0)
    through_zero = two_terms([(1.0, 1.0), (1.0, 2.0)], [1.0, 3.0])
    assert (through_zero.first, through_zero.second > 0) == (0, True)
    found = two_terms([(1.0, 5.0)], [10.0])
    assert (found.first, found.second) in ((10.0, 0.0), (0.0, 2.0))
    assert found.residuals == pytest.approx((0.0,))
    weighted = two_terms([(1.0, 0.0), (1.0, 0.0)], [1.0, 2.0], weights=[1.0, 0.0])
    assert weighted.residuals == pytest.approx((0.0, -0.5))  # the relative error of the fit


def test_spread_finds_mean_and_jitter_of_a_lognormal_among_outliers() -> None:
    noise = random.Random(2)
    samples = [0.05 * math.exp(0.1 * noise.gauss()) for _ in range(2000)]
    for place in range(0, 2000, 50):
        samples[place] = 5.0  # the machine did something else
    found = lognormal(samples)
    assert found.sigma == pytest.approx(0.1, rel=0.15)
    assert found.mean == pytest.approx(0.05 * math.exp(0.1**2 / 2), rel=0.02)
    assert statistics.fmean(samples) > 2 * found.mean
    assert lognormal([0.2, 0.3, 0.2]).sigma == 0
    same = lognormal([0.2] * 10)
    assert (same.mean, same.sigma) == pytest.approx((0.2, 0))


def test_computed_finds_row_step_and_jitter_and_is_best_where_it_matters_most() -> None:
    noise = random.Random(3)
    step, row, sigma = 4e-3, 1e-3, 0.05

    def block(rows: int, drift: float) -> list[float]:
        factors = (math.exp(sigma * noise.gauss() - sigma**2 / 2) for _ in range(400))
        return [(step + row * rows) * drift * factor for factor in factors]

    drifts = (1.8, 1.0, 1.4)
    found = fit_compute({rows: [block(rows, drift) for drift in drifts] for rows in (8, 16, 24)}, rows=16)
    assert found.step == pytest.approx(step, rel=0.1)
    assert found.row == pytest.approx(row, rel=0.03)
    assert found.jitter == pytest.approx(sigma, rel=0.1)
    assert set(found.residuals) == {8, 16, 24}
    assert max(map(abs, found.residuals.values())) < 0.02
    bent = {8: [[0.010] * 8], 16: [[0.030] * 8], 24: [[0.031] * 8]}
    middle, last = fit_compute(bent, rows=16), fit_compute(bent, rows=24)
    assert abs(middle.residuals[16]) < abs(last.residuals[16])
    assert abs(last.residuals[24]) < abs(middle.residuals[24])
    with pytest.raises(ValueError, match="no samples"):
        fit_compute({}, rows=16)


ITEM = 4


def calls_on(network: SimNetworkSpec, workers: int, elements: int) -> list[TimedCollective]:
    """What a machine would measure that is exactly as the model has it."""
    costs = Costs(NetworkState(network, workers, 0), workers)
    means = [("mean", n) for n in sizes_of(elements, ITEM)]
    calls = [TimedCollective(name, n, ITEM, 0.0) for name, n in (*means, ("all_gather", 1024))]
    calls.append(TimedCollective("barrier", 0, 0, 0.0))
    return [TimedCollective(call.name, call.elements, call.item, call.cost(costs).seconds) for call in calls]


def test_a_network_is_found_again_from_its_own_costs() -> None:
    memory = SimNetworkSpec(workers_per_host=ALL, local_latency=3e-6, local_bandwidth=5e10)
    for workers in (2, 3, 8):
        for network, wanted in ((memory, (3e-6, 5e10)), (SimNetworkSpec(latency=8e-5, bandwidth=6e9), (8e-5, 6e9))):
            calls = calls_on(network, workers, 900_000)
            found = fit_group(calls, workers, 900_000, one_host=network is memory)
            assert (found.first, bandwidth_of(found)) == pytest.approx(wanted)
            assert found.worst < 1e-9
    calls = calls_on(memory, 2, 900_000)  # the model's own size is fitted best
    slow = [replace(call, seconds=call.seconds * (2 if call.elements == 900_000 else 1)) for call in calls]
    place = [call.elements for call in calls].index(900_000)
    own = fit_group(slow, 2, 900_000, one_host=True).residuals[place]
    other = fit_group(slow, 2, 65_536, one_host=True).residuals[place]
    assert abs(own) < abs(other)
    found = fit_group([TimedCollective("barrier", 0, 0, 1e-5)], 2, 10, one_host=True)
    assert found.first == pytest.approx(1e-5)
    assert bandwidth_of(found) == float("inf")


def test_a_call_lasts_from_the_last_arrival_to_the_last_end_and_sizes_hold_the_models_own() -> None:
    first = [("mean", 8, ITEM, [(0.0, 9.0)] * 4 + [(1.0, 5.0), (1.0, 6.0), (1.0, 5.0)])]
    second = [("mean", 8, ITEM, [(0.0, 9.0)] * 4 + [(3.0, 4.0), (3.0, 4.0), (2.0, 7.0)])]
    assert timed_collectives([first, second]) == [TimedCollective("mean", 8, ITEM, 3.0)]
    assert sizes_of(1_000_000, ITEM) == [1024, 8192, 65536, 524288, 1_000_000]
    assert sizes_of(96, ITEM)[0] == 96
    assert sizes_of(96, ITEM)[-1] * ITEM == LEAST_LARGEST


def step(tick: int, time_s: float, rank: int = 0, **values: object) -> Event:
    known = {"epoch": 0, "rows": 4, "wait_s": 0.0, "round": False}
    return Event(type="step", time_s=time_s, rank=rank, tick=tick, step=tick, values=known | values)


def rounds_every(period: int, steps: int) -> list[Event]:
    return [step(tick, float(tick), round=(tick + 1) % period == 0 or tick == steps - 1) for tick in range(steps)]


def test_a_tick_is_between_two_events_and_a_turn_the_mean_of_those_that_most_are_like() -> None:
    """An event is sent when the next tick ends: the times of two neighbours tell the length of the tick after them."""
    seconds = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0]
    ends = [sum(seconds[: n + 1]) for n in range(len(seconds))]
    events = [step(tick, ends[tick + 1], wait_s=0.25) for tick in range(len(seconds) - 1)]
    assert tick_seconds(events) == {4: pytest.approx([second - 0.25 for second in seconds[WARM + 2 : -1]])}
    places = [(tick, rank) for tick in range(WARM + 6) for rank in (0, 1)]
    events = [step(tick, float(tick), rank, rows=rank * 3, epoch=tick // (WARM + 3)) for tick, rank in places]
    assert tick_seconds(events) == {3: [1.0, 1.0]}
    assert merged([{4: [1.0], 2: [0.5]}, {4: [3.0]}]) == {4: [[1.0], [3.0]], 2: [[0.5]]}
    shorter = {WARM + 5: 1}
    events = [step(tick, tick * 3.0, wait_s=1.0, input_s=0.5, rows=shorter.get(tick, 4)) for tick in range(WARM + 8)]
    found = tick_time(events)
    assert (found.seconds, found.input_s, found.leased) == (pytest.approx(2.0), pytest.approx(0.5), False)
    assert tick_time([*events, step(WARM + 8, 99.0, input_s=0.5, lease=[0, 0, 0])]).leased


def test_a_block_is_whole_rounds_of_global_batches_and_ends_with_the_slowest_part() -> None:
    strategy = LocalSGD()
    assert block_of([step(tick, 0.0, round=True) for tick in range(20)], strategy) == 8
    assert block_of(rounds_every(5, 30), strategy) == 10
    assert block_of(rounds_every(12, 40), strategy) == 12
    assert block_of([step(tick, 0.0) for tick in range(20)], strategy) == 8  # nothing is exchanged, ever
    for period in (14, 50):
        with pytest.raises(BadInput, match=r"local-sgd.* steps: 26.*--steps"):
            block_of(rounds_every(period, 26), strategy)
    late = [1.5 if tick == WARM else 0.5 for tick in range(steps_for(16))]
    for first, second in ((0, 1), (1, 0)):
        places = [(tick, rank) for tick in range(len(late)) for rank in (first, second)]
        events = [step(tick, tick * 2.0 + (late[tick] if rank else 0.0), rank) for tick, rank in places]
        assert blocks(events, 2, every=8) == pytest.approx([(16 - 1) / 8, 2.0])
    events = [step(tick, float(tick)) for tick in range(WARM + 16)]
    early = step(len(events), events[-1].time_s)
    assert blocks([*events, early], 1, every=8) == pytest.approx([1.0])
    assert step_seconds([0.0, 1.0, 2.0, 6.0, 7.0, 8.0, 8.5], every=3) == pytest.approx([2.0, 2.5 / 3])
    assert step_seconds([0.0, 1.0], every=3) == []


N = 1000
PLACE = RunSetup(engine=Sim(), workers=2)


def setting(codec: str, nbytes: int, like: Coding) -> CodecTimes:
    """As a machine would measure it that is exactly as the model has it."""
    encode_s, decode_s = like.encoding(N, nbytes), like.decoding(N, nbytes)
    return CodecTimes(codec=codec, n=N, nbytes=nbytes, encode_s=encode_s, decode_s=decode_s)


def test_constants_are_found_again_from_what_they_cost() -> None:
    """Seconds a byte from two settings of a codec; from one, or from several of one length, all are seconds a number."""
    threshold, onebit = Coding(1e-9, 5e-10, 1.2e-8, 7e-9), Coding(1e-9, 5e-9)
    measured = [setting("threshold:1e30", 0, threshold), setting("onebit", 133, onebit)]
    found = codings([*measured, setting("threshold:1e-30", 4 * N, threshold)])
    assert list(found) == ["threshold", "onebit"]
    for name, wanted in {"threshold": threshold, "onebit": onebit}.items():
        for constant in ("encode", "decode", "encode_byte", "decode_byte"):
            assert getattr(found[name], constant) == pytest.approx(getattr(wanted, constant), rel=1e-3), constant
    same = [CodecTimes(codec=f"powersgd:{rank}", n=N, nbytes=8 * N, encode_s=1.0, decode_s=2.0) for rank in (2, 8)]
    powersgd = codings(same)["powersgd"]
    assert (powersgd.encoding(N, 8 * N), powersgd.decoding(N, 8 * N)) == pytest.approx((1.0, 2.0))
    assert {text.partition(":")[0] for text in SETTINGS} == set(CODECS)


class Clock:
    """Each look at it takes as long as it is told."""

    def __init__(self, *steps: float) -> None:
        self.now, self.steps = 0.0, list(steps)

    def perf_counter(self) -> float:
        self.now += self.steps.pop(0)
        return self.now


def test_the_group_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Made; JSON from, to; all_gather from, to; decoded; stopped."""
    many = _EchoGroup(Worker(rank=40, size=64))  # some payloads are enough
    assert len(many.all_gather(torch.ones(3))) == 4
    monkeypatch.setattr(coding, "time", Clock(0.0, 1.0, 100.0, 2.0, 100.0, 12.0, 4.0))
    group = _EchoGroup(Worker(rank=1, size=3))
    vector, codec = torch.tensor([1.0, -2.0, 3.0, -4.0] * 4), codec_of("onebit")
    total = compressed_mean_(group, codec, vector, 2.0, 5)
    group.stop()
    assert (total.weight, total.bits) == (6.0, 5)
    assert (group.n, group.nbytes) == (16, 4 + 2)
    assert group.encode_s == 1.0 + 2.0 + 4.0
    assert group.decode_s == 12.0 / 3
    torch.testing.assert_close(vector, 2.5 * torch.tensor([1.0, -1.0, 1.0, -1.0] * 4))


def test_each_setting_has_its_turn_on_the_whole_vector() -> None:
    """And the mean of equals is what the codec leaves."""
    found = {one.codec: one for one in time_codecs(PLACE, task(), 1)}
    assert list(found) == list(SETTINGS)
    n = found["bf16"].n
    assert {one.n for one in found.values()} == {n}
    lengths = {"bf16": 2 * n, "threshold:1e30": 0, "threshold:1e-30": 4 * 84}  # of every parameter, no padding
    assert {name: found[name].nbytes for name in lengths} == lengths
    assert min(min(one.encode_s, one.decode_s) for one in found.values()) > 0
    for text in SETTINGS:
        vector, own = torch.randn(N, generator=torch.Generator().manual_seed(1)), torch.empty(N)
        group, hints = _EchoGroup(Worker(rank=0, size=4)), Hints(torch.Generator().manual_seed(2))
        compressed_mean_(group, codec_of(text), vector, 1.0, 0, hints, own)
        torch.testing.assert_close(vector, own, rtol=1e-6, atol=1e-7)
