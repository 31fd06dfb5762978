"""The batches that a proof takes."""

import planted
import pytest
from torch.utils.data import DataLoader

from manyhands.evidence.check.check import even_batches, uneven_batches
from manyhands.evidence.check.copies import TrialConfig


def test_the_tasks_own_batch_size_or_less_where_rows_are_few() -> None:
    even = even_batches(planted.task(epochs=3, max_steps=9), workers=2, steps=4)
    assert (even.batch_size, even.steps, even.total_steps) == (12, 4, 9)
    assert even_batches(planted.task(batch_size=64), workers=2, steps=4).batch_size == 13
    assert even_batches(planted.task(batch_size=64), workers=2, steps=4).total_steps == 4
    assert even_batches(planted.task(train_data=planted.rows(3)), workers=2, steps=4).batch_size == 2
    own = planted.task(batch_size=None, train_data=DataLoader(planted.Pairs(), 7))
    assert even_batches(own, workers=2, steps=4).batch_size is None


@pytest.mark.parametrize(
    ("workers", "one_row", "batch_size", "rows"),
    [(2, True, 11, 23), (2, False, 11, None), (3, True, 11, 23), (11, True, 13, 27)],
)
def test_batches_that_do_not_divide_and_a_single_row(
    workers: int, one_row: bool, batch_size: int, rows: int | None
) -> None:
    task = planted.task()
    found = uneven_batches(task, workers, TrialConfig(steps=4, batch_size=12), lambda: one_row)
    assert found is not None
    assert (found.batch_size, found.rows) == (batch_size, rows)
    assert found.batch_size % workers


def test_data_with_batches_of_its_own_is_left_as_it_is() -> None:
    batches = [list(range(i, i + 7)) for i in range(0, 35, 7)]
    own = planted.task(batch_size=None, train_data=DataLoader(planted.Pairs(), batch_sampler=batches))
    assert uneven_batches(own, 2, TrialConfig(steps=4, batch_size=None), lambda: True) is None
