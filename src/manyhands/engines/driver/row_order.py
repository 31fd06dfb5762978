"""In which order rows go on that workers deliver: pieces that come too early wait. Pure."""

from __future__ import annotations

from manyhands.data.row_pieces import RowPiece


class RowOrder:
    """Takes the pieces of all workers as they come, and gives them out by number and part.

    A number may be missing where its worker has said that it delivers no more (`RowPiece.parts`). Pieces without a
    number go on at once.
    """

    waiting_bytes: int  # of the pieces that wait for others

    def __init__(self) -> None:
        self.waiting_bytes = 0
        self._front = (0, 0)  # the place of the piece that goes on next
        self._waiting: dict[tuple[int, int], RowPiece] = {}
        self._ended: dict[int, tuple[int, int]] = {}  # remainder -> the place from which on nothing comes
        self._parts = 1

    def is_next(self, piece: RowPiece) -> bool:
        """Whether it would go on at once."""
        return piece.number < 0 or piece.place == self._front

    def waits(self, piece: RowPiece) -> bool:
        """Whether it is still held."""
        return piece.place in self._waiting

    def add(self, piece: RowPiece) -> list[RowPiece]:
        """The pieces that go on now. ValueError for a place that was taken before, and for ends that disagree."""
        if piece.number < 0:
            return [piece]
        if piece.parts:
            if self._ended and piece.parts != self._parts:
                raise ValueError(f"an end of rows in {piece.parts} parts after one in {self._parts}")
            self._parts = piece.parts
            self._ended[piece.number % piece.parts] = piece.place
            return self._ready()
        if piece.place < self._front or piece.place in self._waiting:
            raise ValueError(f"rows of number {piece.number}, part {piece.part}, that came before")
        self._waiting[piece.place] = piece
        self.waiting_bytes += len(piece.data)
        return self._ready()

    def missing(self) -> str:
        """What has to come before the pieces that wait can go on; "" where none waits."""
        return f"rows of number {self._front[0]}, part {self._front[1]}" if self._waiting else ""

    def _ready(self) -> list[RowPiece]:
        ready: list[RowPiece] = []
        while self._waiting:
            number, part = self._front
            if (piece := self._waiting.pop(self._front, None)) is not None:
                self.waiting_bytes -= len(piece.data)
                ready.append(piece)
                self._front = (number + 1, 0) if piece.last else (number, part + 1)
            elif not self._is_over(number):
                break
            elif len(self._ended) == self._parts:
                self._front = min(self._waiting)
            else:
                self._front = number + 1, 0
        return ready

    def _is_over(self, number: int) -> bool:
        """Whether its worker has said that it does not come, or not further than the front."""
        ended = self._ended.get(number % self._parts)
        return ended is not None and ended <= self._front
