import itertools
import random
from collections.abc import Sequence

import pytest

from manyhands.data.row_pieces import RowPiece
from manyhands.engines.driver.row_order import RowOrder


def pieces(parts_of: Sequence[int]) -> list[RowPiece]:
    """So many parts of each number, each with a byte."""
    return [
        RowPiece(number=number, part=part, last=part == parts - 1, rows=1, data=b"x")
        for number, parts in enumerate(parts_of)
        for part in range(parts)
    ]


def test_every_way_in_which_pieces_can_come_gives_one_order() -> None:
    wanted = pieces([1, 3, 1, 2])
    for given in itertools.islice(itertools.permutations(wanted), 0, None, 7):
        order, found = RowOrder(), list[RowPiece]()
        for piece in given:
            assert order.is_next(piece) == (piece == wanted[len(found)])
            found += order.add(piece)
            held = [one for one in given[: given.index(piece) + 1] if one not in found]
            assert order.waiting_bytes == len(held)
            assert all(map(order.waits, held))
            assert not any(map(order.waits, found))
            assert bool(order.missing()) == bool(held)
        assert found == wanted


def test_a_worker_that_ends_early_holds_nobody_up() -> None:
    """Worker r delivers numbers r, r + N, …, up to a number of its own; the news of its end comes between others' pieces."""
    draw = random.Random(1)
    for parts in (1, 2, 3, 5) * 50:
        counts = [draw.randrange(4) for _ in range(parts)]
        own = [
            [
                *(RowPiece(number=r + parts * k, rows=1) for k in range(count)),
                RowPiece(number=r + parts * count, parts=parts),
            ]
            for r, count in enumerate(counts)
        ]
        order, found = RowOrder(), list[int]()
        while left := [one for one in own if one]:
            found += [piece.number for piece in order.add(draw.choice(left).pop(0))]
        assert found == sorted(r + parts * k for r, count in enumerate(counts) for k in range(count))
        assert not order.missing()


def numbers(order: RowOrder, **fields: int | bool) -> list[int]:
    """Of the pieces that go on when this one has come."""
    return [piece.number for piece in order.add(RowPiece(**{"rows": 1, **fields}))]  # type: ignore[arg-type]


def test_an_end_within_a_number_says_nothing_of_what_comes_before_it() -> None:
    order = RowOrder()
    assert numbers(order, number=1) == []
    assert numbers(order, number=0, part=0, last=False) == [0]
    assert numbers(order, number=0, part=1, parts=2, rows=0) == [1]
    order = RowOrder()
    numbers(order, number=4, parts=2, rows=0)
    assert numbers(order, number=1) == []
    assert numbers(order, number=0) == [0, 1]


def test_absurd_numbers_take_no_time() -> None:
    order = RowOrder()
    order.add(RowPiece(number=1 << 60))
    order.add(RowPiece(number=1, parts=1 << 50))
    with pytest.raises(ValueError, match="in 1 parts after one in 1125899906842624"):
        order.add(RowPiece(number=0, parts=1))
    order = RowOrder()
    order.add(RowPiece(number=1 << 60))
    assert order.add(RowPiece(number=0, parts=1)) != []
