"""The text that the command prints."""

from __future__ import annotations

import re
from dataclasses import replace

from manyhands.engines.sim.compute import Compute
from manyhands.engines.sim.network import SimNetworkSpec
from manyhands.engines.sim.profile import Profile
from manyhands.evidence.estimate.bars import Bars
from manyhands.evidence.estimate.estimate import Estimate, Estimates, Span
from manyhands.evidence.estimate.table import text

PROFILE = Profile(
    networks={"local": SimNetworkSpec(workers_per_host=2)},
    compute=Compute(row=1e-4),
    task="chars",
    workers=2,
    errors={"allreduce": 0.034, "local-sgd": -0.07},
)
ROW = Estimate(
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
    ROW, strategy="downpour", staleness=7.0, bars=replace(ROW.bars, tried=False), notes=("its warmup is left out",)
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
    estimates=(ROW, SERVED),
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
    cells = (
        "60 ms",
        "34,133",
        "6.4",
        "80 %",
        "1 h (50 min to 1.2 h)",
        "5.9 MB",
        "352.0 GB",
        "80 %",
        "15 %",
        "5 %",
        "-",
    )
    assert re.match("allreduce  .*" + ".*".join(map(re.escape, cells)), row)


def test_rows_without_their_own_bars_are_marked_and_the_rule_is_printed() -> None:
    printed = lines(FOUND)
    assert any(line.startswith("downpour* ") and line.endswith(" 7") for line in printed)
    rule = " ".join(printed[next(i for i, line in enumerate(printed) if line.startswith("low to high")) :])
    assert re.search(
        r"on 2 workers.*allreduce \+3.4%, local-sgd -7.0%.*at least 5%.*\* was not tried .*extrapolated", rule
    )
    assert "  downpour: its warmup is left out" in printed
    assert printed[-1] == "Something holds of all."
    assert "extrapolated" not in text(replace(FOUND, estimates=(ROW,)))
    bare = replace(ROW, bars=None, training=Span(seconds=90.0, low=None, high=None))
    shown = text(replace(FOUND, profile=replace(PROFILE, errors={}), estimates=(bare,)))
    assert "1.5 min" in shown
    assert "low to high" not in shown
    assert " to " not in shown.split("rows/s, speed-up")[0]


def test_it_fits_a_terminal_and_each_number_of_workers_has_a_table() -> None:
    """The tables are cut into several, whose rows all begin with the strategy; no number is lost."""
    for width in (60, 80, 120):
        printed = text(FOUND, width)
        assert max(map(len, printed.splitlines())) <= width
        assert set(text(FOUND).split()) - {"*"} <= set(printed.split()) | {"low", "to"}
    refused = [Estimate(strategy=name, workers=64, refused="some without a row") for name in ("allreduce", "downpour")]
    printed = lines(replace(FOUND, estimates=(ROW, SERVED, *refused)))
    heads = [line for line in printed if "worker" in line and line[0].isdigit()]
    assert heads == ["8 workers, 2,048 rows a step", "64 workers"]
    assert printed.count("  all: some without a row") == 1
    assert "  allreduce: some without a row" in lines(replace(FOUND, estimates=(ROW, SERVED, refused[0])))


def test_what_is_not_known_is_a_dash_and_times_are_in_the_unit_that_fits() -> None:
    stream = replace(ROW, steps=None, training=None, bytes_in_training=None)
    printed = lines(replace(FOUND, rows=None, estimates=(stream,)))
    assert "a stream" in printed[0]
    assert next(line for line in printed if line.startswith("allreduce")).split().count("-") == 3
    for seconds, shown in (
        *(
            (3e-10, "0.3 ns"),
            (2.5e-6, "2.5 µs"),
            (1.5e-3, "1.5 ms"),
            (59.0, "59 s"),
            (200.0, "3.33 min"),
            (7200.0, "2 h"),
        ),
        (1e6, "11.6 d"),
    ):
        one = replace(ROW, step=Span(seconds=seconds, low=None, high=None))
        assert f" {shown} " in text(replace(FOUND, estimates=(one,))), seconds
