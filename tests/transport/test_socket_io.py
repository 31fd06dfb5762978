"""What is left of buffers after a part of them was sent, and deadlines below a second."""

import socket

import pytest

from manyhands.transport.socket_io import Late, PlainWire


def test_many_pieces_arrive_whole():
    near, far = socket.socketpair()
    with near, far:
        near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        sender, receiver = PlainWire(near, 0.05), PlainWire(far, 5)
        sender.send([b"head", memoryview(b"body"), b""])
        into = memoryview(bytearray(8))
        receiver.receive(into)
        assert bytes(into) == b"headbody"
        with pytest.raises(Late) as late:  # the second piece finds no room: it is known that the first one left
            sender.send([bytes(1000), bytes(1_000_000)])
        assert late.value.moved


def test_what_the_kernel_takes_in_parts_arrives_in_order(monkeypatch):
    near, far = socket.socketpair()

    class Sparing:
        def sendmsg(self, buffers, *rest):
            return near.send(b"".join(buffers)[:3])

    with near, far:
        wire = PlainWire(near, 5)
        monkeypatch.setattr(wire, "_sock", Sparing())
        wire.send([b"header", b"", memoryview(b"and a body")])
        assert far.recv(100) == b"headerand a body"
