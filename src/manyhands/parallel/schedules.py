"""Who computes which micro-batch when: the orders in which stages go forward and back. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

Schedule = Literal["1f1b", "gpipe"]
SCHEDULES: tuple[Schedule, ...] = ("1f1b", "gpipe")


@dataclass(frozen=True, slots=True)
class Action:
    """One pass of one stage over one micro-batch.

    Forward: it receives from the stage before, if there is one, and sends to the next one. Back: the other way.
    """

    forward: bool
    micro: int

    def source(self, stage: int, stages: int) -> int | None:
        """The stage from which it receives; None: from none."""
        other = stage - 1 if self.forward else stage + 1
        return other if 0 <= other < stages else None

    def target(self, stage: int, stages: int) -> int | None:
        """The stage to which it sends; None: to none."""
        other = stage + 1 if self.forward else stage - 1
        return other if 0 <= other < stages else None


def actions(schedule: Schedule, stages: int, micro_batches: int, stage: int) -> list[Action]:
    """Of one stage, in order.

    gpipe: all forward, then all back. Huang et al., GPipe: Efficient Training of Giant Neural Networks using Pipeline
    Parallelism, 2019.

    1f1b: as many forward as there are stages behind this one, then one forward and one back in turn. Fewer micro-batches
    are held. Narayanan et al., PipeDream: Generalized Pipeline Parallelism for DNN Training, 2019.
    """
    ahead = micro_batches if schedule == "gpipe" else min(stages - 1 - stage, micro_batches)
    order = [Action(True, micro) for micro in range(ahead)]
    for micro in range(ahead, micro_batches):
        order += [Action(True, micro), Action(False, micro - ahead)]
    return order + [Action(False, micro) for micro in range(micro_batches - ahead, micro_batches)]


def in_flight(order: Sequence[Action]) -> int:
    """The most micro-batches that a stage has gone forward with, and not yet back."""
    held = most = 0
    for action in order:
        held += 1 if action.forward else -1
        most = max(most, held)
    return most


def bubble(stages: int, micro_batches: int) -> float:
    """The share of a step in which a stage waits, where all stages take equally long: (K - 1) / (M + K - 1)."""
    return (stages - 1) / (micro_batches + stages - 1)


def micro_batches_of(rows: int, most: int | None, size: int | None) -> Iterator[tuple[int, int]]:
    """[start, stop) of the micro-batches of so many rows: of `size` rows each, or at most `most`, as equal as whole rows
    allow but for the last."""
    length = size if size is not None else -(-rows // min(rows, most or 1))
    for start in range(0, rows, max(1, length)):
        yield start, min(start + length, rows)
