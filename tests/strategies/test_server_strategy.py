"""Strategies that push windows to a server, on mathematics that a hand can check: AGN, DynSGD, Distance; what they share."""

import pytest
import torch
from by_hand import ROW, Hand, close, hands, path_of, quadratic, scripted, slope

from manyhands.errors import Unsupported
from manyhands.replica.flat_vector import FlatVector
from manyhands.strategies.agn import AGN
from manyhands.strategies.window import Window
from manyhands.worker import Worker


def test_a_window_enters_divided_by_its_steps_and_so_does_the_short_last_one() -> None:
    """CASE 12: windows of 4, 4 and 2 steps of -.1 each enter as -.1 each.

    Local steps go on from each other: on w²/2 with rate .5 from 1 to .5 and .25, their mean is -.375, the next begins at .625.
    """
    (path,) = hands("agn:window=4", [slope(1.0)], path_of(10, ends=1))
    assert close([center for _, center in path], [0, 0, 0, -0.1, -0.1, -0.1, -0.1, -0.2, -0.2, -0.2, -0.3])
    (path,) = hands("agn:window=2", [quadratic([1.0])], path_of(4, ends=1), start=[1.0], rate=0.5)
    assert close([center for _, center in path], [1.0, 0.625, 0.625, 0.625 - 0.375 * 0.625, 0.625 - 0.375 * 0.625])


def test_workers_add_and_window_1_is_downpour() -> None:
    both = [hands(spec, [slope(1.0)] * 3, path_of(4, ends=1)) for spec in ("agn:window=1,bound=0", "downpour:bound=0")]
    ends = [path[-1][1] for paths in both for path in paths]
    assert ends == [ends[0]] * 6
    assert ends[0] == pytest.approx(-0.1 * 4 * 3)


def test_a_worker_without_rows_enters_nothing() -> None:
    """CASE 27: the other's window is not divided by two workers, nor the ticks without rows counted as steps."""

    def program(hand: Hand) -> float:
        for tick in range(4):
            hand.tick(None if hand.worker.rank or tick == 2 else ROW)
        hand.worker.group.barrier()
        hand.finish()
        return float(hand.center)

    assert hands("agn:window=4,bound=0", [slope(1.0)] * 2, program) == pytest.approx([-0.1] * 2)


def test_an_update_of_staleness_3_enters_with_weight_a_quarter() -> None:
    """CASE 12: worker 0 pulls, worker 1 makes three versions, worker 0 pushes: -.1·(1 + 1 + 1 + 1/4).

    Then worker 0 makes two more, whose staleness is 0: its own pushes do not count. Of two who pull at once the first enters
    whole, the second by half. A window of two steps enters as it is where nothing is stale.
    """
    order = [0, *[1, 1] * 3, 0, *[0, 0] * 2]
    assert hands("dynsgd", [slope(1.0)] * 2, scripted(order, 3)) == pytest.approx([-0.1 * 5.25] * 2)
    assert hands("dynsgd:window=1", [slope(1.0)] * 2, scripted([0, 1, 0, 1], 1)) == pytest.approx([-0.15] * 2)
    assert hands("dynsgd:window=2", [slope(1.0)], scripted([0] * 6, 3)) == pytest.approx([-0.3])


def test_weights_that_others_have_moved_count_less() -> None:
    """Both pull 0; worker 0 moves the first weight by -.3; worker 1's -.1 there is divided by 1 + .09/.03 = 4, elsewhere by 1.

    A worker that pulls before each window finds the center where it left it: nothing is damped, alone. A window enters divided
    by its steps, the short last one too: the thesis combines it with AGN.
    """
    losses = [lambda model, batch: 3 * model.w[0], slope(1.0)]
    ends = hands("distance:window=1,rate=.03", losses, scripted([0, 1, 0, 1], 1), start=[0.0, 0.0])
    assert close(ends[0], [-0.3 - 0.1 / 4, -0.1], 1e-15)
    for window, moved in ((1, -0.9), (2, -0.6)):
        ends = hands(f"distance:window={window},rate=1e-6", losses[:1], scripted([0] * 6, 3), start=[0.0, 0.0])
        assert close(ends[0], [moved, 0.0], 1e-15), window


def test_without_a_server_it_is_refused() -> None:
    with pytest.raises(Unsupported, match="needs a parameter server, and this worker has none"):
        Hand(AGN(), Worker(), slope(1.0), [0.0], 0.1)


def test_the_center_comes_in_a_vector_of_its_own() -> None:
    """Keeping it, or writing to it, changes nothing."""

    def program(hand: Hand) -> tuple[bool, bool]:
        first = hand.strategy.consensus(hand.replica, hand.worker, hand.state)
        second = hand.strategy.consensus(hand.replica, hand.worker, hand.state)
        one, other, own = (vector.parts[0].data_ptr() for vector in (first, second, hand.replica.parameters))
        return one != other, one != own

    assert hands("agn", [slope(1.0)] * 2, program) == [(True, True)] * 2


def test_a_window_of_another_number_of_workers_begins_anew() -> None:
    windows = [Window(start=FlatVector([torch.zeros(1)]), ticks=3, steps=2, fresh=True) for _ in range(2)]
    merged = windows[0].merge(windows, 2, 3)
    assert (merged.ticks, merged.steps, merged.fresh) == (0, 0, False)
    assert windows[0].merge(windows, 1, 2) is windows[1]
