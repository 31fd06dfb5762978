"""An observed loop under strategies that `mh.prepare` takes: it ends well, all workers hold one model, it has learned."""

from pathlib import Path

import pytest
from observing import Program, alone, on_workers

IN_STEP = (
    ("local-sgd:period=4", "breaking"),
    ("local-sgd:period=end", "plateau"),
    ("diloco:period=4", "breaking"),
    ("allreduce:compress=topk:0.1", "breaking"),
    ("allreduce:overlap=true", "plateau"),
)
SERVED = ("downpour", *(pytest.param(strategy, marks=pytest.mark.slow) for strategy in ("easgd", "hogwild")))
pytestmark = [pytest.mark.xdist_group("observed strategies"), pytest.mark.timeout(400)]


def test_in_step(tmp_path: Path) -> None:
    """Each worker has as many steps as one process, and what is evaluated without autograd sets the same rates on all."""
    programs = [Program("shapes", (shape,), strategy=strategy) for strategy, shape in IN_STEP]
    shapes = ("plateau", "breaking")
    solo = dict(zip(shapes, alone([Program("shapes", (one,)) for one in shapes], tmp_path / "1"), strict=True))
    for program, ran in zip(programs, on_workers(2, programs, tmp_path / "2"), strict=True):
        one, strategy = solo[program.args[0]], program.strategy
        assert not ran.error, ran.said
        assert len(ran.parameters) == len(one.parameters)
        if strategy.startswith("allreduce"):
            assert (ran.parameters[0] - one.parameters[0]).abs().max() < (1e-10 if "overlap" in strategy else 0.1), (
                strategy
            )
        if program.args[0] == "breaking":
            assert ran.dump["rates"] == one.dump["rates"]
        assert ran.dump["printed"][-1] < ran.dump["printed"][0]


@pytest.mark.parametrize("strategy", SERVED)
def test_with_a_server_and_at_their_own_pace(strategy: str, tmp_path: Path) -> None:
    """Schedules go along with the rows of all; evaluation inside of a pass is each worker's own."""
    shapes = ("step_lr", "plateau") if strategy == "downpour" else ("step_lr",)
    programs = [Program("shapes", (shape,), strategy=strategy) for shape in shapes]
    runs = on_workers(2, programs, tmp_path, served=strategy)
    for ran in runs:
        assert not ran.error, ran.said
    ran = runs[0]
    rates = [round(rate, 9) for rates in ran.dump["rates"] for rate in rates]
    assert rates[0] == 1e-2
    assert rates == sorted(rates, reverse=True)
    assert set(rates) <= {1e-2, 7e-3}
    assert ran.dump["printed"][-1] < ran.dump["printed"][0] + 0.2
