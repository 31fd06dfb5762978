"""`calibrate`: what it refuses, the text that the command prints, and a calibration from end to end on real workers."""

import inspect
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import manyhands as mh
from manyhands.cli import commands, evidence
from manyhands.comm.codecs import CODECS
from manyhands.engines.local.engine import Local
from manyhands.engines.sim.compute import Compute
from manyhands.engines.sim.engine import Sim
from manyhands.engines.sim.network import SimNetworkSpec
from manyhands.engines.sim.profile import Profile
from manyhands.errors import BadInput, UnknownName, Unsupported
from manyhands.evidence.calibrate.calibrate import STRATEGIES, Calibration, Prediction, calibrated, lease_and_request
from manyhands.evidence.calibrate.coding import SETTINGS, CodecTimes
from manyhands.evidence.calibrate.fit import ComputeFit, Terms
from manyhands.evidence.calibrate.measure import ServerTimes
from manyhands.evidence.calibrate.observe import TickTime
from manyhands.evidence.calibrate.report import text
from manyhands.evidence.estimate.estimate import estimate
from manyhands.evidence.estimate.table import text as estimates_text
from plain import rows, task


def test_what_cannot_be_is_refused(nothing_starts: None) -> None:
    for fields, options, error, words in (
        *(({}, {"workers": workers}, BadInput, "at least 2 workers") for workers in (1, 0, True, 2.0)),
        ({}, {"engine": "sim"}, Unsupported, "engine sim cannot do that: use engine local"),
        ({}, {"engine": "hosts:listen=127.0.0.1"}, Unsupported, "engine hosts cannot do that: use engine local"),
        ({}, {"strategies": ["solo"]}, Unsupported, "strategy solo runs on one worker"),
        ({}, {"strategies": ["allredduce"]}, UnknownName, "allreduce"),
        ({}, {"steps": 3}, BadInput, "steps must be a whole number of at least 16, not 3"),
        ({"batch_size": 3}, {"workers": 4}, BadInput, "leaves some of the 4 workers without a row"),
    ):
        with pytest.raises(error, match=words):
            calibrated(task(**fields), **options)
    default = inspect.signature(evidence.calibrate).parameters["strategies"].default
    assert default == ",".join(STRATEGIES)  # the command's


def test_what_a_served_tick_takes_longer_and_the_run_that_is_furthest_off() -> None:
    served, alone = TickTime(5.0, 0.75, leased=True), TickTime(3.0, 0.25, leased=False)
    assert lease_and_request(served, alone, 3.5) == (0.5, 0.5)
    assert lease_and_request(served, alone, 4.75) == (0.25, 0.0)
    assert lease_and_request(served, alone, 6.0) == (0.0, 0.0)  # a quicker run than that which was simulated
    assert lease_and_request(TickTime(5.0, 0.75, leased=False), alone, 3.5) == (0.0, 0.75)  # a stream has no leases
    worst = {sim: Prediction(strategy="s", real_s=1.0, slowest_s=1.5, simulated_s=sim).worst for sim in (0.9, 1.2, 1.4)}
    assert worst == pytest.approx({0.9: 0.9 / 1.5 - 1, 1.2: 1.2 / 1.5 - 1, 1.4: 0.4})


FOUND = Calibration(
    profile=Profile(
        networks={"local": SimNetworkSpec(workers_per_host=2)},
        compute=Compute(lease=9e-5, request=2e-5),
        task="chars",
        workers=2,
        machine={"threads_per_worker": "1", "cores": "2"},
    ),
    compute=ComputeFit(step=2e-3, row=3.5e-3, jitter=0.04, residuals={8: 0.02, 16: -0.01}),
    memory=Terms(4e-6, 1 / 8e10, (0.1, -0.3)),
    sockets=Terms(1e-4, 0.0, (0.0,)),
    server=ServerTimes(1000, 4, request=5e-5, pull=1.5e-3, push=2e-3, lease=6e-5),
    codecs=(
        CodecTimes(codec="topk:0.01", n=1000, nbytes=80, encode_s=0.051, decode_s=9e-4),
        CodecTimes(codec="threshold:1e-30", n=1000, nbytes=4000, encode_s=0.0452, decode_s=0.02541),
    ),
    predictions=(
        Prediction(strategy="allreduce", real_s=0.060, slowest_s=0.063, simulated_s=0.063),
        Prediction(strategy="local-sgd:period=8", real_s=0.050, slowest_s=0.051, simulated_s=0.045),
    ),
    seconds=41.0,
)


def test_the_measurements_their_errors_and_how_to_use_the_profile() -> None:
    printed = text(FOUND, "chars:batch_size=32", Path("my profile.json"))
    lines = printed.splitlines()
    for line, words in zip(
        lines,
        (
            r"chars on 2 workers .* 1 thread each, 2 cores \(41 s\)",
            r"3.5 ms a row \+ 2 ms, jitter 4.0%; .* \+2% at 8 rows, -1% at 16 rows",
            "4 µs latency, 80 Gbit/s; .* 30%",
            "100 µs latency, bytes cost nothing",
            r"50 µs a request, 1.5 ms a pull, 2 ms a push \(4,000 bytes\), 60 µs a lease",
            "20 µs more a request, 90 µs a lease",
        ),
        strict=False,
    ):
        assert re.search(words, line), (words, line)
    rows = [line.split() for line in lines if line.startswith(("topk", "threshold", "allreduce", "local-sgd"))]
    assert rows == [
        ["topk:0.01", "80", "51", "0.9"],
        ["threshold:1e-30", "4,000", "45.2", "25.4"],
        ["allreduce", "60.00", "63.00", "63.00", "+5.0%"],
        ["local-sgd:period=8", "50.00", "51.00", "45.00", "-10.0%"],
    ]
    assert "manyhands train chars:batch_size=32 -n 32 -s diloco --engine sim --profile 'my profile.json'" in printed
    assert "idle" not in printed
    for simulated, slowest in ((0.050, 0.063), (0.061, 0.090)):  # a large error, and a machine that changed its speed
        one = Prediction(strategy="allreduce", real_s=0.060, slowest_s=slowest, simulated_s=simulated)
        assert "when it is idle" in text(replace(FOUND, predictions=(one,)), "chars", Path("p.json"))
    printed = text(replace(FOUND, predictions=(), codecs=()), "chars", Path("p.json"))
    assert "No strategy was compared." in printed
    for words in ("simulated ms", "ms to encode", "\n\n\n"):
        assert words not in printed


def test_the_command_writes_a_profile_that_sim_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}
    monkeypatch.setattr(
        "manyhands.evidence.calibrate.calibrate.calibrated", lambda task, **options: asked.update(options) or FOUND
    )
    path = tmp_path / "here.json"
    words = ["calibrate", "chars", "--quick", "--steps", "20", "--batch-size", "8", "--strategies", "allreduce,agn"]
    done = CliRunner().invoke(commands.app, [*words, "--output", str(path)])
    assert done.exit_code == 0, done.output
    assert f"--profile {path}" in done.stdout
    assert (asked["strategies"], asked["quick"], asked["steps"]) == (["allreduce", "agn"], True, 20)
    assert asked["batch_size"] == 8
    network, compute, _ = Sim(profile=path).parts
    assert (network, compute) == (FOUND.profile.network, FOUND.profile.compute)
    done = CliRunner().invoke(commands.app, [*words, "--output", str(tmp_path / "nowhere" / "p.json")])
    assert done.exit_code == 2
    assert "a folder that does not exist" in done.output


@pytest.mark.slow
def test_all_is_measured_and_an_estimate_lies_within_the_bars(local: Local, tmp_path: Path) -> None:
    given = task(name="tiny", train_data=rows(120), validation_data=rows(120))
    lines: list[str] = []
    torch.manual_seed(3)
    before = torch.get_rng_state()
    names = ("allreduce", "local-sgd:period=4", "downpour")
    found = calibrated(given, strategies=names, steps=16, quick=True, engine=local, say=lines.append)
    assert torch.equal(torch.get_rng_state(), before)
    assert len(lines) == 4 + len(names)
    profile = found.profile
    assert (profile.task, profile.workers, profile.batch_sizes) == ("tiny", 2, (3, 6, 9))
    assert profile.network.workers_per_host == 2
    assert profile.compute.row + profile.compute.step > 0
    assert min(profile.network.latency, profile.network.local_latency) > 0
    assert min(profile.compute.lease, profile.compute.request) >= 0  # beside computing, noise of a tick may hide them
    assert [one.codec for one in found.codecs] == list(SETTINGS)
    assert profile.compute.codecs.keys() == CODECS.keys()
    assert [one.strategy for one in found.predictions] == list(names) == list(profile.errors)
    for one in found.predictions:
        assert 0 < one.real_s <= one.slowest_s
        assert profile.errors[one.strategy] == round(one.worst, 4)
    profile.save(tmp_path / "here.json")
    estimates = estimate(given, profile=tmp_path / "here.json", workers=[2], strategies=names)
    for predicted, one in zip(found.predictions, estimates.estimates, strict=True):
        assert (one.strategy, one.bars.tried) == (predicted.strategy, True)
        assert one.step.low <= one.step.seconds <= one.step.high
    assert "2 workers, 12 rows a step" in estimates_text(estimates)
    with pytest.raises(mh.BadInput, match=r"local-sgd:period=50 .* too rarely .*--steps"):
        calibrated(given, strategies=["local-sgd:period=50"], steps=16, quick=True, engine=local, batch_size=4)
