"""Control bits: what workers tell each other beside their vectors, whether rows are left and whether all are to stop."""

from __future__ import annotations

import torch

from manyhands.comm.group import MeanResult
from manyhands.worker import Worker

MORE, STOP, REGROUP = 1, 2, 4
CONTROL_BITS = 2  # where members never change; see `ControlBits.width`
_PLACE_BITS = 16
SYNC_EVERY_S, SYNC_AT_MOST_TICKS = 1.0, 256  # a stop is received within about so many seconds, and within so many ticks


def with_inverse(number: int, width: int) -> int:
    """The last `width` bits of a number, and above them their inverse. Joined by OR, some bit is in both where workers'
    numbers differ: see `have_differed`."""
    mask = (1 << width) - 1
    return number & mask | (~number & mask) << width


def have_differed(bits: int, width: int) -> bool:
    """Whether the numbers differ of which these bits are the OR."""
    return bool(bits & bits >> width & (1 << width) - 1)


class ControlBits:
    """This worker's own bits, and those that came back from the exchanges of this tick."""

    def __init__(self, elastic: bool = False, *, compares_places: bool = False) -> None:
        """elastic: members may change, which needs a bit of its own. compares_places: `place` must be everybody's."""
        self._first = CONTROL_BITS + elastic  # bit of the place
        self._compares = compares_places
        self.width = self._first + 2 * _PLACE_BITS * compares_places
        """Bit `width` + i of an exchange says that parameter i got a gradient."""
        self.more = True  # rows are left here this epoch
        self.stop = False  # this worker wants all to stop
        self.regroup = False  # all are to form the next generation
        self.place = 0  # a number of what is exchanged: of the batch, say
        self.apart = False  # of an exchange in which another worker was at another place
        self.received = 0  # of the exchanges of this tick, OR of all ranks
        self._unsynced_ticks, self._sync_after_ticks = 0, 1  # ticks since the last sync, and when the next is due
        self._synced_s = 0.0  # when the last one was, on the worker's clock

    @property
    def own(self) -> int:
        """What this worker sends."""
        bits = (MORE if self.more else 0) | (STOP if self.stop else 0) | (REGROUP if self.regroup else 0)
        return bits | with_inverse(self.place, _PLACE_BITS) << self._first if self._compares else bits

    @property
    def any_rank_has_rows(self) -> bool:
        """As received in this tick."""
        return bool(self.received & MORE)

    def rows_left(self, worker: Worker, exchanged: bool = False) -> bool:
        """At a tick's end: whether anybody has rows, as far as this worker can know; True between exchanges.

        exchanged: the bits of this tick came with an exchange; else they are swapped alone where that is due.
        """
        return self.any_rank_has_rows if exchanged or self.sync_if_due(worker) else True

    def record(self, total: MeanResult) -> MeanResult:
        """Take note of the control bits that came back from an exchange."""
        self.received |= total.bits & ((1 << self._first) - 1)
        if self._compares:
            self.apart = self.apart or have_differed(total.bits >> self._first, _PLACE_BITS)
        return total

    def restart(self) -> None:
        """Other members: nothing is received, and the next tick without an exchange is due."""
        self.received, self._unsynced_ticks, self._sync_after_ticks = 0, 0, 1

    def sync_if_due(self, worker: Worker) -> bool:
        """For ticks without an exchange: swap the control bits alone, about once a second. Whether it did in this tick.

        How many ticks a second holds is measured at each sync and agreed on, so that all ranks sync at the same ticks.
        """
        self._unsynced_ticks += 1
        if self._unsynced_ticks < self._sync_after_ticks:
            return False
        now = worker.clock()
        pace = torch.tensor([(now - self._synced_s) / self._unsynced_ticks], dtype=torch.float64)  # seconds a tick
        self.record(worker.mesh.world.mean_(pace, 1.0, self.own))
        self._sync_after_ticks = max(1, min(SYNC_AT_MOST_TICKS, int(SYNC_EVERY_S / max(float(pace), 1e-9))))
        self._unsynced_ticks, self._synced_s = 0, worker.clock()
        return True
