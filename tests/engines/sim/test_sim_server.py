"""The simulated server passes the conformance suite, also over a network that loses messages; its times and its faults."""

import math
import weakref
from collections.abc import Callable
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from sim_world import outside, run, servers_of

from manyhands.engines.sim.timeline import Deadlock, Timeline
from manyhands.errors import ManyhandsError, PeerLost
from manyhands.server.base import ServerSpec
from manyhands.server.client import ShardLost
from manyhands.server.store import InvalidCall
from manyhands.testing.server_suite import SERVER_SUITE

ADD, IN_STEP, BOUND_1 = (ServerSpec(rule="add", bound=bound) for bound in (None, 0, 1))
QUORUM = ServerSpec(rule="quorum", bound=16)
NETWORKS = {
    "free": ("", ""),
    "lossy": ("latency=1ms,bandwidth=1Mbit", "drop=0.1,duplicate=0.1,delay=0.1:0.5,reorder=0.1"),
}


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("check", SERVER_SUITE)
def test_conformance(check: str, network: str) -> None:
    @contextmanager
    def open_servers(spec: ServerSpec, workers: int, shards: int) -> Any:
        with outside(servers_of(Timeline(), spec, workers, shards, *NETWORKS[network])) as clients:
            yield clients

    SERVER_SUITE[check](open_servers)


class World:
    """Workers' programs, each of which gets (its client, the world), on a timeline with a server."""

    def __init__(
        self, spec: ServerSpec = ADD, workers: int = 1, shards: int = 1, network: str = "", faults: str = "",
        compute: str = "", seed: int = 0, timeout_s: float = math.inf,
    ) -> None:  # fmt: skip
        self.timeline = Timeline(seed)
        self.servers = servers_of(self.timeline, spec, workers, shards, network, faults, compute, seed, timeout_s)
        self.ends: dict[int, tuple[Any, float]] = {}
        self.timeline.on_end = lambda one: self.ends.update({one.name: (one.error, self.timeline.now)})

    def start(self, rank: int, program: Callable[..., Any]) -> Any:
        return self.timeline.start(rank, partial(program, self.servers.clients[rank], self), at=self.timeline.now)

    def run(self, *programs: Callable[..., Any]) -> list[Any]:
        """Their values; errors are raised."""
        return run(self.timeline, [partial(one, self.servers.clients[i], self) for i, one in enumerate(programs)])

    def kill(self, rank: int, at: float, lost_at: float) -> None:
        self.timeline.at(at, lambda: self.timeline.programs[rank].kill())
        self.timeline.at(lost_at, lambda: self.servers.lose(rank))

    @property
    def now(self) -> float:
        return self.timeline.now

    def sleep(self, seconds: float) -> None:
        self.timeline.sleep(seconds)

    def until(self, time: float) -> None:
        self.sleep(time - self.now)


def taken(world: World, function: Callable[[], Any]) -> float:
    """Virtual seconds."""
    before = world.now
    function()
    return world.now - before


def ready(client: Any, n: int = 1000) -> None:
    client.initialize(torch.zeros(n))
    client.activate()


def pulled(client: Any, n: int = 1) -> list[float]:
    client.pull(into := torch.zeros(n))
    return into.tolist()


def pushing(at: float, *times: float) -> Callable[..., Any]:
    """A worker that pushes ones at these times; it gives the seconds of the last one."""

    def program(client: Any, world: World) -> float:
        ready(client, 1)
        for time in (at, *times):
            world.until(time)
            spent = taken(world, lambda: client.push(torch.ones(1)))
        return spent

    return program


# -- time ------------------------------------------------------------------------------------------------------------


def test_calls_take_a_message_there_and_back() -> None:
    """1 s of latency each way, 1 kB/s: a push of 4,000 bytes travels 4 s there, a pull 4 s back; control is latency; without a
    bound a tick is no message."""
    world = World(network="latency=1,bandwidth=8000")

    def program(client: Any, world: World) -> Any:
        ready(client)
        vector = torch.ones(1000)
        calls = {
            "push": lambda: client.push(vector),
            "pull": lambda: client.pull(vector),
            "center": lambda: client.center(vector),
            "activate": client.activate,
            "tick": lambda: client.tick(5),
            "deactivate": client.deactivate,
            "capture": client.capture,
        }
        return {name: taken(world, call) for name, call in calls.items()}, client.tick(5)

    ((times, bits),) = world.run(program)
    wanted = {"push": 6, "pull": 6, "center": 6, "activate": 2, "tick": 0, "deactivate": 2, "capture": 6}
    assert (times, bits) == (pytest.approx(wanted), 5)


def test_only_who_is_first_sends_its_center() -> None:
    """The others ask whether they are, and wait until it is there."""

    def program(client: Any, world: World) -> tuple[float, int]:
        client.initialize(torch.full((1000,), world.now))
        return world.now, client.ledger.total_bytes

    world = World(workers=3, network="latency=1,bandwidth=8000")
    assert sorted(world.run(program, program, program)) == [(8.0, 0), (8.0, 0), (8.0, 4000)]


def test_a_shard_works_on_one_push_at_a_time() -> None:
    def program(client: Any, world: World) -> float:
        ready(client)
        world.sleep(100.0)
        return taken(world, lambda: client.push(torch.ones(1000)))

    world = World(
        workers=3, compute="request=2,merge=1ms"
    )  # 2 s a call, in which the shard is free for others; 4 s a push
    assert sorted(world.run(program, program, program)) == pytest.approx([6.0, 10.0, 14.0])


def test_time_at_the_gate_is_waiting_and_the_way_there_is_not() -> None:
    world = World(IN_STEP, workers=2, network="latency=1")

    def program(seconds: float, client: Any, world: World) -> tuple[float, float]:
        ready(client)
        world.sleep(5.0)  # all have begun
        world.sleep(seconds)
        waited = client.waited_s
        return taken(world, client.tick), client.waited_s - waited

    fast, slow = world.run(partial(program, 0.0), partial(program, 7.0))
    assert fast == pytest.approx((9.0, 7.0), abs=2.1)
    assert slow == pytest.approx((2.0, 0.0), abs=2.1)
    assert fast[0] - fast[1] == pytest.approx(2.0)


def test_a_pull_is_what_the_shard_has_when_it_handles_it() -> None:
    """Not when it was asked for, nor when the answer arrives: pushes are handled at 20.5 and 23.0, the pull at 21.0."""
    world = World(workers=2, network="latency=1")

    def puller(client: Any, world: World) -> Any:
        ready(client, 1)
        world.until(20.0)
        return pulled(client), world.now

    assert world.run(puller, pushing(19.5, 22.0))[0] == ([1.0], 22.0)


# -- messages --------------------------------------------------------------------------------------------------------


class Fates:
    """What happens to each message is written down; to later ones nothing."""

    def __init__(self) -> None:
        self.fates: list[list[float]] = []

    def copies(self) -> list[float]:
        return self.fates.pop(0) if self.fates else [0.0]


def written(network: str = "latency=1", faults: str = "drop=0.5,retry=10", **options: Any) -> World:
    """A world whose messages' fates are written down."""
    world = World(network=network, faults=faults, **options)
    world.servers._messages = Fates()  # type: ignore[assignment]
    return world


def scripted(world: World, *fates: list[float]) -> None:
    """The next messages' fates."""
    world.servers._messages.fates = list(fates)  # type: ignore[union-attr]


def resent(client: Any) -> int:
    return int(client.ledger.as_dict().get("resent", {"messages": 0})["messages"])


@pytest.mark.parametrize(
    ("fates", "seconds", "times"),
    [
        ([[0.0], [0.0]], 2.0, 0),
        ([[], [0.0], [0.0]], 13.0, 1),  # the request is lost, which should have arrived at 1
        ([[0.0], [], [0.0], [0.0]], 14.0, 1),  # the answer is, which should have arrived at 2
        ([[0.0, 0.0, 3.0], [0.0], [0.0], [0.0]], 2.0, 0),  # three requests arrive
        ([[15.0], [0.0], [0.0], [0.0]], 13.0, 1),  # it comes after its repetition
        ([[0.0], [15.0], [0.0], [0.0]], 14.0, 1),  # so does its answer
    ],
)
def test_a_push_is_applied_once(fates: list[list[float]], seconds: float, times: int) -> None:
    world = written()

    def program(client: Any, world: World) -> Any:
        ready(client, 3)
        scripted(world, *fates)
        update = torch.ones(3)
        spent = taken(world, lambda: client.push(update))
        update.fill_(100.0)
        world.sleep(40.0)
        return spent, pulled(client, 3), resent(client)

    assert world.run(program) == [(seconds, [1.0] * 3, times)]


def test_a_request_that_comes_again_gets_the_answer_that_was_lost() -> None:
    """Not what the shard has by then: the push is there at 26, and the pull comes for the second time at 33."""
    world = written(workers=2)

    def puller(client: Any, world: World) -> list[float]:
        ready(client, 1)
        world.until(20.0)
        scripted(world, [0.0], [])
        return pulled(client)

    assert world.run(puller, pushing(25.0))[0] == [0.0]


def test_a_late_copy_of_a_pull_does_not_touch_the_tensor() -> None:
    """Whether or not it is this worker's newest request."""

    def puller(between: bool, client: Any, world: World) -> float:
        ready(client, 1)
        world.until(20.0)
        scripted(world, [0.0, 30.0])
        client.pull(into := torch.zeros(1))
        into.fill_(7.0)
        if between:
            client.center(torch.zeros(1))
        world.sleep(60.0)
        return float(into)

    for between in (False, True):
        assert written(workers=2).run(partial(puller, between), pushing(30.0))[0] == 7.0


def test_a_shard_that_never_answers_is_lost_at_last() -> None:
    """Nobody waits for ever: for one whose messages are lost, or that stands still."""
    with pytest.raises(ShardLost, match="did not answer for 300 s"):
        World(faults="drop=0.999999,retry=1", timeout_s=300).run(lambda client, world: client.activate())
    world = World(timeout_s=5)

    def program(client: Any, world: World) -> None:
        ready(client, 1)
        world.servers.shards[0].pause(100.0)
        client.push(torch.ones(1))

    with pytest.raises(ShardLost, match="did not answer for 5 s"):
        world.run(program)
    assert world.now == 5.0


def test_a_deadlock_is_seen_also_where_messages_get_lost() -> None:
    """Who waits for others does not ask again for ever."""

    def waits(client: Any, world: World) -> None:
        ready(client, 1)
        world.sleep(50.0)
        client.tick()

    with pytest.raises(Deadlock, match="0 waits for its answer of server.tick"):
        World(IN_STEP, workers=2, faults="drop=0.1").run(waits, lambda client, world: ready(client, 1))


def test_nothing_is_sent_again_while_it_is_on_its_way() -> None:
    """A push takes 8 s on the wire, and four workers share a card: one lost control message starts no storm. Nor in the queue."""
    world = written("latency=1ms,bandwidth=1000", "drop=0.5,retry=0.2", workers=4)

    def program(client: Any, world: World) -> int:
        ready(client, 250)
        for _ in range(3):
            client.push(torch.ones(250))
        return resent(client)

    scripted(world, [])  # the very first one
    assert sorted(world.run(program, program, program, program)) == [0, 0, 0, 1]
    assert world.now == pytest.approx(8 * 13, rel=0.1)
    world = written(compute="merge=10s")
    assert world.run(pushing(10.0)) == [42.0]
    assert resent(world.servers.clients[0]) == 0


# -- who waits too long ----------------------------------------------------------------------------------------------


def test_who_waits_for_a_push_or_a_first_center_too_long_hears_for_what() -> None:
    with pytest.raises(PeerLost, match="worker 1 on host1 made no progress") as raised:
        World(QUORUM, workers=2, timeout_s=5).run(pushing(10.0), pushing(110.0))
    assert raised.value.rank == 1
    with pytest.raises(ManyhandsError, match="waited 5 s in server.pull for .* one worker must call server.initialize"):
        World(timeout_s=5).run(lambda client, world: client.pull(torch.zeros(1)))


def test_answers_are_not_kept() -> None:
    """Of a rule that answers, each worker would have a vector for ever."""

    def program(client: Any, world: World) -> Any:
        ready(client, 3)
        return weakref.ref(client.push(torch.ones(3)).answer)()

    assert World(QUORUM).run(program) == [None]


# -- faults ----------------------------------------------------------------------------------------------------------


def test_what_is_sent_to_a_shard_that_is_gone_is_lost_and_it_knows_who_waits_at_its_gate() -> None:
    """Also where it would arrive after it is back: sent at 1 it would at 11, but the shard is back at 5, and asked again then."""
    world = World(network="latency=10")
    world.timeline.at(100.0, lambda: world.servers.restart_shard(0, 5.0))
    assert world.run(pushing(101.0)) == [4.0 + 20.0]

    def ticking(at: float, client: Any, world: World) -> float:
        ready(client, 1)
        world.until(at)
        client.tick()
        return world.now

    world = World(IN_STEP, workers=2, network="latency=1")
    world.timeline.at(25.0, lambda: world.servers.restart_shard(0, 5.0))
    assert world.run(partial(ticking, 20.0), partial(ticking, 40.0)) == [42.0, 42.0]


def test_a_lost_worker_holds_nobody_up() -> None:
    """CASE 11: it blocks the others at the bound until it is declared lost, and then no longer. What it pushed before counts; what
    it says while it dies reaches nobody, nor does what was under way when it was declared lost."""

    def survivor(bound: int, client: Any, world: World) -> Any:
        ready(client, 2)
        world.until(20.0)
        for _ in range(bound + 2):
            client.tick()
        return world.now, pulled(client, 2)

    def victim(client: Any, world: World) -> None:
        ready(client, 2)
        world.until(20.0)
        client.push(torch.ones(2))
        try:
            world.sleep(100.0)
        finally:
            client.close()

    for bound in (0, 1):
        world = World(ServerSpec(rule="add", bound=bound), workers=2, shards=2, network="latency=1")
        living, dying = world.start(0, partial(survivor, bound)), world.start(1, victim)
        world.kill(1, 23.0, 40.0)
        world.timeline.run()
        assert (living.error, dying.error) == (None, None)
        end, center = living.value
        assert 40.0 < end < 50.0
        assert center == [1.0, 1.0]
    world = World(workers=2, network="latency=5")
    for rank, time in enumerate((60.0, 40.0)):
        world.start(rank, pushing(time))
    world.kill(1, 42.0, 43.0)
    world.timeline.run()
    assert world.servers.stores[0].center.tolist() == [1.0]


def test_who_was_declared_lost_and_lives_is_refused() -> None:
    world = World(workers=2, network="latency=1")

    def program(client: Any, world: World) -> None:
        ready(client, 1)
        world.timeline.at(world.now + 0.5, lambda: world.servers.lose(0))
        for call in (lambda: client.pull(torch.zeros(1)), client.activate):
            with pytest.raises(InvalidCall, match="declared lost"):
                call()
        client.close()

    world.run(program)


def test_a_first_center_that_will_never_come_is_not_waited_for() -> None:
    """Who was first died before it had given its center."""
    world = World(workers=3, network="latency=1")

    def other(begins: float, client: Any, world: World) -> None:
        world.sleep(begins)
        client.initialize(torch.ones(1))

    for rank, begins in enumerate((0.0, 0.5, 10.0)):  # one waits already, one comes later
        world.start(rank, partial(other, begins))
    world.kill(0, 1.5, 7.0)
    world.timeline.run()
    for rank, when in ((1, 8.0), (2, 14.0)):
        error, end = world.ends[rank]
        assert isinstance(error, PeerLost)
        assert (error.rank, end) == (0, when)


def test_a_restarted_worker_begins_anew() -> None:
    """The push of its old process is under way, and forgotten; its sequence numbers begin at 1; the gate goes on with it."""
    world = World(BOUND_1, workers=2, network="latency=5")
    pushed = []

    def worker(rank: int, client: Any, world: World) -> None:
        ready(client, 1)
        for _ in range(3):
            client.push(torch.full((1,), float(1 + 100 * rank)))
            pushed.append(rank)
            client.tick()
        client.deactivate()

    def again() -> None:
        world.timeline.left -= 1
        world.servers.restart(1)
        world.start(1, partial(worker, 1))

    for rank in range(2):
        world.start(rank, partial(worker, rank))
    world.timeline.left += 1
    world.timeline.at(32.0, world.timeline.programs[1].kill)  # its first push was given to the network at 30
    world.timeline.at(33.0, again)
    world.timeline.run()
    assert [error for error, _ in world.ends.values()] == [None, None]
    store = world.servers.stores[0]
    assert store.center.tolist() == [float(sum(1 + 100 * rank for rank in pushed))]
    assert pushed.count(1) == 3
    assert store._states[1].generation == 1
