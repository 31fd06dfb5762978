"""A store that took another's image answers every later call as that one does, to the bit."""

import json
import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from manyhands.errors import ManyhandsError
from manyhands.server.base import ServerSpec
from manyhands.server.replication.log import Call, Entry, make
from manyhands.server.rules import RULES, make_rule
from manyhands.server.store import Store

WORKERS, N = 3, 5
OPTIONS: dict[str, dict[str, Any]] = {
    "distance": {"rate": 0.1},
    "outer": {"optimizer": "Adam", "rate": 0.1},
    "quorum": {"backups": 1},
    "elastic": {"alpha": 0.3},
}
CALLS = (
    ["PUSH"] * 9 + ["TICK"] * 5 + ["ACTIVATE"] * 3 + ["PULL", "PULL", "READ", "DEACTIVATE", "LEAVE", "FENCE", "AGAIN"]
)


class Calls:
    """Random calls of workers, the same for every store; refused ones too."""

    def __init__(self, seed: int) -> None:
        self.random, self.generator = random.Random(seed), torch.Generator().manual_seed(seed)
        self.generations, self.sequences, self.ticks = [0] * WORKERS, [0] * WORKERS, [0] * WORKERS

    def next(self) -> Entry:
        worker, name = self.random.randrange(WORKERS), self.random.choice(CALLS)
        if name == "ACTIVATE" and self.random.random() < 0.2:
            self.generations[worker] += 1
            self.sequences[worker] = self.ticks[worker] = 0
        self.sequences[worker] += name == "PUSH"
        self.ticks[worker] += name == "TICK"
        numbers = {"PUSH": self.sequences, "AGAIN": self.sequences, "TICK": self.ticks}.get(name, self.generations)
        update = torch.randn(N, generator=self.generator, dtype=torch.float64)
        weight, bits = self.random.choice([0.0, 1.0, 2.5]), self.random.randrange(4)
        return Entry(0, Call["PUSH" if name == "AGAIN" else name], worker, numbers[worker], weight, bits, (update,))


def made(store: Store, entry: Entry) -> Any:
    """What the store says to a call, as text, with all that it released."""
    try:
        reply = make(store, replace(entry, vectors=tuple(vector.clone() for vector in entry.vectors)))
    except ManyhandsError as error:
        reply = error
    released, store.released = store.released, []
    return [repr(reply), repr(released), store.version, store.center.tolist()]


def empty(rule: str, bound: int | None) -> Store:
    return Store(make_rule(ServerSpec(rule=rule, options=OPTIONS.get(rule, {}))), WORKERS, bound)


def opened(rule: str, bound: int | None) -> Store:
    store = empty(rule, bound)
    store.initialize(torch.zeros(N, dtype=torch.float64))
    for worker in range(WORKERS):
        store.activate(worker, 0)
    return store


def copied(store: Store, rule: str, bound: int | None) -> Store:
    (vectors, numbers), other = store.image(), empty(rule, bound)
    other.take_image({name: vector.clone() for name, vector in vectors.items()}, json.loads(json.dumps(numbers)))
    return other


@pytest.mark.parametrize("bound", [None, 0, 2])
@pytest.mark.parametrize("rule", RULES)
def test_a_copy_goes_on_as_the_store_does(rule: str, bound: int | None) -> None:
    for seed in range(4):
        calls, store = Calls(seed), opened(rule, bound)
        copies: list[Store] = []
        for index in range(60):
            if index % 15 == 7:
                copies.append(copied(store, rule, bound))
            call = calls.next()
            wanted = made(store, call)
            for copy in copies:
                assert made(copy, call) == wanted, (seed, index, call)


def test_a_store_without_a_center_is_copied_too() -> None:
    store = empty("add", None)
    store.activate(1, 4)
    other = copied(store, "add", None)
    for one in (store, other):
        one.initialize(torch.zeros(N))
        one.push(1, 1, torch.ones(N), 1.0, 0)
        assert one.center.eq(1).all()
