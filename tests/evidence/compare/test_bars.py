"""The charts whose rows are variants."""

from dataclasses import replace
from typing import Any

import pytest
from synthetic import changed, comparison

from manyhands.evidence.compare import bars, drawing
from manyhands.evidence.compare.comparison import Comparison


def drawn(draw: Any, made: Comparison) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    found = draw(made).to_plotly_json()
    return found["data"], found["layout"]


def times(**parts: float) -> dict[str, float]:
    return {"input": 0.0, "compute": 0.0, "exchange": 0.0, "wait": 0.0} | parts


def labels(layout: dict[str, Any]) -> list[tuple[str, str]]:
    """[(name, what is said of it)]"""
    output = [one["text"] for one in layout["annotations"]]
    return list(zip(output[::2], output[1::2], strict=True))


def test_times_are_shares_of_each_worker_stacked_from_compute_to_wait() -> None:
    both = times(compute=3.0, wait=1.0), times(compute=1.0, exchange=2.0, input=1.0)
    made = changed(comparison(("allreduce",), (2,)), "allreduce on 2", timing=both)
    traces, layout = drawn(bars.time_split, made)
    assert [trace["name"] for trace in traces] == ["compute", "input", "exchange", "wait"]
    of_two = {trace["name"]: list(trace["x"])[-2:] for trace in traces}
    assert of_two == {"compute": [0.75, 0.25], "input": [0, 0.25], "exchange": [0, 0.5], "wait": [0.25, 0]}
    assert layout["barmode"] == "stack"
    assert labels(layout)[-1] == ("allreduce on 2", "4.00 s, 50 % compute")
    assert list(layout["yaxis"]["ticktext"]) == ["0", "0", "0", "1"]
    assert len(set(layout["yaxis"]["tickvals"])) == 4
    assert "worker 1<br>exchange 2.00 s, 50 %" in traces[2]["hovertext"][-1]


def test_of_many_workers_those_from_the_least_to_the_most_compute_are_drawn() -> None:
    workers = [times(compute=float((7 * rank) % 64), wait=1.0) for rank in range(64)]
    ranks = bars.picked(workers, 3)
    computed = [workers[rank]["compute"] for rank in ranks]
    assert len(ranks) == bars.MOST_WORKERS == 8
    assert computed == sorted(computed)
    assert (computed[0], computed[-1]) == (0, 63)
    assert bars.picked(workers[:8], 3) == list(range(8))
    assert [bars.room(variants) for variants in (0, 1, 6, 12, 48)] == [8, 8, 8, 4, 2]


def test_sixty_four_workers_fit_into_a_chart_and_what_is_not_known_is_none() -> None:
    traces, layout = drawn(bars.time_split, comparison(("allreduce", "gossip"), (64,)))
    assert [len(trace["x"]) for trace in traces] == [18] * 4
    assert layout["height"] < 700
    made = comparison(("allreduce",), (2,))
    for timing in ((), (times(),)):
        assert bars.time_split(replace(made, trials=tuple(replace(one, timing=timing) for one in made.trials))) is None
    assert bars.staleness(made) is None  # without a server there is none


def test_bytes_and_the_largest_workers_memory_are_bars_with_their_size_beside_the_name() -> None:
    made = changed(comparison(("allreduce",), (2,)), "allreduce on 2", bytes=61_200_000)
    traces, layout = drawn(bars.bytes_sent, made)
    assert list(traces[0]["x"]) == [0, 0, 61_200_000]
    assert labels(layout) == [("solo, 1 thread", "0 B"), ("solo, 4 threads", "0 B"), ("allreduce on 2", "61.2 MB")]
    assert list(traces[0]["marker"]["color"]) == [one.colour for one in drawing.styles_of(made).values()]
    assert bars.bytes_sent(comparison((), ())) is None
    made = changed(comparison(("allreduce",), (2,)), "allreduce on 2", memory=(100_000_000, 300_000_000))
    made = changed(made, "solo, 1 thread", memory=())
    traces, layout = drawn(bars.memory, made)
    assert list(traces[0]["x"])[-1] == 300_000_000
    assert labels(layout)[-1] == ("allreduce on 2", "300.0 MB × 2")
    assert [name for name, _ in labels(layout)] == ["solo, 4 threads", "allreduce on 2"]


def test_staleness_is_in_shares_a_row_for_each_variant_that_has_any_and_a_long_tail_is_binned() -> None:
    made = comparison(("allreduce", "downpour", "dynsgd"), (2,))
    made = changed(made, "downpour on 2", staleness={0: 3, 2: 1})
    made = changed(made, "dynsgd on 2", staleness={1: 5})
    traces, layout = drawn(bars.staleness, made)
    assert [(list(one["x"]), list(one["y"])) for one in traces] == [([0, 2], [0.75, 0.25]), ([1], [1.0])]
    assert labels(layout) == [("downpour on 2", "median 0, latest 2"), ("dynsgd on 2", "median 1, latest 1")]
    (low, high), (under, over) = layout["yaxis"]["domain"], layout["yaxis2"]["domain"]
    assert 0 <= under < over < low < high <= 1
    assert layout["xaxis"]["anchor"] == "y2"  # below the last
    assert list(layout["yaxis"]["range"]) == list(layout["yaxis2"]["range"]) == [0, 1.0]
    made = changed(comparison(("downpour",), (2,)), "downpour on 2", staleness={0: 1, 1: 1, 399: 2})
    traces, _ = drawn(bars.staleness, made)
    assert traces[0]["width"] == pytest.approx(9)
    assert [(x, y) for x, y in zip(traces[0]["x"], traces[0]["y"], strict=True)] == [(4.5, 0.5), (394.5, 0.5)]
    assert "50 % of the pushes are 390–399 versions late" in traces[0]["hovertext"][1]
