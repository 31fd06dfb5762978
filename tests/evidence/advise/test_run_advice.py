"""Advice about one run: each rule at its threshold, which speaks first, that no two contradict each other; and of real runs."""

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from measured_runs import measured, reads_well

import manyhands as mh
from manyhands.evidence.advise import Machine, RunMeasurements, advise, all_advice
from manyhands.recording.run import Run
from manyhands.server.staleness import limit


def kinds(run: RunMeasurements) -> list[str]:
    return [advice.kind for advice in all_advice(run)]


def test_each_rule_at_its_threshold() -> None:
    waits: dict[str, Any] = {"compute": 0.85, "wait": 0.15}
    alone: dict[str, Any] = {"compute": 0.1, "workers": 1}
    for facts, kind, says in (
        ({"steps": 0}, "unmeasured", ""),
        ({"input": 20.0, "compute": 80.0}, "input-bound", r"20 % .*\(2,000 ms a step\).* 1.2x"),
        ({"input": 19.9, "compute": 80.1}, "fine", r"80 % .*\(8,010 ms a step\)"),
        ({"compute": 0.099, "exchange": 0.01}, "too-short", "9.9 ms"),
        ({"compute": 0.1, "exchange": 0.01}, "fine", "10 ms"),
        ({"compute": 0.099, "simulated": True}, "fine", "9.9 ms"),
        ({"compute": 0.099, "strategy": "ensemble"}, "fine", "9.9 ms"),
        (waits, "stragglers", r"15 % .*\(local-sgd\)"),
        ({"compute": 0.86, "wait": 0.14}, "fine", "86 %"),
        (waits | {"strategy": "downpour:bound=3"}, "stragglers", "raise bound"),
        *((waits | {"strategy": name}, "stragglers", "where all meet") for name in ("downpour", "ensemble")),
        (waits | {"strategy": "local-sgd:period=end"}, "stragglers", "where all meet"),
        (waits | {"strategy": "quorum", "server": True}, "stragglers", "raise backups"),
        (waits | {"strategy": "easgd:via=group"}, "stragglers", "raise period"),
        (waits | {"strategy": "local-sgd:period=4"}, "stragglers", "raise period"),
        ({"compute": 0.75, "exchange": 0.25, "steps": 100}, "too-short", "7.5 ms"),
        ({"compute": 0.75, "exchange": 0.25}, "exchange-bound", "local-sgd:period=3,"),
        ({"compute": 0.76, "exchange": 0.24}, "fine", "76 %"),
        (alone | {"compute": 0.09}, "solo", "one process is right.* 9 ms"),
        (alone | {"threads_per_worker": 1}, "solo", "--workers 2: .* 10 ms, and 1 of 2 cores"),
        (alone | {"threads_per_worker": 2}, "solo", "all 2 cores"),
        (alone | {"cores": 1}, "solo", "one core"),
        (alone | {"device": "cuda:0"}, "solo", "another GPU"),
    ):
        advice = advise(measured(**facts))
        assert advice.kind == kind, facts
        assert re.search(says, advice.text), (says, advice.text)


def test_what_wins_most_speaks_first_and_a_line_wins_the_share_that_goes() -> None:
    """Whatever starves the workers longest; a short step makes exchange and waiting large, and waiting is not exchange."""
    everything = {"input": 0.04, "compute": 0.05, "exchange": 0.06, "wait": 0.03}
    assert kinds(measured(**everything)) == ["input-bound", "too-short"]
    assert kinds(measured(**everything | {"input": 0.0})) == ["too-short"]
    long: dict[str, Any] = {part: 10 * seconds for part, seconds in everything.items()}
    assert kinds(measured(**long)) == ["exchange-bound", "input-bound", "stragglers"]
    assert kinds(measured(**long | {"wait": 0.8})) == ["stragglers", "exchange-bound"]
    assert kinds(measured(**long | {"exchange": 0.0, "wait": 0.0})) == ["input-bound"]
    assert advise(measured(**everything, workers=1)).kind == "input-bound"
    found = {one.kind: one for one in all_advice(measured(input=3.0, compute=5.0, exchange=4.0, wait=3.0))}
    assert set(found) == {"input-bound", "stragglers", "exchange-bound"}
    assert found["input-bound"].wins == pytest.approx(3 / 15)
    assert found["input-bound"].numbers["speedup"] == pytest.approx(15 / 12)
    assert found["stragglers"].wins == pytest.approx(3 / 15)
    # 9 · 4 / 11 = 3.3: period 4, and 1 of 4 seconds of exchange is left
    assert found["exchange-bound"].wins == pytest.approx(3 / 15)
    short = measured(input=0.03, compute=0.05, exchange=0.04, wait=0.03)
    assert all_advice(short)[1].wins == pytest.approx(0.02 / 0.15)  # both take 2 · 0.05 + 0.03 one after the other
    assert advise(measured(compute=0.09, exchange=0.01)).wins == 0.0


def test_the_straggler_is_named_with_what_makes_it_one() -> None:
    uneven: dict[str, Any] = {"compute": 0.5, "wait": 0.5, "workers": 3, "cores": 3}
    advice = advise(measured(**uneven, compute_of_workers_s=[0.8, 1.0, 1.5]))
    assert "Worker 2 computes 36 % longer" in advice.text
    assert advice.numbers["slowest"] == 2
    assert "jitter" in advise(measured(compute=0.5, wait=0.5, compute_of_workers_s=[1.0, 1.2])).text
    assert "Worker 1" in advise(measured(compute=0.5, wait=0.5, compute_of_workers_s=[1.0, 1.23])).text


def test_input_is_sped_up_by_what_is_not_there_already() -> None:
    """Data in memory starts no loader processes, and arrays are arrays."""
    for loads, says, not_said in (
        ({}, "with --loader-processes 2, or .* arrays", "instead"),
        ({"loader_processes": 2}, "with --loader-processes 4 instead of 2", "beside"),
        ({"loader_processes": 3, "loader_option": "num_workers"}, "with num_workers 6 instead of 3", "--loader"),
        ({"loader_processes": 1, "loader_option": ""}, "as arrays:", "--loader"),
        ({"loader_option": ""}, "leave out those that are not used", "loader"),
        ({"loader_option": "", "strategy": "downpour"}, "raise --batch-size", "loader"),
    ):
        advice = advise(measured(input=20.0, compute=80.0, **loads))
        assert advice.kind == "input-bound"
        assert re.search(says, advice.text), (loads, advice.text)
        assert not_said not in advice.text, loads
        reads_well(advice.text)


def test_options_are_proposed_where_there_are_such_options() -> None:
    late = {"compute": 1.0, "staleness": {3: 99}, "server": True, "rate": 0.1, "push_gain": 2 * limit(3)}
    for strategy, has in (("downpour", True), ("diloco:via=server", True), ("quorum", False), ("mine.py:Own", False)):
        assert ("bound=0" in advise(measured(**late, strategy=strategy)).text) == has, strategy
    unused = {"compute": 1.0, "unused": 0.11}
    dropped = advise(measured(**unused, strategy="quorum"))
    assert re.search("11 % .* fewer backups", dropped.text)
    assert dropped.wins == 0.11
    assert re.search("not finite. Lower the rate.* clip with --clip-norm 1", advise(measured(**unused)).text)
    assert "clip to less" in advise(measured(**unused, clipped=True)).text
    assert kinds(measured(compute=1.0, unused=0.1)) == ["fine"]


def test_more_threads_than_cores_are_said_instead_of_stragglers() -> None:
    for workers, threads, says in (
        (4, 1, "4 threads share 2 cores.* --workers 2"),
        (2, 2, "use --workers 1 or --threads-per-worker 1"),
        (1, 4, "4 threads share 2 cores.* --threads-per-worker 2"),
    ):
        run: dict[str, Any] = {"compute": 0.5, "wait": 0.5, "workers": workers, "threads_per_worker": threads}
        found = all_advice(measured(**run, one_host=True))
        assert re.search(says, found[0].text), found[0].text
        assert found[0].wins == (0.5 if workers > 1 else 0.0)
        assert "stragglers" not in [one.kind for one in found]
        for silent in ({"cores": 4}, {"one_host": False}, {"device": "cuda:0"}):
            assert "threads" not in kinds(measured(**{**run, "one_host": True, **silent})), silent
    # hosts that joined from one machine share its cores
    run = {"compute": 0.5, "wait": 0.5, "workers": 3, "threads_per_worker": 2}
    crowded = Machine(host="alpha", workers=2, threads=4, cores=2)
    found = all_advice(measured(**run, machines=[crowded, Machine(host="beta", workers=1, threads=2, cores=2)]))
    assert [one.kind for one in found] == ["threads"]
    assert re.search("4 threads share 2 cores of alpha.* 1 worker there or --threads-per-worker 1", found[0].text)
    reads_well(found[0].text)
    apart = [Machine(host=host, workers=1, threads=2, cores=2) for host in ("alpha", "beta", "gamma")]
    assert kinds(measured(**run, machines=apart)) == ["stragglers"]
    assert kinds(measured(**run, machines=[crowded], device="cuda:0")) == ["stragglers"]


def test_staleness_speaks_near_its_limit_and_before_all_else_beyond_it() -> None:
    late = {"staleness": {0: 1, 3: 99}, "strategy": "downpour", "server": True, "rate": 0.1}
    run = {"input": 0.5, "compute": 0.5, **late}
    most = limit(3)  # 0.445
    assert kinds(measured(**run, push_gain=0.79 * most)) == ["input-bound"]
    assert kinds(measured(**run, push_gain=0.81 * most)) == ["input-bound", "near-limit"]
    assert kinds(measured(**run, push_gain=1.01 * most)) == ["unstable", "input-bound"]
    assert kinds(measured(**{**run, "staleness": {0: 99, 3: 1}}, push_gain=1.01 * most)) == ["input-bound"]
    advice = advise(measured(**run, push_gain=2 * most))
    assert advice.wins == 1.0  # the rate: 80 % of the limit
    assert re.search("3 versions late, .* 0.445; it is 0.89.*rate to 0.04, or set bound=0", advice.text)
    assert "by 60 %" in advise(measured(**{**run, "rate": 0.0}, push_gain=2 * most)).text
    late = {"staleness": {3: 99}, "strategy": "downpour", "server": True, "push_gain": limit(3)}
    found = all_advice(measured(compute=0.4, exchange=0.3, wait=0.3, **late))
    assert [one.kind for one in found] == ["stragglers", "near-limit"]
    assert "use fewer workers" in found[0].text  # late pushes are not made later


def test_few_rows_in_a_short_step() -> None:
    for rows, compute, says in (
        (1.0, 0.1, " 1 a worker"),
        (2.0, 0.1, " 2 a worker"),
        (3.9, 0.1, "3.9 a worker"),
        *((4.0, 0.1, ""), (0.0, 0.1, ""), (1.0, 0.2, "")),
    ):
        found = {one.kind: one for one in all_advice(measured(compute=compute, rows_per_step=rows, workers=3))}
        assert ("few-rows" in found) == bool(says), (rows, compute)
        if says:
            assert says in found["few-rows"].text
            assert "--batch-size to 24" in found["few-rows"].text
            assert found["few-rows"].wins == 0  # what it costs this model is not known
        assert "few-rows" not in kinds(measured(compute=compute, rows_per_step=rows, workers=3, simulated=True))


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


SHARING = ("stragglers", "exchange-bound", "compress", "codec-costs", "server-costs", "few-rows", "fine")
APART = [
    *({"stragglers", "threads"}, {"compress", "codec-costs"}, {"unstable", "near-limit"}),
    *({"unstable", "exchange-bound"}, {"near-limit", "exchange-bound"}),
    *({one, other} for one in ("too-short", "solo") for other in SHARING),
]


@settings(max_examples=60, deadline=None, derandomize=True)
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


def test_the_page_has_every_kind_and_no_other() -> None:
    root = Path(__file__).parents[3]
    code = "".join(path.read_text() for path in (root / "src/manyhands/evidence/advise").glob("*.py"))
    spoken = {*re.findall(r'Advice\(\s*kind="([a-z-]+)"', code), *re.findall(r'_advice\(one, "([a-z-]+)"', code)}
    rows = [line.split("|")[1] for line in (root / "docs/advice.md").read_text().splitlines() if line.startswith("| `")]
    listed = {name for row in rows for name in re.findall(r"`([a-z-]+)`", row)}
    assert spoken == listed - {"bf16"}


CLUSTER = "sim:network='bandwidth={}Mbit',compute='row=1e-3'"  # 8 rows a worker and step: 8 ms


def simulated(strategy: str, engine: str, steps: int = 24) -> Run:
    """A run whose costs count as those of a machine that was measured."""
    run = mh.train("digits", strategy=strategy, engine=engine, workers=4, max_steps=steps)
    assert run.advice().kind == "assumed"
    run.info["simulated"]["profile"] = "measured.json"
    return run


@pytest.mark.slow
def test_the_predicted_speed_comes_true() -> None:
    run = simulated("allreduce", CLUSTER.format(600))
    advice = run.advice()
    assert advice.kind == "exchange-bound"
    strategy = re.search(r"--strategy (local-sgd:period=\S+)", advice.text)[1]
    rarer = simulated(strategy, CLUSTER.format(600))
    assert rarer.advice().kind == "fine"
    assert rarer.timing["exchange"] <= 0.1 * sum(rarer.timing.values())
    faster = sum(run.timing.values()) / sum(rarer.timing.values())
    assert faster == pytest.approx(advice.numbers["speedup"], rel=0.02)
    slow = simulated("allreduce", CLUSTER.format(10), steps=12).advice()  # wants a longer period, which an epoch ends
    assert slow.numbers["period"] == 41  # steps of an epoch of 1,297 rows
    assert "diloco:period=41" in slow.text


def test_rows_that_backups_drop_are_seen() -> None:
    run = simulated("quorum:backups=1", "sim:compute='row=1e-3,3=9x'", steps=8)
    advice = run.advice()
    assert advice.kind == "unused-rows"
    assert advice.wins == run.rows["unused"] / run.rows["total"]


def test_a_real_run_of_digits() -> None:
    for workers, steps, likely in (
        (1, 4, {"too-few-steps"}),
        (2, 12, {"too-short", "threads", "stragglers", "exchange-bound", "fine", "input-bound"}),
    ):
        run = mh.train("digits", workers=workers, max_steps=steps)
        advice = run.advice()
        assert advice.kind in likely
        reads_well(advice.text)
        assert run.summary().splitlines()[-1] == f"Advice: {advice.text}"
