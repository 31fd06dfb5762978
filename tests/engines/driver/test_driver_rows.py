"""Rows that workers deliver, on the driver: who is answered when, and what malformed ones are."""

from __future__ import annotations

from typing import Any

import pytest
from test_driver import Scripted
from typing_extensions import override

from manyhands.data.row_pieces import RowPiece
from manyhands.engines.base import LaunchSpec, Observer
from manyhands.engines.driver.driver import Driver
from manyhands.errors import WorkerFailed
from manyhands.transport.frame import FrameError


class Holding(Observer):
    """Keeps the workers of these numbers waiting."""

    def __init__(self) -> None:
        self.held: set[int] = set()
        self.came: list[RowPiece] = []

    @override
    def take_rows(self, piece: RowPiece) -> None:
        if piece.data == b"nonsense":
            raise FrameError("nonsense")
        self.came.append(piece)

    @override
    def must_wait(self, piece: RowPiece) -> bool:
        return piece.number in self.held


def rows(number: int, data: bytes = b"data") -> dict[str, Any]:
    return {"type": "rows", "number": number, "part": 0, "last": True, "parts": 0, "rows": 1, "data": data}


@pytest.fixture
def observer() -> Holding:
    return Holding()


@pytest.fixture
def driver(observer: Holding) -> Driver:
    return Driver([Scripted("here", [0, 1, 2])], LaunchSpec(workers=3, observer=observer))


def heard(driver: Driver, *messages: tuple[int, dict[str, Any]]) -> list[tuple[int, Any]]:
    """What the workers are answered when these come."""
    (host,) = driver.hosts
    assert isinstance(host, Scripted)
    host.sent.clear()
    host.output += messages
    driver._hear(host)
    assert all(body["type"] == "delivered" for _, body in host.sent)
    return [(process_index, body["value"]) for process_index, body in host.sent]


def test_a_worker_is_answered_at_once_and_named_by_its_process(driver: Driver, observer: Holding) -> None:
    assert heard(driver, (1, rows(0))) == [(1, True)]
    assert [(piece.rank, piece.number, piece.data) for piece in observer.came] == [(1, 0, b"data")]


def test_who_must_wait_is_told_so_once_and_goes_on_when_there_is_room(driver: Driver, observer: Holding) -> None:
    observer.held = {1, 2}
    assert heard(driver, (1, rows(1)), (2, rows(2))) == [(1, None), (2, None)]
    observer.held = {2}
    assert heard(driver, (0, rows(0))) == [(1, True), (0, True)]
    observer.held = set()
    assert heard(driver, (0, rows(3))) == [(2, True), (0, True)]


def test_rows_that_cannot_be_read_name_their_worker(driver: Driver) -> None:
    with pytest.raises(WorkerFailed, match="worker 2 on here sent rows that cannot be read: nonsense"):
        heard(driver, (2, rows(0, b"nonsense")))
