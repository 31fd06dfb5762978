"""Tensors between neighbours: their shapes and dtypes, in order, in pieces, without waiting."""

import pytest
import torch

from manyhands.comm.stage_channel import Sent, StageChannel
from manyhands.testing.threads import together
from manyhands.worker import Worker

CPU = torch.device("cpu")


def messages(rank: int) -> list[list[Sent]]:
    """What a rank sends: of other shapes each time."""
    found = []
    for number in range(12):
        draws = torch.Generator().manual_seed(100 * rank + number)
        found.append(
            [
                Sent(torch.randn(number, 3, generator=draws), True),
                Sent(None),
                Sent(torch.randint(9, (2, 0 if number == 3 else 5), generator=draws)),
                Sent(torch.randn(7, generator=draws).to(torch.bfloat16).reshape(7, 1, 1), True),
                Sent(torch.randn(4, 6, generator=draws, dtype=torch.float64).t()),
                Sent(torch.tensor(number % 2 == 0)),
            ]
        )
    return found


def swapped(worker: Worker, longest: int) -> dict[str, dict[str, int]]:
    """Both send all before they receive any: nobody waits for room."""
    channel = StageChannel(worker.group, longest)
    for message in messages(worker.rank):
        channel.send("forward" if worker.rank == 0 else "back", message)
    for message in messages(1 - worker.rank):
        came = channel.receive(CPU)
        assert len(came) == len(message)
        for one, expected in zip(came, message, strict=True):
            if expected.tensor is None:
                assert one.tensor is None
                continue
            assert one.requires_grad == expected.requires_grad
            assert one.tensor is not None
            assert one.tensor.dtype == expected.tensor.dtype
            assert torch.equal(one.tensor, expected.tensor)
            assert not one.tensor._is_view()
    return channel.ledger.as_dict()


def expected_bytes(rank: int) -> int:
    return sum(one.tensor.nbytes for message in messages(rank) for one in message if one.tensor is not None)


@pytest.mark.parametrize("longest", [1, 100, 1 << 20])
def test_messages_between_threads(longest: int) -> None:
    assert together(2, lambda worker: swapped(worker, longest)) == [
        {name: {"bytes": expected_bytes(rank), "messages": 12}} for rank, name in enumerate(("forward", "back"))
    ]
