"""Which of this host's addresses the workers of other hosts are told, where it listens on all."""

from __future__ import annotations

import pytest

from manyhands.engines.hosts.engine import _common_address
from manyhands.errors import BadInput


@pytest.mark.parametrize(
    ("came_by", "expected"),
    [
        ({"beta": "10.0.0.1", "gamma": "10.1.0.1"}, "10.0.0.1"),
        ({"alpha (2)": "127.0.0.1", "alpha (3)": "127.0.0.1"}, "127.0.0.1"),
        ({"beta": "fd00::1"}, "fd00::1"),
    ],
)
def test_the_first_by_which_a_host_came(came_by: dict[str, str], expected: str) -> None:
    assert _common_address(came_by) == expected


@pytest.mark.parametrize("loopback", ["127.0.0.1", "::1"])
def test_who_came_over_loopback_is_reached_by_nobody_else(loopback: str) -> None:
    with pytest.raises(
        BadInput, match=r"^alpha \(2\) joined over loopback, .*: on that host, join with the address 10\.0\.0\.1 too"
    ):
        _common_address({"alpha (2)": loopback, "beta": "10.0.0.1"})
