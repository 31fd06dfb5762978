"""Who trains what since the last round, and who gets the slices of those who are lost."""

import json
import random
from collections import Counter

from manyhands.data.slice_ledger import Carried, Place, SliceLedger


def ledger(**fields: object) -> SliceLedger:
    return SliceLedger(**{"round": 3, "epoch": 1, "first": 4, "members": (5, 7, 8), **fields})


def test_slices_of_the_lost_are_dealt_evenly_to_those_who_are_left() -> None:
    assert ledger().slices(7, 6) == [Place(4, 1, 3), Place(5, 1, 3)]  # those of its rank
    assert ledger().slices(7, 4) == ledger().slices(6, 6) == []
    after, orphaned = ledger().reassign(7, [5, 8])
    assert orphaned == [Place(4, 1, 3), Place(5, 1, 3), Place(6, 1, 3)]
    assert after.dealt == {5: (Place(4, 1, 3), Place(6, 1, 3)), 8: (Place(5, 1, 3),)}
    assert after.slices(5, 7) == [*ledger().slices(5, 7), *after.dealt[5]]
    assert SliceLedger.of_json(json.loads(json.dumps(after.as_json()))) == after
    after, orphaned = ledger().reassign(7, [5, 7, 8])  # nobody is lost
    assert orphaned == []
    assert all(after.slices(one, 7) == ledger().slices(one, 7) for one in (5, 7, 8))


def test_each_slice_belongs_to_one_survivor_whatever_the_losses() -> None:
    """All slices of a window, through any losses, are someone's who is left, each once."""
    draws = random.Random(0)
    for _ in range(200):
        members = draws.sample(range(20), draws.randint(2, 6))
        first, until = sorted(draws.choices(range(12), k=2))
        now = SliceLedger(round=0, epoch=0, first=first, members=tuple(members))
        left = members
        while len(left) > 1:
            left = draws.sample(left, draws.randint(1, len(left)))
            now, _ = now.reassign(until, sorted(left))
            found = Counter(place for one in left for place in now.slices(one, until))
            whole = [Place(tick, part, len(members)) for tick in range(first, until) for part in range(len(members))]
            assert found == Counter(whole), (members, first, until, left)


def test_what_a_server_has_of_the_lost_is_not_dealt() -> None:
    """A push of global batch 2 was its last, so that its window began before that of those who are left."""
    _, orphaned = ledger().reassign(7, [5, 8], {7: Carried(3, 0)})
    assert orphaned == [Place(tick, 1, 3) for tick in (3, 4, 5, 6)]
    once, _ = ledger().reassign(7, [5, 8])
    _, orphaned = once.reassign(7, [5], {8: Carried(7, 0)})
    assert orphaned == [Place(5, 1, 3)]
    assert once.reassign(7, [5], {8: Carried(7, 1)})[1] == []


def test_newer_is_the_later_epoch_then_the_later_round_then_the_one_with_more_losses() -> None:
    again, _ = ledger().reassign(6, [5, 7])
    ages = [ledger().age, again.age, ledger(round=4).age, ledger(round=4, epoch=2, first=0).age]
    assert ages == sorted(ages)
    assert len(set(ages)) == 4
