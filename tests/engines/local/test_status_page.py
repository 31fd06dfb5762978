"""The page on which a worker leaves its phase and step."""

from __future__ import annotations

import os

from manyhands.engines.local.status_page import Status, create


def test_what_one_mapping_writes_another_reads() -> None:
    fd = create()
    ours, theirs = Status(fd), Status(fd)
    os.close(fd)
    assert theirs.read() is None
    ours.write("compute", 7)
    assert theirs.read() == ("compute", 7)
    ours.write("a phase of somebody's own that has a name beyond all measure", 2**40)
    assert theirs.read() == ("a phase of somebody's own that has a nam", 2**40)
    ours.close()
    theirs.close()
