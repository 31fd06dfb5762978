"""Rules of advice: each at its threshold, and which speaks first."""

import pytest

from manyhands.advise import Measured, advise


def measured(
    *,
    input: float = 0.0,
    compute: float = 0.0,
    exchange: float = 0.0,
    wait: float = 0.0,
    steps: int = 10,
    workers: int = 2,
    **more: object,
) -> Measured:
    return Measured(
        workers=workers,
        steps=steps,
        input_s=input,
        compute_s=compute,
        exchange_s=exchange,
        wait_s=wait,
        **{"cores": 2, **more},
    )  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("run", "kind", "says"),
    [
        (measured(steps=0), "unmeasured", "no step was made"),
        (measured(input=20.0, compute=80.0), "input-bound", "20 % of the time waits for rows"),
        (measured(input=19.9, compute=80.1), "fine", "compute 80 % of the time (8,010 ms a step)"),
        (measured(compute=0.099, exchange=0.01), "too-short", "computes 9.9 ms"),
        (measured(compute=0.1, exchange=0.01), "fine", "10 ms a step"),
        (measured(compute=0.85, wait=0.15), "stragglers", "15 % of the time workers wait"),
        (measured(compute=0.86, wait=0.14), "fine", "86 %"),
        (measured(compute=0.75, exchange=0.25), "exchange-bound", "--strategy local-sgd:period=8 (about 1.3x as fast)"),
        (measured(compute=0.76, exchange=0.24), "fine", "76 %"),
        (
            measured(compute=0.6, exchange=0.4, strategy="local-sgd:period=4"),
            "exchange-bound",
            "Raise the period of local-sgd",
        ),
        (measured(compute=0.6, exchange=0.4, server=True), "exchange-bound", "Push and pull every 8 steps (push_every"),
        (measured(compute=0.85, wait=0.15, server=True), "stragglers", "raise bound."),
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
def test_each_rule_at_its_threshold(run: Measured, kind: str, says: str) -> None:
    advice = advise(run)
    assert advice.kind == kind
    assert says in advice.text
    assert "\n" not in advice.text


def test_the_first_cause_speaks() -> None:
    """Input starves workers whatever else; a short step makes exchange and waiting large; waiting is not exchange."""
    everything = {"input": 0.03, "compute": 0.05, "exchange": 0.04, "wait": 0.03}
    assert advise(measured(**everything)).kind == "input-bound"
    assert advise(measured(**everything | {"input": 0.0})).kind == "too-short"
    assert advise(measured(**everything | {"input": 0.0}, steps=1)).kind == "stragglers"
    assert advise(measured(**everything | {"input": 0.0, "wait": 0.0}, steps=1)).kind == "exchange-bound"
    assert advise(measured(**everything, workers=1)).kind == "input-bound"


def test_the_straggler_is_named_with_what_makes_it_one() -> None:
    advice = advise(
        measured(compute=0.5, wait=0.5, compute_of_workers_s=[0.8, 1.0, 1.5], threads_per_worker=1, workers=3, cores=3)
    )
    assert "Worker 2 computes 36 % longer" in advice.text
    assert advice.numbers["slowest"] == 2
    assert "jitter" in advise(measured(compute=0.5, wait=0.5, compute_of_workers_s=[1.0, 1.05])).text
    assert "4 threads share 2 cores" in advise(measured(compute=0.5, wait=0.5, workers=4)).text


def test_all_time_in_one_part_divides_by_nothing() -> None:
    assert "100 %" in advise(measured(input=1.0)).text
    assert "100 %" in advise(measured(compute=1.0)).text
