"""Advice about one run: each rule at its threshold, which speaks first, and that no two in a list contradict each other."""

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from measured_runs import measured

from manyhands.evidence.advise import Machine, RunMeasurements, advise, all_advice
from manyhands.server.staleness import limit
from manyhands.strategies import strategy_of

LINE = 200 - len("Advice: ")  # two lines of a summary


def kinds(run: RunMeasurements) -> list[str]:
    return [advice.kind for advice in all_advice(run)]


@pytest.mark.parametrize(
    ("run", "kind", "says"),
    [
        (measured(steps=0), "unmeasured", "no step was made"),
        (
            measured(input=20.0, compute=80.0),
            "input-bound",
            "20 % of the time waits for rows (2,000 ms a step)",
        ),
        (measured(input=20.0, compute=80.0), "input-bound", "up to 1.2x as fast"),
        (measured(input=19.9, compute=80.1), "fine", "compute 80 % of the time (8,010 ms a step)"),
        (measured(compute=0.099, exchange=0.01), "too-short", "computes 9.9 ms"),
        (measured(compute=0.1, exchange=0.01), "fine", "10 ms a step"),
        (measured(compute=0.099, simulated=True), "fine", "9.9 ms a step"),
        (measured(compute=0.099, strategy="ensemble"), "fine", "9.9 ms a step"),
        (measured(compute=0.85, wait=0.15), "stragglers", "15 % of the time workers wait"),
        (measured(compute=0.86, wait=0.14), "fine", "86 %"),
        (measured(compute=0.85, wait=0.15, strategy="downpour:bound=3"), "stragglers", "raise bound."),
        (measured(compute=0.85, wait=0.15, strategy="downpour"), "stragglers", "less often, where all meet."),
        (measured(compute=0.85, wait=0.15, strategy="hogwild"), "stragglers", "less often, where all meet."),
        (measured(compute=0.85, wait=0.15, strategy="ensemble"), "stragglers", "less often, where all meet."),
        (measured(compute=0.85, wait=0.15, strategy="local-sgd:period=end"), "stragglers", "where all meet."),
        (measured(compute=0.85, wait=0.15, strategy="quorum", server=True), "stragglers", "raise backups."),
        (measured(compute=0.85, wait=0.15, strategy="easgd:via=group"), "stragglers", "raise period."),
        (measured(compute=0.85, wait=0.15, strategy="local-sgd:period=4"), "stragglers", "raise period."),
        (measured(compute=0.85, wait=0.15), "stragglers", "average less often (local-sgd)."),
        (measured(compute=0.75, exchange=0.25, steps=100), "too-short", "7.5 ms"),
        (measured(compute=0.75, exchange=0.25), "exchange-bound", "local-sgd:period=3,"),
        (measured(compute=0.76, exchange=0.24), "fine", "76 %"),
        (measured(compute=0.09, workers=1), "solo", "one process is right: a step computes 9 ms"),
        (
            measured(compute=0.1, workers=1, threads_per_worker=1),
            "solo",
            "try --workers 2: a step computes 10 ms, and 1 of 2 cores is idle",
        ),
        (measured(compute=0.1, workers=1, threads_per_worker=2), "solo", "already has all 2 cores"),
        (measured(compute=0.1, workers=1, cores=1), "solo", "there is one core"),
        (measured(compute=0.1, workers=1, device="cuda:0"), "solo", "another GPU"),
    ],
)
def test_each_rule_at_its_threshold(run: RunMeasurements, kind: str, says: str) -> None:
    advice = advise(run)
    assert advice.kind == kind
    assert says in advice.text
    assert "\n" not in advice.text


def test_what_wins_most_speaks_first() -> None:
    """Whatever starves the workers longest; a short step makes exchange and waiting large, and waiting is not exchange."""
    everything = {"input": 0.04, "compute": 0.05, "exchange": 0.06, "wait": 0.03}
    assert kinds(measured(**everything)) == ["input-bound", "too-short"]
    assert kinds(measured(**everything | {"input": 0.0})) == ["too-short"]
    long: dict[str, Any] = {part: 10 * seconds for part, seconds in everything.items()}
    assert kinds(measured(**long)) == ["exchange-bound", "input-bound", "stragglers"]
    assert kinds(measured(**long | {"wait": 0.8})) == ["stragglers", "exchange-bound"]
    assert kinds(measured(**long | {"exchange": 0.0, "wait": 0.0})) == ["input-bound"]
    assert advise(measured(**everything, workers=1)).kind == "input-bound"


def test_what_a_line_wins_is_the_share_that_goes() -> None:
    found = {one.kind: one for one in all_advice(measured(input=3.0, compute=5.0, exchange=4.0, wait=3.0))}
    assert set(found) == {"input-bound", "stragglers", "exchange-bound"}
    assert found["input-bound"].wins == pytest.approx(3 / 15)
    assert found["input-bound"].numbers["speedup"] == pytest.approx(15 / 12)
    assert found["stragglers"].wins == pytest.approx(3 / 15)
    # 9 · 4 / 11 = 3.3: period 4, and 1 of 4 seconds of exchange is left
    assert found["exchange-bound"].wins == pytest.approx(3 / 15)
    # both shares one after the other take 2 · 0.05 + 0.03 of 0.15 seconds
    assert all_advice(measured(input=0.03, compute=0.05, exchange=0.04, wait=0.03))[1].wins == pytest.approx(
        0.02 / 0.15
    )
    assert advise(measured(compute=0.09, exchange=0.01)).wins == 0.0


def test_the_straggler_is_named_with_what_makes_it_one() -> None:
    uneven: dict[str, Any] = {"compute": 0.5, "wait": 0.5, "workers": 3, "cores": 3}
    advice = advise(measured(**uneven, compute_of_workers_s=[0.8, 1.0, 1.5]))
    assert "Worker 2 computes 36 % longer" in advice.text
    assert advice.numbers["slowest"] == 2
    assert "jitter" in advise(measured(compute=0.5, wait=0.5, compute_of_workers_s=[1.0, 1.2])).text
    assert "Worker 1" in advise(measured(compute=0.5, wait=0.5, compute_of_workers_s=[1.0, 1.23])).text


@pytest.mark.parametrize(
    ("loads", "says", "not_said"),
    [
        ({}, "with --loader-processes 2, or prepare them once as arrays:", "instead"),
        ({"loader_processes": 2}, "with --loader-processes 4 instead of 2, or prepare", "beside"),
        ({"loader_processes": 3, "loader_option": "num_workers"}, "with num_workers 6 instead of 3", "--loader"),
        ({"loader_processes": 1, "loader_option": ""}, "prepare them once as arrays:", "--loader"),
        ({"loader_option": ""}, "columns already: leave out those that are not used", "loader"),
        ({"loader_option": "", "strategy": "downpour"}, "leased slice by slice: raise --batch-size", "loader"),
    ],
)
def test_input_is_sped_up_by_what_is_not_there_already(loads: dict[str, Any], says: str, not_said: str) -> None:
    """Data in memory starts no loader processes, and arrays are arrays."""
    advice = advise(measured(input=20.0, compute=80.0, **loads))
    assert advice.kind == "input-bound"
    assert says in advice.text
    assert not_said not in advice.text
    reads_well(advice.text)


def test_a_bound_is_proposed_where_the_strategy_has_one() -> None:
    late = {"compute": 1.0, "staleness": {3: 99}, "server": True, "rate": 0.1, "push_gain": 2 * limit(3)}
    for strategy, has in (("downpour", True), ("diloco:via=server", True), ("quorum", False), ("mine.py:Own", False)):
        assert ("bound=0" in advise(measured(**late, strategy=strategy)).text) == has


def test_clipping_is_proposed_where_nothing_is_clipped() -> None:
    skipped = {"compute": 1.0, "unused": 0.11}
    assert "clip with --clip-norm 1" in advise(measured(**skipped)).text
    assert "clip to less" in advise(measured(**skipped, clipped=True)).text


def test_hosts_that_joined_from_one_machine_share_its_cores() -> None:
    """Each has a thread for every core: what looks like jitter, or a slow host, is that they wait for each other."""
    run: dict[str, Any] = {"compute": 0.5, "wait": 0.5, "workers": 3, "threads_per_worker": 2}
    crowded = Machine(host="alpha", workers=2, threads=4, cores=2)
    found = all_advice(measured(**run, machines=[crowded, Machine(host="beta", workers=1, threads=2, cores=2)]))
    assert [one.kind for one in found] == ["threads"]
    assert "4 threads share 2 cores of alpha" in found[0].text
    assert "use at most 1 worker there or --threads-per-worker 1." in found[0].text
    reads_well(found[0].text)
    apart = [Machine(host=host, workers=1, threads=2, cores=2) for host in ("alpha", "beta", "gamma")]
    assert kinds(measured(**run, machines=apart)) == ["stragglers"]
    assert kinds(measured(**run, machines=[crowded], device="cuda:0")) == ["stragglers"]


@pytest.mark.parametrize(
    ("workers", "threads", "says"),
    [
        (4, 1, "4 threads share 2 cores, so that some wait while others compute: use --workers 2."),
        (2, 2, "use --workers 1 or --threads-per-worker 1."),
        (1, 4, "4 threads share 2 cores, so that some wait while others compute: use --threads-per-worker 2."),
    ],
)
def test_more_threads_than_cores_are_said_instead_of_stragglers(workers: int, threads: int, says: str) -> None:
    run: dict[str, Any] = {"compute": 0.5, "wait": 0.5, "workers": workers, "threads_per_worker": threads}
    found = all_advice(measured(**run, one_host=True))
    assert says in found[0].text
    assert found[0].wins == (0.5 if workers > 1 else 0.0)
    assert "stragglers" not in [one.kind for one in found]
    for silent in ({"cores": 4}, {"one_host": False}, {"device": "cuda:0"}):
        assert "threads" not in kinds(measured(**{**run, "one_host": True, **silent}))


def test_staleness_speaks_near_its_limit_and_before_all_else_beyond_it() -> None:
    late = {"staleness": {0: 1, 3: 99}, "strategy": "downpour", "server": True, "rate": 0.1}
    run = {"input": 0.5, "compute": 0.5, **late}
    most = limit(3)  # 0.445
    assert kinds(measured(**run, push_gain=0.79 * most)) == ["input-bound"]
    assert kinds(measured(**run, push_gain=0.81 * most)) == ["input-bound", "near-limit"]
    assert kinds(measured(**run, push_gain=1.01 * most)) == ["unstable", "input-bound"]
    assert kinds(measured(**{**run, "staleness": {0: 99, 3: 1}}, push_gain=1.01 * most)) == ["input-bound"]
    advice = advise(measured(**run, push_gain=2 * most))
    assert advice.wins == 1.0
    assert "up to 3 versions late, which bears rate x curvature up to 0.445; it is 0.89." in advice.text
    assert "Lower the rate to 0.04, or set bound=0." in advice.text  # 80 % of the limit
    assert "Lower the rate by 60 %" in advise(measured(**{**run, "rate": 0.0}, push_gain=2 * most)).text


def test_late_pushes_are_not_made_later() -> None:
    late = {"staleness": {3: 99}, "strategy": "downpour", "server": True, "push_gain": limit(3)}
    found = all_advice(measured(compute=0.4, exchange=0.3, wait=0.3, **late))
    assert [one.kind for one in found] == ["stragglers", "near-limit"]
    assert "jitter: use fewer workers." in found[0].text


@pytest.mark.parametrize(
    ("rows", "compute", "says"),
    [
        (1.0, 0.1, "1 a worker"),
        (2.0, 0.1, "2 a worker"),
        (3.9, 0.1, "3.9 a worker"),
        (4.0, 0.1, ""),
        (0.0, 0.1, ""),
        (1.0, 0.2, ""),
    ],
)
def test_few_rows_in_a_short_step(rows: float, compute: float, says: str) -> None:
    found = {one.kind: one for one in all_advice(measured(compute=compute, rows_per_step=rows, workers=3))}
    assert ("few-rows" in found) == bool(says)
    if says:
        assert says in found["few-rows"].text
        assert "Raise --batch-size to 24" in found["few-rows"].text
        assert found["few-rows"].wins == 0  # what it costs this model is not known
    assert "few-rows" not in kinds(measured(compute=compute, rows_per_step=rows, workers=3, simulated=True))


def test_rows_without_effect() -> None:
    assert kinds(measured(compute=1.0, unused=0.1)) == ["fine"]
    dropped, skipped = (advise(measured(compute=1.0, unused=0.11, strategy=name)) for name in ("quorum", "allreduce"))
    assert "11 % of all were computed and came too late. Use fewer backups" in dropped.text
    assert "not finite. Lower the rate" in skipped.text
    assert dropped.wins == 0.11


def test_all_time_in_one_part_divides_by_nothing() -> None:
    assert "100 %" in advise(measured(input=1.0)).text
    assert "100 %" in advise(measured(compute=1.0)).text
    for part in ("exchange", "wait"):
        assert all_advice(measured(**{part: 1.0}, simulated=True))


SECONDS = st.sampled_from([0.0, 0.001, 0.05, 0.3, 1.0, 7.0, 90.0])
SPECS = (
    *("solo", "allreduce", "local-sgd:period=8", "diloco:period=50", "gossip", "downpour", "agn", "easgd", "quorum"),
    *("allreduce:compress=topk:0.01", "allreduce:overlap=true", "diloco:streaming=4", "mine.py:Own", "ensemble"),
    *("agn:window=8,compress=bf16", "diloco:via=server,compress=int8"),
)


@st.composite
def runs(draw: st.DrawFn) -> RunMeasurements:
    strategy = draw(st.sampled_from(SPECS))
    served = strategy.partition(":")[0] in ("downpour", "agn", "easgd") or "via=server" in strategy
    workers = 1 if strategy == "solo" else draw(st.sampled_from([1, 2, 4, 64]))
    steps = draw(st.sampled_from([0, 1, 10, 700, 100_000]))
    return measured(
        **{part: draw(SECONDS) for part in ("input", "compute", "exchange", "wait")},
        steps=steps,
        workers=workers,
        strategy=strategy,
        server=served,
        period=draw(st.sampled_from([1.0, 4.0, 7.8, 500.0])),
        threads_per_worker=draw(st.sampled_from([1, 2, 8])),
        simulated=draw(st.booleans()),
        assumed=draw(st.booleans()),
        one_host=draw(st.booleans()),
        compute_of_workers_s=[1.0] * (workers - 1) + [draw(st.sampled_from([1.0, 3.0]))],
        sent_bytes=draw(st.sampled_from([0.0, 1e6, 1e12])),
        parameters=draw(st.sampled_from([0, 1000, 10**7])),
        rows_per_step=draw(st.sampled_from([0.0, 1.0, 3.0, 32.0])),
        epoch_steps=draw(st.sampled_from([None, 1, 40])),
        unused=draw(st.sampled_from([0.0, 0.5])),
        rate=draw(st.sampled_from([0.0, 0.1])),
        staleness=draw(st.sampled_from([{}, {0: 5}, {3: 9}])) if served else {},
        push_gain=draw(st.sampled_from([None, 0.4, 3.0])) if served else None,
    )


SHARING = {
    *("stragglers", "exchange-bound", "compress", "codec-costs", "server-costs", "few-rows", "fine"),
}
APART = [
    {"stragglers", "threads"},
    {"compress", "codec-costs"},
    {"unstable", "exchange-bound"},
    {"near-limit", "exchange-bound"},
    {"unstable", "near-limit"},
    *({"too-short", other} for other in SHARING),
    *({"solo", other} for other in SHARING),
]


@settings(max_examples=400, deadline=None, derandomize=True)
@given(runs())
def test_no_line_contradicts_another_and_all_read_well(run: RunMeasurements) -> None:
    found = all_advice(run)
    output = [one.kind for one in found]
    assert len(output) == len(set(output)) >= 1
    assert not ({"unmeasured", "fine"} & set(output)) or len(output) == 1
    for pair in APART:
        assert not pair <= set(output)
    assert [one.wins for one in found] == sorted((one.wins for one in found), reverse=True)
    whole = " ".join(one.text for one in found)
    assert not ("set bound=0" in whole and "raise bound" in whole)
    assert len({*re.findall(r"--workers \d+", whole)}) <= 1
    for one in found:
        assert 0 <= one.wins <= 1
        if "speedup" in one.numbers:
            assert one.wins == pytest.approx(max(0.0, 1 - 1 / one.numbers["speedup"]))
        reads_well(one.text)


def reads_well(text: str, length: int = LINE) -> None:
    """One line, that a terminal wraps once at most, without words that only the code knows; a strategy that it names exists."""
    assert len(text) <= length, text
    assert "\n" not in text
    assert text.endswith(".")
    assert not re.search(r"Amdahl|_s\b|_per_|None|nan|inf\b|  |\d{7}", text), text
    for spec in re.findall(r"--strategy (\S+)", text):
        if ".py" not in spec:
            strategy_of(spec.rstrip(".;,"))


def test_the_page_has_every_kind_and_no_other() -> None:
    root = Path(__file__).parents[3]
    code = "".join(path.read_text() for path in (root / "src/manyhands/evidence/advise").glob("*.py"))
    spoken = {*re.findall(r'Advice\(\s*kind="([a-z-]+)"', code), *re.findall(r'_advice\(one, "([a-z-]+)"', code)}
    rows = [line.split("|")[1] for line in (root / "docs/advice.md").read_text().splitlines() if line.startswith("| `")]
    listed = {name for row in rows for name in re.findall(r"`([a-z-]+)`", row)}
    assert spoken == listed - {"bf16"}
