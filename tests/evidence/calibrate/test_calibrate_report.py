"""The text that the command prints."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from manyhands.engines.sim.compute import Compute
from manyhands.engines.sim.network import SimNetworkSpec
from manyhands.engines.sim.profile import Profile
from manyhands.evidence.calibrate.calibrate import Calibration, Prediction
from manyhands.evidence.calibrate.coding import CodecTimes
from manyhands.evidence.calibrate.fit import ComputeFit, Terms
from manyhands.evidence.calibrate.measure import ServerTimes
from manyhands.evidence.calibrate.report import text

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


def test_the_run_that_is_furthest_off_is_the_error_that_a_profile_keeps() -> None:
    """The slower of several runs is one that a user may see."""
    worst = {sim: Prediction(strategy="s", real_s=1.0, slowest_s=1.5, simulated_s=sim).worst for sim in (0.9, 1.2, 1.4)}
    assert worst == pytest.approx({0.9: 0.9 / 1.5 - 1, 1.2: 1.2 / 1.5 - 1, 1.4: 0.4})
