"""The simulated server passes the conformance suite, also over a network that loses messages; its times and its faults."""

import math
import weakref
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from sim_world import outside, servers_of

from manyhands.engines.sim.timeline import Deadlock, Timeline
from manyhands.errors import ManyhandsError, PeerLost
from manyhands.server.base import ServerSpec
from manyhands.server.client import ShardLost
from manyhands.server.store import InvalidCall
from manyhands.testing.server_suite import SERVER_SUITE

ADD, IN_STEP = ServerSpec(rule="add"), ServerSpec(rule="add", bound=0)
FREE, LOSSY = ("", ""), ("latency=1ms,bandwidth=1Mbit", "drop=0.1,duplicate=0.1,delay=0.1:0.5,reorder=0.1")


@pytest.mark.parametrize(("network", "faults"), [FREE, LOSSY], ids=["free", "lossy"])
@pytest.mark.parametrize("check", SERVER_SUITE.values(), ids=SERVER_SUITE)
def test_conformance(check, network, faults):
    @contextmanager
    def open_servers(spec, workers, shards):
        with outside(servers_of(Timeline(), spec, workers, shards, network, faults)) as clients:
            yield clients

    check(open_servers)


class World:
    """Workers' programs, each of which gets (its client, the world), on a timeline with a server."""

    def __init__(self, spec=ADD, workers=1, shards=1, network="", faults="", compute="", seed=0, timeout_s=math.inf):
        self.timeline = Timeline(seed)
        self.servers = servers_of(self.timeline, spec, workers, shards, network, faults, compute, seed, timeout_s)
        self.ends = {}
        self.timeline.on_end = lambda one: self.ends.update({one.name: (one.error, self.timeline.now)})

    def start(self, rank, program):
        client = self.servers.clients[rank]
        return self.timeline.start(rank, partial(program, client, self), at=self.timeline.now)

    def run(self, *programs):
        """Their values; errors are raised."""
        started = [self.start(rank, program) for rank, program in enumerate(programs)]
        self.timeline.run()
        for program in started:
            if program.error is not None:
                raise program.error
        return [program.value for program in started]

    @property
    def now(self):
        return self.timeline.now

    def sleep(self, seconds):
        self.timeline.sleep(seconds)


def taken(world, function):
    """Virtual seconds."""
    before = world.now
    function()
    return world.now - before


def ready(client, n=1000):
    client.initialize(torch.zeros(n))
    client.activate()


# -- time ------------------------------------------------------------------------------------------------------------


def test_calls_take_a_message_there_and_back():
    """1 s of latency each way, 1 kB/s: a push of 4,000 bytes travels 4 s there, a pull 4 s back; control is latency."""
    world = World(network="latency=1,bandwidth=8000")

    def program(client, world):
        ready(client)
        vector = torch.ones(1000)
        calls = {
            "push": lambda: client.push(vector),
            "pull": lambda: client.pull(vector),
            "center": lambda: client.center(vector),
            "activate": client.activate,
            "deactivate": client.deactivate,
            "capture": client.capture,
        }
        return {name: taken(world, call) for name, call in calls.items()}

    (times,) = world.run(program)
    assert times == pytest.approx({"push": 6, "pull": 6, "center": 6, "activate": 2, "deactivate": 2, "capture": 6})


def test_only_who_is_first_sends_its_center():
    """The others ask whether they are, and wait until it is there."""
    world = World(workers=3, network="latency=1,bandwidth=8000")

    def program(client, world):
        client.initialize(torch.full((1000,), world.now))
        return world.now, client.ledger.total_bytes

    values = world.run(program, program, program)
    assert sorted(values) == [(8.0, 0), (8.0, 0), (8.0, 4000)]


def test_a_shard_works_on_one_push_at_a_time():
    """compute.merge: 1 ms a byte, 4 s a push; who comes third waits for two."""
    world = World(workers=3, compute="merge=1ms")

    def program(client, world):
        ready(client)
        world.sleep(100.0)
        return taken(world, lambda: client.push(torch.ones(1000)))

    assert sorted(world.run(program, program, program)) == pytest.approx([4.0, 8.0, 12.0])


def test_a_call_takes_its_worker_time_in_which_the_shard_is_free_for_others():
    """compute.request: 2 s a call, beside 4 s of merging; who comes second waits for the merging alone."""
    world = World(workers=2, compute="request=2,merge=1ms")

    def program(client, world):
        ready(client)
        world.sleep(100.0)
        return taken(world, lambda: client.push(torch.ones(1000)))

    assert sorted(world.run(program, program)) == pytest.approx([6.0, 10.0])


def test_without_a_bound_a_tick_is_no_message():
    world = World(network="latency=1")

    def program(client, world):
        ready(client)
        return taken(world, lambda: client.tick(5)), client.tick(5)

    assert world.run(program) == [(0.0, 5)]


def test_time_at_the_gate_is_waiting_and_the_way_there_is_not():
    world = World(ServerSpec(rule="add", bound=0), workers=2, network="latency=1")

    def program(seconds, client, world):
        ready(client)
        world.sleep(5.0)  # all have begun
        world.sleep(seconds)
        waited = client.waited_s
        return taken(world, client.tick), client.waited_s - waited

    fast, slow = world.run(partial(program, 0.0), partial(program, 7.0))
    assert fast == pytest.approx((9.0, 7.0), abs=2.1)
    assert slow == pytest.approx((2.0, 0.0), abs=2.1)
    assert fast[0] - fast[1] == pytest.approx(2.0)


def test_a_pull_is_what_the_shard_has_when_it_handles_it():
    """Not when it was asked for, nor when the answer arrives."""
    world = World(workers=2, network="latency=1")

    def puller(client, world):
        ready(client, 1)
        world.sleep(20.0 - world.now)
        into = torch.zeros(1)
        client.pull(into)
        return float(into), world.now

    def pusher(client, world):
        ready(client, 1)
        for time in (19.5, 22.0):  # handled at 20.5 and 23.0: the pull at 21.0
            world.sleep(time - world.now)
            client.push(torch.ones(1))

    assert world.run(puller, pusher)[0] == (1.0, 22.0)


def test_ties_are_the_seeds():
    def first_come(seed):
        world, log = World(workers=6, seed=seed), []

        def program(rank, client, world):
            ready(client, 6)
            for _ in range(2):
                world.sleep(1.0)
                client.push(torch.ones(6))
                log.append((rank, client.drain_journal()["pushes"][-1][0]))

        world.run(*[partial(program, rank) for rank in range(6)])
        return log

    assert first_come(1) == first_come(1)
    assert first_come(1) != first_come(2)


# -- messages --------------------------------------------------------------------------------------------------------


class Fates:
    """What happens to each message is written down; to later ones nothing."""

    def __init__(self, *fates):
        self.fates = list(fates)

    def copies(self):
        return self.fates.pop(0) if self.fates else [0.0]


def scripted(world, *fates):
    """The next messages' fates."""
    world.servers._messages.fates = list(fates)


def written(**options):
    """A world whose messages' fates are written down."""
    world = World(network="latency=1", faults="drop=0.5,retry=10", **options)
    world.servers._messages = Fates()
    return world


@pytest.mark.parametrize(
    ("fates", "seconds", "resent"),
    [
        ([[0.0], [0.0]], 2.0, 0),
        ([[], [0.0], [0.0]], 13.0, 1),  # the request is lost, which should have arrived at 1
        ([[0.0], [], [0.0], [0.0]], 14.0, 1),  # the answer is, which should have arrived at 2
        ([[0.0, 0.0, 3.0], [0.0], [0.0], [0.0]], 2.0, 0),  # three requests arrive
        ([[15.0], [0.0], [0.0], [0.0]], 13.0, 1),  # it comes after its repetition
        ([[0.0], [15.0], [0.0], [0.0]], 14.0, 1),  # so does its answer
    ],
)
def test_a_push_is_applied_once(fates, seconds, resent):
    world = written()

    def program(client, world):
        ready(client, 3)
        scripted(world, *fates)
        update = torch.ones(3)
        spent = taken(world, lambda: client.push(update))
        update.fill_(100.0)
        world.sleep(40.0)
        into = torch.zeros(3)
        client.pull(into)
        return spent, into.tolist(), client.ledger.as_dict().get("resent", {"messages": 0})["messages"]

    assert world.run(program) == [(seconds, [1.0] * 3, resent)]


def test_a_tick_counts_once_however_often_it_arrives():
    world = written(spec=ServerSpec(rule="add", bound=1), workers=1)

    def program(client, world):
        ready(client, 1)
        scripted(world, [0.0, 0.5, 1.0])
        client.tick()
        world.sleep(5.0)

    world.run(program)
    assert world.servers.stores[0]._gate.finished(0) == 1


@pytest.mark.parametrize("between", [False, True], ids=["newest", "older"])
def test_a_late_copy_of_a_pull_does_not_touch_the_tensor(between):
    world = written(workers=2)
    into = torch.zeros(1)

    def puller(client, world):
        ready(client, 1)
        world.sleep(20.0 - world.now)
        scripted(world, [0.0, 30.0])
        client.pull(into)
        into.fill_(7.0)
        if between:  # it is not this worker's newest request any more
            client.center(torch.zeros(1))
        world.sleep(60.0)
        return float(into)

    def pusher(client, world):
        ready(client, 1)
        world.sleep(30.0)
        client.push(torch.ones(1))

    assert world.run(puller, pusher)[0] == 7.0


def test_a_held_answer_that_gets_lost_is_asked_for_again():
    world = written(spec=IN_STEP, workers=2)

    def first(client, world):
        ready(client, 1)
        world.sleep(20.0 - world.now)
        client.tick()
        return world.now

    def second(client, world):
        ready(client, 1)
        world.sleep(50.0 - world.now)
        scripted(world, [0.0], [], [])  # the request arrives; both answers are lost
        client.tick()
        return world.now

    # both answers leave at 51, and are missed 10 s later at the latest
    for end in world.run(first, second):
        assert 60.0 < end <= 65.0


def test_a_shard_that_never_answers_is_lost_at_last():
    """Nobody waits for ever."""
    world = World(faults="drop=0.999999,retry=1", timeout_s=300)

    def program(client, world):
        client.activate()

    with pytest.raises(ShardLost, match="did not answer for 300 s"):
        world.run(program)


def test_a_deadlock_is_seen_also_where_messages_get_lost():
    """Who waits for others does not ask again for ever."""
    world = World(IN_STEP, workers=2, faults="drop=0.1")

    def waits(client, world):
        ready(client, 1)
        world.sleep(50.0)
        client.tick()

    def forgets(client, world):
        ready(client, 1)

    with pytest.raises(Deadlock, match="0 waits for its answer of server.tick"):
        world.run(waits, forgets)


def test_nothing_is_sent_again_while_it_is_on_its_way():
    """A push takes 8 s on the wire, and four workers share a card: one lost control message starts no storm."""
    world = World(workers=4, network="latency=1ms,bandwidth=1000", faults="drop=0.5,retry=0.2")
    world.servers._messages = Fates()

    def program(client, world):
        ready(client, 250)
        for _ in range(3):
            client.push(torch.ones(250))
        return client.ledger.as_dict().get("resent", {"messages": 0})["messages"]

    scripted(world, [])  # the very first one
    values = world.run(program, program, program, program)
    assert sorted(values) == [0, 0, 0, 1]
    assert world.now == pytest.approx(8 * 13, rel=0.1)


def test_nothing_is_sent_again_while_it_is_in_the_queue():
    world = written(compute="merge=10s")

    def program(client, world):
        ready(client, 2)
        client.push(torch.ones(2))
        return client.ledger.as_dict().get("resent")

    assert world.run(program) == [None]


def test_who_waits_for_a_worker_too_long_hears_for_whom():
    """It is not said of those who wait themselves; and what is on its way for long is not late."""
    world = World(ServerSpec(rule="add", bound=1), workers=3, network="latency=20", timeout_s=5)

    def program(seconds, client, world):
        ready(client, 1)
        world.sleep(200.0 - world.now + seconds)
        for _ in range(9):
            client.tick()

    started = [world.start(rank, partial(program, 1000.0 * (rank == 1))) for rank in range(3)]
    world.timeline.run()
    for rank in (0, 2):
        error = started[rank].error
        assert isinstance(error, PeerLost)
        assert (error.rank, error.host, error.operation, error.step) == (1, "host1", "server.tick", 2)
        assert "made no progress for 5 s" in str(error)
        assert world.ends[rank][1] == pytest.approx(200 + 20 + 20 + 20 + 5)


def test_an_answer_that_waits_for_another_workers_push_names_that_worker():
    world = World(ServerSpec(rule="quorum", bound=16), workers=2, timeout_s=5)

    def program(seconds, client, world):
        ready(client, 1)
        world.sleep(10.0 + seconds)
        client.push(torch.ones(1))

    with pytest.raises(PeerLost, match="worker 1 on host1 made no progress") as raised:
        world.run(partial(program, 0.0), partial(program, 100.0))
    assert raised.value.rank == 1


def test_who_waits_too_long_for_a_first_center_hears_it():
    world = World(timeout_s=5)
    with pytest.raises(ManyhandsError, match="waited 5 s in server.pull for .* one worker must call server.initialize"):
        world.run(lambda client, world: client.pull(torch.zeros(1)))


def test_a_shard_that_stands_still_for_long_is_lost():
    world = World(timeout_s=5)

    def program(client, world):
        ready(client, 1)
        world.servers.shards[0].pause(100.0)
        client.push(torch.ones(1))

    with pytest.raises(ShardLost, match="did not answer for 5 s"):
        world.run(program)
    assert world.now == 5.0


def test_answers_are_not_kept():
    """Of a rule that answers, each worker would have a vector for ever."""
    world = World(ServerSpec(rule="quorum", bound=16))

    def program(client, world):
        ready(client, 3)
        first = client.push(torch.ones(3)).answer
        kept = weakref.ref(first)
        del first
        return kept()

    assert world.run(program) == [None]


# -- faults ----------------------------------------------------------------------------------------------------------


def test_a_paused_shard_answers_later():
    world = World(network="latency=1")

    def program(client, world):
        ready(client, 1)
        world.servers.shards[0].pause(10.0)
        return taken(world, lambda: client.push(torch.ones(1)))

    assert world.run(program) == [11.0]


def test_a_pause_stops_the_work_on_a_push():
    world = World(compute="merge=1s")

    def program(client, world):
        ready(client, 1)
        world.timeline.at(world.now + 1.0, lambda: world.servers.shards[0].pause(10.0))
        return taken(world, lambda: client.push(torch.ones(1)))

    assert world.run(program) == [11.0]


@pytest.mark.parametrize("when", [0.5, 1.0, 1.5])
def test_a_restarted_shard_has_its_store_and_nothing_else(when):
    """Whether the request or the answer was under way: it is sent again when the shard is back, and applied once."""
    world = World(network="latency=1")

    def program(client, world):
        ready(client, 2)
        client.push(torch.ones(2))
        world.timeline.at(world.now + when, lambda: world.servers.restart_shard(0, 5.0))
        spent = taken(world, lambda: client.push(torch.ones(2)))
        into = torch.zeros(2)
        client.pull(into)
        return spent, into.tolist(), client.ledger.as_dict()["resent"]["messages"]

    assert world.run(program) == [(when + 5.0 + 2.0, [2.0, 2.0], 1)]


def test_what_is_sent_to_a_shard_that_is_gone_is_lost():
    """Also where it would arrive after it is back: sent at 1 it would at 11, but the shard is back at 5, and asked again then."""
    world = World(network="latency=10")

    def program(client, world):
        ready(client, 1)
        world.servers.restart_shard(0, 5.0)
        world.sleep(1.0)
        return taken(world, lambda: client.push(torch.ones(1)))

    assert world.run(program) == [4.0 + 20.0]


def test_a_restarted_shard_knows_who_waits_at_its_gate():
    world = World(IN_STEP, workers=2, network="latency=1")

    def program(seconds, client, world):
        ready(client, 1)
        world.sleep(20.0 - world.now + seconds)
        client.tick()
        return world.now

    world.timeline.at(25.0, lambda: world.servers.restart_shard(0, 5.0))
    assert world.run(partial(program, 0.0), partial(program, 20.0)) == [42.0, 42.0]


def test_a_killed_shard_is_everybodys_loss():
    world = World(ServerSpec(rule="add", bound=0), workers=2, shards=2, network="latency=1")

    def program(seconds, client, world):
        ready(client, 2)
        world.sleep(20.0 - world.now + seconds)
        try:
            client.tick()
        finally:
            client.close()

    world.timeline.at(25.0, lambda: world.servers.kill_shard(1))
    with pytest.raises(ShardLost):
        world.run(partial(program, 0.0), partial(program, 20.0))
    (first, when), (second, then) = world.ends[0], world.ends[1]
    assert isinstance(first, PeerLost)
    assert (first.shard, first.operation, first.step, first.seconds) == (1, "server.tick", 1, 5.0)
    assert when == 25.0
    assert isinstance(second, PeerLost)
    assert then == 40.0


@pytest.mark.parametrize("bound", [0, 1])
def test_a_lost_worker_holds_nobody_up(bound):
    """CASE 11: it blocks the others at the bound until it is declared lost, and then no longer."""
    world = World(ServerSpec(rule="add", bound=bound), workers=2, shards=2, network="latency=1")

    def survivor(client, world):
        ready(client, 2)
        world.sleep(20.0 - world.now)
        for _ in range(bound + 2):
            client.tick()
        into = torch.zeros(2)
        client.center(into)
        return world.now, into.tolist()

    def victim(client, world):
        ready(client, 2)
        world.sleep(20.0 - world.now)
        client.push(torch.ones(2))
        world.sleep(100.0)

    living, dying = world.start(0, survivor), world.start(1, victim)
    world.timeline.at(23.0, dying.kill)
    world.timeline.at(40.0, lambda: world.servers.lose(1))
    world.timeline.run()
    assert living.error is None
    end, center = living.value
    assert 40.0 < end < 50.0
    assert center == [1.0, 1.0], "what a worker pushed before it died counts"


def test_what_comes_from_the_lost_is_ignored():
    """Its push was under way when it was declared lost."""
    world = World(workers=2, network="latency=5")

    def victim(client, world):
        ready(client, 1)
        world.sleep(40.0 - world.now)
        client.push(torch.ones(1))

    def survivor(client, world):
        ready(client, 1)
        world.sleep(60.0 - world.now)
        into = torch.zeros(1)
        client.pull(into)
        return float(into)

    living, dying = world.start(0, survivor), world.start(1, victim)
    world.timeline.at(42.0, dying.kill)
    world.timeline.at(43.0, lambda: world.servers.lose(1))
    world.timeline.run()
    assert living.value == 0.0


def test_who_was_declared_lost_and_lives_is_refused():
    world = World(workers=2, network="latency=1")

    def program(client, world):
        ready(client, 1)
        world.sleep(20.0 - world.now)
        world.timeline.at(world.now + 0.5, lambda: world.servers.lose(0))
        with pytest.raises(InvalidCall, match="declared lost"):
            client.pull(torch.zeros(1))
        with pytest.raises(InvalidCall, match="declared lost"):
            client.activate()
        client.close()

    world.run(program)


def test_a_first_center_that_will_never_come_is_not_waited_for():
    """Who was first died before it had given its center."""
    world = World(workers=3, network="latency=1")

    def other(begins, client, world):
        world.sleep(begins)
        client.initialize(torch.ones(1))

    world.start(0, lambda client, world: client.initialize(torch.ones(1)))
    for rank, begins in ((1, 0.5), (2, 10.0)):  # one waits already, one comes later
        world.start(rank, partial(other, begins))
    world.timeline.at(1.5, world.timeline.programs[0].kill)
    world.timeline.at(7.0, lambda: world.servers.lose(0))
    world.timeline.run()
    for rank, when in ((1, 8.0), (2, 14.0)):
        error, end = world.ends[rank]
        assert isinstance(error, PeerLost)
        assert (error.rank, end) == (0, when)


def test_a_restarted_worker_begins_anew():
    """The push of its old process is under way, and forgotten; its sequence numbers begin at 1; the gate goes on with it."""
    world = World(ServerSpec(rule="add", bound=1), workers=2, network="latency=5")
    pushed = []

    def worker(rank, client, world):
        ready(client, 1)
        for _ in range(3):
            client.push(torch.full((1,), float(1 + 100 * rank)))
            pushed.append(rank)
            client.tick()
        client.deactivate()

    def again():
        world.servers.restart(1)
        world.start(1, partial(worker, 1))

    world.start(0, partial(worker, 0))
    victim = world.start(1, partial(worker, 1))
    world.timeline.left += 1
    world.timeline.at(32.0, victim.kill)  # its first push was given to the network at 30
    world.timeline.at(33.0, lambda: (setattr(world.timeline, "left", world.timeline.left - 1), again()))
    world.timeline.run()
    assert [error for error, _ in world.ends.values()] == [None, None]
    store = world.servers.stores[0]
    assert store.center.tolist() == [float(sum(1 + 100 * rank for rank in pushed))]
    assert pushed.count(1) == 3
    assert store._states[1].generation == 1


def test_what_a_process_asked_before_it_was_restarted_is_forgotten():
    """Its `begin` was under way: nobody must wait for it."""
    world = World(ServerSpec(rule="add", bound=1), network="latency=5")
    victim = world.start(0, lambda client, world: client.activate())
    world.timeline.at(1.0, victim.kill)
    world.timeline.at(2.0, lambda: world.servers.restart(0))
    while world.timeline.advance():
        pass
    assert world.now == 5.0
    assert world.servers.stores[0]._gate.active == []


def test_the_dead_do_not_say_goodbye():
    """A killed worker's `close` reaches nobody: the gate waits for it until it is declared lost."""
    world = World(IN_STEP, workers=2)

    def survivor(client, world):
        ready(client, 1)
        world.sleep(10.0)
        client.tick()
        return world.now

    def victim(client, world):
        ready(client, 1)
        try:
            world.sleep(100.0)
        finally:
            client.close()

    living, dying = world.start(0, survivor), world.start(1, victim)
    world.timeline.at(5.0, dying.kill)
    world.timeline.at(30.0, lambda: world.servers.lose(1))
    world.timeline.run()
    assert living.value == 30.0
    assert dying.error is None
