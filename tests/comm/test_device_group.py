"""Which workers have a GPU of their own: a pure decision."""

import pytest

from manyhands.comm.device_group import has_own_gpu


@pytest.mark.parametrize("wanted", ["auto", "cuda"])
@pytest.mark.parametrize(
    ("workers", "gpus", "own"), [(2, 2, True), (2, 8, True), (3, 2, False), (1, 1, True), (2, 0, False)]
)
def test_each_its_own_where_there_are_enough(wanted, workers, gpus, own):
    assert has_own_gpu(wanted, workers, gpus) is own


@pytest.mark.parametrize(
    ("wanted", "workers", "own"), [("cuda:0", 2, False), ("cuda:0", 1, True), ("cpu", 2, False), ("cpu", 1, False)]
)
def test_one_device_for_all_is_nobodys_own(wanted, workers, own):
    assert has_own_gpu(wanted, workers, 8) is own
