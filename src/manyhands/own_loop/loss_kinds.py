"""What each loss of a loop is over the rows of a worker's slice, which says how the workers' gradients become one process's."""

from __future__ import annotations

from dataclasses import dataclass

from manyhands.errors import Line, Unsupported
from manyhands.own_loop.backward_watch import Roots
from manyhands.own_loop.loss_graph import EITHER, MEAN, MIXED, SUM, UNKNOWN, OverRows, over_rows, rows_meet
from manyhands.own_loop.rank_zero import RankZeroLines
from manyhands.worker import Worker

_MEETING = "rows of a batch look at each other in it (a product or a variance over the batch)"
_REMEDY = (
    'Give --batches whole (batches="whole"), whose loss is one process\'s whatever it is, or call mh.weight(what its mean divides by) before backward(), or '
    'mh.weight("sum") if all of it is a sum over rows'
)


@dataclass(frozen=True)
class LossKind:
    """What a loss is over rows."""

    name: str  # MEAN or SUM
    divisor: float | None  # of a mean: what it divides by, where that is not the rows


class LossKinds:
    """By the line of a backward, agreed on by all workers at the first one there."""

    def __init__(self, worker: Worker) -> None:
        self._worker, self._say = worker, RankZeroLines(worker.rank)
        self._known: dict[Line, str] = {}

    def of(self, roots: Roots, rows: float, *, together: bool, exact: bool) -> LossKind:
        """Of the backward that begins. A collective at the first one of a line, where workers are in step.

        rows: of this worker's slice; 0: a stand-in. together: workers are in step. exact: they are to compute what one
        process does.

        Raises Unsupported, on all workers alike, for a loss that is neither a mean nor a sum.
        """
        own = _found(roots, rows)
        known = self._known.get(roots.line)
        if known is None:
            known = self._known[roots.line] = self._agreed(roots, own, together, exact)
        elif own.kind == MIXED or (own.kind in (MEAN, SUM) and own.kind != known):
            raise Unsupported(
                f"the loss was {known} over rows at first, and here it is {own.kind}: write a line for each. {_REMEDY}"
            )
        return LossKind(known, own.divisor)

    def _agreed(self, roots: Roots, own: OverRows, together: bool, exact: bool) -> str:
        meets = exact and roots.loss is not None and rows_meet(roots.loss)
        mine = [own.kind, _MEETING if meets else own.why]
        everyone = self._worker.group.all_gather_json(mine) if together else [mine]
        kinds = {kind for kind, _ in everyone}
        why = next((why for _, why in everyone if why), "")
        if not why and SUM in kinds and not kinds <= {SUM, EITHER}:
            why = "it is a sum over the rows of some workers"
        if not why and kinds == {EITHER}:
            why = "of so few rows a sum and a mean are the same"
        if why:
            raise Unsupported(f"slices of a batch do not show what this loss is over the whole batch: {why}. {_REMEDY}")
        found = SUM if SUM in kinds else MEAN
        if found == SUM or UNKNOWN in kinds:
            taken = (
                "a sum over rows, so the workers' gradients are added"
                if found == SUM
                else "taken as a mean over rows: mh.weight says otherwise"
            )
            self._say(f"{roots.line}: the loss is {taken}")
        return found


def _found(roots: Roots, rows: float) -> OverRows:
    if roots.loss is None:
        return OverRows(UNKNOWN)
    return over_rows(roots.loss, rows) if rows else OverRows(EITHER)
