"""A worker is lost while what is exchanged is compressed: what it has yet to send goes with it, and nobody else's does."""

from __future__ import annotations

import pytest
import torch
from fault_harness import Strike, Trial, fired, flat, lose_peer, task
from test_faults_rounds_integration import PERIOD, check_counts
from test_faults_rounds_integration import task as rows_in_order

import manyhands as mh

ALLREDUCE, DILOCO = "allreduce:compress={}", "diloco:period=3,compress={}"
WHOLE = f"diloco:period={PERIOD},outer_rate=1,outer_momentum=0,compress=topk:1"
slow = pytest.mark.slow


@pytest.mark.parametrize("fault", ["kill=1@step:5", pytest.param("kill=0@step:7:exchange", marks=slow)])
@pytest.mark.parametrize("replaced", [pytest.param(True, marks=slow), False])
def test_a_lost_workers_rows_are_in_the_same_round(fault: str, replaced: bool, trial: Trial) -> None:
    """The codec leaves nothing out, so that each row shows."""
    survive = f"max_losses=1,replace={str(replaced).lower()}"
    run = trial.train(of=rows_in_order(), faults=fault, strategy=WHOLE, survive=survive, run_dir=trial.run_dir)
    fired(run, fault)
    check_counts(run, trial.run_dir)


CASES = [(ALLREDUCE, "topk:0.2"), (DILOCO, "topk:0.2"), (ALLREDUCE, "powersgd:1"), (DILOCO, "powersgd:1")]
CASES += [(ALLREDUCE, "qsgd:4"), (DILOCO, "onebit")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("of", "codec"), [pytest.param(*case, marks=() if number < 2 else slow) for number, case in enumerate(CASES)]
)
@pytest.mark.parametrize("place", ["before complete", pytest.param("in complete", marks=slow)])
def test_an_exchange_is_remembered_once_all_have_it(of: str, codec: str, place: str, trial: Trial) -> None:
    """Nobody is lost, but a connection breaks with the mean at hand: it is made again, or it is completed by all. What each
    has yet to send is what it would be, and so are all later bits."""
    strategy = of.format(codec)
    whole = mh.train(task(), engine=trial.local, workers=3, strategy=strategy, survive="max_losses=3")
    strike = Strike(1, place, lose_peer, call=2)
    run = trial.train(strike, strategy=strategy, run_dir=trial.run_dir)
    fired(run, strike)
    assert run.losses == []
    assert run.generations > 1
    assert torch.equal(flat(run), flat(whole))


@pytest.mark.parametrize("strategy", [ALLREDUCE.format("topk:0.2"), DILOCO.format("topk:0.2")])
def test_what_a_lost_worker_has_yet_to_send_is_reported(strategy: str, trial: Trial) -> None:
    fault = "kill=1@step:7"
    run = trial.train(faults=fault, strategy=strategy, survive="max_losses=1,replace=false", run_dir=trial.run_dir)
    fired(run, fault)
    [loss] = run.losses
    assert loss["left_out"] > 0
    assert [f"of norm {loss['left_out']:.3g}" in message for message in trial.seen.changes] == [True]


def test_one_that_is_left_sends_all_that_it_left_out(trial: Trial) -> None:
    """A step of each row's own: with nothing compressed any more, what waited enters the next step."""
    fault = "kill=1@step:5"
    run = trial.train(
        of=rows_in_order(), faults=fault, strategy="allreduce:compress=topk:0.02", workers=2,
        survive="max_losses=1,replace=false", run_dir=trial.run_dir,
    )  # fmt: skip
    fired(run, fault)
    moved, [loss] = run.model.of.detach(), run.losses
    # each row adds 1 / 6: of the gradients of the lost worker, half of what it left out is missing, and of the other nothing
    missing = 1 / 6 - moved
    assert loss["left_out"] > 0
    assert torch.all(missing > -1e-9)
    assert float(missing.norm()) == pytest.approx(loss["left_out"] / 2, abs=1e-9)
