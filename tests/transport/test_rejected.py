"""Each stranger once in the log."""

import logging

from manyhands.transport import rejected
from manyhands.transport.rejected import RejectedPeers


def test_once_for_each_address(caplog):
    named = RejectedPeers()
    for address in ["10.0.0.1", "10.0.0.2", "10.0.0.1"]:
        named.name(address, "garbage")
    assert [record.args[0] for record in caplog.records] == ["10.0.0.1", "10.0.0.2"]
    assert {(record.name, record.levelno) for record in caplog.records} == {("manyhands", logging.WARNING)}


def test_a_flood_of_addresses_ends_with_a_word(caplog, monkeypatch):
    monkeypatch.setattr(rejected, "MOST_NAMED", 3)
    named = RejectedPeers()
    for number in range(10):
        named.name(f"fe80::{number}", "garbage" * 1000)
    assert len(caplog.records) == 3
    assert "no further one is named" in caplog.records[-1].getMessage()
    assert len(caplog.records[-1].getMessage()) < 500
