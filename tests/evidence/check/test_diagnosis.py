"""What follows from the differences of trials: shares, and causes that could not be judged; trials are a table here."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest

from manyhands.evidence.check.copies import DATA, SLICES, SUMMED, WORKERS
from manyhands.evidence.check.diagnosis import Attribution
from manyhands.evidence.check.interventions import BATCH_NORM, DROPOUT, IN_PLACE
from manyhands.evidence.check.report import BREAKS, Finding, Suspect, finding

REMEDIES = {"coupled-rows": SLICES, "summed-loss": SUMMED, "data-order": DATA, "hidden-state": ""}
REMEDIES |= {"nondeterministic-operator": "", "depends-on-workers": WORKERS}


@dataclass
class Table:
    """The difference of a trial with these causes left in; where it is not said, the largest of one of them."""

    alone: Mapping[str, float]
    together: Mapping[frozenset[str], float]
    limit: float = 1e-10

    def difference(self, without: frozenset[str]) -> float:
        left = frozenset(kind for kind in self.alone if REMEDIES.get(kind, kind) not in without)
        return self.together.get(left, max((self.alone[kind] for kind in left), default=0.0))

    def steps(self, without: frozenset[str]) -> tuple[Any, ...]:
        return ()


def judged(alone: Mapping[str, float], together: Mapping[tuple[str, ...], float] | None = None) -> dict[str, Finding]:
    table: Any = Table(alone, {frozenset(kinds): value for kinds, value in (together or {}).items()})
    suspects = [Suspect(finding(kind, BREAKS, kind), REMEDIES.get(kind, kind)) for kind in alone]
    found = Attribution(table, suspects, table.difference(frozenset())).run()
    return {one.kind: one for one in found}


def test_a_share_is_of_the_sum_of_what_all_make_alone_and_of_batch_norm_on_top_of_coupled_rows() -> None:
    found = judged({DROPOUT: 1.2, "coupled-rows": 0.3}, {(DROPOUT, "coupled-rows"): 1.8})
    assert {kind: one.share for kind, one in found.items()} == pytest.approx({DROPOUT: 0.8, "coupled-rows": 0.2})
    assert found[DROPOUT].alone == 1.2
    assert list(found) == [DROPOUT, "coupled-rows"]
    apart = {BATCH_NORM: 0.4, "coupled-rows": 0.3}
    both = (BATCH_NORM, "coupled-rows")
    found = judged(apart, {both: 0.9})
    assert found[BATCH_NORM].alone == pytest.approx(0.6)
    assert sum(one.share or 0.0 for one in found.values()) == pytest.approx(1)
    hidden = judged(apart, {both: 0.2})
    assert hidden[BATCH_NORM].share is None
    assert "coupled-rows hides it: with it 2.0e-01, without it 3.0e-01" in hidden[BATCH_NORM].unjudged
    assert hidden["coupled-rows"].share == 1


def test_what_no_trial_takes_away_has_what_is_left_and_others_what_goes_beyond_it() -> None:
    found = judged({"hidden-state": 0.5, SUMMED: 0.4, DROPOUT: 0.1}, {("hidden-state", SUMMED): 0.8})
    assert found["hidden-state"].alone == 0.5
    assert found[SUMMED].alone == pytest.approx(0.3)
    assert "hides it" in found[DROPOUT].unjudged
    assert found["hidden-state"].share == pytest.approx(0.5 / 0.8)
    found = judged({"hidden-state": 0.5, "nondeterministic-operator": 0.2})
    assert found["hidden-state"].share == 1
    assert found["nondeterministic-operator"].unjudged == "it cannot be separated from hidden-state"


def test_a_suspect_without_a_difference_is_a_note_with_share_0_unless_it_breaks_equality_elsewhere() -> None:
    found = judged({DROPOUT: 0.5, "depends-on-workers": 0.0, IN_PLACE: 0.0, "hidden-state": 0.0})
    assert (found["depends-on-workers"].share, found["depends-on-workers"].breaks) == (0.0, False)
    assert (found[IN_PLACE].share, found[IN_PLACE].breaks) == (None, True)
    assert "by itself" in found[IN_PLACE].unjudged
    assert "nothing is left" in found["hidden-state"].unjudged
    assert found[DROPOUT].share == 1
    fails = judged({"coupled-rows": float("inf"), DROPOUT: 0.5})  # workers fail with it: it has all of the difference
    assert (fails["coupled-rows"].share, fails[DROPOUT].share) == (1, 0)
