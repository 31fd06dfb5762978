"""The parameter server of simulated workers: the real stores, reached in virtual time."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, cast

from torch import Tensor
from typing_extensions import override

from manyhands.engines.faults import Faults, Messages
from manyhands.engines.sim.compute import Compute
from manyhands.engines.sim.copies import LoggedStore, SimCopies
from manyhands.engines.sim.network import NetworkState
from manyhands.engines.sim.shard import Request, ShardCall, SimShard
from manyhands.engines.sim.timeline import Future, Killed, Timeline
from manyhands.errors import ManyhandsError, PeerLost
from manyhands.server.base import Encoded, Exchanged, Server, ServerSpec
from manyhands.server.client import OpenExchange, ShardLost
from manyhands.server.in_process import NO_LOAD, Act, Load, StoreClient, answers_to_push
from manyhands.server.replication.log import Copy, Entry
from manyhands.server.shard_ranges import codec_for, lengths_of, make_stores
from manyhands.server.store import InvalidCall, Store
from manyhands.worker import LastPushes


class SimServers:
    """The shards and, in `clients`, each worker's `Server`, which only that worker's program calls, in its turn.

    A call is one request to each shard and one answer of each; the worker waits until it has them all. After
    `compute.request` seconds of its worker's own a request takes its time on the wires, waits until the shard has
    handled what came before, and is handled in `compute.merge` seconds a byte of a push or of the center. An encoded
    push takes its worker the codec's seconds before it leaves, and at the shard those of decoding, at the same time as
    others, before it stands in line. A pull is written into the worker's tensor, and a push read from it, then.
    `waited_s` is what the shards say: how long they held answers back for other workers.

    messages: what happens to each message, None where nothing does. Then a request is sent again `faults.retry_s` after
    its last copy, or the last answer to it, was to arrive; not while it waits at its shard, since that would change
    nothing. Its copies are known by its number, pushes by the store. `initialize` sends the center to a shard only if
    this worker is first.

    timeout_s: a call that waits for other workers for so long, while none of them does anything, gets PeerLost, and one
    that does not answer for so long ShardLost; what is on its way takes the time that it takes. inf: never.

    copies: of each shard. changed: called with (shard, how many copies it has now). Where none is left the run ends.
    With a shard's next primary an open request is sent again: pushes and ticks have numbers, and count once.

    Ledger: as of served servers, each request once; what is sent again is counted as "resent".
    """

    def __init__(
        self,
        spec: ServerSpec,
        workers: int,
        shards: int,
        timeline: Timeline,
        wires: NetworkState,
        messages: Messages | None,
        compute: Compute,
        faults: Faults,
        timeout_s: float,
        copies: int = 1,
        changed: Callable[[int, int], None] = lambda shard, copies: None,
    ) -> None:
        self.spec, self.timeline, self.wires, self.timeout_s = spec, timeline, wires, timeout_s
        self.compute = compute
        self.stores = make_stores(spec, workers, shards)
        self._messages, self._workers, self.has_copies = messages, workers, copies > 1
        self.shards = [
            SimShard(number, store, workers, timeline, self._carry, compute.merge, self._plan_retry)
            for number, store in enumerate(self.stores)
        ]
        """Of each shard the primary. Where there are copies, nobody serves before there are two."""
        self.clients: list[Server] = [SimServer(self, worker, 0) for worker in range(workers)]
        self.giver: int | None = None  # the worker whose center is the first
        self._retry_s = None if messages is None else faults.retry_s
        self._open: dict[int, ShardCall] = {}  # by worker
        self._generations = [0] * workers
        self._lost: set[int] = set()
        self._fencing: dict[int, tuple[Callable[[], None], Future[None]]] = {}
        """By worker that is lost: how all shards are asked (again), and that all have answered."""
        self._watched = False  # whether a look at the open calls is planned
        self.copies: list[SimCopies] = []
        if self.has_copies:
            for shard in self.shards:
                shard.kill()
            self.copies = [self._copies_of(number, copies, faults, changed) for number in range(len(self.shards))]

    # -- what befalls workers and shards -----------------------------------------------------------------------------

    def lose(self, worker: int) -> None:
        """Declare a worker lost: nobody waits for it, and its messages under way are ignored. Idempotent."""
        self._give_up(worker)
        for shard in self.shards:
            shard.queue(partial(shard.lose, worker))
        if worker == self.giver:
            for shard in self.shards:
                shard.queue(partial(shard.expect_no_center, self._no_center(worker)))

    def fence(self, worker: int, closed: Callable[[LastPushes], None]) -> None:
        """As `lose`, where others go on and the worker may have a new process: what comes of this one is refused.

        closed: called with what all shards have of it once nothing of it enters any more. Another worker may give the
        first center in its place.
        """
        if worker in self._fencing:
            return
        self._give_up(worker)
        generation, has = self._generations[worker], dict[int, tuple[int, int]]()
        no_center = worker == self.giver and not all(store.initialized for store in self.stores)

        def fence_at(number: int) -> None:
            last = self.shards[number].fence(worker, generation)
            self.shards[number].once_copied(partial(fenced, number, last))

        def fenced(number: int, last: tuple[int, int]) -> None:
            has[number] = last
            if len(has) == len(self.shards) and not all_fenced.is_set:
                all_fenced.set(None)
                del self._fencing[worker]
                closed(LastPushes.of(has))

        def ask() -> None:
            for number, shard in enumerate(self.shards):
                shard.queue(partial(fence_at, number))

        all_fenced: Future[None] = self.timeline.cell()
        self._fencing[worker] = ask, all_fenced
        ask()
        if no_center:
            self.giver = None
            for shard in self.shards:
                shard.queue(partial(shard.expect_no_center, self._no_center(worker)))
                shard.queue(partial(shard.expect_no_center, None))

    def wait_for_fences(self) -> None:
        """Until all shards have answered of each lost worker. Called in a worker's turn."""
        while self._fencing:
            _, all_fenced = next(iter(self._fencing.values()))
            self.timeline.wait(all_fenced, "the shards to refuse a lost worker")

    def _give_up(self, worker: int) -> None:
        self._lost.add(worker)
        if (call := self._open.get(worker)) is not None:
            call.cell.fail(self._refused(worker))

    def _no_center(self, worker: int) -> PeerLost:
        return PeerLost(worker, self._host(worker), "server.initialize", 0, 0.0, "is gone with the first center")

    def restart(self, worker: int) -> None:
        """A worker has a new process: `clients[worker]` is a new client, of the next generation. It waits until all shards
        have refused the one before."""
        if worker in self._fencing:
            self.timeline.wait(self._fencing[worker][1], "the shards to refuse the process before")
        self._lost.discard(worker)
        self._open.pop(worker, None)
        self._generations[worker] += 1
        self.clients[worker] = SimServer(self, worker, self._generations[worker])
        for shard in self.shards:
            shard.queue(partial(shard.restart_worker, worker, self._generations[worker]))
            if worker == self.giver:
                shard.queue(partial(shard.expect_no_center, None))

    def restart_shard(self, shard: int, seconds: float) -> None:
        """The shard is gone for a while. Messages under way are lost and sent again later; its store is kept."""
        self.shards[shard].restart(seconds, partial(self._is_back, shard))

    def kill_shard(self, shard: int) -> None:
        """It is gone for good: everybody who waits for it, or calls, gets PeerLost."""
        self.shards[shard].kill()
        for call in self._open.values():
            if shard in call.missing:
                call.cell.fail(self._shard_lost(shard, call, "is gone"))

    # -- copies ------------------------------------------------------------------------------------------------------

    def _copies_of(self, number: int, copies: int, faults: Faults, changed: Callable[[int, int], None]) -> SimCopies:
        def new_shard(process_index: int, copy: Copy, send: Callable[[Entry], None]) -> SimShard:
            (store,) = make_stores(self.spec, self._workers)
            logged = cast(Store, LoggedStore(store, copy, send))
            return SimShard(
                number,
                logged,
                self._workers,
                self.timeline,
                self._carry,
                self.compute.merge,
                self._plan_retry,
                copy=copy,
                node=process_index,
            )

        def serve(primary: SimShard) -> None:
            """Workers, and what they have open, go to this copy; so does what the driver asks of a lost one."""
            self.shards[number], self.stores[number] = primary, primary.store
            ages = enumerate(self._generations)
            primary.serve([(age, math.inf if worker in self._lost else 0) for worker, age in ages])
            for ask, _ in [*self._fencing.values()]:
                ask()
            for call in self._open.values():
                for request in call.requests:
                    if request.shard == number:  # whatever the copy before has done with it
                        request.handled_at, request.is_answered = None, False
            self._is_back(number)

        def lost() -> None:
            raise ShardLost(
                number,
                f"server shard {number}",
                "server.call",
                0,
                0.0,
                "has no copy left: start the run again from its newest checkpoint with resume=True (--resume)",
            )

        return SimCopies(
            [-1 - number - copy * len(self.shards) for copy in range(copies)],
            self.timeline,
            self.wires,
            faults.notice_s,
            self.compute.merge,
            new_shard=new_shard,
            serve=serve,
            changed=lambda copies, _: changed(number, copies),
            lost=lost,
        )

    # -- calls -------------------------------------------------------------------------------------------------------

    def exchange(self, call: ShardCall) -> None:
        """Send a call's requests and wait for all answers, in virtual time."""
        self.send(call)
        self.wait_for(call)

    def send(self, call: ShardCall) -> None:
        """Send a call's requests; `wait_for` its answers. One call of a worker is open at a time."""
        if self.timeline.is_dead:  # the dead say nothing
            raise Killed
        if call.worker in self._lost:
            raise self._refused(call.worker)
        for shard in self.shards:
            if shard.is_killed and not self.has_copies:
                raise self._shard_lost(shard.number, call, "is gone")
        self._open[call.worker] = call
        for request in call.requests:
            request.quiet_from = self._send(request)
        self._watch(self.timeline.now)

    def wait_for(self, call: ShardCall) -> None:
        """For all answers, in virtual time."""
        try:
            self.timeline.wait(call.cell, f"its answer of server.{call.operation}")
        finally:
            if self._open.get(call.worker) is call:
                del self._open[call.worker]
            for request in call.requests:
                if request.due is not None:
                    request.due.cancel()

    def _carry(self, source: int, target: int, bytes: int, deliver: Callable[[], None]) -> float:
        """Bring a message between worker and shard, by `Carry`; with faults, some come late, twice, or never."""
        arrives = self.wires.send(source, target, bytes, self.timeline.now)
        for late in [0.0] if self._messages is None else self._messages.copies():
            self.timeline.at(arrives + late, deliver)
        return arrives

    def _send(self, request: Request) -> float:
        """When it is to arrive."""
        arrives = self.shards[request.shard].send(request)
        self._plan_retry(request, arrives)
        return arrives

    def _plan_retry(self, request: Request, arrives: float) -> None:
        """After a request, or an answer to it, was sent, that may not arrive."""
        if request.due is not None:
            request.due.cancel()
            request.due = None
        if self._retry_s is not None and self._is_missing(request):
            request.due = self.timeline.at(arrives + self._retry_s, partial(self._resend, request))

    def _is_missing(self, request: Request) -> bool:
        """Whether its answer is waited for."""
        return self._open.get(request.call.worker) is request.call and request.shard in request.call.missing

    def _resend(self, request: Request) -> None:
        """Unless it is at its shard: then the answer will come, and this is planned anew."""
        if self._is_missing(request) and not self.shards[request.shard].has(request):
            self.clients[request.call.worker].ledger.add("resent", request.sends)
            self._send(request)

    def _is_back(self, shard: int) -> None:
        for call in list(self._open.values()):
            for request in call.requests:
                if request.shard == shard:
                    self._resend(request)

    # -- deadlines ---------------------------------------------------------------------------------------------------

    def _watch(self, since: float) -> None:
        """Check the open calls once the oldest silence may exceed the deadline. One check is planned at a time."""
        if not self._watched and self.timeout_s < math.inf:
            self._watched = True
            self.timeline.at(max(self.timeline.now, since + self.timeout_s), self._look)

    def _look(self) -> None:
        self._watched = False
        missing = [r for call in self._open.values() for r in call.requests if r.shard in call.missing]
        for request in missing:
            if self._quiet_since(request) + self.timeout_s <= self.timeline.now:
                request.call.cell.fail(self._late(request))
        since = [self._quiet_since(request) for request in missing if not request.call.cell.is_set]
        if since:
            self._watch(min(since))

    def _quiet_since(self, request: Request) -> float:
        shard = self.shards[request.shard]
        return max(request.quiet_from, shard.moved_at) if shard.has(request) else request.quiet_from

    def _late(self, request: Request) -> ManyhandsError:
        """No answer to a request for too long: because of another worker, or of the shard."""
        call, shard = request.call, self.shards[request.shard]
        seconds = self.timeline.now - call.since
        if not shard.holds(request):
            return self._shard_lost(shard.number, call, f"did not answer for {self.timeout_s:g} s")
        worker = shard.slowest if shard.store.initialized else self.giver
        if worker is None:
            return ManyhandsError(
                f"worker {call.worker} waited {seconds:g} s in server.{call.operation} for the server's first "
                "parameters: one worker must call server.initialize"
            )
        why = f"made no progress for {self.timeout_s:g} s"
        return PeerLost(worker, self._host(worker), f"server.{call.operation}", call.step, seconds, why)

    # -- words -------------------------------------------------------------------------------------------------------

    def _host(self, node: int) -> str:
        return f"host{self.wires.host_of(node)}"

    def _refused(self, worker: int) -> InvalidCall:
        return InvalidCall(f"worker {worker} was declared lost: it takes no part, unless its process is started again")

    def _shard_lost(self, shard: int, call: ShardCall, why: str) -> ShardLost:
        seconds = self.timeline.now - call.since
        return ShardLost(shard, f"server shard {shard}", f"server.{call.operation}", call.step, seconds, why)


class SimServer(StoreClient):
    """One worker's client: each call is a request to every shard, whose answers it awaits in virtual time."""

    def __init__(self, servers: SimServers, worker: int, generation: int) -> None:
        super().__init__(servers.spec, servers.stores, worker, generation)
        self._servers, self._numbers_ticks = servers, servers.has_copies
        self._calls = 0
        self._beside: ShardCall | None = None  # that goes on while this worker computes

    @override
    def initialize(self, center: Tensor) -> None:
        """As the contract. The first worker at the first shard gives to all: parts of two centers are never mixed."""
        (first,) = self._request("initialize", [Request(0, self._offer)])
        if first:
            super().initialize(center)
        else:
            self._ask("initialize", [lambda store: None] * self.shards, Load(needs_center=True))

    @override
    def close(self) -> None:
        with suppress(PeerLost, InvalidCall):  # there is nobody to say goodbye to
            super().close()

    @override
    def _ask(self, operation: str, acts: Sequence[Act], load: Load = NO_LOAD) -> list[Any]:
        return self._request(operation, [Request(shard, act, load) for shard, act in enumerate(acts)])

    def _request(self, operation: str, requests: list[Request]) -> list[Any]:
        """What the shards answer; raises the first error among it."""
        call = self._new_call(operation, requests)
        self._servers.exchange(call)
        return self._answers(call)

    def _new_call(self, operation: str, requests: list[Request]) -> ShardCall:
        """Once what goes on beside this worker is over."""
        self._end_beside()
        self._calls += 1
        if request_s := self._servers.compute.request:
            self._servers.timeline.sleep(request_s)
        cell = self._servers.timeline.cell()
        return ShardCall(self._worker, (self._generation, self._calls), operation, self.step, requests, cell)

    def _end_beside(self) -> None:
        if self._beside is not None:
            self._servers.wait_for(self._beside)
            self._beside = None

    def _answers(self, call: ShardCall) -> list[Any]:
        self.waited_s += max(request.held_s for request in call.requests)
        for request in call.requests:
            if isinstance(request.answer, Exception):
                raise request.answer
        return [request.answer for request in call.requests]

    @override
    def _begin(self, exchange: OpenExchange, bits: int | None) -> Callable[[], Exchanged]:
        """One request to each shard, which handles its parts one after the other; the worker goes on meanwhile."""
        update, into, parts = exchange.update, exchange.into, list[tuple[list[Act], Load]]()
        if update is not None:
            self._sequence += 1
            parts.append(self._acts_to_push(update, self._sequence, exchange.weight, 0, exchange.since))
        if into is not None:
            parts.append(self._acts_to_read("pull", into))
        answers: list[list[Any]] = [[] for _ in range(self.shards)]  # by shard, of push and pull

        def act(shard: int, store: Store) -> Any:
            answers[shard] = [acts[shard](store) for acts, _ in parts]
            return None if bits is None else self._act_to_tick(bits)(store)

        load = self._together([load for _, load in parts], brings=[] if into is None else parts[-1][1].work)
        call = self._new_call("exchange", [Request(shard, partial(act, shard), load) for shard in range(self.shards)])
        self._servers.send(call)
        self._beside = call

        def wait() -> Exchanged:
            self._end_beside()
            self._answers(call)
            by_part = [list(of_all) for of_all in zip(*answers, strict=True)]
            pushed = None if update is None else answers_to_push(by_part.pop(0))
            return self._exchanged(exchange, pushed, None if into is None else by_part.pop(0))

        return wait

    def _offer(self, store: Store) -> bool:
        """Whether this worker gives the first center: the first to offer, also after its process was replaced."""
        servers = self._servers
        if servers.giver is None and not all(one.initialized for one in servers.stores):
            servers.giver = self._worker
        return servers.giver == self._worker and not all(store.initialized for store in servers.stores)

    @override
    def _load_of_push(self, update: Tensor | Encoded, parts: Sequence[Tensor]) -> Load:
        """Shards work through the center, after decoding an encoded part; its encoding is waited for here."""
        decode_s: Sequence[float] = ()
        if isinstance(update, Encoded):
            codec, compute = codec_for(self.spec).name, self._servers.compute
            self._servers.timeline.work(compute.coding(codec, self._worker).encoding(update.n, update.nbytes))
            decode_s = [
                compute.coding(codec, -1 - shard).decoding(n, part.nbytes, 1)
                for shard, (n, part) in enumerate(zip(lengths_of(update), parts, strict=True))
            ]
        sizes = [part.nbytes for part in parts]
        centers = [store.center.nbytes if store.initialized else 0 for store in self._stores]
        return Load(sends=sizes, work=centers, decode_s=decode_s, again=True)

    def _together(self, loads: Sequence[Load], brings: Sequence[int]) -> Load:
        """Of a push and a pull in one request. brings: by shard, the bytes of the center."""

        def total(of_each: Sequence[Sequence[float]]) -> list[Any]:
            return [sum(one[shard] for one in of_each if one) for shard in range(self.shards)]

        return Load(
            needs_center=bool(brings),
            sends=total([load.sends for load in loads]),
            work=total([load.work for load in loads]),
            decode_s=total([load.decode_s for load in loads]),
            brings=brings,
        )
