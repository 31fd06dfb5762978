from __future__ import annotations

from typing import Any

import pytest

from manyhands.engines.base import LaunchSpec, check_counts
from manyhands.errors import BadInput
from manyhands.server.base import ServerSpec

SERVED = ServerSpec(rule="add")


@pytest.mark.parametrize("count", [0, -3, 1.5, True, None])
def test_a_count_is_a_whole_number_of_at_least_one(count: Any) -> None:
    with pytest.raises(BadInput, match=f"workers must be a whole number of at least 1, not {count}"):
        check_counts(LaunchSpec(workers=count))
    with pytest.raises(BadInput, match=f"servers must be a whole number of at least 1, not {count}"):
        check_counts(LaunchSpec(workers=1, servers=count, server=SERVED))


def test_shards_are_counted_only_where_there_is_a_server() -> None:
    check_counts(LaunchSpec(workers=1, servers=0))
    check_counts(LaunchSpec(workers=1, servers=1, server=SERVED))
