"""What a worker believes of a shard: nothing that its own vectors do not imply."""

import socket

import pytest
import torch
from served import channel_to

from manyhands.server.base import ServerSpec
from manyhands.server.client import ServedServer, ShardLost
from manyhands.server.protocol import Kind
from manyhands.transport.channel import Channel
from manyhands.transport.frame import Frame, to_json

N = 6
ONE = {"version": 1}


def snapshot(output, *vectors):
    return [(Frame(kind=Kind.SNAPSHOT, blob=to_json(output)), None), *vectors]


def vector(elements=N, dtype=torch.float32, tensor=None):
    return (Frame(kind=Kind.VECTOR, elements=elements, dtype=dtype), tensor)


SNAPSHOTS = {
    "no JSON": [(Frame(kind=Kind.SNAPSHOT, blob=b"{"), None)],
    "no names": snapshot({"numbers": ONE}),
    "names that are none": snapshot({"names": [7, "center"], "numbers": ONE}),
    "a name twice": snapshot({"names": ["center", "center"], "numbers": ONE}),
    "a thousand names": snapshot({"names": ["center", *map(str, range(1000))], "numbers": ONE}),
    "no center": snapshot({"names": ["sum"], "numbers": ONE}),
    "no numbers": snapshot({"names": ["center"], "numbers": []}),
    "no version": snapshot({"names": ["center"], "numbers": {"version": "1"}}),
    "more elements": snapshot({"names": ["center"], "numbers": ONE}, vector(1 << 37)),
    "fewer elements": snapshot({"names": ["center"], "numbers": ONE}, vector(N - 1)),
    "whole numbers": snapshot({"names": ["center"], "numbers": ONE}, vector(dtype=torch.int64)),
    "a late worker that is none": [(Frame(kind=Kind.LATE, blob=to_json({"worker": "x", "seconds": 1})), None)],
    "no seconds": [(Frame(kind=Kind.LATE, blob=to_json({"worker": 0, "seconds": None})), None)],
}


@pytest.mark.parametrize("answers", SNAPSHOTS.values(), ids=SNAPSHOTS)
def test_a_shard_that_answers_nonsense_is_named(answers):
    its, mine = socket.socketpair()
    shard, client = (
        Channel(its, peer="worker 0", timeout_s=10),
        ServedServer(ServerSpec(rule="add"), [channel_to(0, mine, 10)], hosts=["host-a"], memory_from=-1),
    )
    shard.send(Frame(kind=Kind.DONE))
    client.initialize(torch.zeros(N))
    for frame, tensor in answers:
        shard.send(frame, tensor) if tensor is not None else its.sendall(_alone(frame))
    with pytest.raises(ShardLost, match="server shard 0.*expected"):
        client.capture()
    client.close()
    shard.close()


def _alone(frame):
    """A frame whose vector never comes: memory for it must not be taken."""
    from manyhands.transport.frame import pack

    return pack(frame) + frame.blob
