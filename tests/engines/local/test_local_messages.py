from __future__ import annotations

import os

import pytest

from manyhands.engines.local.messages import Closed, ControlSocket, Status, create_status_page


def pair() -> tuple[ControlSocket, ControlSocket]:
    here, there = ControlSocket.pair()
    return here, ControlSocket(there)


def test_messages_arrive_in_order_whatever_their_size() -> None:
    a, b = pair()
    sent = [{"i": i, "text": "x" * (i * 500)} for i in range(20)]
    for message in sent:
        a.send(message)
    got = []
    while len(got) < len(sent):
        got += [message.body for message in b.receive()]
    assert got == sent
    a.close()
    b.close()


def test_descriptors_travel_beside_their_message() -> None:
    a, b = pair()
    read, write = os.pipe()
    a.send({"none": 1})
    a.send({"two": 2}, [read, write])
    os.close(read)
    os.close(write)
    messages = []
    while len(messages) < 2:
        messages += b.receive()
    assert [len(message.fds) for message in messages] == [0, 2]
    os.write(messages[1].fds[1], b"through")
    assert os.read(messages[1].fds[0], 100) == b"through"
    for fd in messages[1].fds:
        assert not os.get_inheritable(fd)
        os.close(fd)
    a.close()
    b.close()


def test_what_was_sent_before_the_end_is_received() -> None:
    a, b = pair()
    a.send({"last": "words"})
    a.close()
    assert b.hung_up()
    assert [message.body for message in b.receive()] == [{"last": "words"}]
    with pytest.raises(Closed):
        b.receive()
    b.close()


def test_not_waiting_returns_at_once() -> None:
    a, b = pair()
    b.sock.settimeout(60)
    assert b.receive(wait=False) == []
    assert not b.readable(0)
    assert not b.hung_up()
    a.close()
    b.close()


def test_what_one_mapping_of_a_status_page_writes_another_reads() -> None:
    fd = create_status_page()
    ours, theirs = Status(fd), Status(fd)
    os.close(fd)
    assert theirs.read() is None
    ours.write("compute", 7)
    assert theirs.read() == ("compute", 7)
    ours.write("a phase of somebody's own that has a name beyond all measure", 2**40)
    assert theirs.read() == ("a phase of somebody's own that has a nam", 2**40)
    ours.close()
    theirs.close()
