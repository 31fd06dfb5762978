"""What a worker and a shard may say to each other: nonsense ends that connection, and others are served."""

import socket
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from served import channel_to

from fuzzing import ODD_NUMBERS, Damage, bounded, json_bytes, survive
from manyhands.errors import ManyhandsError, PeerLost
from manyhands.server.base import ServerSpec
from manyhands.server.client import ServedServer
from manyhands.server.protocol import Kind, about
from manyhands.server.replication.log import Call
from manyhands.server.shard_host import Connection, Shard
from manyhands.transport.channel import Channel, ChannelClosed
from manyhands.transport.frame import Frame, FrameError, pack

N = 6
LIKE = about(torch.zeros(N))
VECTOR = torch.arange(float(N))
NUMBERS = {"version": 3, "rule": {}, "seats": []}
SPECS = {
    "add": ServerSpec(rule="add"),
    "bound": ServerSpec(rule="add", bound=0),
    "elastic": ServerSpec(rule="elastic", options={"alpha": 0.5}),
    "adagrad": ServerSpec(rule="adagrad", options={"rate": 0.1}),
    "compressed": ServerSpec(rule="add", compress="topk:0.5"),
}
Said = tuple[Frame, bytes]  # a frame, and what follows its blob


def output(kind: int, body: bytes = b"", **fields: Any) -> Said:
    return Frame(kind=kind, **fields), body


def with_vector(kind: int, **fields: Any) -> Said:
    return output(kind, VECTOR.numpy().tobytes(), dtype=torch.float32, elements=N, **fields)


def damaged(damage: Damage, one: Said) -> Said:
    """With another number, blob or length in it, or none."""
    frame, body = one
    odd = damage.choice(ODD_NUMBERS)
    wrong: list[dict[str, Any]] = [
        {"kind": damage.choice([*Kind, 0, 17, 255])},
        {damage.choice(("a", "b")): damage.choice((-1, -(1 << 63), odd & (1 << 63) - 1))},
        {damage.choice(("sequence", "generation")): odd & (1 << 64) - 1},
        {"weight": damage.choice((0.0, -1.0, 1e308, -1e308, 5e-324))},
        {
            "elements": damage.choice((0, 1, N, N + 1, 1 << 30)),
            "dtype": damage.choice((torch.uint8, torch.float64, torch.bool)),
        },
        {"blob": damage.of_bytes(frame.blob or b"\x01")},
        {},
    ]
    return replace(frame, **damage.choice(wrong)), body


def stream(damage: Damage, valid: list[Said], most: int) -> bytes:
    parts = [damage.choice(valid) for _ in range(damage.randint(1, most))]
    if damage.random() < 0.9:
        at = damage.randrange(len(parts))
        parts[at] = damaged(damage, parts[at])
    data = b"".join(pack(frame) + frame.blob + body for frame, body in parts)
    return damage.of_bytes(data) if damage.random() < 0.2 else data


def requests(damage: Damage) -> list[Said]:
    names = damage.of_json(["center"]) if damage.random() < 0.5 else ["center"]
    snapshot = json_bytes({"names": names, "numbers": damage.of_json(NUMBERS) if damage.random() < 0.7 else NUMBERS})
    return [
        *(output(kind, **LIKE) for kind in (Kind.OFFER, Kind.AWAIT, Kind.PULL, Kind.PEEK)),
        *(output(kind) for kind in (Kind.ACTIVATE, Kind.RELEASE, Kind.DEACTIVATE, Kind.CAPTURE, Kind.GOODBYE)),
        output(Kind.TICK, blob=b"\x01"),
        with_vector(Kind.GIVE),
        with_vector(Kind.PUSH, sequence=damage.randint(1, 3), weight=1.0, blob=b"\x05"),
        output(Kind.ENCODED, bytes(24), elements=24, sequence=1, weight=1.0),
        (Frame(kind=Kind.RESTORE, blob=snapshot), with_frame(Kind.VECTOR)),
    ]


def with_frame(kind: int) -> bytes:
    frame, body = with_vector(kind)
    return pack(frame) + body


def talked(shard: Shard, worker: int, data: bytes) -> None:
    """What a shard's thread does with one connection, all of whose requests are there already."""
    its, mine = socket.socketpair()
    connection = Connection(shard, worker, Channel(its, peer=f"worker {worker}", timeout_s=1.0))
    with mine:
        mine.sendall(data)
        mine.shutdown(socket.SHUT_WR)
        try:
            connection.serve()
        finally:
            connection.channel.close()
            shard.end(worker, Call.LEAVE)


@pytest.mark.parametrize("rule", SPECS)
def test_requests(rule: str, inputs: int) -> None:
    """The shard that heard nonsense from worker 0 answers worker 1."""
    damage = Damage(rule)
    opening = b"".join(
        pack(frame) + body
        for frame, body in (output(Kind.OFFER, **LIKE), with_vector(Kind.GIVE), output(Kind.ACTIVATE))
    )
    goodbye = pack(Frame(kind=Kind.GOODBYE))

    def take(data: bytes) -> None:
        shard = Shard(SPECS[rule], 2, timeout_s=0.01)
        try:
            if damage.random() < 0.8:
                talked(shard, 1, opening + goodbye)
            talked(shard, 0, data)
        finally:
            if shard.published is not None:
                talked(shard, 1, pack(Frame(kind=Kind.PEEK, **about(shard.published.buffers[0]))) + goodbye)
            shard.close()

    drawn = (stream(damage, requests(damage), 4) for _ in range(inputs // 20))
    with bounded(512):
        _, refused = survive(take, drawn, (FrameError, ChannelClosed, ManyhandsError))
    assert refused


CALLS: dict[str, Callable[[ServedServer], Any]] = {
    "pull": lambda server: server.pull(torch.zeros(N)),
    "push": lambda server: server.push(torch.zeros(N)),
    "tick": lambda server: server.tick(),
    "capture": lambda server: (server.center(torch.zeros(N)), server.capture()),
    "restore": lambda server: server.activate(),
}


def answers(damage: Damage) -> list[Said]:
    snapshot = json_bytes(
        {"names": ["center"], "numbers": damage.of_json(NUMBERS) if damage.random() < 0.7 else NUMBERS}
    )
    late = json_bytes(damage.of_json({"worker": 0, "seconds": 1.0}))
    refused = json_bytes(damage.of_json({"error": "BadInput", "message": "no"}))
    return [
        *(output(kind) for kind in (Kind.DONE, Kind.WAIT, Kind.WANTED)),
        with_vector(Kind.CENTER, a=3),
        with_vector(Kind.APPLIED, a=3, b=1, sequence=2, weight=1.0),
        output(Kind.DROPPED, a=3, b=1),
        output(Kind.HELD, a=3),
        output(Kind.GO, blob=b"\x01"),
        output(Kind.LATE, blob=late),
        output(Kind.REFUSED, blob=refused),
        (Frame(kind=Kind.SNAPSHOT, blob=snapshot), with_frame(Kind.VECTOR)),
    ]


@pytest.mark.parametrize("call", CALLS)
def test_answers(call: str, inputs: int) -> None:
    """A worker believes nothing that its own vectors do not imply: the shard is lost to it."""
    damage = Damage(call)

    def take(data: bytes) -> None:
        its, mine = socket.socketpair()
        server = ServedServer(
            ServerSpec(rule="elastic", options={"alpha": 0.5}, bound=1),
            [channel_to(0, mine, 1.0)],
            hosts=["a"],
            memory_from=-1,
        )
        with its:
            its.sendall(data)
            its.shutdown(socket.SHUT_WR)
            try:
                CALLS[call](server)
            finally:
                server.close()

    drawn = (stream(damage, answers(damage), 3) for _ in range(inputs // 20))
    with bounded(256):
        _, refused = survive(take, drawn, (PeerLost, ManyhandsError))
    assert refused
