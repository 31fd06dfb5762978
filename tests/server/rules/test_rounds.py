"""The rule of rounds: when a round is over, and what it weighs."""

import json
import re
from fractions import Fraction
from typing import Any

import pytest
import torch

from manyhands.server.base import ServerSpec
from manyhands.server.pushes import Applied
from manyhands.server.rules import make_rule
from manyhands.server.rules.rounds import LAST
from manyhands.server.store import Store

F64 = torch.float64
PLAIN = {"rate": 1.0, "momentum": 0.0}  # the center goes to the weighted mean of the updates


class Rounds(Store):
    """With a center of 0, everybody taking part and looking at it."""

    def __init__(self, workers: int, **options: Any) -> None:
        super().__init__(make_rule(ServerSpec(rule="rounds", options={**PLAIN, **options})), workers)
        self.initialize(torch.zeros(1, dtype=F64))
        self.sequences, self.generations = [0] * workers, [0] * workers
        for worker in range(workers):
            self.activate(worker, 0)
            self.pull(worker)

    def give(self, worker: int, update: float, weight: float = 1.0, bits: int = 0) -> float:
        """Where the center is after this push, each of which is a version."""
        self.sequences[worker] += 1
        version = self.version
        reply = self.push(worker, self.sequences[worker], torch.tensor([update], dtype=F64), weight, bits)
        assert isinstance(reply, Applied)
        assert reply.version == version + 1
        return float(self.center)

    def gives(self, *pushes: tuple[int, float]) -> list[float]:
        return [self.give(*push) for push in pushes]

    def step(self, words: str) -> float:
        """The center after `0+2*3`: worker 0 pushes 2 with weight 3, with `!` at last; or a word, of a worker."""
        if push := re.fullmatch(r"(\d)\+([^*!]+)\*?(\d+)?(!?)", words):
            worker, update, weight, last = push.groups()
            return self.give(int(worker), float(update), float(weight or 1), LAST if last else 0)
        word, worker = words.rstrip("0123456789"), int("0" + words.strip("abcdefghijklmnopqrstuvwxyz"))
        match word:
            case "look":
                self.pull(worker)
            case "park":
                self.deactivate(worker)
            case "back":
                self.activate(worker, self.generations[worker])
            case "lose":
                self.leave(worker)
                self.generations[worker], self.sequences[worker] = self.generations[worker] + 1, 0
            case "quorum":
                self.rule.quorum = worker
            case "restore":
                self.restore(*self.capture())
            case "read":
                self.read()
        return float(self.center)


PARK = [f"park{worker}" for worker in range(3)]
TRAJECTORIES = """
all are in, and weigh by rows: 3 quorum=3: 2+8 0+2*3 1+5*4=34/8
what one pushes twice adds up, with both weights: 2 quorum=2: 0+1*2 0+2*4 1+9*6=72/12
no grace: 3 quorum=2 grace=0: 0+1 1+1=1
grace of 1, in each round: 3 quorum=2 grace=1: 0+1 1+1 0+1=5/3 0+3 1+3 0+0=14/3
grace of 2: 3 quorum=2 grace=2: 0+1 1+1 0+1 1+1=2
none is used up before: 3 quorum=2 grace=1: 0+1 0+1 0+1 1+1 0+1=17/5
when all are in nobody is waited for: 2 quorum=1 grace=9: 0+1 1+3=2
more than half of 1: 1 grace=0: 0+1=1
more than half of 2: 2 grace=0: 0+1 1+1=1
more than half of 3: 3 grace=0: 0+1 1+1=1
more than half of 4: 4 grace=0: 0+1 1+1 2+1=1
last pushes are of one round whoever is in it: 2 quorum=1 grace=0 momentum=.5: 0+1! 1+2! 0+3*2! park0 park1 read=21/4
the next look after last pushes ends the round, though others take part: 2 quorum=2: 0+1! 1+2! look0=3/2 look1 1+5 look1
what waits for a quorum counts when it is read while nobody takes part: \
3 quorum=3: 0+4 1+2 park0 read park1 read park2 read=3 read
who is back pushes into the open round, at its own age: 2 quorum=2 momentum=.5: 0+4 park0 park1 back0 back1 1+2=9/2
8 rows of who looked two rounds before weigh 8/3: 3 quorum=1 grace=0: 0+0 look0 0+0 look0 quorum2 2+6*8 0+3*4=21/5
who looks a moment before its own round is over is not late: \
2: 0+1 look0 1+5=3 look1 0+1 look0 1+5=6 look1 0+1 look0 1+5=9
9 rows weigh 3 after one's own round and two without one: \
3 quorum=2 grace=0: 0+0 look0 1+0 look1 2+0 look2 1+0 look1 2+0 look2 1+0 look1 2+0 look2 0+4*9=3
a late push is of the next round: 3 quorum=2 grace=0: 0+2 1+4=3 2+6 0+3=7
a pull while nobody takes part sees the closed round: 2 quorum=2: 0+4*2 park0 park1 look1=4 back0 back1 1+9*2 0+3*4=9
everybody has seen a restored center: \
3 quorum=1 grace=0: 0+0 look0 park0 park1 park2 restore back0 back1 back2 quorum2 2+6*8 0+3*4=5
in rank order, else a part of the sum would be rounded away: 4 quorum=4: 0+1e17 1+1 2+-1e17 3+1=1/4
the same in another order: 4 quorum=4: 3+1 1+1 0+1e17 2+-1e17=1/4
who is lost is not waited for: 3 quorum=3: 0+2 lose2 1+4=3
the last one that is waited for is lost: 3 quorum=3: 0+2 1+4 lose2=3 lose2
who comes back is waited for: 2 quorum=2: lose1 back1 0+2 1+4=3
a lost one's push counts, but not for those who live: 4 quorum=2 grace=5: 0+1 lose0 1+2 2+3 3+6=3
"""
"""By hand: workers, options, and steps, each alone or with where the center goes then; else it stays."""


def test_trajectories() -> None:
    for line in TRAJECTORIES.strip().splitlines():
        _, setting, steps = line.split(": ")
        workers, *options = setting.split()
        store, center = (
            Rounds(
                int(workers),
                **{
                    name: float(value) if "." in value else int(value)
                    for name, value in (option.split("=") for option in options)
                },
            ),
            0.0,
        )
        for number, step in enumerate(steps.split()):
            words, _, moved = step.partition("=")
            center = float(Fraction(moved)) if moved else center
            assert store.step(words) == pytest.approx(center, rel=0, abs=2e-15), (line, number, words)


def test_a_round_is_closed_into_the_memory_that_the_server_gives() -> None:
    """Readers of the old center see no half of the new one; reading again makes no version."""
    store = Rounds(2, quorum=2)
    buffers = [torch.zeros(1, dtype=F64) for _ in range(9)]
    store.next_buffer = lambda: buffers.pop()
    store.give(0, 4.0)
    old = store.center
    for words in PARK[:2]:
        store.step(words)
    for _ in range(2):
        assert (float(store.read()), float(old), store.version) == (4.0, 0.0, 1)


PUSHES = ((0, 1.0), (1, 2.0), (2, 5.0), (2, 1.0), (1, -4.0), (0, 3.0), (2, 2.0), (1, 7.0), (0, 1.0))


def test_a_snapshot_has_the_open_round_and_goes_on_from_there() -> None:
    """Taking it changes nothing; what the store had before it is restored is forgotten."""
    for at in range(1, len(PUSHES)):
        first, second = (Rounds(3, rate=0.5, momentum=0.9, quorum=3, grace=2) for _ in range(2))
        first.gives(*PUSHES[:at])
        second.gives((0, 9.0), (2, 8.0))
        vectors, numbers = first.capture()
        second.restore({name: vector.clone() for name, vector in vectors.items()}, json.loads(json.dumps(numbers)))
        for worker in range(3):  # a restored store takes it that everybody looks
            first.pull(worker)
        assert first.gives(*PUSHES[at:]) == second.gives(*PUSHES[at:]), at
        for words in PARK:
            first.step(words)
            second.step(words)
        assert torch.equal(first.read(), second.read()), at


def test_a_snapshot_after_last_pushes_or_of_more_workers_than_go_on_leaves_the_round_open() -> None:
    """What workers pushed that are no more counts: (2 + 4 + 6 + 8) / 4."""
    store, other = Rounds(2), Rounds(2)
    for words in ("0+1!", "1+1!", *PARK[:2]):
        store.step(words)
    other.restore(*store.capture())
    for worker in range(2):
        other.activate(worker, 1)
    assert float(other.center) == 0.0
    assert other.step("look0") == 1.0
    store, fewer = Rounds(4, quorum=4), Rounds(2, quorum=2, grace=9)
    store.gives((1, 2.0), (2, 4.0), (3, 6.0))
    fewer.restore(*store.capture())
    assert fewer.give(0, 8.0) == 5.0
