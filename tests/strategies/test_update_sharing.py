"""Update sharing: nothing is lost, every update counts once on every worker, and the threshold follows the density."""

from typing import Any

import pytest
import torch
from by_hand import Hand, hands, quadratic, slope
from torch import Tensor

import manyhands as mh
import plain
from manyhands.engines.local.engine import Local
from manyhands.errors import BadInput, ManyhandsError
from manyhands.replica.replica import Replica
from manyhands.strategies.update_sharing import UpdateSharing, UpdateSharingState

WIDE = [1.0, 3.0, 0.5, 2.0, 0.1, 0.01]
"""Curvatures: steps of very different lengths."""


class Counting(UpdateSharing):
    """Also adds up every step that the optimizer takes."""

    def _update_of(self, replica: Replica, state: UpdateSharingState) -> Tensor:
        assert state.messaging is not None
        step = replica.parameters.joined() - state.messaging.before.joined()
        replica.steps = getattr(replica, "steps", torch.zeros_like(step)) + step  # type: ignore[attr-defined]
        return super()._update_of(replica, state)


def trained(hand: Hand) -> dict[str, Tensor]:
    """Thirty steps, a meeting, and the end."""
    for _ in range(30):
        hand.tick()
    hand.worker.group.barrier()
    hand.strategy.settle(hand.replica, hand.worker, hand.state)
    met = {"x": hand.x, "residual": hand.replica.named(hand.state.residual)["w"].clone()}
    hand.finish()
    steps = hand.replica.named(hand.replica.steps)["w"]  # type: ignore[attr-defined]
    return {**met, "end": hand.x, "left": hand.state.residual, "steps": steps}


def test_all_updates_and_residuals_are_all_steps() -> None:
    losses = [quadratic(WIDE, [1.0 + rank] * 6) for rank in range(4)]
    for options in ({}, {"bound": 0}, {"density": 0.5}, {"density": None, "tau": 0.01}):
        found = hands(Counting(**options), losses, trained, start=[0.0] * 6, rate=0.02)
        steps, residuals = (sum(one[name] for one in found) for name in ("steps", "residual"))
        assert residuals.abs().max() > 1e-4, options
        for one in found:
            assert (one["x"] + residuals - steps).abs().max() <= 1e-12, options
            assert (one["end"] - steps).abs().max() <= 1e-12, options
            assert not one["left"].any(), options
            assert torch.equal(one["end"], found[0]["end"]), options


def test_two_workers_in_step_by_hand() -> None:
    """Steps of 0.1·3 and 0.1·(-1); above 0.25 plus or minus 0.25 is sent. Both apply both."""

    def program(hand: Hand) -> list[list[float]]:
        seen = []
        for _ in range(3):
            hand.tick()
            seen.append([float(hand.x), float(hand.replica.named(hand.state.residual)["w"])])
        return seen

    strategy = UpdateSharing(bound=0, tau=0.25, density=None)
    first, second = hands(strategy, [slope(-3.0), slope(1.0)], program)
    assert first == [[pytest.approx(x), pytest.approx(r)] for x, r in ((0.25, 0.05), (0.5, 0.1), (0.5, 0.15))]
    assert second == [[pytest.approx(x), pytest.approx(r)] for x, r in ((0.25, -0.1), (0.5, -0.2), (0.5, -0.05))]


def test_the_threshold_follows_the_density() -> None:
    """Steps of the same lengths again and again: messages have 3 values of 100, whatever the first threshold was."""
    n, warm = 200, 60
    slopes = torch.linspace(0.1, 1.0, n, dtype=torch.float64)

    def program(hand: Hand) -> float:
        counts, taken = list[int](), hand.state.messaging.mailbox.take

        def counting(until: Any = None) -> Any:
            came = taken(until)
            counts.extend(((len(message) - 16) // 4) for messages in came for message in messages)
            return came

        hand.state.messaging.mailbox.take = counting
        for _ in range(3 * warm):
            hand.tick()
        return sum(counts[warm:]) / len(counts[warm:])

    losses = [lambda model, batch: (model.w * slopes).sum()] * 2
    for tau in (1e-3, 3.0):
        share = hands(UpdateSharing(bound=0, density=0.03, tau=tau), losses, program, start=[0.0] * n)[0] / n
        assert share == pytest.approx(0.03, rel=0.25), tau


def test_a_step_that_is_not_finite_is_no_update() -> None:
    def program(hand: Hand) -> None:
        hand.replica.optimizer.param_groups[0]["lr"] = 1e308
        hand.tick()

    with pytest.raises(ManyhandsError, match="not finite, and no threshold can send that: lower the rate"):
        hands("update-sharing:bound=0", [slope(1e9)] * 2, program)


def test_workers_that_may_be_lost_are_refused() -> None:
    with pytest.raises(BadInput, match="some have applied and others have not"):
        mh.train(plain.task(), workers=2, strategy="update-sharing", survive="max_losses=1")


def test_each_row_once_on_real_workers(local: Local) -> None:
    run = mh.train(plain.task(epochs=2), engine=local, workers=3, strategy="update-sharing")
    assert run.rows["total"] == 2 * run.info["rows"]
    steps = sum(run.staleness.values())
    assert steps == 3 * 2 * run.info["ticks_per_epoch"]
    assert run.ledger["post"]["messages"] == 2 * steps  # each to two others


def test_resumed_by_another_number_of_workers_nothing_is_lost() -> None:
    """What three have yet to send is what two have yet to send."""
    written = [UpdateSharingState(residual=torch.tensor([rank, -1.0]), tau=0.1 * rank) for rank in range(3)]
    own = [UpdateSharingState(residual=torch.zeros(2), messaging=object()) for _ in range(2)]  # type: ignore[arg-type]
    merged = [state.merge(written, rank, 2) for rank, state in enumerate(own)]
    assert sum(one.residual for one in merged).tolist() == [3.0, -3.0]
    assert [one.tau for one in merged] == [0.2, 0.2]
    assert all(one.messaging is before.messaging for one, before in zip(merged, own, strict=True))
