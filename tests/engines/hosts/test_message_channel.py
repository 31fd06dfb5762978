"""Messages over a socket pair, both ends in this process; and values that travel as JSON and tensors."""

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from typing import Any

import pytest
import torch
from harness import forked, values
from torch import Tensor

from manyhands.engines.hosts.message_channel import HostMessage, MessageChannel
from manyhands.engines.hosts.plain_values import decode, encode
from manyhands.errors import BadInput, ManyhandsError
from manyhands.transport.channel import Channel, ChannelClosed
from manyhands.transport.frame import Frame
from refusals import all_refused

Ends = tuple[MessageChannel, MessageChannel]


def channels() -> tuple[Channel, Channel]:
    here, there = (Channel(sock, peer="the other", timeout_s=5.0) for sock in socket.socketpair())
    return here, there


@contextmanager
def joined(memory: Callable[[dict[str, Any], int], Tensor] | None = None) -> Iterator[Ends]:
    """memory: of the second one."""
    here, there = channels()
    with closing(MessageChannel(here)) as one, closing(MessageChannel(there, *([memory] if memory else []))) as other:
        yield one, other


@pytest.fixture
def ends() -> Iterator[Ends]:
    with joined() as both:
        yield both


@contextmanager
def with_raw_end() -> Iterator[tuple[MessageChannel, Channel]]:
    """A post whose other end says what it likes."""
    here, there = channels()
    with closing(MessageChannel(here)) as post, closing(there):
        yield post, there


def one(post: MessageChannel) -> HostMessage:
    (message,) = post.wait(5.0)
    return message


def test_letters_arrive_with_their_tensors_whatever_their_length(ends: Ends) -> None:
    here, there = ends
    tensors = [torch.arange(6.0).view(2, 3), torch.tensor(7), torch.empty(0), torch.ones(2, dtype=torch.bfloat16)]
    here.send({"type": "from_process", "process_index": 3}, tensors)
    message = one(there)
    assert message.body == {"type": "from_process", "process_index": 3}
    assert [t.dtype for t in message.tensors] == [t.dtype for t in tensors]
    assert all(torch.equal(came, sent) for came, sent in zip(message.tensors, tensors, strict=True))
    text = "x" * (3 << 20)  # longer than a frame's blob
    here.send({"type": "long", "text": text})
    assert one(there).body["text"] == text


def test_silence_ends_both_ways() -> None:
    """The timeout holds from the next message on; should the other end come back, it finds that it was given up."""
    with with_raw_end() as (post, there):
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


def test_both_ways_in_order_and_the_end_behind_what_came(ends: Ends) -> None:
    here, there = ends
    for i in range(100):
        here.send({"type": "a", "i": i})
        there.send({"type": "b", "i": i})
    came: dict[str, list[int]] = {"a": [], "b": []}
    while min(map(len, came.values())) < 100:
        for message in [*here.wait(0.01), *there.wait(0.01)]:
            came[message.body["type"]].append(message.body["i"])
    assert came == {"a": list(range(100)), "b": list(range(100))}
    here.send({"type": "last"})
    here.close()
    here.close()
    assert one(there).body == {"type": "last"}
    assert there.lost or there.wait(5.0) == []
    assert "ended" in there.lost


def announced(tensors: str) -> Frame:
    return Frame(kind=1, blob=b'{"type": "a", "tensors": %s}' % tensors.encode())


NO_TENSORS = (
    "3",
    '[["object", [1]]]',
    '[["uint8", [-1]]]',
    '[["uint8", 1]]',
    '[[["uint8"], [1]]]',
    f'[["uint8", [{",".join(["1"] * 65)}]]]',
    '[["uint8", [4294967296, 4294967296]]]',
    '[["float32", [2147483648]], ["float32", [2147483649]]]',
)
NO_BODIES = (b"[]", b"{}", b"\x80\x04K\x01.")
NONSENSE: list[tuple[str, list[Any]]] = [
    ("cannot be read", [Frame(kind=9, blob=b"{}")]),
    *[("cannot be read", [Frame(kind=1, blob=blob)]) for blob in NO_BODIES],
    *[("cannot be read", [announced(tensors)]) for tensors in NO_TENSORS],
    (
        "expected a tensor of 4000000 bytes",
        [announced('[["float32", [1000000]]]'), (Frame(kind=3), torch.zeros(3, dtype=torch.uint8))],
    ),
    ("cannot be read, or does not fit", [Frame(kind=1, blob=b"[" * 500_000)]),  # too deep to be read
    (
        "cannot be read, or does not fit",
        [announced(f'[["uint8", [0, {1 << 70}]]]'), (Frame(kind=3), torch.empty(0, dtype=torch.uint8))],
    ),
]


def test_what_makes_no_sense_ends_the_connection() -> None:
    for words, frames in NONSENSE:
        with with_raw_end() as (post, other):
            for frame in frames:
                other.send(*(frame if isinstance(frame, tuple) else (frame,)))
            assert post.wait(5.0) == [], frames
            assert words in post.lost, frames


def test_tensors_go_where_the_receiver_wants_them_and_what_goes_wrong_there_is_heard_at_both_ends() -> None:
    room = torch.zeros(8, dtype=torch.uint8)

    def memory(body: dict[str, object], nbytes: int) -> Tensor:
        assert (body["type"], nbytes) == ("launch", 8)
        return room

    with joined(memory) as (sender, receiver):
        sender.send({"type": "launch"}, [torch.full((1,), 1, dtype=torch.int64)])
        one(receiver)
        assert room.tolist() == [1, 0, 0, 0, 0, 0, 0, 0]
    for error in (MemoryError(), RuntimeError("no memory"), RecursionError("deep"), OSError("full")):

        def fails(body: dict[str, object], nbytes: int, error: Exception = error) -> Tensor:
            raise error

        with joined(fails) as (sender, receiver):
            sender.send({"type": "launch"}, [torch.ones(1)])
            assert receiver.wait(5.0) == sender.wait(5.0) == []
            words = str(error) or "MemoryError"
            assert receiver.lost == f"a message cannot be read, or does not fit into memory ({words})"
            assert sender.lost


def test_more_bytes_than_the_other_end_takes_are_not_sent(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("manyhands.engines.hosts.message_channel.MAX_TENSOR_BYTES", 8_000)
    here, there = ends
    with pytest.raises(BadInput, match=r"12.0 KB of tensors, and at most 8.0 KB fit"):
        here.send({"type": "from_process"}, [torch.zeros(1000), torch.zeros(2000)])
    here.send({"type": "from_process"}, [torch.zeros(2000)])
    assert [tensor.shape for tensor in one(there).tensors] == [(2000,)]


def test_the_local_address_of_a_connection_over_tcp() -> None:
    """Also where the socket takes both IPv4 and IPv6."""
    with socket.create_server(("127.0.0.1", 0)) as server, ExitStack() as stack:
        client = socket.socket(socket.AF_INET6)
        client.connect((f"::ffff:{server.getsockname()[0]}", server.getsockname()[1]))
        for sock in (client, server.accept()[0]):
            post = stack.enter_context(closing(MessageChannel(Channel(sock, peer="the other", timeout_s=5.0))))
            assert post.local_address == "127.0.0.1"


def test_no_descriptor_is_left() -> None:
    """In a process of its own, where nobody else opens any."""

    def run(_: int) -> list[str]:
        before = set(os.listdir("/proc/self/fd"))
        for post in map(MessageChannel, channels()):
            post.close()
            post.close()
        return sorted(set(os.listdir("/proc/self/fd")) - before)

    assert values(forked(1, run, 30)) == [[]]


PLAIN = [None, True, 3, -1.5, "text", [1, [2]], (1, "a"), {"a": [None]}, {"tuple": 1}, {"tensor": 0}, []]


def test_what_goes_in_comes_out_and_tensors_go_beside() -> None:
    for value in PLAIN:
        found = decode(*encode(value, "the value"))
        assert (found, type(found)) == (value, type(value))
    both = {"a": torch.arange(3), "b": [torch.ones(2, 2)]}
    encoded, tensors = encode(both, "the value")
    assert encoded == {"dict": {"a": {"tensor": 0}, "b": [{"tensor": 1}]}}
    assert tensors == [both["a"], both["b"][0]]
    assert decode(encoded, tensors)["b"][0] is both["b"][0]


class Odd:
    pass


def test_anything_else_is_refused_by_its_place_and_what_encode_never_wrote() -> None:
    odd = [Odd(), {1: 2}, {1}, b"", lambda: 0, torch.eye(2).to_sparse(), torch.zeros(1, dtype=torch.complex64)]
    words = r"the value\['a'\]\[1\] is a .* cannot return that"
    all_refused(lambda part: encode({"a": [0, part]}, "the value"), [(part, words) for part in odd])
    wrong = [{"tensor": 1}, {"tensor": -1}, {"tuple": 1}, {"dict": []}, {"other": 1}, {"a": 1, "b": 2}, {}]
    cases = [(encoded, "cannot be read") for encoded in wrong]
    all_refused(lambda encoded: decode(encoded, [torch.zeros(1)]), cases, ManyhandsError)
