"""Who sends what to whom in a round of gossip. Pure: ranks and numbers in, turns out; the same on all ranks."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

Graph = Literal["ring", "exponential", "random"]
Edge = tuple[int, int, float]  # source, target, the share of the source's that goes over


@dataclass(frozen=True, slots=True)
class Turn:
    """What one rank does at a time: it sends to one, receives from one (the same, or another), or both at once."""

    target: int | None = None
    source: int | None = None
    given: float = 0.0  # the share of this rank's that goes to `target`
    gotten: float = 0.0  # the share of the source's that comes


Round = tuple[tuple[Turn, ...], ...]
"""By rank: its turns, one after the other."""


def edges(graph: Graph, size: int, number: int, *, one_way: bool = False, seed: int = 0) -> list[Edge]:
    """The messages of round `number` among `size` workers. What a worker does not send it keeps: columns sum to 1.

    Without `one_way` rows sum to 1 too (doubly stochastic): the mean of all is preserved, each counting the same.

    ring: a third to each neighbour; with two workers, a half. D-PSGD, Lian et al., 2017. One way: a half to the right.
    exponential: a half to the worker 2^k further on, k = number modulo ceil(log2 size): one peer a round. The mean of
        2^m workers is exact after m rounds. Stochastic Gradient Push, Assran et al., 2019; Exponential Graph is
        Provably Efficient for Decentralized Deep Training, Ying et al., 2021. It is one way, and doubly stochastic all
        the same.
    random: a matching, drawn from seed and number: half and half; of an odd number one worker sits out. One way: each
        sends a half to one worker drawn out of all others, so that some get much and some nothing.
    """
    if size == 1:
        return []
    if graph == "exponential":
        return _around(size, 1 << _phase(graph, size, number), 0.5)
    if graph == "ring":
        return _around(size, 1, 0.5) if one_way or size == 2 else _around(size, 1, 1 / 3) + _around(size, -1, 1 / 3)
    draw = random.Random(f"{seed} {number}")
    return _targets(draw, size) if one_way else _matching(draw, size)


def _around(size: int, step: int, share: float) -> list[Edge]:
    return [(rank, (rank + step) % size, share) for rank in range(size)]


def _matching(draw: random.Random, size: int) -> list[Edge]:
    ranks = list(range(size))
    draw.shuffle(ranks)
    pairs = sorted((min(pair), max(pair)) for pair in zip(ranks[::2], ranks[1::2], strict=False))
    return [edge for a, b in pairs for edge in ((a, b, 0.5), (b, a, 0.5))]


def _targets(draw: random.Random, size: int) -> list[Edge]:
    others = [draw.randrange(size - 1) for _ in range(size)]
    return [(rank, other + (other >= rank), 0.5) for rank, other in enumerate(others)]


def _phase(graph: Graph, size: int, number: int) -> int:
    """Rounds of one phase are the same."""
    if graph == "random":
        return number
    return number % (size - 1).bit_length() if graph == "exponential" and size > 1 else 0


# -- turns -------------------------------------------------------------------------------------------------------------


def round_of(graph: Graph, size: int, number: int, *, one_way: bool = False, seed: int = 0) -> Round:
    """The messages of `edges`, by rank, in turns."""
    return _round_of(graph, size, _phase(graph, size, number), one_way, seed)


@lru_cache(maxsize=32)  # a simulated cluster asks once for each worker
def _round_of(graph: Graph, size: int, phase: int, one_way: bool, seed: int) -> Round:
    sides: list[list[Turn]] = [[] for _ in range(size)]
    for turn in in_turns(edges(graph, size, phase, one_way=one_way, seed=seed)):
        to = {source: (target, share) for source, target, share in turn}
        of = {target: (source, share) for source, target, share in turn}
        for rank in sorted(to.keys() | of.keys()):
            (target, given), (source, gotten) = to.get(rank, (None, 0.0)), of.get(rank, (None, 0.0))
            sides[rank].append(Turn(target, source, given, gotten))
    return tuple(tuple(side) for side in sides)


def in_turns(messages: list[Edge]) -> list[list[Edge]]:
    """The messages, each in the first turn in which its source does not send yet, nor its target receive.

    Nobody waits in a circle: whoever is in the earliest turn that is not over meets ranks that are in it too, or will
    be; and within a turn a `swap` is one (see `Group.swap`). Each graph that is a permutation is one turn, a ring both
    ways two.
    """
    turns: list[list[Edge]] = []
    busy: list[tuple[set[int], set[int]]] = []  # by turn: who sends, who receives
    for edge in messages:
        source, target, _ = edge
        turn = next((t for t, (to, of) in enumerate(busy) if source not in to and target not in of), len(turns))
        if turn == len(turns):
            turns.append([])
            busy.append((set(), set()))
        turns[turn].append(edge)
        busy[turn][0].add(source)
        busy[turn][1].add(target)
    return turns
