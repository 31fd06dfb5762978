"""Leases of workers that a launcher started: what is handed out stands in the launcher's store, and whoever takes a slice
writes it anew.

There is no driver that all of them could ask. A worker reads the state, takes its slice by the same rules as a driver
would (`data/leases.py`), and writes the state if nobody else has meanwhile; else it tries again.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable

from torch.distributed.distributed_c10d import Store

from manyhands.data.leases import End, Lease, Leases, Segment
from manyhands.errors import ManyhandsError

_STATE = "state"
_PAUSE_S = 0.01  # between two looks of a worker that waits for others


class StoreLeases:
    """Of all workers that have this store of torch.distributed."""

    def __init__(self, store: Store, timeout_s: float) -> None:
        """timeout_s: a worker that waits for others gives up when none of them took a slice for so long."""
        self._store, self._timeout_s = store, timeout_s
        self._taken = 0  # by this worker

    def take(self, replica: int, segment: Segment, stopping: Callable[[], str] = lambda: "") -> Lease | End:
        """As `DriverClient.lease`. stopping: why the run is to stop, or ""; all workers then get an End with it.

        ManyhandsError where it waits for others, and they take nothing for timeout_s.
        """
        seen, since = "", time.monotonic()
        while True:
            state = self._read()
            if state != seen:
                seen, since = state, time.monotonic()
            leases = Leases.of(json.loads(state).get("leases", {}))
            if reason := stopping():
                leases.stop(reason)
            if (answer := leases.take(replica, segment)) is None:
                self._wait(replica, segment, time.monotonic() - since)
            elif self._write(state, leases, replica):
                return answer

    def _read(self) -> str:
        return self._store.compare_set(_STATE, "", "{}").decode()

    def _write(self, before: str, leases: Leases, replica: int) -> bool:
        """Whether nobody else has written since. Two who take from the same queue would write the same but for `by`."""
        self._taken += 1
        state = json.dumps({"leases": leases.to_json(), "by": [replica, self._taken]})
        return self._store.compare_set(_STATE, before, state).decode() == state

    def _wait(self, replica: int, segment: Segment, seconds: float) -> None:
        if seconds > self._timeout_s:
            whom = "worker 0, which trains alone (warmup)" if segment.rank0_warmup_ticks else "the others' parts"
            raise ManyhandsError(
                f"worker {replica} waited for {whom}, and nobody took rows for {self._timeout_s:g} s: look for errors of "
                "other workers in the log"
            )
        time.sleep(_PAUSE_S)
