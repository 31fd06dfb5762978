"""Messages over a socket pair: both ends in this process."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from manyhands.engines.hosts.message_channel import HostMessage, MessageChannel
from manyhands.errors import BadInput
from manyhands.transport.channel import Channel, ChannelClosed
from manyhands.transport.frame import Frame
from open_files import open_files

Ends = tuple[MessageChannel, MessageChannel]


@pytest.fixture
def ends() -> Iterator[Ends]:
    here, there = (Channel(sock, peer="the other", timeout_s=5.0) for sock in socket.socketpair())
    posts = MessageChannel(here), MessageChannel(there)
    yield posts
    for post in posts:
        post.close()


@pytest.fixture
def raw() -> Iterator[tuple[MessageChannel, Channel]]:
    """A post whose other end says what it likes."""
    here, there = (Channel(sock, peer="the other", timeout_s=5.0) for sock in socket.socketpair())
    post = MessageChannel(here)
    yield post, there
    post.close()
    there.close()


def one(post: MessageChannel) -> HostMessage:
    (message,) = post.wait(5.0)
    return message


def test_letters_arrive_with_their_tensors(ends: Ends) -> None:
    here, there = ends
    tensors = [
        torch.arange(6.0).view(2, 3),
        torch.tensor(7, dtype=torch.int64),
        torch.empty(0),
        torch.ones(2, dtype=torch.bfloat16),
    ]
    here.send({"type": "from_process", "process_index": 3}, tensors)
    message = one(there)
    assert message.body == {"type": "from_process", "process_index": 3}
    assert [t.dtype for t in message.tensors] == [t.dtype for t in tensors]
    assert all(torch.equal(came, sent) for came, sent in zip(message.tensors, tensors, strict=True))


def test_silence_ends_both_ways(raw: tuple[MessageChannel, Channel]) -> None:
    """The timeout holds from the next message on; should the other end come back, it finds that it was given up."""
    post, there = raw
    post.set_silence(0.2)
    there.send(Frame(kind=1, blob=b'{"type": "alive"}'))
    assert post.wait(5.0) == []
    assert post.lost == "nothing came for 0.2 s"
    with pytest.raises(ChannelClosed):
        post.send({"type": "stop"})


def test_hung_up_it_gives_nothing_and_keeps_its_descriptor(ends: Ends) -> None:
    """Whoever waits on the descriptor may go on to do so."""
    here, there = ends
    before = here.fileno()
    here.hang_up("no sense in it")
    assert there.wait(5.0) == []
    assert there.lost
    assert here.wait(0.1) == []
    assert (here.lost, here.fileno()) == ("no sense in it", before)
    os.fstat(before)


def test_both_ways_in_order(ends: Ends) -> None:
    here, there = ends
    for i in range(100):
        here.send({"type": "a", "i": i})
        there.send({"type": "b", "i": i})
    came: dict[str, list[int]] = {"a": [], "b": []}
    while min(map(len, came.values())) < 100:
        for message in [*here.wait(0.01), *there.wait(0.01)]:
            came[message.body["type"]].append(message.body["i"])
    assert came == {"a": list(range(100)), "b": list(range(100))}


def test_a_letter_longer_than_a_frames_blob(ends: Ends) -> None:
    text = "x" * (3 << 20)
    ends[0].send({"type": "long", "text": text})
    assert one(ends[1]).body["text"] == text


def test_tensors_go_where_the_receiver_wants_them() -> None:
    room = torch.zeros(8, dtype=torch.uint8)

    def memory(body: dict[str, object], nbytes: int) -> Tensor:
        assert (body["type"], nbytes) == ("launch", 8)
        return room

    here, there = (Channel(sock, peer="the other", timeout_s=5.0) for sock in socket.socketpair())
    sender, receiver = MessageChannel(here), MessageChannel(there, memory)
    sender.send({"type": "launch"}, [torch.full((1,), 1, dtype=torch.int64)])
    one(receiver)
    assert room.tolist() == [1, 0, 0, 0, 0, 0, 0, 0]
    sender.close()
    receiver.close()


def test_the_end_is_heard_behind_what_came(ends: Ends) -> None:
    here, there = ends
    here.send({"type": "last"})
    here.close()
    assert one(there).body == {"type": "last"}
    assert there.lost or there.wait(5.0) == []
    assert "ended" in there.lost


@pytest.mark.parametrize(
    "frame",
    [
        Frame(kind=9, blob=b"{}"),
        Frame(kind=1, blob=b"[]"),
        Frame(kind=1, blob=b"{}"),
        Frame(kind=1, blob=b"\x80\x04K\x01."),
        Frame(kind=1, blob=b'{"type": "a", "tensors": 3}'),
        Frame(kind=1, blob=b'{"type": "a", "tensors": [["object", [1]]]}'),
        Frame(kind=1, blob=b'{"type": "a", "tensors": [["uint8", [-1]]]}'),
        Frame(kind=1, blob=b'{"type": "a", "tensors": [["uint8", 1]]}'),
        Frame(kind=1, blob=b'{"type": "a", "tensors": [[["uint8"], [1]]]}'),
        Frame(kind=1, blob=b'{"type": "a", "tensors": [["uint8", [%s]]]}' % b",".join([b"1"] * 65)),
        Frame(kind=1, blob=b'{"type": "a", "tensors": [["uint8", [4294967296, 4294967296]]]}'),
        Frame(kind=1, blob=b'{"type": "a", "tensors": [["float32", [2147483648]], ["float32", [2147483649]]]}'),
    ],
    ids=lambda frame: f"{frame.kind} {frame.blob.decode(errors='replace')}",
)
def test_what_makes_no_sense_ends_the_connection(raw: tuple[MessageChannel, Channel], frame: Frame) -> None:
    post, other = raw
    other.send(frame)
    assert post.wait(5.0) == []
    assert "cannot be read" in post.lost


def test_a_tensor_of_another_size_than_announced(raw: tuple[MessageChannel, Channel]) -> None:
    post, other = raw
    other.send(Frame(kind=1, blob=b'{"type": "a", "tensors": [["float32", [1000000]]]}'))
    other.send(Frame(kind=3), torch.zeros(3, dtype=torch.uint8))
    assert post.wait(5.0) == []
    assert "expected a tensor of 4000000 bytes" in post.lost


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("no memory"), RecursionError("deep"), OSError("full")])
def test_whatever_goes_wrong_while_a_letter_is_taken_in_both_ends_hear_of_it(error: Exception) -> None:
    def memory(body: dict[str, object], nbytes: int) -> Tensor:
        raise error

    here, there = (Channel(sock, peer="the other", timeout_s=5.0) for sock in socket.socketpair())
    sender, receiver = MessageChannel(here), MessageChannel(there, memory)
    sender.send({"type": "launch"}, [torch.ones(1)])
    assert receiver.wait(5.0) == sender.wait(5.0) == []
    assert receiver.lost == f"a message cannot be read, or does not fit into memory ({str(error) or 'MemoryError'})"
    assert sender.lost
    sender.close()
    receiver.close()


def test_json_too_deep_to_be_read(raw: tuple[MessageChannel, Channel]) -> None:
    post, other = raw
    other.send(Frame(kind=1, blob=b"[" * 500_000))
    assert post.wait(5.0) == []
    assert "cannot be read, or does not fit" in post.lost


def test_an_empty_tensor_of_no_possible_shape(raw: tuple[MessageChannel, Channel]) -> None:
    post, other = raw
    other.send(Frame(kind=1, blob=b'{"type": "a", "tensors": [["uint8", [0, %d]]]}' % (1 << 70)))
    other.send(Frame(kind=3), torch.empty(0, dtype=torch.uint8))
    assert post.wait(5.0) == []
    assert "cannot be read, or does not fit" in post.lost


def test_more_bytes_than_the_other_end_takes_are_not_sent(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("manyhands.engines.hosts.message_channel.MAX_TENSOR_BYTES", 8_000)
    here, there = ends
    with pytest.raises(BadInput, match=r"12.0 KB of tensors, and at most 8.0 KB fit"):
        here.send({"type": "from_process"}, [torch.zeros(1000), torch.zeros(2000)])
    here.send({"type": "from_process"}, [torch.zeros(2000)])
    assert [tensor.shape for tensor in one(there).tensors] == [(2000,)]


def test_the_local_address_of_a_connection_over_tcp() -> None:
    """Also where the socket takes both IPv4 and IPv6."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = socket.socket(socket.AF_INET6)
        client.connect((f"::ffff:{server.getsockname()[0]}", server.getsockname()[1]))
        accepted, _ = server.accept()
    posts = [MessageChannel(Channel(sock, peer="the other", timeout_s=5.0)) for sock in (client, accepted)]
    assert [post.local_address for post in posts] == ["127.0.0.1"] * 2
    for post in posts:
        post.close()


def test_nothing_is_left() -> None:
    before = open_files()
    here, there = (Channel(sock, peer="the other", timeout_s=5.0) for sock in socket.socketpair())
    posts = MessageChannel(here), MessageChannel(there)
    for post in posts:
        post.close()
        post.close()
    assert open_files() <= before
