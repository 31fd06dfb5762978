"""Estimates on clusters small enough to be worked out by hand, and the text that the command prints of them."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from both_ways import task

import manyhands as mh
from manyhands.engines.sim.compute import Compute
from manyhands.engines.sim.network import SimNetworkSpec
from manyhands.engines.sim.profile import Profile
from manyhands.errors import BadInput, UnknownName
from manyhands.evidence.estimate.bars import Bars
from manyhands.evidence.estimate.estimate import DEFAULT, Estimate, Estimates, Span, estimate
from manyhands.evidence.estimate.table import text
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
    """Of whole epochs, whose ends have words."""
    options = {"workers": [workers], "strategies": [strategy], "network": network, "profile": profile(), "steps": 40}
    (only,) = estimate(given or task(optimizer=torch.optim.SGD), **(options | more)).estimates
    return only


# -- by hand -------------------------------------------------------------------------------------------------------------


def test_a_mean_on_a_ring_is_two_rounds_of_pieces_and_local_sgd_pays_for_it_every_fourth_step() -> None:
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
    bare = estimate(task(), profile=profile(errors={}), workers=[2], strategies=["allreduce"], steps=10)
    assert (bare.estimates[0].step.low, bare.estimates[0].bars) == (None, None)
    assert any("No error bars" in note for note in bare.notes)


def test_the_whole_training_is_its_epochs_or_its_steps() -> None:
    found = of("allreduce", epochs=3)
    assert found.steps == 30
    assert found.training.seconds == pytest.approx(30 * found.step.seconds)
    assert found.bytes_in_training == pytest.approx(30 * found.bytes_per_step)
    stream = task(train_data=lambda: iter([(torch.zeros(64), torch.tensor(0))]))
    found = of("allreduce", given=stream, steps=30)
    assert found.step is not None
    assert (found.steps, found.training, found.bytes_in_training) == (None, None, None)
    assert (found.simulated_steps, of("downpour", given=stream, max_steps=9, steps=8).steps) == (30, 9)


# -- what cannot be ----------------------------------------------------------------------------------------------------


def test_what_is_impossible_is_a_row_with_the_reason_or_an_error() -> None:
    found = estimate(task(), profile=profile(), workers=[2, 4], strategies=["solo", "allreduce", "hogwild"], steps=8)
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
    given: dict[str, Any] = {"workers": [4], "strategies": ["allreduce"], "steps": 10}
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
    rare = of("local-sgd:period=end", network="free", steps=None)
    assert rare.efficiency == pytest.approx(24 / (4 * (STEP + 6 * ROW)) * (STEP + 24 * ROW) / 24)
    assert re.match(r"no exchange was due in [0-9]+ steps", rare.notes[0])


# -- the whole ---------------------------------------------------------------------------------------------------------


def test_the_defaults_and_the_progress_lines(tmp_path: Path) -> None:
    path, lines = tmp_path / "p.json", list[str]()
    profile().save(path)
    given = task(batch_size=None, batch_size_per_worker=6)
    found = estimate(given, profile=path, workers=[2, 2], strategies=["allreduce"], network="lan", say=lines.append)
    assert [strategy_of(spec).name for spec in DEFAULT] == [
        *("allreduce", "local-sgd", "diloco", "downpour", "easgd", "gossip")
    ]
    assert lines == ["the model's shape", "1 of 1: allreduce on 2 workers"]
    assert (found.parameters, found.rows, found.task) == (64 * 40 + 40 + 400 + 10, 240, "wide")
    assert found.network == SimNetworkSpec.parse("lan")


def test_json_has_every_number_and_is_the_same_every_time() -> None:
    def once() -> Estimates:
        strategies, compute = ["downpour", "solo"], "jitter=lognormal:0.2"
        options = {"strategies": strategies, "compute": compute, "network": "lan", "steps": 10}
        return estimate(task(), profile=profile(), workers=[2], **options)

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


PROFILE = profile(compute=Compute(row=1e-4), task="chars", errors={"allreduce": 0.034, "local-sgd": -0.07})
LINE = Estimate(
    strategy="allreduce",
    workers=8,
    batch_size=2048,
    step=Span(seconds=0.06, low=0.05, high=0.072),
    rows_per_s=34133.0,
    steps=60_000,
    training=Span(seconds=3600.0, low=3000.0, high=4320.0),
    speed_up=6.4,
    efficiency=0.8,
    bytes_per_step=5_870_000.0,
    bytes_in_training=3.52e11,
    compute=0.8,
    exchange=0.15,
    wait=0.05,
    bars=Bars(factor=1.2, error=0.05, tried=True, besides=0.0, doublings=2.0),
    simulated_steps=64,
    spread=0.001,
)
SERVED = replace(
    LINE, strategy="downpour", staleness=7.0, bars=replace(LINE.bars, tried=False), notes=("its warmup is left out",)
)
FOUND = Estimates(
    task="chars",
    parameters=838_528,
    rows=11_227,
    profile=PROFILE,
    network=SimNetworkSpec.parse("lan"),
    compute=Compute(row=1e-4),
    servers=1,
    solo_rows_per_s=5333.0,
    estimates=(LINE, SERVED),
    notes=("Something holds of all.",),
)


def lines(found: Estimates) -> list[str]:
    return text(found).splitlines()


def test_the_head_and_every_number_of_a_row() -> None:
    printed = lines(FOUND)
    assert re.match("chars: 838,528 parameters, 11,227 rows an epoch; .* 5,333 rows/s", printed[0])
    assert printed[1] == f"network {SimNetworkSpec.parse('lan')}".replace(",", ", ")
    assert (printed[2], printed[4]) == ("compute row=0.0001", "8 workers, 2,048 rows a step")
    row = next(line for line in printed if line.startswith("allreduce"))
    cells = ["60 ms", "34,133", "6.4", "80 %", "1 h (50 min to 1.2 h)", "5.9 MB", "352.0 GB", "80 %", "15 %", "5 %"]
    assert re.match("allreduce  .*" + ".*".join(map(re.escape, cells)), row)


def test_rows_without_their_own_bars_are_marked_and_the_rule_is_printed() -> None:
    printed = lines(FOUND)
    assert any(line.startswith("downpour* ") and line.endswith(" 7") for line in printed)
    rule = " ".join(printed[next(i for i, line in enumerate(printed) if line.startswith("low to high")) :])
    assert re.search(r"on 2 workers.*allreduce \+3.4%, local-sgd -7.0%.*at least 5%.*\* was not tried", rule)
    assert "  downpour: its warmup is left out" in printed
    assert printed[-1] == "Something holds of all."
    assert "extrapolated" not in text(replace(FOUND, estimates=(LINE,)))
    bare = replace(LINE, bars=None, training=Span(seconds=90.0, low=None, high=None))
    shown = text(replace(FOUND, profile=replace(PROFILE, errors={}), estimates=(bare,)))
    assert "1.5 min" in shown
    assert "low to high" not in shown
    assert " to " not in shown.split("rows/s, speed-up")[0]


def test_it_fits_a_terminal_and_each_number_of_workers_has_a_table() -> None:
    """The tables are cut into several, whose rows all begin with the strategy; no number is lost."""
    for width in (60, 120):
        printed = text(FOUND, width)
        assert max(map(len, printed.splitlines())) <= width
        assert set(text(FOUND).split()) - {"*"} <= set(printed.split()) | {"low", "to"}
    refused = [Estimate(strategy=name, workers=64, refused="some without a row") for name in ("allreduce", "downpour")]
    printed = lines(replace(FOUND, estimates=(LINE, SERVED, *refused)))
    heads = [line for line in printed if "worker" in line and line[0].isdigit()]
    assert heads == ["8 workers, 2,048 rows a step", "64 workers"]
    assert printed.count("  all: some without a row") == 1


def test_what_is_not_known_is_a_dash_and_times_are_in_the_unit_that_fits() -> None:
    stream = replace(LINE, steps=None, training=None, bytes_in_training=None)
    printed = lines(replace(FOUND, rows=None, estimates=(stream,)))
    assert "a stream" in printed[0]
    assert next(line for line in printed if line.startswith("allreduce")).split().count("-") == 3
    for seconds, shown in (
        *((3e-10, "0.3 ns"), (2.5e-6, "2.5 µs"), (1.5e-3, "1.5 ms"), (59.0, "59 s"), (200.0, "3.33 min")),
        (7200.0, "2 h"),
        (1e6, "11.6 d"),
    ):
        one = replace(LINE, step=Span(seconds=seconds, low=None, high=None))
        assert f" {shown} " in text(replace(FOUND, estimates=(one,))), seconds
