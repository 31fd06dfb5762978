"""Frames, channels and hellos that nobody meant: refused as such, in bounded memory, and the next peer is served."""

import dataclasses
import json
import socket
from typing import Any

import torch
from socket_pairs import HELLO, PROOF, aside, name, raw

from fuzzing import ODD_NUMBERS, Damage, bounded, survive
from manyhands.transport.channel import ChannelClosed
from manyhands.transport.frame import (
    HEADER_BYTES,
    MAX_BLOB_BYTES,
    MAX_TENSOR_BYTES,
    Frame,
    FrameError,
    from_json,
    pack,
    unpack,
)
from manyhands.transport.hello import HandshakeRefused, Peer, listen_to, speak_to
from manyhands.transport.listener import Listener, connect

HEADERS = [
    pack(Frame(kind=1)),
    pack(Frame(kind=9, dtype=torch.float32, elements=4, generation=1, sequence=7, weight=2.5, a=-1, b=3)),
    pack(Frame(kind=255, dtype=torch.complex128, elements=1 << 20, blob=b"x" * 17)),
]
STREAM = pack(Frame(kind=9, dtype=torch.float32, elements=4, blob=b"{}")) + b"{}" + bytes(16)


def test_headers(inputs: int) -> None:
    damage = Damage(1)

    def take(data: bytes) -> None:
        frame, length = unpack(data)
        assert length <= MAX_BLOB_BYTES
        assert frame.tensor_bytes <= MAX_TENSOR_BYTES
        assert unpack(pack(dataclasses.replace(frame, blob=bytes(length)))) == (frame, length)

    def drawn() -> bytes:
        data = damage.of_bytes(*HEADERS)
        return data if damage.random() < 0.2 else (data + bytes(HEADER_BYTES))[:HEADER_BYTES]

    taken, refused = survive(take, (drawn() for _ in range(inputs)), FrameError)
    assert taken > inputs / 50
    assert refused > inputs / 50


def test_blobs(inputs: int) -> None:
    damage = Damage(2)
    valid = [HELLO, json.dumps({"reason": "no", "list": [1, {"a": None}]}).encode(), b"[" * 5000]
    taken, _ = survive(from_json, (damage.of_bytes(*valid) for _ in range(inputs)), FrameError)
    assert taken


def test_channels(inputs: int) -> None:
    """The limits of a frame allow a tensor that no memory holds: what is taken is what the receiver gives."""
    damage, vector = Damage(3), torch.empty(4)

    def take(data: bytes) -> None:
        with raw() as (channel, far):
            far.sendall(data)
            far.close()
            try:
                channel.expect(9, vector)
            except (FrameError, ChannelClosed):
                assert channel.fileno() < 0
                raise

    with bounded(64):
        taken, _ = survive(take, (damage.of_bytes(STREAM) for _ in range(inputs // 5)), (FrameError, ChannelClosed))
    assert taken


def conversation(damage: Damage) -> list[Any]:
    """What listener and speaker come to where words may be changed on their way; "waits" for one that wants more."""
    ends = [socket.socketpair() for _ in range(2)]
    (near, way), (back, far) = ends
    for sock in (near, way, back, far):
        sock.settimeout(0)
    sides = [listen_to(far, PROOF, 2, name), speak_to(near, PROOF, 3, HELLO)]
    ended: list[Any] = ["waits", "waits"]
    moved = True
    while moved:
        for i, side in enumerate(sides):
            try:
                next(side)
            except StopIteration as end:
                if ended[i] == "waits":
                    ended[i] = end.value
            except (FrameError, HandshakeRefused, OSError) as error:
                ended[i] = error
        moved = any([carry(damage, way, back), carry(damage, back, way)])
    for sock in (near, way, back, far):
        sock.close()
    return ended


def carry(damage: Damage, source: socket.socket, target: socket.socket) -> bool:
    """Whether anything was there to be carried, changed now and then."""
    try:
        data = source.recv(1 << 16)
    except BlockingIOError:
        return False
    if data:
        target.send(damage.of_bytes(data) if damage.random() < 0.2 else data)
    return bool(data)


def test_hellos(inputs: int) -> None:
    """Whoever is let in has said this very hello: a changed word is never welcome."""
    damage, came = Damage(4), []
    with bounded(64):
        survive(lambda _: came.append(conversation(damage)), iter(range(inputs // 5)), ())
    peer = [listener for listener, _ in came if isinstance(listener, Peer)]
    assert inputs / 100 < len(peer) < inputs / 5
    assert all((peer.name, peer.hello) == ("worker 3", {"worker": 3}) for peer in peer)
    assert all(isinstance(speaker, FrameError | HandshakeRefused | OSError | str | None) for _, speaker in came)


def test_the_next_peer_is_served(inputs: int) -> None:
    damage, secret = Damage(5), {"credentials": None, "token": PROOF.token}
    handshake = pack(Frame(kind=0, a=0))
    listener = Listener("127.0.0.1", **secret, timeout_s=5.0)
    try:
        with bounded(512):  # threads reserve addresses, too
            for _ in range(inputs // 500):
                with socket.create_connection(listener.address[:2]) as stranger:
                    stranger.sendall(
                        damage.of_bytes(handshake, handshake + HELLO, bytes(damage.choice(ODD_NUMBERS) & 0xFFF))
                    )
            coming = aside(lambda: connect(listener.address[:2], {"worker": 3}, **secret, peer="it", timeout_s=5.0))
            channel, output = listener.accept(name, timeout_s=10.0)
            assert output == {"worker": 3}
            channel.close()
            coming.result(5).close()
    finally:
        listener.close()
