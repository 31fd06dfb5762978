"""For tests of the simulated engine's parts: programs on a timeline, and calls from outside of it."""

import math
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from typing import Any

import manyhands as mh
from manyhands.engines.faults import Faults
from manyhands.engines.sim.compute import Compute
from manyhands.engines.sim.costs import Costs
from manyhands.engines.sim.group import SimGroup
from manyhands.engines.sim.network import NetworkState, SimNetworkSpec
from manyhands.engines.sim.rendezvous import SimRendezvous
from manyhands.engines.sim.server import SimServers
from manyhands.engines.sim.timeline import Timeline
from manyhands.server.base import Server, ServerSpec

BETWEEN_CALLS_S = 1e-3


class Changes(mh.Callback):
    """(kind, message) of all that a run says of its members and copies."""

    def __init__(self) -> None:
        self.changes: list[tuple[str, str]] = []

    def on_notice(self, event: mh.Event) -> None:
        if event.type == "change":
            self.changes.append((event.values["kind"], event.values["message"]))


def meeting_of(timeline: Timeline, size: int, network: str = "", timeout_s: float = 300.0) -> SimRendezvous:
    wires = NetworkState(SimNetworkSpec.parse(network), size, 0)
    return SimRendezvous(timeline, Costs(wires, size), wires, size, timeout_s)


def servers_of(
    timeline: Timeline,
    spec: ServerSpec,
    workers: int,
    shards: int = 1,
    network: str = "",
    faults: str = "",
    compute: str = "",
    seed: int = 0,
    timeout_s: float = math.inf,
) -> SimServers:
    output = Faults.parse(faults)
    wires = NetworkState(SimNetworkSpec.parse(network), workers, 1 if spec.one_shard else shards)
    return SimServers(
        spec, workers, shards, timeline, wires, output.messages(seed), Compute.parse(compute), output, timeout_s
    )


def raise_errors(program: Any) -> None:
    if program.error is not None:
        raise program.error


def run(timeline: Timeline, programs: Sequence[Callable[[], Any]]) -> list[Any]:
    """Values of the programs, in order; the first error is raised."""
    timeline.on_end = raise_errors
    started = [timeline.start(rank, program) for rank, program in enumerate(programs)]
    timeline.run()
    return [program.value for program in started]


def in_group(
    size: int, program: Callable[[SimGroup, Timeline], Any], network: str = ""
) -> tuple[list[Any], list[SimGroup], SimRendezvous]:
    """What the program gives on every rank; the groups, and where they meet."""
    timeline = Timeline()
    meeting = meeting_of(timeline, size, network)
    groups = [SimGroup(meeting, rank) for rank in range(size)]
    return run(timeline, [partial(program, group, timeline) for group in groups]), groups, meeting


class Outside:
    """Runs a timeline in a thread of its own, one program for each call that comes from other threads.

    Virtual time passes from call to call, and only by what is due; calls that wait stay on the timeline.
    """

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def call(self, function: Callable[[], Any]) -> Any:
        future: Future[Any] = Future()
        self._calls.put((function, future))
        return future.result()

    def close(self) -> None:
        self._calls.put(None)
        self._thread.join()

    def _run(self) -> None:
        timeline = self._timeline
        while (call := self._calls.get()) is not None:
            program = timeline.start(len(timeline.programs), partial(_settle, *call), at=timeline.now + BETWEEN_CALLS_S)
            assert not program.ended
            while timeline.advance():
                pass


def _settle(function: Callable[[], Any], future: Future[Any]) -> None:
    try:
        future.set_result(function())
    except Exception as error:  # noqa: BLE001 - raised where it was called
        future.set_exception(error)


class Proxy(Server):
    """A simulated client, for callers outside of the timeline."""

    def __init__(self, outside: Outside, client: Server) -> None:
        self._outside, self._client = outside, client

    for _name in ("ledger", "shards", "waited_s", "pulled", "pushes"):
        locals()[_name] = property(lambda self, name=_name: getattr(self._client, name))

    def _through(name):
        def call(self, *arguments, **options):
            return self._outside.call(partial(getattr(self._client, name), *arguments, **options))

        return call

    for _name in Server.__abstractmethods__ - {"pushes"}:
        locals()[_name] = _through(_name)


@contextmanager
def outside(servers: SimServers) -> Iterator[list[Server]]:
    """Its clients, for callers outside of the timeline."""
    bridge = Outside(servers.timeline)
    try:
        yield [Proxy(bridge, client) for client in servers.clients]
    finally:
        bridge.close()
