"""The conformance suite of mailboxes: the guarantees of `Mailbox`, as checks for any group's.

Run every check of `MAILBOX_SUITE` on every rank of a group, in the same order:

    for name, check in MAILBOX_SUITE.items():
        check(group)

A check opens mailboxes of its own and raises CheckFailed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from manyhands.comm.group import Group
from manyhands.testing.group_suite import checks_of, expect, vector

LONGEST = 40_000
"""Bytes of the longest message of a check: many of them are more than any ring or socket has room for."""


def message(rank: int, number: int) -> Tensor:
    """uint8 [n] what `rank` posts as its so manieth message: of different lengths, none among them."""
    n = 0 if number % 7 == 3 else 1 + (number * 977 + rank) % LONGEST
    return torch.full((n,), (number * 13 + rank) % 251, dtype=torch.uint8)


def expect_messages(came: list[list[Tensor]], own: int, first: list[int], what: str) -> None:
    """Of each peer those from `first` on, in order; none of this rank's own."""
    expect(came[own] == [], f"{what}: rank {own} got messages of its own")
    for rank, messages in enumerate(came):
        for number, data in enumerate(messages, start=first[rank]):
            same = data.dtype == torch.uint8 and torch.equal(data, message(rank, number))
            expect(same, f"{what}: message {number} of rank {rank} came otherwise than it was posted")


def check_every_message_comes_once_in_order(group: Group) -> None:
    """Whenever one looks; the last ones when they are waited for."""
    mailbox, count = group.open_mailbox(LONGEST), 40
    for number in range(count):
        mailbox.post(message(group.rank, number))
        before = list(mailbox.taken)
        expect_messages(mailbox.take(), group.rank, before, "taken on the way")
    before = list(mailbox.taken)
    expect_messages(mailbox.take([count] * group.size), group.rank, before, "taken at the end")
    wanted = [0 if rank == group.rank else count for rank in range(group.size)]
    expect(mailbox.taken == wanted, f"taken is {mailbox.taken}, expected {wanted}")
    expect(mailbox.posted == count, f"posted is {mailbox.posted}, expected {count}")
    group.barrier()
    expect(not any(mailbox.take()), "more came than was posted")
    group.barrier()


def check_take_stops_where_it_is_told_to(group: Group) -> None:
    """Also where more is here; `peek` shows the same, and it stays."""
    mailbox = group.open_mailbox(LONGEST)
    for number in range(5):
        mailbox.post(message(group.rank, number))
    group.barrier()
    shown = mailbox.peek([3] * group.size)
    expect(
        all(len(shown[rank]) == 3 * (rank != group.rank) for rank in range(group.size)), "peek showed another number"
    )
    expect_messages(shown, group.rank, [0] * group.size, "shown")
    came = mailbox.take([2] * group.size)
    expect(all(len(came[rank]) == 2 * (rank != group.rank) for rank in range(group.size)), "take went on too far")
    expect_messages(came, group.rank, [0] * group.size, "taken")
    expect(not any(mailbox.take([1] * group.size)), "take went back")
    expect_messages(mailbox.take([5] * group.size), group.rank, [2] * group.size, "taken last")
    group.barrier()


def check_nobody_waits_in_a_circle(group: Group) -> None:
    """All post more than there is room for before anybody takes."""
    mailbox, count = group.open_mailbox(LONGEST), 200
    for number in range(count):
        mailbox.post(message(group.rank, number))
    expect_messages(mailbox.take([count] * group.size), group.rank, [0] * group.size, "taken after all was posted")
    group.barrier()


def check_those_who_wait_elsewhere_hold_nobody_up(group: Group) -> None:
    """Rank 0 posts more than there is room for, while the others wait for it in a collective; then all take."""
    mailbox, count = group.open_mailbox(LONGEST), 200
    for number in range(count if group.rank == 0 else 0):
        mailbox.post(message(group.rank, number))
    group.barrier()
    came = mailbox.take([count, *[0] * (group.size - 1)])
    expect_messages(came, group.rank, [0] * group.size, "taken after the wait")
    expect(len(came[0]) == (count if group.rank else 0), f"{len(came[0])} messages of rank 0 came")
    group.barrier()


def check_mailboxes_are_apart(group: Group) -> None:
    """What is posted in one does not come in another; collectives go on beside them."""
    one, other = group.open_mailbox(LONGEST), group.open_mailbox(8)
    one.post(message(group.rank, 0))
    total = vector(group.rank, 5)
    group.all_reduce_(total)
    other.post(torch.tensor([group.rank], dtype=torch.uint8))
    came = other.take([1] * group.size)
    wanted = [[] if rank == group.rank else [rank] for rank in range(group.size)]
    expect([[int(data) for data in of_rank] for of_rank in came] == wanted, f"another mailbox's message came: {came}")
    expect_messages(one.take([1] * group.size), group.rank, [0] * group.size, "taken of the first")
    group.barrier()


def check_what_is_posted_is_counted(group: Group) -> None:
    """In the ledger, once for each peer; and a message is copied."""
    mailbox, before = group.open_mailbox(LONGEST), group.ledger.as_dict().get("post", {"bytes": 0, "messages": 0})
    data = message(group.rank, 1)
    mailbox.post(data)
    data.zero_()
    came = mailbox.take([1] * group.size)
    expect_messages(came, group.rank, [1] * group.size, "of a tensor that was changed after it was posted")
    now = group.ledger.as_dict().get("post", {"bytes": 0, "messages": 0})
    peers = group.size - 1
    wanted = {"bytes": before["bytes"] + peers * len(data), "messages": before["messages"] + peers}
    expect(now == wanted, f"the ledger has {now}, expected {wanted}")
    group.barrier()


MAILBOX_SUITE = checks_of(globals())
"""{name: check}"""
